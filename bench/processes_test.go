package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// TestMain has this program be one of several processes, when it is started as that. The
// figures of tests say nothing, so servers may have their data in memory.
func TestMain(m *testing.M) {
	if !lab.IsChild() {
		_ = os.Setenv("TMPDIR", throwaway.FastDir()) // or they take longer to start
		os.Exit(m.Run())
	}
	if err := runChild(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// TestProcesses: several processes ask for one key, and their figures are put together.
func TestProcesses(t *testing.T) {
	t.Parallel()
	pgtest.Long(t)
	file := filepath.Join(t.TempDir(), "processes.svg")
	var out, errs bytes.Buffer
	args := []string{"--rounds", "1", "--round", "200ms", "--plot", file, "--only", "^(tx/8 × 8/ours, before the transaction, escrow$|decisions/2 × 32/(single-row|ours, combined))"}
	if err := runProcesses(t.Context(), args, &out, &errs); err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &errs)
	}
	for _, want := range []string{
		`8 processes, 8 goroutines in each\n +` + oursTxEscrow + ` +\d`,
		`single-row UPDATE +\d`,
		`servers (on processor [\d, ]+, processes on \d|and processes share all processors)`, // a server in a container is not ours to place
		oursCombined + ` +\d`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if err := readable(file); err != nil {
		t.Errorf("the picture: %v", err)
	}
}

// TestCheckProcesses: each figure is judged by the ratio of the same rounds.
func TestCheckProcesses(t *testing.T) {
	t.Parallel()
	spreadOf := func(name, impl string, c crowd, pace ...float64) spread {
		s := spread{processesJob: processesJob{name: name, impl: impl, crowd: c}, pace: pace}
		for range pace {
			s.p99 = append(s.p99, time.Millisecond)
			s.retries, s.statements = append(s.retries, 0), append(s.statements, 1)
			s.least, s.most = append(s.least, 8), append(s.most, 10)
		}
		return s
	}
	spreads := []spread{
		spreadOf(processesTx, oursTx, crowd{1, 64}, 100, 1000, 10), spreadOf(processesTx, oursTx, crowd{8, 8}, 90, 700, 9),
		spreadOf(processesOwn, plainUpdate, crowd{8, 8}, 10, 20, 30), spreadOf(processesOwn, oursCombined, crowd{8, 8}, 80, 80, 80),
	}
	got := make(map[string]string)
	for _, f := range checkProcesses(spreads).All {
		got[f.Claim+": "+f.What] = f.Measured + " " + f.Verdict()
	}
	for what, want := range map[string]string{
		"Transactions that take from the row: 8 processes, as a share of one":                           "0.90 ok",
		"Transactions that take from the row: least of the processes, as a share of most":               "0.80 ok",
		"Decisions on their own: 8 processes, as a share of UPDATEs a second × goroutines in a process": "0.50 **no**",
		"Decisions on their own: least of the processes, as a share of most":                            "0.80 **no**",
	} {
		if got[what] != want {
			t.Errorf("%s: got %q, want %q", what, got[what], want)
		}
	}
}
