package main

import (
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// TestProcessors: programs have the processors that they are given, and this one keeps its own.
func TestProcessors(t *testing.T) {
	first, second, err := halves()
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]bool)
	for _, p := range []*processors{nil, first, second, nil} {
		err := p.run(func() error {
			mask, err := exec.Command("grep", "Cpus_allowed:", "/proc/self/status").Output()
			seen[string(mask)] = true
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	if want := min(all.Count(), 2)*2 - 1; len(seen) != want { // all, and two halves unless there is but one
		t.Errorf("programs had the processors %v, want %d different sets", seen, want)
	}
}
