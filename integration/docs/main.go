// Command docs keeps what is made from the pages of the documentation:
//
//	go run ./integration/docs           # fails if something is out of date
//	go run ./integration/docs --write   # writes llms.txt, docs/index.md, and the table of speed in README.md
//
// llms.txt is an index of README.md, INVARIANTS.md and the pages under docs/, for programs that read
// documentation. docs/index.md lists tasks, from comments above the headings of pages:
// <!-- task: limit requests of a user -->. The table of speed has the ratios of the run that docs/benchmark.md keeps.
//
// Its tests hold the pages to what they say. Every block of Go is compiled and run, every
// block of SQL and of shell is run, every link leads somewhere, every command and every
// test that is named exists, and no page is longer than it may be.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	write := flag.Bool("write", false, "write what is out of date, from the root of the repository")
	flag.Parse()
	if err := run(".", *write); err != nil {
		fmt.Fprintln(os.Stderr, "docs:", err)
		os.Exit(1)
	}
}

func run(root string, write bool) error {
	files, err := made(root)
	if err != nil {
		return err
	}
	var stale []string
	for name, text := range files {
		file := filepath.Join(root, name)
		if old, err := os.ReadFile(file); err == nil && string(old) == text {
			continue
		}
		stale = append(stale, name)
		if write {
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				return err
			}
		}
	}
	slices.Sort(stale)
	if len(stale) > 0 && !write {
		return fmt.Errorf("out of date: %s; go run ./integration/docs --write", strings.Join(stale, ", "))
	}
	return nil
}

// made returns the files that this command writes, by name.
func made(root string) (map[string]string, error) {
	readme, err := withSpeed(root)
	if err != nil {
		return nil, err
	}
	pages, err := readPages(root)
	if err != nil {
		return nil, err
	}
	return map[string]string{"README.md": readme, "llms.txt": llms(pages), indexPage: index(pages)}, nil
}
