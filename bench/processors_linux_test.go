package main

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestProcessors: programs have the processors that they are given, and this one keeps its own.
func TestProcessors(t *testing.T) {
	allowed := func(status []byte) string {
		return string(regexp.MustCompile(`Cpus_allowed:\s+(\S+)`).FindSubmatch(status)[1])
	}
	own := func() map[string]bool { // of its threads
		files, _ := filepath.Glob("/proc/self/task/*/status")
		found := make(map[string]bool)
		for _, file := range files {
			if status, err := os.ReadFile(file); err == nil { // or it has ended
				found[allowed(status)] = true
			}
		}
		return found
	}
	before := own()
	first, second, err := halves()
	if err != nil {
		t.Fatal(err)
	}
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	if all.Count() == 1 {
		if first != nil || second != nil {
			t.Errorf("one processor was divided into %v and %v", first, second)
		}
		return
	}
	if first.set().Count()+second.set().Count() != all.Count() || strings.Contains(second.String(), first.String()) {
		t.Errorf("%d processors were divided into %v and %v", all.Count(), first, second)
	}
	seen := make(map[string]bool)
	for _, p := range []*processors{nil, first, second} {
		if err := p.run(func() error {
			status, err := exec.Command("cat", "/proc/self/status").Output()
			if err == nil {
				seen[allowed(status)] = true
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) != 3 {
		t.Errorf("programs had the processors %v, want all and two halves", seen)
	}
	if after := own(); !maps.Equal(after, before) {
		t.Errorf("this program had the processors %v, and has %v now", before, after)
	}
}
