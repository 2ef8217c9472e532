package throwaway

import (
	"archive/tar"
	"context"
	"crypto/rand"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// initdb takes most of the time that a server needs to start. It runs once for each version of
// PostgreSQL on a machine: its result is kept as a template, which each server copies.
//
// A template is one file: a tar archive of the superuser's password and of the data directory.
// So it can be read by this process and handed to a server of another user, and it appears
// whole or not at all. Only its owner may read it.

//go:embed template.sh
var templateMaker string

// unfinished is how old a file is that was left by a process killed while it wrote it.
const unfinished = time.Hour

// making is held by the one goroutine of this process that looks for a template. Two
// processes may make the same one at a time; the later replaces the earlier.
var making sync.Mutex

// template returns an archive for a new server, to be closed by the caller, and the
// password in it.
func (i installation) template(ctx context.Context) (archive *os.File, password string, err error) {
	making.Lock()
	defer making.Unlock()
	path := i.templatePath()
	archive, password, err = readTemplate(os.Open(path))
	if err != nil {
		archive, password, err = readTemplate(i.makeTemplate(ctx, path))
	}
	if err != nil {
		return nil, "", fmt.Errorf("making a template of its data: %w", err)
	}
	return archive, password, nil
}

// templatePath returns where a template is kept. Where this process has no directory for
// that, it is kept nowhere.
func (i installation) templatePath() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	// initdb writes the time zone into the configuration.
	made := sha256.Sum256(fmt.Appendf(nil, "%q", []any{i.dir, os.Getenv("TZ"), directory, templateMaker}))
	return filepath.Join(cache, "ratelimit-postgres", fmt.Sprintf("%x-%s.tar", made[:8], filepath.Base(i.version)))
}

// makeTemplate makes a template and keeps it at path, if it can.
func (i installation) makeTemplate(ctx context.Context, path string) (*os.File, error) {
	archive, err := createBeside(path)
	if err != nil {
		return nil, err
	}
	defer os.Remove(archive.Name()) // unless it is kept
	if err := i.writeTemplate(ctx, archive); err != nil {
		return nil, errors.Join(err, archive.Close())
	}
	if os.Rename(archive.Name(), path) == nil {
		removeOutdated(path)
	}
	return archive, nil
}

// createBeside creates a file in the directory of path, or, if that cannot be written to,
// in that for temporary files.
func createBeside(path string) (*os.File, error) {
	if dir := filepath.Dir(path); path != "" && os.MkdirAll(dir, 0o700) == nil {
		if f, err := os.CreateTemp(dir, "*.part"); err == nil {
			return f, nil
		}
	}
	return os.CreateTemp("", "ratelimit-postgres-*.part")
}

func (i installation) writeTemplate(ctx context.Context, archive *os.File) error {
	cmd := shell(templateMaker, FastDir(), []string{i.dir})
	cmd.Stdout = archive
	if err := dropRoot(cmd); err != nil {
		return err
	}
	p, err := startProcess(cmd)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintln(p.stdin, rand.Text()) // or the script has ended, and says why
	// Killed, it would leave its directory behind.
	if err := errors.Join(p.close(), ctx.Err()); err != nil {
		return err
	}
	return archive.Sync() // before it gets the name at which it is taken to be whole
}

// removeOutdated removes the templates of other versions from the same directory of binaries,
// and unfinished ones.
func removeOutdated(path string) {
	made, _, _ := strings.Cut(filepath.Base(path), "-")
	outdated, _ := filepath.Glob(filepath.Join(filepath.Dir(path), made+"-*.tar")) // fails for malformed patterns only
	for _, other := range outdated {
		if other != path {
			_ = os.Remove(other)
		}
	}
	parts, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "*.part"))
	for _, part := range parts {
		if info, err := os.Stat(part); err == nil && time.Since(info.ModTime()) > unfinished {
			_ = os.Remove(part)
		}
	}
}

// readTemplate reads the password, an archive's first member, and goes back to the start.
func readTemplate(archive *os.File, err error) (_ *os.File, password string, _ error) {
	if err != nil {
		return nil, "", err
	}
	password, err = readPassword(archive)
	if err != nil {
		return nil, "", errors.Join(fmt.Errorf("%s is no template: %w", archive.Name(), err), archive.Close())
	}
	return archive, password, nil
}

func readPassword(archive io.ReadSeeker) (string, error) {
	if _, err := archive.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	r := tar.NewReader(archive)
	if _, err := r.Next(); err != nil {
		return "", err
	}
	password, err := io.ReadAll(io.LimitReader(r, 1024))
	if err != nil {
		return "", err
	}
	_, err = archive.Seek(0, io.SeekStart)
	return strings.TrimSpace(string(password)), err
}
