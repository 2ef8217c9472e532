package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// processorTime returns how long this program and the servers that it has started have had a
// processor, as far as their processes are there still.
func processorTime() (total time.Duration) {
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	parents := make(map[string]string, len(files))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		// The state and the parent are behind the program's name, which may be anything.
		if fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:]); len(fields) > 1 {
			parents[filepath.Base(filepath.Dir(file))] = string(fields[1])
		}
	}
	own := strconv.Itoa(os.Getpid())
	for process := range parents {
		ancestor := process
		for ancestor != own && parents[ancestor] != "" {
			ancestor = parents[ancestor]
		}
		if ancestor == own {
			total += hadProcessor(process)
		}
	}
	return total
}

// hadProcessor returns how long the threads of a process have had a processor.
func hadProcessor(process string) (total time.Duration) {
	threads, _ := filepath.Glob("/proc/" + process + "/task/*/schedstat")
	for _, file := range threads {
		text, err := os.ReadFile(file)
		if fields := bytes.Fields(text); err == nil && len(fields) > 0 {
			n, _ := strconv.ParseInt(string(fields[0]), 10, 64)
			total += time.Duration(n)
		}
	}
	return total
}
