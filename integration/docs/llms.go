package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// details are the sections of README.md that llms.txt has in full, without their headings.
var details = []string{"A whole program", "Install", "What you want"}

// about says what is in the pages whose first paragraph is about how they were made.
var about = map[string]string{
	"docs/benchmark.md": "A run of the benchmarks: decisions and transactions beside Redis and beside limits made by hand.",
	"docs/attacks.md":   "A run of the attacks from outside, with the figures of each.",
}

// llms returns llms.txt (https://llmstxt.org): what README.md begins with, its program, and
// for each page its address, what it is about, and its sections.
func llms(pages []*page) string {
	var b strings.Builder
	readme := pages[0]
	fmt.Fprintf(&b, "# %s\n\n> %s\n\n", readme.headings[0].text, readme.intro)
	for _, name := range details {
		b.WriteString(readme.section(name))
	}
	b.WriteString("## Pages\n\n")
	for _, p := range inOrder(pages) {
		if p.name == indexPage {
			continue
		}
		intro, ok := about[p.name]
		if !ok {
			intro = p.intro
		}
		fmt.Fprintf(&b, "- [%s](%s): %s", p.headings[0].text, p.name, intro)
		if !ok {
			var sections []string
			for _, h := range p.headings[1:] {
				sections = append(sections, h.text)
			}
			fmt.Fprintf(&b, " Sections: %s.", strings.Join(sections, "; "))
		}
		b.WriteByte('\n')
	}
	b.WriteString("\n## Reference\n\n")
	for _, r := range reference {
		fmt.Fprintf(&b, "- [%[1]s](https://pkg.go.dev/%[1]s): %[2]s\n", module+r.path, r.about)
	}
	return b.String()
}

// section returns the text below a heading of the second level.
func (p *page) section(name string) string {
	_, rest, _ := strings.Cut(string(p.text), "\n## "+name+"\n\n")
	text, _, _ := strings.Cut(rest, "\n## ")
	return strings.TrimRight(text, "\n") + "\n\n"
}

// inOrder returns the pages but the first, in the order in which that links to them last:
// at its end, one after the other.
func inOrder(pages []*page) []*page {
	last := map[string]int{}
	for i, link := range pages[0].links {
		last[link.text] = i
	}
	ordered := slices.Clone(pages[1:])
	slices.SortStableFunc(ordered, func(a, b *page) int { return cmp.Compare(last[a.name], last[b.name]) })
	return ordered
}

const module = "github.com/pgratelimit/ratelimit"

// reference are the packages that users import.
var reference = []struct{ path, about string }{
	{"", "definitions of limits, requests, results and errors."},
	{"/pgstore", "the verbs on PostgreSQL."},
	{"/fallback", "answers at once while the database is silent."},
	{"/sqltx", "transactions of database/sql for the verbs."},
	{"/memstore", "the same verbs in memory, for tests."},
	{"/migrate", "puts the table in place."},
	{"/migrations", "the table as SQL files, for goose and other tools."},
	{"/httplimit", "a middleware for servers and a transport for clients."},
	{"/grpclimit", "interceptors for servers and clients of gRPC."},
	{"/riverlimit", "limits for jobs of the queue River."},
	{"/otellimit", "metrics and spans for OpenTelemetry."},
}
