//go:build !linux

package throwaway

// memoryDir returns nothing: these systems have no such directory by default.
func memoryDir() string { return "" }
