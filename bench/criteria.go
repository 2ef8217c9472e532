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

// check finds what the results have to say on each criterion.
func check(results []result) []criterion {
	c := checker{results: results}
	c.redis()
	c.lone()
	c.escrowed()
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

// find returns nil for what was measured with network before the servers only:
// the figures wanted are those of one machine.
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

// throughput is a's to b's, round by round: what changes from round to round
// then changes both.
func throughput(a, b *result) float64 {
	ratios := make([]float64, min(len(a.rounds), len(b.rounds)))
	for i := range ratios {
		ratios[i] = a.rounds[i] / b.rounds[i]
	}
	return median(ratios)
}

func (c *checker) redis() {
	c.claim = "Where many ask, decisions keep up with a script in Redis, and on one key are ahead of it"
	c.faster(grantedOneKey, 64, goRedisLua, 1.5)
	c.faster(grantedOneKey, 64, rueidisLua, 1)
	c.faster(grantedOneKey, 256, goRedisLua, 4)
	c.faster(grantedOneKey, 256, rueidisLua, 2)
	c.faster(granted10k, 64, goRedisLua, 1)
	c.faster(granted10k, 256, rueidisLua, 1)
}

func (c *checker) faster(name string, goroutines int, than string, wanted float64) {
	what := fmt.Sprintf("%s, %s: %s / %s", name, plural(goroutines, "goroutine"), oursCombined, than)
	a, b := c.find(name, goroutines, oursCombined), c.find(name, goroutines, than)
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
	c.claim = "What was taken ahead is handed out as if there were no limit"
	const tx, own = txOneKey + ", 64 goroutines, escrow: ", grantedOneKey + ", escrow: "
	ours, none := c.find(txOneKey, busy, oursTxEscrow), c.find(txOneKey, busy, noLimit)
	if ours == nil || none == nil {
		c.missing(tx+"ours / "+noLimit, "≥ 0.97")
	} else {
		c.atLeast(tx+"ours / "+noLimit, throughput(ours, none), 0.97)
		c.atMost(tx+"p99 of ours / "+noLimit, float64(ours.p99)/float64(none.p99), 1.1)
		c.atMost(tx+"retries", ours.perDecision, 0)
	}
	for _, at := range []struct {
		goroutines int
		wanted     float64
	}{{1, 50}, {busy, 40}} {
		goroutines, wanted := at.goroutines, at.wanted
		what := own + plural(goroutines, "goroutine") + " / " + rueidisLua
		ours, redis := c.find(grantedOneKey, goroutines, oursEscrow), c.find(grantedOneKey, goroutines, rueidisLua)
		if ours == nil || redis == nil {
			c.missing(what, fmt.Sprintf("≥ %g", wanted))
			continue
		}
		c.atLeast(what, throughput(ours, redis), wanted)
	}
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
	c.claim = "Refusals that are remembered are two million a second, and ask no server"
	const what = refusedOneKey + ", 64 goroutines, remembered: "
	r := c.find(refusedOneKey, busy, oursRemembered)
	if r == nil {
		c.missing(what+"a second", "≥ 2,000,000")
		return
	}
	c.add(what+"a second", "≥ 2,000,000", thousands(r.opsPerSec), r.opsPerSec >= 2e6)
	c.atMost(what+"round trips", r.perDecision, 0)
}

func (c *checker) churned() {
	c.claim = "The table stays small: its updates are HOT, and it does not go on growing"
	for _, name := range []string{churnOneKey, churn10k} {
		for _, impl := range []string{oursCombined, oursEach} {
			what := name + ", " + impl + ": "
			r := c.find(name, busy, impl)
			if r == nil {
				c.missing(what+"HOT updates", "> 99 %")
				continue
			}
			c.add(what+"HOT updates", "> 99 %", fmt.Sprintf("%.2f %%", r.churn.hotPercent), r.churn.hotPercent > 99)
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
	for _, impl := range []string{oursLocked1, oursLocked7} {
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
