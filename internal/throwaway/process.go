package throwaway

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"
)

// process is a child process that ends when its stdin does: when close closes
// it, or when the kernel closes it because this process is gone. Unlike a
// parent-death signal, which Linux sends when the thread that started the child
// ends, this suits Go and works everywhere.
type process struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	done  chan struct{} // closed when the child has ended

	// Written before done is closed.
	err    error
	stderr bytes.Buffer
}

// runHere runs the program that its arguments name, in a directory of its own, until its stdin ends. Then it
// kills the program and removes the directory.
const runHere = `dir=$(mktemp -d "${TMPDIR:-/tmp}/ratelimit-program.XXXXXX") && cd "$dir" || exit 1
exec 3<&0
"$@" </dev/null 3<&- >&2 & program=$!
{ read -r _ <&3; : >stop; kill -KILL "$program"; } 2>/dev/null & watcher=$!
wait "$program" 2>/dev/null; status=$?
[ -e stop ] && status=0
kill "$watcher" 2>/dev/null
cd / && rm -rf "$dir"
exit "$status"`

// startProgram starts a program that does not end by itself when its stdin does.
func startProgram(name string, args ...string) (*process, error) {
	return startProcess(exec.Command("/bin/sh", append([]string{"-c", runHere, "sh", name}, args...)...))
}

func startProcess(cmd *exec.Cmd) (*process, error) {
	// A terminal's Ctrl-C is for this process. The child follows by its stdin.
	detach(cmd)
	p := &process{cmd: cmd, done: make(chan struct{})}
	cmd.Stderr = &p.stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("making a pipe: %w", err)
	}
	p.stdin = stdin
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	go p.wait()
	return p, nil
}

func (p *process) wait() {
	defer close(p.done)
	p.err = p.cmd.Wait()
	if text := strings.TrimSpace(p.stderr.String()); p.err != nil && text != "" {
		p.err = fmt.Errorf("%w: %s", p.err, text)
	}
}

// await returns once answers returns no error. If the child ends before, or the context does, it returns why,
// and the child has ended.
func (p *process) await(ctx context.Context, answers func(context.Context) error) error {
	for {
		err := answers(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return startError(p)
		case <-ctx.Done():
			_ = p.close()
			return fmt.Errorf("waiting for it to answer: %w (%w)", ctx.Err(), err)
		case <-time.After(pollInterval):
		}
	}
}

// close ends the child and waits until it has cleaned up.
func (p *process) close() error {
	// An error means that the child, and the pipe with it, is gone already.
	_ = p.stdin.Close()
	<-p.done
	return p.err
}
