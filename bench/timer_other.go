//go:build !linux

package main

import "time"

// timer sleeps.
type timer struct{}

func newTimer() (*timer, error) { return &timer{}, nil }

func (*timer) sleep(d time.Duration) error {
	time.Sleep(d)
	return nil
}

func (*timer) close() {}
