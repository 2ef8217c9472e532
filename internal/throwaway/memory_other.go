//go:build !linux

package throwaway

// MemoryDir returns nothing: these systems have no such directory by default.
func MemoryDir() string { return "" }
