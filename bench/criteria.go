package main

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
)

// measure is a figure of a result, often beside another.
type measure struct {
	name string // behind that of the implementation
	of   func(a, b *result) float64
}

var (
	pace       = measure{"", throughput}
	lone       = measure{", time of a call", func(a, b *result) float64 { return throughput(b, a) }} // the inverse of one goroutine's pace
	p99        = measure{", p99", func(a, b *result) float64 { return float64(a.p99) / float64(b.p99) }}
	inTurn     = measure{", p99 of the time of 64 calls", func(a, b *result) float64 { return a.p99.Seconds() * b.opsPerSec / busy }}
	perSecond  = measure{", a second", func(a, _ *result) float64 { return a.opsPerSec }}
	p50        = measure{", p50 in µs", func(a, _ *result) float64 { return micros(a.p50) }}
	statements = measure{", statements a second", func(a, _ *result) float64 { return a.statements }}
	retries    = measure{", retries a transaction", func(a, _ *result) float64 { return a.perDecision }}
)

// throughput returns the ratio of a's to b's, round by round, so that changes from round to
// round affect both.
func throughput(a, b *result) float64 { return ratio(a.rounds, b.rounds) }

// ratio returns the median of a's to b's, round by round.
func ratio[T float64 | time.Duration](a, b []T) float64 {
	ratios := make([]float64, min(len(a), len(b)))
	for i := range ratios {
		ratios[i] = float64(a[i]) / max(float64(b[i]), 1e-9)
	}
	return median(ratios)
}

// mostAsked is how many statements a second a key is to cost that is decided from memory:
// four while that lasts.
const mostAsked = 4 * float64(time.Second) / float64(escrow)

// criteria are what a run must show, each with its bound. other, if it is not "", is what impl is
// compared with, in as many goroutines or in one.
var criteria = []struct {
	claim       string // "" for that of the line before
	name        string
	goroutines  int
	impl, other string
	measure     measure
	least, most float64 // one of them; 0 for none, but for a most of 0
	others      int     // 0 for as many
}{
	{"Where many ask, decisions keep up with a script in Redis, and on one key are ahead of it", grantedOneKey, busy, oursCombined, goRedisLua, pace, 1.5, 0, 0},
	{"", grantedOneKey, busy, oursCombined, rueidisLua, pace, 1, 0, 0},
	{"", grantedOneKey, 256, oursCombined, goRedisLua, pace, 4, 0, 0},
	{"", grantedOneKey, 256, oursCombined, rueidisLua, pace, 2, 0, 0},
	{"", granted10k, busy, oursCombined, goRedisLua, pace, 1, 0, 0},
	{"", granted10k, 256, oursCombined, rueidisLua, pace, 1, 0, 0},
	{"A call that meets no other takes little longer than the UPDATE of a row", grantedOneKey, 1, oursCombined, plainUpdate, lone, 0, 1.15, 0},
	{"What was taken ahead is handed out from memory, and the servers are seldom asked", grantedOneKey, busy, oursEscrow, "", perSecond, 5e6, 0, 0},
	{"", grantedOneKey, busy, oursEscrow, "", p50, 0, 1, 0},
	{"", grantedOneKey, busy, oursEscrow, "", statements, 0, mostAsked, 0},
	{"", grantedOneKey, busy, oursEscrow, rueidisLua, pace, 40, 0, 0},
	{"", grantedOneKey, 1, oursEscrow, rueidisLua, pace, 50, 0, 0},
	{"", granted10k, busy, oursEscrow, oursCombined, pace, 0.95, 0, 0},
	{"Transactions whose token was taken ahead go on as if there were no limit", txOneKey, busy, oursTxEscrow, noLimit, pace, 0.97, 0, 0},
	{"", txOneKey, busy, oursTxEscrow, noLimit, p99, 0, 1.1, 0},
	{"", txOneKey, busy, oursTxEscrow, "", retries, 0, 0, 0},
	{"On what distributes PostgreSQL, calls for one row share statements as well", grantedOneKey, busy, oursPortable, plainUpdate, pace, 10, 0, 0},
	{"Over 32 shards a limit leaves transactions most of their pace, and has none run again", txOneKey, busy, oursTx32, noLimit, pace, 0.8, 0, 0},
	{"", txOneKey, busy, oursTx32, noLimit, p99, 0, 2, 0},
	{"", txOneKey, busy, oursTx32, "", retries, 0, 0, 0},
	{"Transactions that share a row go on at the pace of a lone one, in turn, and none runs again", txOneKey, busy, oursTx, oursTx, pace, 0.85, 0, 1},
	{"", txOneKey, busy, oursTx, "", retries, 0, 0, 0},
	{"", txOneKey, busy, oursTx, oursTx, inTurn, 0, 2, 1},
	{"In the caller's transaction a limit costs little more than an upsert that decides nothing", tx10k, busy, oursCaller, keyUpsert, pace, 0.87, 0, 0},
	{"A take with COMMIT is faster than such an upsert in a round trip of its own", tx10k, busy, oursOnCommit, keyUpsert, pace, 1.15, 0, 0},
	{"", tx10k, busy, oursOnCommit, noLimit, pace, 0.8, 0, 0},
	{"", txOneKey, busy, oursOnCommit, keyUpsert, pace, 1.2, 0, 0},
	{"A take in the batch of the work leaves transactions on many keys most of their pace", tx10k, busy, oursBatch, noLimit, pace, 0.9, 0, 0},
	{"A flood that is refused from memory is two million a second, and the server is seldom asked", refusedOneKey, busy, oursEscrow, "", perSecond, 2e6, 0, 0},
	{"", refusedOneKey, busy, oursEscrow, "", statements, 0, mostAsked, 0},
}

