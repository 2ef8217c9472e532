package leak

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Every package of users' that exports an error provokes each with Key, by Errors.
func TestErrorsOfAllPackages(t *testing.T) {
	const root = "../.."
	found := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil || !d.IsDir():
			return err
		case path != root && strings.HasPrefix(d.Name(), "."), strings.Contains(path, "internal"), d.Name() == "testdata",
			d.Name() == "bench", d.Name() == "integration", d.Name() == "examples", d.Name() == "cmd", d.Name() == "tools":
			return fs.SkipDir
		}
		if len(exportedErrors(t, path)) == 0 {
			return nil
		}
		found++
		tests, err := filepath.Glob(filepath.Join(path, "*_test.go"))
		if err != nil {
			return err
		}
		for _, file := range tests {
			if text, err := os.ReadFile(file); err != nil || strings.Contains(string(text), `leak.Errors(t, "."`) {
				return err
			}
		}
		t.Errorf("package %s exports errors, and no test of its own looks for keys in them: call leak.Errors", path)
		return nil
	})
	if err != nil || found < 8 {
		t.Errorf("looked at %d packages, %v", found, err)
	}
}
