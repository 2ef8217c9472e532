package main

import (
	"fmt"
	"time"
)

// criterion is something that a run must show.
type criterion struct {
	claim   string // in words
	what    string // the figure that shows it
	wanted  string
	got     string // "" when it was not measured
	verdict string
}

// check returns the verdict of the results on each criterion.
func check(results []result) []criterion {
	c := checker{results: results}
	c.redis()
	c.lone()
	c.escrowed()
	c.escrowedTx()
	c.portable()
	c.bound()
	c.sharded()
	c.unsharded()
	c.flood()
	c.churned()
	c.neverOver()
	c.locked()
	return c.found
}

type checker struct {
	results []result
	claim   string // that is judged
	found   []criterion
}

// find returns nil for jobs that were measured with network before the servers only: the
// figures wanted are those of one machine.
func (c *checker) find(name string, goroutines int, impl string) *result {
	for i := range c.results {
		r := &c.results[i]
		if r.name == name && r.goroutines == goroutines && r.impl == impl && r.network == 0 {
			return r
		}
	}
	return nil
}

func (c *checker) add(what, wanted, got string, ok bool) {
	verdict := "no"
	if ok {
		verdict = "yes"
	}
	c.found = append(c.found, criterion{c.claim, what, wanted, got, verdict})
}

func (c *checker) missing(what, wanted string) {
	c.found = append(c.found, criterion{c.claim, what, wanted, "-", "not measured"})
}

func (c *checker) atLeast(what string, got, wanted float64) {
	c.add(what, fmt.Sprintf("≥ %g", wanted), fmt.Sprintf("%.2f", got), got >= wanted)
}

func (c *checker) atMost(what string, got, wanted float64) {
	c.add(what, fmt.Sprintf("≤ %g", wanted), fmt.Sprintf("%.2f", got), got <= wanted)
}

// throughput returns the ratio of a's to b's, round by round, so that changes from round to
// round affect both.
func throughput(a, b *result) float64 {
	ratios := make([]float64, min(len(a.rounds), len(b.rounds)))
	for i := range ratios {
		ratios[i] = a.rounds[i] / b.rounds[i]
	}
	return median(ratios)
}

func (c *checker) redis() {
	c.claim = "Where many ask, decisions keep up with a script in Redis, and on one key are ahead of it"
	c.ratio(grantedOneKey, 64, oursCombined, goRedisLua, 1.5)
	c.ratio(grantedOneKey, 64, oursCombined, rueidisLua, 1)
	c.ratio(grantedOneKey, 256, oursCombined, goRedisLua, 4)
	c.ratio(grantedOneKey, 256, oursCombined, rueidisLua, 2)
	c.ratio(granted10k, 64, oursCombined, goRedisLua, 1)
	c.ratio(granted10k, 256, oursCombined, rueidisLua, 1)
}

// ratio wants impl to be so many times as fast as another.
func (c *checker) ratio(name string, goroutines int, impl, other string, wanted float64) {
	what := fmt.Sprintf("%s, %s: %s / %s", name, plural(goroutines, "goroutine"), impl, other)
	a, b := c.find(name, goroutines, impl), c.find(name, goroutines, other)
	if a == nil || b == nil {
		c.missing(what, fmt.Sprintf("≥ %g", wanted))
		return
	}
	c.atLeast(what, throughput(a, b), wanted)
}

// lone compares times, which are the inverse of one goroutine's throughput.
func (c *checker) lone() {
	c.claim = "A call that meets no other takes little longer than the UPDATE of a row"
	const what = grantedOneKey + ", 1 goroutine: time of " + oursCombined + " / " + plainUpdate
	a, b := c.find(grantedOneKey, 1, oursCombined), c.find(grantedOneKey, 1, plainUpdate)
	if a == nil || b == nil {
		c.missing(what, "≤ 1.15")
		return
	}
	c.atMost(what, throughput(b, a), 1.15)
}

func (c *checker) sharded() {
	c.claim = "Over 32 shards a limit leaves transactions most of their pace, and has none run again"
	const what = txOneKey + ", 64 goroutines, 32 shards: "
	ours, none := c.find(txOneKey, busy, oursTx32), c.find(txOneKey, busy, noLimit)
	if ours == nil || none == nil {
		c.missing(what+"ours / "+noLimit, "≥ 0.8")
		return
	}
	c.atLeast(what+"ours / "+noLimit, throughput(ours, none), 0.8)
	c.atMost(what+"p99 of ours / "+noLimit, float64(ours.p99)/float64(none.p99), 2)
	c.atMost(what+"retries", ours.perDecision, 0)
}

func (c *checker) escrowed() {
	c.claim = "What was taken ahead is handed out from memory, and the servers are seldom asked"
	const what = grantedOneKey + ", 64 goroutines, escrow: "
	if r := c.find(grantedOneKey, busy, oursEscrow); r == nil {
		c.missing(what+"a second", "≥ 5,000,000")
		c.missing(what+"p50", "< 1 µs")
		c.missing(what+"statements a second", seldom)
	} else {
		c.add(what+"a second", "≥ 5,000,000", thousands(r.opsPerSec), r.opsPerSec >= 5e6)
		c.add(what+"p50", "< 1 µs", latency(r.p50), r.p50 < time.Microsecond)
		c.seldom(what, r)
	}
	c.ratio(grantedOneKey, busy, oursEscrow, rueidisLua, 40)
	c.ratio(grantedOneKey, 1, oursEscrow, rueidisLua, 50)
	c.ratio(granted10k, busy, oursEscrow, oursCombined, 0.95)
}

