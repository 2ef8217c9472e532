package main

import (
	"fmt"
	"strings"
)

// llms returns llms.txt (https://llmstxt.org): what README.md begins with, and for each
// page its address, what it is about, and its sections.
func llms(pages []*page) string {
	var b strings.Builder
	readme := pages[0]
	fmt.Fprintf(&b, "# %s\n\n> %s\n\n## Documentation\n\n", readme.headings[0].text, readme.intro)
	for _, p := range pages {
		fmt.Fprintf(&b, "- [%s](%s): %s", p.headings[0].text, p.name, p.intro)
		var sections []string
		for _, h := range p.headings {
			if h.level == 2 {
				sections = append(sections, h.text)
			}
		}
		if len(sections) > 0 {
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

const module = "github.com/pgratelimit/ratelimit"

// reference are the packages that users import.
var reference = []struct{ path, about string }{
	{"", "definitions of limits, requests, results and errors."},
	{"/pgstore", "the verbs on PostgreSQL."},
	{"/memstore", "the same verbs in memory, for tests."},
	{"/migrate", "puts the table in place."},
	{"/migrations", "the table as SQL files, for goose and other tools."},
	{"/httplimit", "a middleware for servers and a transport for clients."},
	{"/riverlimit", "limits for jobs of the queue River."},
}
