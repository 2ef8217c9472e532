package main

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	mostWordsOfReadme = 1500
	mostWordsOfPage   = 2000
)

var tasks = regexp.MustCompile(`(?m)^<!-- task: .* -->$`)

// What a command writes is as that command would write it now.
func TestUpToDate(t *testing.T) {
	if err := run(root, false); err != nil {
		t.Error(err)
	}
}

// Words are counted as wc -w does, without the comments that index.md is made of.
func TestLength(t *testing.T) {
	pages, err := readPages(root)
	must(t, err)
	for _, p := range pages {
		words, most := len(strings.Fields(tasks.ReplaceAllString(string(p.text), ""))), mostWordsOfPage
		if p.name == "README.md" {
			most = mostWordsOfReadme
		}
		t.Logf("%-32s %5d", p.name, words)
		if words > most && !slices.Contains(generated, p.name) {
			t.Errorf("%s: got %d words, want at most %d", p.name, words, most)
		}
	}
}

// Links lead to files, and to headings that these have. What is on other machines is not
// asked for.
func TestLinks(t *testing.T) {
	pages := allPages(t)
	for _, p := range pages {
		for _, link := range p.links {
			if err := follow(pages, p, link.text); err != nil {
				t.Errorf("%s:%d: %s: %v", p.name, link.line, link.text, err)
			}
		}
	}
}

func TestLinksAreFollowed(t *testing.T) {
	p, err := parsePage("docs/page.md", []byte("# A `name`, and more\n\n[here](#a-name-and-more)\n\n[up](../README.md)\n\n[no](#none) [nor](nothing.md) [nor](../README.md#none) [nor](https:///x)\n"))
	must(t, err)
	pages := append(allPages(t), p)
	var broken []string
	for _, link := range p.links {
		if follow(pages, p, link.text) != nil {
			broken = append(broken, link.text)
		}
	}
	if want := []string{"#none", "nothing.md", "../README.md#none", "https:///x"}; !slices.Equal(broken, want) {
		t.Errorf("got broken %q, want %q", broken, want)
	}
}

// Every page is to be found from README.md.
func TestReadmeLinksToAllPages(t *testing.T) {
	pages, err := readPages(root)
	must(t, err)
	for _, p := range pages[1:] {
		if !slices.ContainsFunc(pages[0].links, func(b block) bool { return b.text == p.name }) {
			t.Errorf("README.md has no link to %s", p.name)
		}
	}
}

// follow reports an error if a link of a page leads nowhere.
func follow(pages []*page, from *page, target string) error {
	u, err := url.Parse(target)
	if err != nil {
		return err
	}
	if u.Scheme != "" {
		if u.Scheme != "https" || u.Host == "" {
			return errors.New("is neither a file nor an address that begins with https://")
		}
		return nil
	}
	name := from.name
	if u.Path != "" {
		name = path.Join(path.Dir(from.name), u.Path)
		if _, err := os.Stat(filepath.Join(root, name)); err != nil {
			return err
		}
	}
	if u.Fragment == "" {
		return nil
	}
	for _, p := range pages {
		if p.name == name && slices.ContainsFunc(p.headings, func(h heading) bool { return h.anchor == u.Fragment }) {
			return nil
		}
	}
	return fmt.Errorf("%s has no heading #%s", name, u.Fragment)
}

// README.md says of each module which Go it needs: that of its go.mod.
func TestGoVersions(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	must(t, err)
	row := regexp.MustCompile("(?m)^\\| `" + module + "(\\S*)` \\|.*\\| Go (1\\.\\d+) \\|$")
	rows := row.FindAllStringSubmatch(string(readme), -1)
	if len(rows) != 7 {
		t.Errorf("got %d modules, want 7", len(rows))
	}
	for _, m := range rows {
		mod, err := os.ReadFile(filepath.Join(root, m[1], "go.mod"))
		if err != nil {
			t.Error(err)
		}
		if want := "\ngo " + m[2] + ".0\n"; !strings.Contains(string(mod), want) {
			t.Errorf("%s%s: README.md says Go %s, and its go.mod does not", module, m[1], m[2])
		}
	}
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
