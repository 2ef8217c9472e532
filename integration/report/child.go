package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/pgstore"
)

// childVariable holds the task of a child process.
const childVariable = "RATELIMIT_REPORT_CHILD"

// task is what a child process does until its stdin ends. It writes a journal to its
// stdout: a line of JSON for each thing that it was told, at once, so that it can be killed.
type task struct {
	Job         string // the name of one of jobs
	URL, Schema string
	Process     int // its number
	Workers     int
	Conns       int32
	Isolation   string            // the level of its connections' transactions, if nobody says another
	Params      map[string]string // of its connections
	Relay       string            // the address that it connects to, if that is not the server's
	Patience    time.Duration     // of a call; 0 for long
	Lifetime    time.Duration     // of a connection; 0 for long
	Seed        uint64
	Escrow      time.Duration
	Portable    bool
}

// jobs are the jobs of children, by name.
var jobs = map[string]func(context.Context, *env) error{
	"work":   work,
	"arrive": arrive,
	"hoard":  hoard,
	"beside": besides,
	"stroll": stroll,
	"permits": holdPermits,
	"queue":  queueForPermits,
}

// env is the environment of a child's job.
type env struct {
	task
	pool  *pgxpool.Pool
	store *pgstore.Store
	out   *journal
}

func isChild() bool { return os.Getenv(childVariable) != "" }

func runChild() error {
	var t task
	if err := json.Unmarshal([]byte(os.Getenv(childVariable)), &t); err != nil {
		return err
	}
	ctx, end := context.WithCancel(context.Background())
	defer end()
	pool, err := newPool(ctx, t.URL, t.Conns, func(c *pgxpool.Config) {
		if t.Isolation != "" {
			c.ConnConfig.RuntimeParams["default_transaction_isolation"] = t.Isolation
		}
		for name, value := range t.Params {
			c.ConnConfig.RuntimeParams[name] = value
		}
		if t.Relay != "" {
			relayed(c, t.Relay)
		}
		if t.Lifetime > 0 {
			c.MaxConnLifetime, c.HealthCheckPeriod = t.Lifetime, t.Lifetime
		}
	})
	if err != nil {
		return err
	}
	// Its connections end with the process: to close them is to wait for a silent network.
	store, err := pgstore.New(pool, &pgstore.Config{Schema: t.Schema, Escrow: t.Escrow, Portable: t.Portable})
	if err != nil {
		return err
	}
	go func() {
		defer end()
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	return jobs[t.Job](ctx, &env{t, pool, store, &journal{to: json.NewEncoder(os.Stdout)}})
}

// journal is the results of a process. It is safe for concurrent use.
type journal struct {
	mu sync.Mutex
	to *json.Encoder
}

func (j *journal) write(v any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	_ = j.to.Encode(v) // if nobody listens any more there is nobody to tell
}

// child is a process that was started.
type child struct {
	cmd  *exec.Cmd
	work io.Closer     // ends its work
	told chan struct{} // is closed when it has been told something
	done chan error    // of reading its journal to the end, and of the process
}

// start starts a process, and has each line of its journal read.
func start(ctx context.Context, t task, read func(line []byte) error) (*child, error) {
	text, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	work, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{cmd, work, make(chan struct{}), make(chan error, 1)}
	first := sync.OnceFunc(func() { close(c.told) })
	go func() {
		err := readLines(out, func(line []byte) error {
			first()
			return read(line)
		})
		first() // nothing comes any more
		c.done <- errors.Join(err, cmd.Wait())
	}()
	return c, nil
}

// atWork waits until all of some processes have told something.
func atWork(children []*child) {
	for _, child := range children {
		<-child.told
	}
}

// end has processes come to their end, and returns the error of each.
func end(children []*child) (errs []error) {
	for _, child := range children {
		_ = child.work.Close() // that of one that was killed is closed
	}
	for _, child := range children {
		errs = append(errs, <-child.done)
	}
	return errs
}

func readLines(from io.Reader, read func(line []byte) error) error {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if err := read(lines.Bytes()); err != nil {
			return fmt.Errorf("journal: %w in %q", err, lines.Text())
		}
	}
	return lines.Err()
}
