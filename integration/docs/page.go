package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/text"
)

// page is a file of Markdown.
type page struct {
	name     string // with slashes, from the root of the repository
	text     []byte
	blocks   []block
	spans    []block // code within lines, without a language
	links    []block // their targets
	headings []heading
	intro    string // the first paragraph, in one line
}

// block is a piece of a page that is no prose.
type block struct {
	line int // of the file, at which the text begins
	lang string
	text string
}

type heading struct {
	level        int
	text, anchor string
}

// generated are the pages that other commands write. Their length is theirs.
var generated = []string{"docs/benchmark.md", "docs/attacks.md", indexPage}

// readPages reads README.md, INVARIANTS.md and the pages under docs/.
func readPages(root string) ([]*page, error) {
	files, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		return nil, err
	}
	pages := []*page{}
	for _, file := range append([]string{filepath.Join(root, "README.md"), filepath.Join(root, "INVARIANTS.md")}, files...) {
		p, err := readPage(root, file)
		if err != nil {
			return nil, err
		}
		pages = append(pages, p)
	}
	return pages, nil
}

func readPage(root, file string) (*page, error) {
	source, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	name, err := filepath.Rel(root, file)
	if err != nil {
		return nil, err
	}
	return parsePage(filepath.ToSlash(name), source)
}

func parsePage(name string, source []byte) (*page, error) {
	p := &page{name: name, text: source}
	seen := map[string]int{} // anchors
	line := 1                // at which the block around the node begins
	md := goldmark.New(goldmark.WithExtensions(extension.GFM))
	root := md.Parser().Parse(text.NewReader(source))
	err := ast.Walk(root, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		if n.Type() == ast.TypeBlock && n.Lines().Len() > 0 {
			line = 1 + bytes.Count(source[:n.Lines().At(0).Start], []byte("\n"))
		}
		switch n := n.(type) {
		case *ast.FencedCodeBlock:
			p.blocks = append(p.blocks, block{line, string(n.Language(source)), string(n.Lines().Value(source))})
		case *ast.CodeSpan:
			p.spans = append(p.spans, block{line: line, text: plain(n, source)})
		case *ast.Link:
			p.links = append(p.links, block{line: line, text: string(n.Destination)})
		case *ast.Image:
			p.links = append(p.links, block{line: line, text: string(n.Destination)})
		case *ast.Heading:
			h := heading{level: n.Level, text: plain(n, source)}
			h.anchor = anchor(h.text, seen)
			p.headings = append(p.headings, h)
		case *ast.Paragraph:
			if p.intro == "" {
				p.intro = plain(n, source)
			}
		}
		return ast.WalkContinue, nil
	})
	return p, err
}

// plain returns the text of a node in one line, without its marks.
func plain(n ast.Node, source []byte) string {
	var b strings.Builder
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if t, ok := n.(*ast.Text); ok && entering {
			b.Write(t.Segment.Value(source))
			if t.SoftLineBreak() || t.HardLineBreak() {
				b.WriteByte(' ')
			}
		}
		return ast.WalkContinue, nil
	})
	return strings.ReplaceAll(strings.Join(strings.Fields(b.String()), " "), `\|`, "|")
}

// anchor returns what GitHub makes of a heading, for links that lead to it.
func anchor(text string, seen map[string]int) string {
	a := strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-', r == '_', r >= '0' && r <= '9', r >= 'a' && r <= 'z', r > 127:
			return r
		}
		return -1
	}, strings.ToLower(text))
	seen[a]++
	if n := seen[a]; n > 1 {
		return a + "-" + string(rune('0'+n-1))
	}
	return a
}
