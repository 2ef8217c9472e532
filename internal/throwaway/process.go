package throwaway

import (
	"bytes"
	"fmt"
	"io"
	"os/exec"
	"strings"
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

// close ends the child and waits until it has cleaned up.
func (p *process) close() error {
	// An error means that the child, and the pipe with it, is gone already.
	_ = p.stdin.Close()
	<-p.done
	return p.err
}
