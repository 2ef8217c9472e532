package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
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
	return writeVersion(ctx, root, all, version)
}

// writeVersion has the modules require each other at the version, with its hashes.
func writeVersion(ctx context.Context, root string, all []ourModule, version string) error {
	if err := requireVersion(root, all, version); err != nil {
		return err
	}
	return sum(ctx, root, all, version)
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

// linkOf returns where the changes of a version are to be seen.
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
		for _, require := range mod.Require {
			if !isOurs(require.Mod.Path) {
				continue
			}
			if err := mod.AddRequire(require.Mod.Path, version); err != nil {
				return err
			}
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
			sums, err := readSum(m.sumFile(root))
			if err != nil {
				return err
			}
			maps.DeleteFunc(sums, func(v module.Version, _ string) bool { return v.Path == p.path() })
			maps.Copy(sums, hashes)
			if err := os.WriteFile(m.sumFile(root), formatSum(sums), 0o644); err != nil {
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

// readSum returns the hashes of a go.sum: none, if there is no such file.
func readSum(file string) (map[module.Version]string, error) {
	text, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	sums := map[module.Version]string{}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			return nil, fmt.Errorf("%s has the line %q", file, line)
		}
		sums[module.Version{Path: fields[0], Version: fields[1]}] = fields[2]
	}
	return sums, nil
}

// formatSum returns a go.sum of the hashes, in the go command's order.
func formatSum(sums map[module.Version]string) []byte {
	order := slices.Collect(maps.Keys(sums))
	module.Sort(order)
	var b bytes.Buffer
	for _, m := range order {
		fmt.Fprintln(&b, m.Path, m.Version, sums[m])
	}
	return b.Bytes()
}
