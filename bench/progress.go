package main

import (
	"fmt"
	"io"
	"os"
	"time"
)

// progress says how far the run is: on a terminal in one line that changes,
// elsewhere in a line for each case that is done.
type progress struct {
	w         io.Writer
	terminal  bool
	steps     int
	done      int
	caseStart time.Time
}

func newProgress(w io.Writer) *progress {
	p := &progress{w: w, caseStart: time.Now()}
	if f, ok := w.(*os.File); ok {
		info, err := f.Stat()
		p.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

// total adds the steps of jobs to those to come.
func (p *progress) total(jobs []job, o options) {
	for _, j := range jobs {
		if j.kind.inRounds() {
			p.steps += o.rounds
		} else {
			p.steps++
		}
	}
}

// step says that the next measurement begins.
func (p *progress) step(j job) {
	p.done++
	if p.terminal {
		fmt.Fprintf(p.w, "\r\x1b[K%d of %d: %s", p.done, p.steps, j)
	}
}

func (p *progress) caseDone(name string) {
	if !p.terminal {
		fmt.Fprintf(p.w, "bench: %s took %v, %d of %d measurements done\n",
			name, time.Since(p.caseStart).Round(100*time.Millisecond), p.done, p.steps)
	}
	p.caseStart = time.Now()
}

// clear makes room for the next line.
func (p *progress) clear() {
	if p.terminal {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}
