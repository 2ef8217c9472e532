package main

import (
	"errors"
	"fmt"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// processors are some of the machine's; nil stands for all.
type processors unix.CPUSet

// halves divides the processors that this program may use into two halves. Both are nil if there is
// but one.
func halves() (first, second *processors, err error) {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return nil, nil, fmt.Errorf("asking for the processors: %w", err)
	}
	if all.Count() < 2 {
		return nil, nil, nil
	}
	first, second = new(processors), new(processors)
	n := 0
	for i := range len(all) * 64 {
		switch {
		case !all.IsSet(i):
			continue
		case n < all.Count()/2:
			first.set().Set(i)
		default:
			second.set().Set(i)
		}
		n++
	}
	return first, second, nil
}

func (p *processors) set() *unix.CPUSet { return (*unix.CPUSet)(p) }

// run calls f. The programs that f starts have these processors only, as have those that they start.
func (p *processors) run(f func() error) error {
	if p == nil {
		return f()
	}
	runtime.LockOSThread() // a program gets its processors from the thread that starts it
	defer runtime.UnlockOSThread()
	var before unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return fmt.Errorf("asking for the processors: %w", err)
	}
	if err := unix.SchedSetaffinity(0, p.set()); err != nil {
		return fmt.Errorf("choosing processors: %w", err)
	}
	return errors.Join(f(), unix.SchedSetaffinity(0, &before))
}

// String lists the numbers.
func (p *processors) String() string {
	var numbers []string
	for i := range len(p) * 64 {
		if p.set().IsSet(i) {
			numbers = append(numbers, fmt.Sprint(i))
		}
	}
	return strings.Join(numbers, ", ")
}
