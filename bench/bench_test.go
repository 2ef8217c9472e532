package main

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// tiny measures what only finds, for so short that the figures say nothing.
func tiny(only string) options {
	o := defaults()
	o.levels = []int{1, 4}
	o.rounds, o.round, o.warmUp = 1, 20*time.Millisecond, 5*time.Millisecond
	o.overGrant = 30 * time.Millisecond
	o.churn = churnSize{decisions: 500, vacuum: 20 * time.Millisecond, atLeast: 300 * time.Millisecond}
	o.only = regexp.MustCompile(only)
	return o
}

// measureTiny runs o, and returns what it printed and its results.
func measureTiny(t *testing.T, o options) (stdout, stderr string, results []result) {
	t.Helper()
	var out, progress bytes.Buffer
	results, facts, err := measureJobs(t.Context(), o, selectJobs(o.cases(), o.only), &progress)
	if err == nil {
		err = o.present(results, facts, &out)
	}
	if err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &progress)
	}
	return out.String(), progress.String(), results
}

// TestWindows: what the attacks on kinds of limits show, on a clock of their own, is the
// same on every machine.
func TestWindows(t *testing.T) {
	t.Parallel()
	pgtest.Long(t)
	file := filepath.Join(t.TempDir(), "windows.svg")
	var out, errs bytes.Buffer
	less := effort{phases: 8, asks: 1000, flooded: 17 * 7}
	if err := attackWindows(t.Context(), less, []string{"--rounds", "1", "--round", "20ms", "--plot", file}, &out, &errs); err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &errs)
	}
	for _, want := range []string{
		`fixed window +2\.00 +1\.00 `, `two weighted counters +1\.99 +\d`, `token bucket +1\.99 +1\.00 `, `token bucket, half of both +0\.99 +0\.50 `,
		`sliding window, 16 slots +1\.00 +0\.94 `, `sliding window, 60 slots +1\.00 +0\.98 `,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if err := readable(file); err != nil {
		t.Errorf("the picture: %v", err)
	}
}

// TestTrade: a flood never gets more at once than the capacity, and less by what is
// refilled during Escrow.
func TestTrade(t *testing.T) {
	pgtest.Long(t)
	file := filepath.Join(t.TempDir(), "escrow.svg")
	var out, errs bytes.Buffer
	if err := run(t.Context(), []string{"escrow", "--rounds", "1", "--round", "20ms", "--plot", file}, &out, &errs); err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &errs)
	}
	for _, want := range []string{`none +[\d,]+ +[\d,]+ +[\d,]+\n`, `500ms +[\d,]+ +[\d,]+ +[1-5],\d\d\d\n`} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if err := readable(file); err != nil {
		t.Errorf("the picture: %v", err)
	}
}

// TestEveryImplementation has each decide something. Without Redis there is a
// message instead of its rows.
func TestEveryImplementation(t *testing.T) {
	t.Parallel()
	pgtest.Long(t)
	o := tiny(`^(granted-one-key|tx-one-key)/4/|^granted-10k-keys/4/UPDATE of many|^refused-one-key/4/|^over-grant|^churn-one-key/.*combined`)
	o.plotFile = filepath.Join(t.TempDir(), "plot.svg")
	stdout, stderr, results := measureTiny(t, o)

	_, err := exec.LookPath(o.redisServer)
	if got, want := strings.Contains(stderr, "apt-get install redis-server"), err != nil; got != want {
		t.Errorf("says how to install Redis: %v, want %v, in %q", got, want, stderr)
	}
	found := make(map[string]bool)
	for _, r := range results {
		found[r.impl] = true
		if r.errors != 0 || r.p50 <= 0 || r.p99 < r.p50 {
			t.Errorf("%s: got %d errors, p50 %v and p99 %v, want none, and 0 < p50 <= p99", r.job, r.errors, r.p50, r.p99)
		}
		if !strings.Contains(stdout, r.impl) {
			t.Errorf("%s is not in the table:\n%s", r.impl, stdout)
		}
	}
	for _, j := range selectJobs(allCases([]int{1}), nil) {
		if ok := found[j.impl]; ok == (needsRedis[j.impl] && err != nil) {
			t.Errorf("%s was measured: %v", j.impl, ok)
		}
	}
	if err := readable(o.plotFile); err != nil {
		t.Errorf("the picture: %v", err)
	}
}

