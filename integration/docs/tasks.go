package main

import (
	"fmt"
	"regexp"
	"strings"
)

// indexPage is the index by task.
const indexPage = "docs/index.md"

// task is a line above a heading: <!-- task: limit requests of a user -->
var task = regexp.MustCompile(`^<!-- task: (.+) -->$`)

// index returns the index by task. It has what stands above the headings of pages, in their order.
func index(pages []*page) string {
	var b strings.Builder
	b.WriteString("# I want to …\n\nEach task, and the section that shows how.\n\n<!-- made by go run ./integration/docs --write -->\n| I want to | |\n|---|---|\n")
	for _, p := range inOrder(pages) {
		heading, fenced := 0, false
		var tasks []string
		for line := range strings.Lines(string(p.text)) {
			line = strings.TrimSpace(line)
			if strings.HasPrefix(line, "```") {
				fenced = !fenced
			}
			if m := task.FindStringSubmatch(line); m != nil && !fenced {
				tasks = append(tasks, m[1])
			}
			if fenced || !strings.HasPrefix(line, "#") {
				continue
			}
			h := p.headings[heading]
			heading++
			for _, t := range tasks {
				address, inDocs := strings.CutPrefix(p.name, "docs/")
				if !inDocs {
					address = "../" + address
				}
				name := p.headings[0].text
				if h.level > 1 {
					address, name = address+"#"+h.anchor, name+", "+h.text
				}
				fmt.Fprintf(&b, "| %s | [%s](%s) |\n", t, name, address)
			}
			tasks = nil
		}
	}
	return b.String()
}
