package throwaway

import "syscall"

// roomInMemory is more than a server of tests and its log of changes take.
const roomInMemory = 2 << 30

// memoryDir returns the directory of a file system in memory with enough room for the data of
// servers, or nothing.
func memoryDir() string {
	const dir = "/dev/shm"
	var fs syscall.Statfs_t
	if syscall.Statfs(dir, &fs) != nil || fs.Bavail*uint64(fs.Bsize) < roomInMemory {
		return ""
	}
	return dir
}
