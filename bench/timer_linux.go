package main

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// timer sleeps, a few microseconds too long. On Linux time.Sleep is up to a
// millisecond late when nothing else goes on, as it waits in whole ones. One
// goroutine at a time can use it.
type timer struct {
	fd   int
	file *os.File
}

func newTimer() (*timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("making a timer: %w", err)
	}
	return &timer{fd, os.NewFile(uintptr(fd), "timer")}, nil
}

func (t *timer) sleep(d time.Duration) error {
	if d <= 0 {
		return nil // which would be never
	}
	once := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}
	err := unix.TimerfdSettime(t.fd, 0, &once, nil)
	if err == nil {
		var expirations [8]byte
		_, err = t.file.Read(expirations[:])
	}
	if err != nil {
		return fmt.Errorf("waiting for a timer: %w", err)
	}
	return nil
}

func (t *timer) close() { t.file.Close() }
