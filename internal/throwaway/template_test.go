package throwaway

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// cached gives this process, and those that it starts, a cache of the test's own. It
// returns the directory of its templates.
func cached(t *testing.T) string {
	t.Helper()
	for _, v := range caches(publicTempDir(t)) {
		name, dir, _ := strings.Cut(v, "=")
		t.Setenv(name, dir)
	}
	cache, err := os.UserCacheDir()
	must(t, err)
	return filepath.Join(cache, "ratelimit-postgres")
}

// caches are the variables that give a process a directory for what it keeps.
func caches(dir string) []string {
	return []string{"HOME=" + dir, "XDG_CACHE_HOME=" + dir}
}

// installed is the installation that servers are started from.
func installed(t *testing.T) installation {
	t.Helper()
	inst, err := newest(t.Context(), binDirs(t.Context()))
	must(t, err)
	return inst
}

// names lists the files of a directory.
func names(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// initdb runs for the first server only, of those that start at a time too, and each
// server has data of its own.
func TestTemplate(t *testing.T) {
	long(t)
	dir := cached(t)
	var started sync.WaitGroup
	for range 3 {
		started.Go(func() {
			s, err := startLocal(t.Context(), Options{})
			if err != nil {
				t.Error(err)
				return
			}
			defer s.Close()
			if _, err := ask(t, s, "CREATE TABLE own ()"); err != nil {
				t.Error(err)
			}
		})
	}
	started.Wait()
	kept := names(t, dir)
	if len(kept) != 1 {
		t.Fatalf("got %q, want one template", kept)
	}
	info, err := os.Stat(filepath.Join(dir, kept[0]))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("got %v, %v; want a file that its owner may read", info.Mode(), err)
	}
	before := info.ModTime()
	mustStartLocal(t, Options{})
	if info, err = os.Stat(filepath.Join(dir, kept[0])); err != nil || info.ModTime() != before {
		t.Errorf("the template was made again: %v", err)
	}
}

// What is no template is replaced by one, and so is that of another version from the same
// binaries. What a process that was killed has left goes in time.
func TestTemplateReplaced(t *testing.T) {
	long(t)
	dir := cached(t)
	inst := installed(t)
	path := inst.templatePath()
	inst.version = "15.0"
	outdated := inst.templatePath()
	inst.dir += "-other"
	another := inst.templatePath()
	must(t, os.MkdirAll(dir, 0o700))
	left, underWay := filepath.Join(dir, "1.part"), filepath.Join(dir, "2.part")
	for _, file := range []string{path, outdated, another, left, underWay} {
		must(t, os.WriteFile(file, []byte("half"), 0o600))
	}
	long := time.Now().Add(-2 * unfinished)
	must(t, os.Chtimes(left, long, long))
	mustStartLocal(t, Options{})
	want := []string{filepath.Base(path), filepath.Base(another), filepath.Base(underWay)}
	slices.Sort(want)
	if got := names(t, dir); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A start that is given up leaves nothing behind, with and without a template.
func TestStartCanceled(t *testing.T) {
	long(t)
	cached(t)
	tmp := publicTempDir(t)
	t.Setenv("TMPDIR", tmp)
	inst := installed(t)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	start := func() {
		t.Helper()
		if _, err := inst.start(canceled, Options{}); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		if !empty(t, tmp) {
			t.Errorf("left %q", names(t, tmp))
		}
	}
	start()
	archive, _, err := inst.template(t.Context())
	must(t, err)
	must(t, archive.Close())
	start()
}
