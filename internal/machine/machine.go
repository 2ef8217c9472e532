// Package machine says on what a figure was measured.
package machine

import (
	"fmt"
	"os"
	"runtime"
	"strings"
)

// Name is the machine's processor, how many cores of it there are, and the system.
func Name() string {
	return fmt.Sprintf("%s, %d cores, %s/%s", cpu(), runtime.NumCPU(), runtime.GOOS, runtime.GOARCH)
}

func cpu() string {
	text, _ := os.ReadFile("/proc/cpuinfo") // on Linux only
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown CPU"
}
