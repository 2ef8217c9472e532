package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb/dirhash"
	"golang.org/x/mod/zip"
)

// A sourceFile is a file of the checkout under its name in a module.
type sourceFile struct{ name, file string }

func (f sourceFile) Path() string                 { return f.name }
func (f sourceFile) Lstat() (fs.FileInfo, error)  { return os.Lstat(f.file) }
func (f sourceFile) Open() (io.ReadCloser, error) { return os.Open(f.file) }

const license = "LICENSE"

// archive writes the version of a module as the go command makes it from a tag: what is
// in the module's directory but not in a module within, and the repository's licence.
func archive(w io.Writer, root string, files []string, m ourModule, version string) error {
	var in []zip.File
	for _, file := range files {
		if name, err := filepath.Rel(string(m), file); err == nil && filepath.IsLocal(name) {
			in = append(in, sourceFile{filepath.ToSlash(name), filepath.Join(root, file)})
		}
	}
	if !slices.ContainsFunc(in, func(f zip.File) bool { return f.Path() == license }) {
		in = append(in, sourceFile{license, filepath.Join(root, license)})
	}
	return zip.Create(w, module.Version{Path: m.path(), Version: version}, in)
}

// hashesOf returns the hashes of a module's version that go.sum has: of its files, and
// of its go.mod.
func hashesOf(root string, files []string, m ourModule, version string) (map[module.Version]string, error) {
	archived, err := os.CreateTemp("", "release-*.zip")
	if err != nil {
		return nil, err
	}
	defer os.Remove(archived.Name())
	defer archived.Close()
	if err := archive(archived, root, files, m, version); err != nil {
		return nil, err
	}
	whole, err := dirhash.HashZip(archived.Name(), dirhash.Hash1)
	if err != nil {
		return nil, err
	}
	mod, err := dirhash.Hash1([]string{"go.mod"}, func(string) (io.ReadCloser, error) { return os.Open(m.modFile(root)) })
	if err != nil {
		return nil, err
	}
	return map[module.Version]string{
		{Path: m.path(), Version: version}:             whole,
		{Path: m.path(), Version: version + "/go.mod"}: mod,
	}, nil
}

// serve writes the version of the modules that are published into a directory that the
// go command takes for a module proxy.
func serve(dir, root string, files []string, version string) error {
	for _, m := range published {
		escaped, err := module.EscapePath(m.path())
		if err != nil {
			return err
		}
		var archived bytes.Buffer
		if err := archive(&archived, root, files, m, version); err != nil {
			return fmt.Errorf("module %s: %w", m.path(), err)
		}
		mod, err := os.ReadFile(m.modFile(root))
		if err != nil {
			return err
		}
		info, err := json.Marshal(map[string]any{"Version": version, "Time": time.Unix(0, 0).UTC()})
		if err != nil {
			return err
		}
		at := filepath.Join(dir, filepath.FromSlash(escaped), "@v")
		if err := os.MkdirAll(at, 0o755); err != nil {
			return err
		}
		for name, text := range map[string][]byte{
			"list": []byte(version + "\n"), version + ".info": info, version + ".mod": mod, version + ".zip": archived.Bytes(),
		} {
			if err := os.WriteFile(filepath.Join(at, name), text, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// A site is the checkout as it would be once it is released: a copy, in which the
// version is cut, and a module proxy that serves it.
type site struct {
	tree    string // the copy
	version string
	environ []string
}

// newSite cuts the version of a copy of the checkout, under a directory.
func newSite(ctx context.Context, root, dir, version string) (*site, error) {
	s := &site{tree: filepath.Join(dir, "tree"), version: version}
	files, err := copyTo(ctx, root, s.tree)
	if err != nil {
		return nil, err
	}
	if err := cut(ctx, s.tree, version, time.Now()); err != nil {
		return nil, err
	}
	proxy := filepath.Join(dir, "proxy")
	if err := serve(proxy, s.tree, files, version); err != nil {
		return nil, err
	}
	s.environ, err = environ(ctx, dir, proxy)
	return s, err
}

// environ is the environment of a go command that has no workspace, has never seen our
// modules, and gets them from our proxy. All else it gets from the user's module cache,
// and asks the user's proxy only for what is missing there: with GOPROXY=off, nobody.
func environ(ctx context.Context, dir, proxy string) ([]string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMODCACHE", "GOPROXY").Output()
	if err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	users := strings.Fields(string(out))
	if len(users) != 2 {
		return nil, fmt.Errorf("go env GOMODCACHE GOPROXY says %q", out)
	}
	proxies := []string{"file://" + filepath.ToSlash(proxy), "file://" + filepath.ToSlash(filepath.Join(users[0], "cache", "download")), users[1]}
	return append(os.Environ(),
		"GOWORK=off",
		"GOPROXY="+strings.Join(proxies, ","),
		"GONOSUMDB="+ourPath+","+ourPath+"/*",
		"GOMODCACHE="+filepath.Join(dir, "modcache"),
		"GOFLAGS=-modcacherw -trimpath", // -trimpath: what was compiled before need not be again
	), nil
}

// run runs a program in a directory of the site, and returns what it printed.
func (s *site) run(ctx context.Context, dir, name string, args ...string) (string, error) {
	var errs strings.Builder
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env, cmd.Stderr = dir, s.environ, &errs
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, errs.String(), out)
	}
	return string(out), nil
}
