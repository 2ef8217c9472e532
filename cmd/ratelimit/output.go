package main

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// A printer writes what a command has found: for people, or with --json one JSON object a
// line, or with --csv as CSV. Texts that strangers have chosen are harmless in all of them.
type printer struct {
	out    io.Writer
	json   bool
	csv    bool
	colour bool
	wide   bool // keys are not cut
}

// keyWidth is how much of a key a table on a terminal shows.
const keyWidth = 64

func (o *options) printer(cmd *cobra.Command) *printer {
	out := cmd.OutOrStdout()
	terminal := isTerminal(out)
	return &printer{
		out: out, json: o.json, csv: o.csv,
		colour: terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb",
		wide:   !terminal || o.wide,
	}
}

// isTerminal reports whether a stream is a terminal.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// key shows a key, cut on a terminal.
func (p *printer) key(key string) string {
	if p.wide || p.csv {
		return visible.Text(key)
	}
	return visible.Short(key, keyWidth)
}

// keyOrAll shows a key of the catalog.
func (p *printer) keyOrAll(key string) string {
	if key == catalog.AllKeys {
		return "(all keys)"
	}
	return p.key(key)
}

// Colours of the terminal.
const (
	red    = "31"
	yellow = "33"
	green  = "32"
)

// paint colours a text on a terminal.
func (p *printer) paint(colour, text string) string {
	if !p.colour || colour == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

// object writes a value as JSON on a line.
func (p *printer) object(v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	_, err := io.WriteString(p.out, visible.JSON(b.Bytes()))
	return err
}

// A table is written row by row. Its last column should be the one whose width and direction
// of writing are not known.
type table struct {
	*printer
	rows *tabwriter.Writer
	csv  *csv.Writer
}

// table begins a table.
func (p *printer) table(headings ...string) *table {
	t := &table{printer: p}
	switch {
	case p.json:
	case p.csv:
		t.csv = csv.NewWriter(p.out)
		for i, h := range headings {
			headings[i] = strings.ToLower(h)
		}
		_ = t.csv.Write(headings) // Flush tells
	default:
		t.rows = tabwriter.NewWriter(p.out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t.rows, strings.Join(headings, "\t"))
	}
	return t
}

// row writes a row: as JSON v, or else the cells.
func (t *table) row(v any, cells ...string) error {
	switch {
	case t.json:
		return t.object(v)
	case t.csv != nil:
		return t.csv.Write(cells)
	}
	_, err := fmt.Fprintln(t.rows, strings.Join(cells, "\t"))
	return err
}

func (t *table) end() error {
	switch {
	case t.json:
		return nil
	case t.csv != nil:
		t.csv.Flush()
		return t.csv.Error()
	}
	return t.rows.Flush()
}

// say writes a line for people, and with --json nothing.
func (p *printer) say(format string, args ...any) {
	if !p.json && !p.csv {
		fmt.Fprintf(p.out, format+"\n", args...)
	}
}

// tell writes a value as JSON, or a line for people.
func (p *printer) tell(v any, format string, args ...any) error {
	if p.json {
		return p.object(v)
	}
	p.say(format, args...)
	return nil
}

// number is a number in JSON, which has no word for infinity: null.
func number(v float64) *float64 {
	if math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// instant is an instant in JSON and CSV; "" for the zero time.
func instant(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