// readable returns an error if a file is no picture with texts.
func readable(file string) error {
	picture, err := os.ReadFile(file)
	if err == nil && strings.Count(string(picture), "<text") < 5 {
		err = fmt.Errorf("few texts in %q", picture)
	}
	return err
}

func TestBadArguments(t *testing.T) {
	for _, args := range [][]string{
		{"--only", "no-such-case"},
		{"--only", "("},
		{"--no-such-flag"},
		{"--network", "-1ms"},
		{"granted-one-key"},
	} {
		if err := run(t.Context(), args, io.Discard, io.Discard); err == nil {
			t.Errorf("%q: no error", args)
		}
	}
}

// TestNetwork finds no decision that took less than the network does, but from memory.
func TestNetwork(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const wanted = 2 * time.Millisecond
	o := tiny(`^(granted-one-key(-1ms)?|tx-one-key)/1/(ours|Redis Lua)`)
	o.network = wanted
	stdout, _, results := measureTiny(t, o)
	for _, r := range results {
		least := wanted
		if r.name == grantedOneKeyFar {
			least = time.Millisecond // of its own
		}
		if r.behind == nil || r.behind.wanted != least {
			t.Errorf("%s: got a network of %+v, want %v", r.job, r.behind, least)
			continue
		}
		far := r.p50 >= least*99/100 || strings.HasSuffix(r.impl, "escrow") // which is how exact latencies are
		if r.behind.far < least || !far {
			t.Errorf("%s: got a ping of %v and a median of %v, want at least %v", r.job, r.behind.far, r.p50, least)
		}
	}
	if want := "Granted, one key, 2ms of network (granted-one-key)"; !strings.Contains(stdout, want) {
		t.Errorf("want %q in:\n%s", want, stdout)
	}
}

// TestCheck judges the same figures twice: with network they are no answer.
func TestCheck(t *testing.T) {
	of := func(impl string, pace float64, network time.Duration) result {
		return result{job: job{testCase{name: grantedOneKey, network: network}, busy, impl}, rounds: []float64{pace}}
	}
	for network, want := range map[time.Duration]map[string]int{
		0:                {"ok": 1, "**no**": 1},
		time.Millisecond: {},
	} {
		got := make(map[string]int)
		for _, f := range check([]result{of(oursCombined, 15, network), of(goRedisLua, 10, network), of(rueidisLua, 16, network)}).All {
			if f.Claim == "" {
				t.Errorf("%s judges nothing in words", f.What)
			}
			if !f.Missing {
				got[f.Verdict()]++
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("with %v of network: got %v, want %v", network, got, want)
		}
	}
}

// TestJobs holds the tables of implementations together: every job can be
// opened, and every implementation is in a case.
func TestJobs(t *testing.T) {
	unused := make(map[string]bool)
	for impl := range implementations {
		unused[impl] = true
	}
	for _, j := range selectJobs(allCases([]int{1}), nil) {
		if implementations[j.impl] == nil {
			t.Errorf("%s cannot be opened", j)
		}
		delete(unused, j.impl)
	}
	for _, c := range processCases {
		for _, impl := range c.impls {
			delete(unused, impl)
		}
	}
	for impl := range unused {
		t.Errorf("%s is in no case", impl)
	}
}

func TestWrong(t *testing.T) {
	bound := int64(40)
	of := func(impl string, granted, errors int64) []result {
		return []result{{job: job{testCase{name: overGrant}, busy, impl}, granted: granted, bound: &bound, errors: errors}}
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
