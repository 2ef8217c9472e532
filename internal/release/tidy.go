package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/mod/module"
)

// next is a version after all that will be released.
const next = "v0.9999.0"

// tidy runs go mod tidy in every module of the checkout at root, each as if all had been
// released. What they require of each other stays as it is.
func tidy(ctx context.Context, root string) error {
	all, err := modules(root)
	if err != nil {
		return err
	}
	released, err := releasedVersion(root, all)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s, err := newSite(ctx, root, dir, next)
	if err != nil {
		return err
	}
	for _, m := range all {
		if _, err := s.run(ctx, filepath.Join(s.tree, string(m)), "go", "mod", "tidy"); err != nil {
			return err
		}
		if err := bringBack(s.tree, root, m, released); err != nil {
			return err
		}
	}
	return nil
}

// bringBack writes a module's go.mod and go.sum from a tree that was tidied into the
// checkout, with our modules at the version that was released.
func bringBack(tree, root string, m ourModule, released string) error {
	mod, err := readMod(tree, m)
	if err != nil {
		return err
	}
	if err := requireOurs(mod, released); err != nil {
		return err
	}
	if err := writeMod(root, m, mod); err != nil {
		return err
	}
	sums, err := os.ReadFile(m.sumFile(tree))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it requires nothing
	}
	if err != nil {
		return err
	}
	before, err := os.ReadFile(m.sumFile(root))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	hashes, err := readSum(before)
	if err != nil {
		return err
	}
	for _, p := range published {
		if sums, err = withHashes(sums, p.path(), ofModule(hashes, p)); err != nil {
			return err
		}
	}
	return os.WriteFile(m.sumFile(root), sums, 0o644)
}

func ofModule(hashes map[module.Version]string, m ourModule) map[module.Version]string {
	its := map[module.Version]string{}
	for v, hash := range hashes {
		if v.Path == m.path() {
			its[v] = hash
		}
	}
	return its
}