func (c *checker) escrowedTx() {
	c.claim = "Transactions whose token was taken ahead go on as if there were no limit"
	const what = txOneKey + ", 64 goroutines, escrow: "
	c.ratio(txOneKey, busy, oursTxEscrow, noLimit, 0.97)
	ours, none := c.find(txOneKey, busy, oursTxEscrow), c.find(txOneKey, busy, noLimit)
	if ours == nil || none == nil {
		c.missing(what+"p99 / "+noLimit, "≤ 1.1")
		c.missing(what+"retries", "≤ 0")
		return
	}
	c.atMost(what+"p99 / "+noLimit, float64(ours.p99)/float64(none.p99), 1.1)
	c.atMost(what+"retries", ours.perDecision, 0)
}

func (c *checker) portable() {
	c.claim = "On what distributes PostgreSQL, calls for one row share statements as well"
	c.ratio(grantedOneKey, busy, oursPortable, oneUpsert, 10)
}

func (c *checker) bound() {
	c.claim = "Where every decision writes a row of its own, most of the time is the server's"
	c.ratio(granted10k, busy, oursCombined, serverBound, 0.85)
	c.ratio(granted10k, 256, oursCombined, serverBound, 0.85)
}

func (c *checker) unsharded() {
	c.claim = "Transactions that share a row go on at the pace of a lone one, in turn, and none runs again"
	const what = txOneKey + ", 64 goroutines, 1 row: "
	many, one := c.find(txOneKey, busy, oursTx), c.find(txOneKey, 1, oursTx)
	if many == nil || one == nil {
		c.missing(what+"64 goroutines / 1", "≥ 0.85")
		return
	}
	c.atLeast(what+"64 goroutines / 1", throughput(many, one), 0.85)
	c.atMost(what+"retries", many.perDecision, 0)
	lone := time.Duration(float64(time.Second) / one.opsPerSec)
	c.atMost(what+"p99 / (64 · a lone transaction's time)", float64(many.p99)/float64(busy*lone), 2)
}

func (c *checker) flood() {
	c.claim = "A flood that is refused from memory is two million a second, and the server is seldom asked"
	const what = refusedOneKey + ", 64 goroutines, escrow: "
	r := c.find(refusedOneKey, busy, oursEscrow)
	if r == nil {
		c.missing(what+"a second", "≥ 2,000,000")
		c.missing(what+"statements a second", seldom)
		return
	}
	c.add(what+"a second", "≥ 2,000,000", thousands(r.opsPerSec), r.opsPerSec >= 2e6)
	c.seldom(what, r)
}

// mostAsked is how many statements a second a key is to cost that is decided from memory:
// four while that lasts.
const mostAsked = 4 * float64(time.Second) / float64(escrow)

var seldom = fmt.Sprintf("≤ %g", mostAsked)

func (c *checker) seldom(what string, r *result) {
	c.add(what+"statements a second", seldom, thousands(r.statements), r.statements <= mostAsked)
}

// churned makes no claim of how many updates are HOT of one statement each: those that wait
// for a row, or for the processor, see it as it was before, and keep the versions since then
// from being cleared away. That is some 99.4 % over minutes, and by chance in a second.
func (c *checker) churned() {
	c.claim = "The table stays small: its updates are HOT, and it does not go on growing"
	for _, name := range []string{churnOneKey, churn10k} {
		for _, impl := range []string{oursCombined, oneUpsert} {
			what := name + ", " + impl + ": "
			r := c.find(name, busy, impl)
			if r == nil {
				c.missing(what+"size at end / early", "≤ 2")
				continue
			}
			if impl == oursCombined {
				c.add(what+"HOT updates", "> 99 %", fmt.Sprintf("%.2f %%", r.churn.hotPercent), r.churn.hotPercent > 99)
			}
			c.atMost(what+"size at end / early", float64(r.churn.endBytes)/float64(r.churn.firstBytes), 2)
		}
	}
}

// neverOver is for all that claim to be correct.
func (c *checker) neverOver() {
	c.claim = "Nobody grants too many, but for the races that are there to show it"
	const what = "granted too many, by all but the races"
	measured, tooMany := false, int64(0)
	for _, r := range c.results {
		if r.bound != nil && correct[r.impl] {
			measured = true
			tooMany += max(0, r.granted-*r.bound)
		}
	}
	if !measured {
		c.missing(what, "0")
		return
	}
	c.add(what, "0", fmt.Sprint(tooMany), tooMany == 0)
}

func (c *checker) locked() {
	c.claim = "Rows that a transaction holds keep nobody waiting who asks for other keys"
	calm := c.find(lockedRow, busy, oursUndisturbed)
	for _, impl := range []string{oursLocked1, oursLocked7, escrowLocked7} {
		what := lockedRow + ", " + impl + ": "
		r := c.find(lockedRow, busy, impl)
		if r == nil || calm == nil {
			c.missing(what+"p99 / with none", "≤ 2")
			continue
		}
		c.atMost(what+"p99 / with none", float64(r.p99)/float64(calm.p99), 2)
		c.add(what+"too late", "0", fmt.Sprint(r.late), r.late == 0)
	}
}
