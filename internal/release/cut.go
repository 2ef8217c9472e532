package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/semver"
)

const ourPath = "github.com/pgratelimit/ratelimit"

// published lists the directories of the modules that users get, each after those that it requires.
var published = []string{".", "migrate", "grpclimit", "httplimit", "otellimit", "riverlimit", "cmd/ratelimit"}

var (
	// requirement matches what a go.mod requires of ours, and what go.work replaces of that.
	requirement = regexp.MustCompile(`(` + ourPath + `[\w/]*) (v\S+)`)

	used = regexp.MustCompile(`(?m)^\t\./(\S+)$`) // in go.work
)

// modules returns the directories of the modules of the checkout at root, those that are published first,
// and the version at which they require each other. A go.mod that replaces a module is an error, since the
// go command heeds no replacement of what it gets for others.
func modules(root string) (all []string, version string, err error) {
	work, err := os.ReadFile(filepath.Join(root, "go.work"))
	if err != nil {
		return nil, "", err
	}
	all = slices.Clone(published)
	for _, use := range used.FindAllSubmatch(work, -1) {
		if dir := string(use[1]); !slices.Contains(published, dir) {
			all = append(all, dir)
		}
	}
	for _, m := range all {
		mod, err := os.ReadFile(filepath.Join(root, m, "go.mod"))
		if err != nil {
			return nil, "", err
		}
		if bytes.Contains(mod, []byte("=>")) {
			return nil, "", fmt.Errorf("module %s replaces another one: leave that to go.work", path.Join(ourPath, m))
		}
		for _, of := range requirement.FindAllStringSubmatch(string(mod), -1) {
			if version = cmp.Or(version, of[2]); of[2] != version {
				return nil, "", fmt.Errorf("module %s requires %s, and another one %s", path.Join(ourPath, m), of[0], version)
			}
		}
	}
	if !semver.IsValid(version) {
		return nil, "", errors.New("the modules do not require each other")
	}
	return all, version, nil
}

// cut writes the version, of that day, into the checkout at root.
func cut(ctx context.Context, root, version string, day time.Time) error {
	all, before, err := modules(root)
	if err != nil {
		return err
	}
	switch {
	case version != semver.Canonical(version) || semver.Build(version) != "":
		return fmt.Errorf("version %q is none as Go has them, such as v0.2.0", version)
	case semver.Compare(version, before) <= 0:
		return fmt.Errorf("version %s does not come after %s, which the modules have", version, before)
	case semver.Major(version) != "v0" && semver.Major(version) != "v1":
		return fmt.Errorf("version %s needs modules whose paths end with /%s", version, semver.Major(version))
	}
	// The changelog first: nothing else is written when it has nothing to say.
	changelog := filepath.Join(root, "CHANGELOG.md")
	text, err := os.ReadFile(changelog)
	if err != nil {
		return err
	}
	if text, err = cutChangelog(text, before, version, day); err != nil {
		return err
	}
	if err := os.WriteFile(changelog, text, 0o644); err != nil {
		return err
	}
	return withSite(ctx, root, func(s *site) error { return s.writeVersion(ctx, all, version) })
}

// writeVersion has the modules require each other at the version, with its hashes, and go.work put the
// checkout in its place.
func (s *site) writeVersion(ctx context.Context, all []string, version string) error {
	files := []string{"go.work"}
	for _, m := range all {
		files = append(files, filepath.Join(m, "go.mod"))
	}
	for _, file := range files {
		file = filepath.Join(s.root, file)
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := os.WriteFile(file, requirement.ReplaceAll(text, []byte("$1 "+version)), 0o644); err != nil {
			return err
		}
	}
	return s.tidy(ctx, all, version)
}

const (
	unreleased = "## [Unreleased]\n"
	repository = "https://" + ourPath
)

// cutChangelog makes what is unreleased in the changelog the section of the version.
func cutChangelog(text []byte, before, version string, day time.Time) ([]byte, error) {
	above, below, found := strings.Cut(string(text), unreleased)
	if !found {
		return nil, fmt.Errorf("CHANGELOG.md has no line %q", strings.TrimSpace(unreleased))
	}
	if changes, _, _ := strings.Cut(below, "\n## ["); strings.TrimSpace(changes) == "" {
		return nil, fmt.Errorf("CHANGELOG.md says of nothing that it changes in %s", version)
	}
	number, link := strings.TrimPrefix(version, "v"), repository+"/compare/"+before+"..."+version
	if semver.Compare(before, "v0.0.0") == 0 { // the first one
		link = repository + "/releases/tag/" + version
	}
	below, links, _ := strings.Cut(below, "\n[Unreleased]: ")
	_, links, _ = strings.Cut(links, "\n") // without the rest of the line
	return fmt.Appendf(nil, "%s%s\n## [%s] - %s\n%s\n\n[Unreleased]: %s/compare/%s...HEAD\n[%s]: %s\n%s",
		above, unreleased, number, day.Format(time.DateOnly), strings.TrimRight(below, "\n"),
		repository, version, number, link, links), nil
}