func rounded(v float64) string {
	if v >= 1000 {
		return thousands(v)
	}
	return fmt.Sprintf("%.2f", v)
}

// check returns the verdict of the results on each criterion.
func check(results []result) *lab.Findings {
	find := func(name string, goroutines int, impl string) *result {
		i := slices.IndexFunc(results, func(r result) bool { return r.name == name && r.goroutines == goroutines && r.impl == impl })
		if i < 0 {
			return nil
		}
		return &results[i]
	}
	var f lab.Findings
	for _, line := range criteria {
		f.Claim = cmp.Or(line.claim, f.Claim)
		what := fmt.Sprintf("%s, %s: %s%s", line.name, plural(line.goroutines, "goroutine"), line.impl, line.measure.name)
		a := find(line.name, line.goroutines, line.impl)
		b := a
		switch {
		case line.others > 0:
			what += " / in " + plural(line.others, "goroutine")
			b = find(line.name, line.others, line.other)
		case line.other != "":
			what += " / " + line.other
			b = find(line.name, line.goroutines, line.other)
		}
		must := "at most " + rounded(line.most)
		if line.least > 0 {
			must = "at least " + rounded(line.least)
		}
		if a == nil || b == nil {
			f.Miss(what, must)
			continue
		}
		got := line.measure.of(a, b)
		f.Add(what, rounded(got), must, line.least > 0 && got >= line.least || line.least == 0 && got <= line.most)
	}
	neverOver(&f, results)
	return &f
}

// neverOver is for all that claim to be correct.
func neverOver(f *lab.Findings, results []result) {
	f.Claim = "Nobody grants too many, but for the races that are there to show it"
	const what = "granted too many, by all but the races"
	measured, tooMany := false, int64(0)
	for _, r := range results {
		if r.bound != nil && r.impl != readCommitted {
			measured = true
			tooMany += max(0, r.granted-*r.bound)
		}
	}
	if !measured {
		f.Miss(what, "0")
		return
	}
	f.Zero(what, int(tooMany))
}
