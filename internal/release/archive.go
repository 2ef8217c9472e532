package main

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

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

// A command is where a program runs, and with what environment.
type command struct {
	dir     string
	environ []string
}

// run runs a program, and returns what it printed.
func (c command) run(ctx context.Context, name string, args ...string) (string, error) {
	var errs strings.Builder
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env, cmd.Stderr = c.dir, c.environ, &errs
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, errs.String(), out)
	}
	return string(out), nil
}
