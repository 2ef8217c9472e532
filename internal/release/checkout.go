package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/semver"
)

const ourPath = "github.com/pgratelimit/ratelimit"

// A ourModule is a module of this repository, by its directory from the root.
type ourModule string

// published are the modules that users get, each after those that it requires.
var published = []ourModule{".", "migrate", "grpclimit", "httplimit", "otellimit", "riverlimit", "cmd/ratelimit"}

func (m ourModule) path() string { return path.Join(ourPath, string(m)) }

// tag returns the name by which the go command finds the version of the module.
func (m ourModule) tag(version string) string { return path.Join(string(m), version) }

// modFile returns the path of the module's go.mod in the checkout at root, and sumFile
// that of its go.sum.
func (m ourModule) modFile(root string) string { return filepath.Join(root, string(m), "go.mod") }
func (m ourModule) sumFile(root string) string { return filepath.Join(root, string(m), "go.sum") }

// isOurs reports whether the path is that of a module that is published.
func isOurs(modulePath string) bool {
	return slices.ContainsFunc(published, func(m ourModule) bool { return m.path() == modulePath })
}

// findRoot returns the root of the checkout in which the program runs.
func findRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOWORK").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOWORK: %w", err)
	}
	file := strings.TrimSpace(string(out))
	if file == "" || file == "off" {
		return "", errors.New("must run in a checkout of the repository, with its go.work")
	}
	return filepath.Dir(file), nil
}

// modules returns the modules of the checkout's go.work.
func modules(root string) ([]ourModule, error) {
	work, err := readWork(root)
	if err != nil {
		return nil, err
	}
	var all []ourModule
	for _, use := range work.Use {
		all = append(all, ourModule(path.Clean(use.Path)))
	}
	for _, m := range published {
		if !slices.Contains(all, m) {
			return nil, fmt.Errorf("go.work does not use %s, which is published", m)
		}
	}
	return all, nil
}

func workFile(root string) string { return filepath.Join(root, "go.work") }

func readWork(root string) (*modfile.WorkFile, error) {
	text, err := os.ReadFile(workFile(root))
	if err != nil {
		return nil, err
	}
	return modfile.ParseWork("go.work", text, nil)
}

func readMod(root string, m ourModule) (*modfile.File, error) {
	file := m.modFile(root)
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return modfile.Parse(file, text, nil)
}

func writeMod(root string, m ourModule, mod *modfile.File) error {
	text, err := mod.Format()
	if err != nil {
		return err
	}
	return os.WriteFile(m.modFile(root), text, 0o644)
}

// releasedVersion returns the version at which the modules require each other. It is
// an error if it is not one, or if a go.mod replaces a module, since the go command
// heeds no replacement of what it gets for others.
func releasedVersion(root string, all []ourModule) (string, error) {
	var version string
	for _, m := range all {
		mod, err := readMod(root, m)
		if err != nil {
			return "", err
		}
		if len(mod.Replace) > 0 {
			return "", fmt.Errorf("module %s replaces %s: leave that to go.work", m.path(), mod.Replace[0].Old.Path)
		}
		for _, require := range mod.Require {
			if !isOurs(require.Mod.Path) {
				continue
			}
			if version == "" {
				version = require.Mod.Version
			}
			if require.Mod.Version != version {
				return "", fmt.Errorf("module %s requires %s %s, and another one %s", m.path(), require.Mod.Path, require.Mod.Version, version)
			}
		}
	}
	if !semver.IsValid(version) {
		return "", errors.New("the modules do not require each other")
	}
	return version, nil
}

// sources returns the files of the checkout: what git has or would add, and outside of a
// clone all.
func sources(ctx context.Context, root string) ([]string, error) {
	if _, err := os.Stat(filepath.Join(root, ".git")); err != nil {
		return walk(root)
	}
	cmd := exec.CommandContext(ctx, "git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	files := strings.Split(strings.TrimRight(string(out), "\x00"), "\x00")
	return slices.DeleteFunc(files, func(file string) bool {
		_, err := os.Lstat(filepath.Join(root, file)) // deleted, and not committed
		return errors.Is(err, fs.ErrNotExist)
	}), nil
}

func walk(root string) (files []string, err error) {
	err = filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			rel, relErr := filepath.Rel(root, file)
			files, err = append(files, filepath.ToSlash(rel)), relErr
		}
		return err
	})
	return files, err
}

// copyTo copies the checkout's files to a directory, and returns their names.
func copyTo(ctx context.Context, root, dir string) ([]string, error) {
	files, err := sources(ctx, root)
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return nil, err
		}
		to := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(to, text, 0o644); err != nil {
			return nil, err
		}
	}
	return files, nil
}
