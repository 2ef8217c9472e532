package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
)

// cut writes the version, of that day, into the checkout at root.
func cut(ctx context.Context, root, version string, day time.Time) error {
	all, err := modules(root)
	if err != nil {
		return err
	}
	before, err := releasedVersion(root, all)
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
	if err := edit(filepath.Join(root, "CHANGELOG.md"), func(text []byte) ([]byte, error) {
		return cutChangelog(text, before, version, day)
	}); err != nil {
		return err
	}
	if err := requireVersion(root, all, version); err != nil {
		return err
	}
	return sum(ctx, root, all, version)
}

// edit rewrites a file.
func edit(file string, change func([]byte) ([]byte, error)) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if text, err = change(text); err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o644)
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
	number := strings.TrimPrefix(version, "v")
	below, links, _ := strings.Cut(below, "\n[Unreleased]: ")
	_, links, _ = strings.Cut(links, "\n") // without the rest of the line
	return fmt.Appendf(nil, "%s%s\n## [%s] - %s\n%s\n\n[Unreleased]: %s/compare/%s...HEAD\n[%s]: %s\n%s",
		above, unreleased, number, day.Format(time.DateOnly), strings.TrimRight(below, "\n"),
		repository, version, number, linkOf(before, version), links), nil
}

// linkOf is where the changes of a version are to be seen.
func linkOf(before, version string) string {
	if semver.Compare(before, "v0.0.0") == 0 { // the first one
		return repository + "/releases/tag/" + version
	}
	return repository + "/compare/" + before + "..." + version
}

// requireVersion has the modules require each other at the version, and go.work put
// the checkout in its place.
func requireVersion(root string, all []ourModule, version string) error {
	for _, m := range all {
		mod, err := readMod(root, m)
		if err != nil {
			return err
		}
		if err := requireOurs(mod, version); err != nil {
			return err
		}
		if err := writeMod(root, m, mod); err != nil {
			return err
		}
	}
	work, err := readWork(root)
	if err != nil {
		return err
	}
	for _, replace := range work.Replace {
		if isOurs(replace.Old.Path) {
			line := []string{replace.Old.Path, version, "=>", replace.New.Path}
			if !replace.Syntax.InBlock {
				line = append([]string{"replace"}, line...)
			}
			replace.Syntax.Token = line
		}
	}
	return os.WriteFile(workFile(root), modfile.Format(work.Syntax), 0o644)
}

// requireOurs has a go.mod require our modules at the version.
func requireOurs(mod *modfile.File, version string) error {
	for _, require := range mod.Require {
		if !isOurs(require.Mod.Path) {
			continue
		}
		if err := mod.AddRequire(require.Mod.Path, version); err != nil {
			return err
		}
	}
	return nil
}

// sum writes the hashes of the version of the modules that are published into the go.sum
// of those that require them. In the order of published: go.sum is a part of what is
// published.
func sum(ctx context.Context, root string, all []ourModule, version string) error {
	files, err := sources(ctx, root)
	if err != nil {
		return err
	}
	for _, p := range published {
		hashes, err := hashesOf(root, files, p, version)
		if err != nil {
			return err
		}
		for _, m := range all {
			mod, err := readMod(root, m)
			if err != nil {
				return err
			}
			if !requires(mod, p) {
				continue
			}
			if err := edit(m.sumFile(root), func(text []byte) ([]byte, error) {
				return withHashes(text, p.path(), hashes)
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

func requires(mod *modfile.File, m ourModule) bool {
	for _, require := range mod.Require {
		if require.Mod.Path == m.path() {
			return true
		}
	}
	return false
}

// withHashes is a go.sum that has the hashes of one version of the module at the path,
// and no other of it.
func withHashes(text []byte, modulePath string, hashes map[module.Version]string) ([]byte, error) {
	sums, err := readSum(text)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(sums, func(m module.Version, _ string) bool { return m.Path == modulePath })
	maps.Copy(sums, hashes)
	order := slices.Collect(maps.Keys(sums))
	module.Sort(order)
	var b bytes.Buffer
	for _, m := range order {
		fmt.Fprintln(&b, m.Path, m.Version, sums[m])
	}
	return b.Bytes(), nil
}

// readSum returns the hashes of a go.sum.
func readSum(text []byte) (map[module.Version]string, error) {
	sums := map[module.Version]string{}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			return nil, fmt.Errorf("go.sum has the line %q", line)
		}
		sums[module.Version{Path: fields[0], Version: fields[1]}] = fields[2]
	}
	return sums, nil
}
