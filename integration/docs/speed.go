package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	speedBegin = "<!-- speed: made by go run ./integration/docs --write -->\n"
	speedEnd   = "<!-- end -->\n"
)

// withSpeed returns README.md with the ratios of the run in docs/benchmark.md.
func withSpeed(root string) (string, error) {
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		return "", err
	}
	benchmark, err := os.ReadFile(filepath.Join(root, "docs", "benchmark.md"))
	if err != nil {
		return "", err
	}
	run, transactions, _ := strings.Cut(string(benchmark), "<!-- bench: transactions -->")
	table, err := speed(figures(run), figures(transactions))
	if err != nil {
		return "", err
	}
	head, rest, ok := strings.Cut(string(readme), speedBegin)
	_, tail, ended := strings.Cut(rest, speedEnd)
	if !ok || !ended {
		return "", fmt.Errorf("README.md has no lines %q and %q", speedBegin, speedEnd)
	}
	return head + speedBegin + table + speedEnd + tail, nil
}

// figure names a number of a run: what a second of an implementation does in a case.
type figure struct {
	name       string // such as granted-one-key
	goroutines int
	of         string // the implementation
}

var (
	caseLine  = regexp.MustCompile(`^\S.*\((\S+)\)$`)
	groupLine = regexp.MustCompile(`^  (\d+) goroutines?$`)
	valueLine = regexp.MustCompile(`^    (\S.*?)  +([\d,]+)  `)
)

// figures reads the tables of a run.
func figures(text string) map[figure]float64 {
	found, at := map[figure]float64{}, figure{}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if m := caseLine.FindStringSubmatch(line); m != nil {
			at = figure{name: m[1]}
		} else if m := groupLine.FindStringSubmatch(line); m != nil {
			at.goroutines, _ = strconv.Atoi(m[1])
		} else if m := valueLine.FindStringSubmatch(line); m != nil && at.name != "" {
			at.of = m[1]
			found[at], _ = strconv.ParseFloat(strings.ReplaceAll(m[2], ",", ""), 64)
		}
	}
	return found
}

// ratios are the rows of the table: by how much ours does better than another, or another
// way than that.
var ratios = []struct {
	what, to   string // in words
	name       string // of the case
	goroutines int
	base       string // the implementation that everything is divided by
	ours       string
	memory     string // "" for none
	other      string // "" for none
	way        string // other in words
}{
	{"a decision, one key, 1 goroutine", rueidis, "granted-one-key", 1, lua, combined, escrow, goRedis, "go-redis"},
	{"the same, 64 goroutines", rueidis, "granted-one-key", 64, lua, combined, escrow, goRedis, "go-redis"},
	{"a decision, 10,000 keys, 64 goroutines", rueidis, "granted-10k-keys", 64, lua, combined, escrow, goRedis, "go-redis"},
	{"one INSERT by `AllowFunc`, one key, 64 goroutines", "no limit", "tx-one-key", 64, noLimit, inTx, beforeTx, byHand, "`FOR UPDATE` by hand"},
	{"the same, 32 shards", "no limit", "tx-one-key", 64, noLimit, inTx + ", 32 shards", "", "", ""},
	{"the same, 10,000 keys", "no limit", "tx-10k-keys", 64, noLimit, inTx, beforeTx, byHand, "`FOR UPDATE` by hand"},
	{"the same, 10,000 keys, by `AllowTx`", "no limit", "tx-10k-keys", 64, noLimit, "ours, AllowTx", "", "no limit, but an upsert of the key's row", "an upsert"},
	{"the same, 10,000 keys, by `AllowOnCommit`", "no limit", "tx-10k-keys", 64, noLimit, "ours, with COMMIT", "", "", ""},
	{"the same, 10,000 keys, by `QueueTake`", "no limit", "tx-10k-keys", 64, noLimit, "ours, in the batch of the work", "", "", ""},
}

const (
	rueidis  = "Redis, rueidis"
	lua      = "Redis Lua, rueidis"
	goRedis  = "Redis Lua, go-redis"
	combined = "ours, combined"
	escrow   = "ours, escrow"
	noLimit  = "no limit"
	inTx     = "ours, in the transaction"
	beforeTx = "ours, before the transaction, escrow"
	byHand   = "SELECT FOR UPDATE, in the transaction"
)

// speed returns the table. Each line is of the first run that has its figures.
func speed(runs ...map[figure]float64) (string, error) {
	var b strings.Builder
	b.WriteString("| operations a second | compared with | this library | [from memory](docs/scaling.md#from-memory) | another way |\n|---|---|---|---|---|\n")
	for _, r := range ratios {
		run := runs[max(0, slices.IndexFunc(runs, func(run map[figure]float64) bool { return run[figure{r.name, r.goroutines, r.ours}] > 0 }))]
		base := run[figure{r.name, r.goroutines, r.base}]
		cells := []string{r.what, r.to}
		for _, of := range []string{r.ours, r.memory, r.other} {
			value := run[figure{r.name, r.goroutines, of}]
			switch {
			case of == "":
				cells = append(cells, "")
			case base == 0 || value == 0:
				return "", fmt.Errorf("docs/benchmark.md lacks %s, %d goroutines, %q or %q", r.name, r.goroutines, of, r.base)
			default:
				cells = append(cells, short(value/base)+" ×")
			}
		}
		if r.other != "" {
			cells[4] = r.way + ": " + cells[4]
		}
		fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | "))
	}
	return b.String(), nil
}

// short returns a ratio with two digits.
func short(v float64) string {
	if v >= 10 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2g", v)
}
