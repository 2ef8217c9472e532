// Package gotool has tests build the programs that they run.
package gotool

import (
	"fmt"
	"os/exec"
	"testing"
)

// Build has the go command build a program into a directory, from within a module or a package
// of it. The arguments are those of go run, which does so, and has a copy made instead of running
// the program: it keeps what it has linked, and go build links each time.
func Build(tb testing.TB, from, dir string, args ...string) {
	tb.Helper()
	keep := fmt.Sprintf(`sh -c 'cp "$0" "%s"'`, dir)
	cmd := exec.CommandContext(tb.Context(), "go", append([]string{"run", "-exec", keep}, args...)...)
	cmd.Dir = from
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("building %s: %v\n%s", args[len(args)-1], err, out)
	}
}
