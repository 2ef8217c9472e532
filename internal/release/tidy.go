package main

import (
	"context"
	"maps"
	"os"
	"path/filepath"

	"golang.org/x/mod/module"
)

// tidy runs go mod tidy in every module of the checkout at root, against the checkout.
func tidy(ctx context.Context, root string) error {
	dir, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	all, err := tidied(ctx, root, dir)
	if err != nil {
		return err
	}
	for _, m := range all {
		mod, sum, err := broughtBack(dir, root, m)
		if err != nil {
			return err
		}
		if err := os.WriteFile(m.modFile(root), mod, 0o644); err != nil {
			return err
		}
		if len(sum) == 0 { // it requires nothing
			continue
		}
		if err := os.WriteFile(m.sumFile(root), sum, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// tidied makes a copy of the checkout in which each module replaces the others, and runs
// go mod tidy in each of its modules. From then on the user's module cache has all that
// they require of others.
func tidied(ctx context.Context, root, tree string) ([]ourModule, error) {
	if _, err := copyTo(ctx, root, tree); err != nil {
		return nil, err
	}
	all, err := modules(tree)
	if err != nil {
		return nil, err
	}
	for _, m := range all {
		if err := replaceOthers(tree, m); err != nil {
			return nil, err
		}
		alone := command{dir: filepath.Join(tree, string(m)), environ: append(os.Environ(), "GOWORK=off")}
		for _, args := range [][]string{{"mod", "tidy"}, {"list", "-m", "all"}} {
			if _, err := alone.run(ctx, "go", args...); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// replaceOthers has the module replace those of ours that it requires by their
// directories.
func replaceOthers(tree string, m ourModule) error {
	mod, err := readMod(tree, m)
	if err != nil {
		return err
	}
	for _, p := range published {
		if !requires(mod, p) {
			continue
		}
		if err := mod.AddReplace(p.path(), "", filepath.Join(tree, string(p)), ""); err != nil {
			return err
		}
	}
	return writeMod(tree, m, mod)
}

// broughtBack returns a module's go.mod and go.sum from a tree that was tidied as the
// checkout at root is to have them: without replacements, and with the hashes of ours
// that it has.
func broughtBack(tree, root string, m ourModule) (mod, sum []byte, err error) {
	file, err := readMod(tree, m)
	if err != nil {
		return nil, nil, err
	}
	for _, p := range published {
		if err := file.DropReplace(p.path(), ""); err != nil {
			return nil, nil, err
		}
	}
	file.Cleanup()
	if mod, err = file.Format(); err != nil {
		return nil, nil, err
	}
	sums, err := readSum(m.sumFile(tree))
	if err != nil {
		return nil, nil, err
	}
	before, err := readSum(m.sumFile(root))
	if err != nil {
		return nil, nil, err
	}
	maps.DeleteFunc(before, func(v module.Version, _ string) bool { return !isOurs(v.Path) })
	maps.Copy(sums, before)
	return mod, formatSum(sums), nil
}
