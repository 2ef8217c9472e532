//go:build !linux

package main

import "time"

// processorTime is for Linux.
func processorTime() time.Duration { return 0 }
