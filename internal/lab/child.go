package lab

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
)

// childVariable holds the task of a child process.
const childVariable = "RATELIMIT_LAB_CHILD"

// Child is another process of this program. It writes a journal to its stdout, a line of JSON for
// each entry and at once, so that it can be killed.
type Child struct {
	*os.Process
	stdin io.Closer
	told  chan struct{} // closed when the first line of the journal was read
	done  chan error    // of the journal, and of the process
}

// Start starts this program as a child with a task, which is written as JSON, and calls read with
// each line of its journal.
func Start(ctx context.Context, task any, read func(line []byte) error) (*Child, error) {
	text, err := json.Marshal(task)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), childVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting another process: %w", err)
	}
	c := &Child{cmd.Process, stdin, make(chan struct{}), make(chan error, 1)}
	first := sync.OnceFunc(func() { close(c.told) })
	go func() {
		err := readLines(out, func(line []byte) error {
			err := read(line)
			first()
			return err
		})
		first() // the journal has ended
		c.done <- errors.Join(err, cmd.Wait())
	}()
	return c, nil
}

func readLines(from io.Reader, read func(line []byte) error) error {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<28)
	for lines.Scan() {
		if err := read(lines.Bytes()); err != nil {
			return fmt.Errorf("journal: %w in %.1000q", err, lines.Text())
		}
	}
	return lines.Err()
}

// Reading returns a function that reads a line of a journal and calls note with it, under mu.
func Reading[T any](mu sync.Locker, note func(T)) func(line []byte) error {
	return func(line []byte) error {
		var entry T
		if err := json.Unmarshal(line, &entry); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		note(entry)
		return nil
	}
}

// AtWork waits until each child has written into its journal, or has ended.
func AtWork(children []*Child) {
	for _, child := range children {
		<-child.told
	}
}

// End closes the stdin of children, waits until they have ended, and returns the error of each.
func End(children []*Child) (errs []error) {
	for _, child := range children {
		_ = child.stdin.Close() // it fails for a child that was killed
	}
	for _, child := range children {
		errs = append(errs, child.Wait())
	}
	return errs
}

// Wait waits until the child has ended, and returns its error.
func (c *Child) Wait() error { return <-c.done }

// IsChild reports whether this process is a child.
func IsChild() bool { return os.Getenv(childVariable) != "" }

// Journal is the journal of this process, which is a child. It is safe for concurrent use.
type Journal struct {
	mu sync.Mutex
	to *json.Encoder
}

// Task reads this child's task. It returns a journal, and a context that ends with its stdin.
func Task(ctx context.Context, task any) (ended context.Context, journal *Journal, err error) {
	if err := json.Unmarshal([]byte(os.Getenv(childVariable)), task); err != nil {
		return nil, nil, fmt.Errorf("reading the task: %w", err)
	}
	ended, end := context.WithCancel(ctx)
	go func() {
		defer end()
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	return ended, &Journal{to: json.NewEncoder(os.Stdout)}, nil
}

// Write adds an entry. Without a reader it does nothing.
func (j *Journal) Write(entry any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	_ = j.to.Encode(entry)
}
