//go:build !linux

package main

import (
	"errors"
	"fmt"
)

func mountSmall(string, int) error {
	return fmt.Errorf("mounting a small file system is for Linux: %w", errors.ErrUnsupported)
}

func unmount(string) error { return nil }

func sameOwner(string, string) error { return errors.ErrUnsupported }
