package main

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// site is a repository with the files of a checkout, from which the go command gets our modules as it
// would get them from the public one: by their tags. It gets others' from the user's module cache, and what
// that lacks from where the user does. Nothing of ours gets into the user's cache.
type site struct {
	root    string // of the checkout
	repo    string
	environ []string
}

// newSite makes a site of the checkout at root, in a directory.
func newSite(ctx context.Context, root, dir string) (*site, error) {
	s := &site{root: root, repo: filepath.Join(dir, "repository")}
	user, err := command{}.run(ctx, "go", "env", "GOMODCACHE", "GOPROXY")
	if err != nil {
		return nil, err
	}
	cache, proxy, _ := strings.Cut(strings.TrimSpace(user), "\n")
	s.environ = append(os.Environ(), "GOWORK=off",
		"GOPROXY="+fileURL(filepath.Join(cache, "cache", "download"))+","+proxy,
		"GONOPROXY="+ourPath, "GONOSUMDB="+ourPath,
		"GOMODCACHE="+filepath.Join(dir, "modcache"),
		"GOFLAGS=-modcacherw -trimpath", // -trimpath: what was compiled elsewhere need not be again
		"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=url."+fileURL(s.repo)+".insteadOf", "GIT_CONFIG_VALUE_0="+repository)
	_, err = command{}.run(ctx, "git", "init", "--quiet", s.repo)
	return s, err
}

func fileURL(dir string) string { return "file://" + filepath.ToSlash(dir) }

// git runs git on the files of the checkout, with the repository of the site.
func (s *site) git(ctx context.Context, args ...string) error {
	_, err := command{dir: s.root}.run(ctx, "git", append([]string{
		"--git-dir=" + filepath.Join(s.repo, ".git"), "--work-tree=" + s.root,
		"-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false",
	}, args...)...)
	return err
}

// tidy runs go mod tidy in all modules of the checkout, against ours as they are there, at a version. It
// tags each of those once it is tidy: its go.sum is a part of what it is.
func (s *site) tidy(ctx context.Context, all []string, version string) error {
	for _, m := range all {
		if _, err := s.takeOurs(m); err != nil {
			return err
		}
		if _, err := (command{filepath.Join(s.root, m), s.environ}).run(ctx, "go", "mod", "tidy"); err != nil {
			return err
		}
		if !slices.Contains(published, m) {
			continue
		}
		err := s.git(ctx, "add", "--all")
		err = cmp.Or(err, s.git(ctx, "commit", "--quiet", "--no-verify", "--allow-empty", "--message", m))
		if err = cmp.Or(err, s.git(ctx, "tag", path.Join(m, version))); err != nil {
			return err
		}
	}
	return nil
}

// takeOurs removes the hashes of ours from a module's go.sum, and returns their lines.
func (s *site) takeOurs(m string) (ours []string, err error) {
	file := filepath.Join(s.root, m, "go.sum")
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) { // it requires nothing
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var others []string
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, ourPath) {
			ours = append(ours, line)
		} else {
			others = append(others, line)
		}
	}
	return ours, writeLines(file, others)
}

// withSite calls do with a site of the checkout at root.
func withSite(ctx context.Context, root string, do func(*site) error) error {
	dir, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s, err := newSite(ctx, root, dir)
	if err != nil {
		return err
	}
	return do(s)
}

// tidy runs go mod tidy in every module of the checkout at root, against the checkout. The hashes of ours
// stay those of the last release.
func tidy(ctx context.Context, root string) error {
	all, version, err := modules(root)
	if err != nil {
		return err
	}
	return withSite(ctx, root, func(s *site) error {
		released := map[string][]string{}
		for _, m := range all {
			if released[m], err = s.takeOurs(m); err != nil {
				return err
			}
		}
		err = s.tidy(ctx, all, version)
		for _, m := range all {
			if err == nil {
				_, err = s.takeOurs(m)
			}
			err = cmp.Or(err, addLines(filepath.Join(root, m, "go.sum"), released[m]))
		}
		return err
	})
}

// addLines adds lines of ours to a go.sum, in the go command's order.
func addLines(file string, ours []string) error {
	if len(ours) == 0 {
		return nil
	}
	text, err := os.ReadFile(file)
	lines := slices.Collect(strings.Lines(string(text)))
	at, _ := slices.BinarySearch(lines, ours[0])
	return cmp.Or(err, writeLines(file, slices.Insert(lines, at, ours...)))
}

func writeLines(file string, lines []string) error {
	return os.WriteFile(file, []byte(strings.Join(lines, "")), 0o644)
}
