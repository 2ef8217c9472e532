package throwaway

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"time"
)

// runRedis runs the program that its arguments name in a directory of its own until its stdin
// ends. The program has no stdin.
const runRedis = `dir=$(mktemp -d "${TMPDIR:-/tmp}/ratelimit-redis.XXXXXX") && cd "$dir" || exit 1
exec 3<&0
"$@" --dir "$dir" </dev/null 3<&- >&2 & redis=$!
{ read -r _ <&3; kill -TERM "$redis"; } 2>/dev/null & watcher=$!
wait "$redis"; status=$?
kill "$watcher" 2>/dev/null
cd / && rm -rf "$dir"
exit "$status"`

// Redis starts a Redis that keeps nothing on disk unless options say so, by a program in the PATH
// or in a file. Address is where it listens. The caller should close it.
func Redis(ctx context.Context, program string, options ...string) (address string, closer func() error, err error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return "", nil, err
	}
	port, err := freePort()
	if err != nil {
		return "", nil, err
	}
	args := append([]string{"-c", runRedis, "sh", path, "--bind", "127.0.0.1", "--port", port, "--save", ""}, options...)
	p, err := startProcess(exec.Command("/bin/sh", args...))
	if err != nil {
		return "", nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	address = net.JoinHostPort("127.0.0.1", port)
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err == nil {
			return address, p.close, conn.Close()
		}
		select {
		case <-p.done:
			return "", nil, fmt.Errorf("starting Redis: %w", p.err)
		case <-ctx.Done():
			_ = p.close()
			return "", nil, fmt.Errorf("waiting for Redis: %w", err)
		case <-time.After(pollInterval):
		}
	}
}
