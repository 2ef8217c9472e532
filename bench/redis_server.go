package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// redisSupervisor runs a server until its own stdin ends, which the kernel sees
// to when we are gone, whichever way. Its arguments are those of the server.
// Interrupts from the terminal are ours to act on.
const redisSupervisor = `trap '' INT
dir=$(mktemp -d "${TMPDIR:-/tmp}/ratelimit-redis.XXXXXX") && cd "$dir" || exit 1
exec 3<&0
"$@" --dir "$dir" </dev/null 3<&- &
server=$!
{ read -r _ <&3; kill -TERM "$server"; } 2>/dev/null &
watcher=$!
wait "$server"
status=$?
kill "$watcher" 2>/dev/null
cd / && rm -rf "$dir"
exit "$status"
`

const (
	redisTimeout = 10 * time.Second // for the start
	pollInterval = 10 * time.Millisecond
)

// errNoRedis is a machine without it.
var errNoRedis = errors.New(`no Redis, so the rest runs without it; install one with "apt-get install redis-server" or "brew install redis"`)

// redisServer is a Redis.
type redisServer struct {
	address string
	counts  *counts
	cmd     *exec.Cmd
	stdin   io.Closer
	output  bytes.Buffer
	done    chan struct{} // closed when the server has ended
}

// startRedis starts a Redis that keeps nothing on disk.
func startRedis(ctx context.Context, program string) (*redisServer, error) {
	return startRedisWith(ctx, program, "--appendonly", "no")
}

// startDurableRedis starts a Redis that answers when what it has changed is on the disk.
func startDurableRedis(ctx context.Context, program string) (*redisServer, error) {
	return startRedisWith(ctx, program, "--appendonly", "yes", "--appendfsync", "always")
}

func startRedisWith(ctx context.Context, program string, options ...string) (*redisServer, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", errNoRedis, err)
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	r := &redisServer{
		address: net.JoinHostPort("127.0.0.1", port),
		counts:  &counts{},
		cmd: exec.Command("/bin/sh", append([]string{
			"-c", redisSupervisor, "supervisor", path,
			"--bind", "127.0.0.1", "--port", port, "--save", "",
		}, options...)...),
		done: make(chan struct{}),
	}
	r.cmd.Stdout, r.cmd.Stderr = &r.output, &r.output
	if r.stdin, err = r.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("making a pipe: %w", err)
	}
	if err := r.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting Redis: %w", err)
	}
	go func() {
		_ = r.cmd.Wait() // how it ended does not matter; that it did too early, its output tells
		close(r.done)
	}()
	if err := r.waitUntilReady(ctx); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

// freePort is a port that was free a moment ago.
func freePort() (string, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("choosing a port: %w", err)
	}
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port), nil
}

func (r *redisServer) waitUntilReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	client := redis.NewClient(&redis.Options{Addr: r.address, MaxRetries: -1})
	defer client.Close()
	for {
		err := client.Ping(ctx).Err()
		if err == nil {
			return nil
		}
		select {
		case <-r.done:
			return fmt.Errorf("starting Redis: %s", r.output.String())
		case <-ctx.Done():
			return fmt.Errorf("waiting for Redis: %w", err)
		case <-time.After(pollInterval):
		}
	}
}

// close stops the server and waits until it has ended.
func (r *redisServer) close() error {
	_ = r.stdin.Close() // fails only if the supervisor is gone already
	select {
	case <-r.done:
		return nil
	case <-time.After(closeTimeout):
		return errors.New("stopping Redis: it goes on")
	}
}

func (r *redisServer) facts(ctx context.Context) (string, error) {
	client := redis.NewClient(&redis.Options{Addr: r.address})
	defer client.Close()
	info, err := client.Info(ctx, "server").Result()
	if err != nil {
		return "", fmt.Errorf("asking Redis for its version: %w", err)
	}
	for line := range strings.Lines(info) {
		if version, ok := strings.CutPrefix(line, "redis_version:"); ok {
			return "Redis " + strings.TrimSpace(version) + ", nothing kept on disk", nil
		}
	}
	return "Redis", nil
}
