package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// TestMain has this program be one of several processes, when it is started as that. The
// figures of tests say nothing, so servers may have their data in memory.
func TestMain(m *testing.M) {
	if lab.IsChild() {
		main()
		return
	}
	_ = os.Setenv("TMPDIR", throwaway.FastDir()) // or they take longer to start
	os.Exit(m.Run())
}

// TestEveryImplementation has each decide something, in this process or in several, and write the
// page. Without Redis there is a message instead of its rows. No decision takes less than the network
// does, but from memory.
func TestEveryImplementation(t *testing.T) {
	pgtest.Long(t)
	dir := t.TempDir()
	page := filepath.Join(dir, "docs", "benchmark.md")
	must(t, os.Mkdir(filepath.Dir(page), 0o755))
	must(t, os.WriteFile(page, []byte("<!-- bench: claims -->\n<!-- end -->\n<!-- bench: run -->\n<!-- end -->\n"), 0o644))
	o := options{
		levels: []int{1, 4}, rounds: 1, round: 20 * time.Millisecond, warmUp: 5 * time.Millisecond, overGrant: 30 * time.Millisecond, docs: dir,
		only: regexp.MustCompile(`-key/4/|^(over-grant|permits-one|granted-one-key-1ms/1/|tx-one-key-1ms/1/)|/2 × 32/`),
	}
	var out, progress bytes.Buffer
	results, facts, err := measureJobs(t.Context(), o, o.jobs(), &progress)
	if err == nil {
		err = o.present(results, facts, &out)
	}
	if err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &progress)
	}
	_, err = exec.LookPath("redis-server")
	if got, want := strings.Contains(progress.String(), "apt-get install redis-server"), err != nil; got != want {
		t.Errorf("says how to install Redis: %v, want %v, in %q", got, want, &progress)
	}
	text, picture := read(t, page), read(t, filepath.Join(dir, "docs", "benchmark.svg"))
	if strings.Count(picture, "<text") < 5 {
		t.Errorf("few texts in %q", picture)
	}
	found := make(map[string]bool)
	for _, r := range results {
		found[r.impl] = true
		if r.errors != 0 || r.p50 <= 0 || r.p99 < r.p50 {
			t.Errorf("%s: got %d errors, p50 %v and p99 %v, want none, and 0 < p50 <= p99", r.job, r.errors, r.p50, r.p99)
		}
		if far := r.late * 99 / 100; r.p50 < far && r.impl != oursEscrow { // which is how exact latencies are
			t.Errorf("%s: got a median of %v, want at least %v", r.job, r.p50, far)
		}
		if !strings.Contains(text, r.impl) {
			t.Errorf("%s is not in the page:\n%s", r.impl, text)
		}
	}
	for impl := range implementations {
		if found[impl] == (needsRedis[impl] && err != nil) {
			t.Errorf("%s was measured: %v", impl, found[impl])
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	return string(text)
}

func TestBadArguments(t *testing.T) {
	for _, args := range [][]string{{"--only", "no-such-case"}, {"--only", "("}, {"--no-such-flag"}, {"granted-one-key"}} {
		if err := run(t.Context(), args, io.Discard, io.Discard); err == nil {
			t.Errorf("%q: no error", args)
		}
	}
}

// TestCheck judges figures, each with a claim in words.
func TestCheck(t *testing.T) {
	of := func(impl string, pace float64) result {
		return result{job: job{testCase{name: grantedOneKey}, crowd{1, busy}, impl}, rounds: []float64{pace}}
	}
	got := make(map[string]int)
	for _, f := range check([]result{of(oursCombined, 15), of(goRedisLua, 10), of(rueidisLua, 16)}).All {
		if f.Claim == "" {
			t.Errorf("%s judges nothing in words", f.What)
		}
		got[f.Verdict()]++
	}
	if got["ok"] != 1 || got["**no**"] != 1 {
		t.Errorf("got %v, want a yes and a no", got)
	}
}

func TestWrong(t *testing.T) {
	bound := int64(40)
	of := func(impl string, granted, errors int64) []result {
		return []result{{job: job{testCase{name: overGrant}, crowd{1, busy}, impl}, granted: granted, bound: &bound, errors: errors}}
	}
	tests := []struct {
		name    string
		results []result
		want    bool
	}{
		{"as much as is right", of(oursCombined, 40, 0), false},
		{"one too many", of(oursCombined, 41, 0), true},
		{"an error", of(oursTx, 40, 1), true},
		{"not ours", of(readCommitted, 4000, 1), false},
	}
	for _, tt := range tests {
		if got := wrong(tt.results) != nil; got != tt.want {
			t.Errorf("%s: wrong is %v, want %v", tt.name, got, tt.want)
		}
	}
}
