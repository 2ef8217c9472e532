package main

import (
	"fmt"
	"os"
	"syscall"
)

// mountSmall mounts a file system of so many bytes, which is for root to do.
func mountSmall(dir string, size int) error {
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0755", size)); err != nil {
		return fmt.Errorf("mounting a small file system: %w", err)
	}
	return nil
}

func unmount(dir string) error { return syscall.Unmount(dir, syscall.MNT_DETACH) }

// sameOwner gives a file to the owner of another.
func sameOwner(file, as string) error {
	info, err := os.Stat(as)
	if err != nil {
		return err
	}
	owner := info.Sys().(*syscall.Stat_t)
	return os.Chown(file, int(owner.Uid), int(owner.Gid))
}
