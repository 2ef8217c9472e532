package main

import (
	"fmt"
	"time"
)

// criterion is something that a run must show.
type criterion struct {
	number  int
	what    string
	wanted  string
	got     string // "" when it was not measured
	verdict string
}

// check finds what the results have to say on each criterion.
func check(results []result) []criterion {
	c := checker{results: results}
	c.faster(1, grantedOneKey, 64, goRedisLua, 1.5)
	c.faster(1, grantedOneKey, 64, rueidisLua, 1)
	c.faster(1, grantedOneKey, 256, goRedisLua, 4)
	c.faster(1, grantedOneKey, 256, rueidisLua, 2)
	c.faster(1, granted10k, 64, goRedisLua, 1)
	c.faster(1, granted10k, 256, rueidisLua, 1)
	c.lone()
	c.sharded()
	c.unsharded()
	c.flood()
	c.churned()
	c.neverOver()
	return c.found
}

type checker struct {
	results []result
	found   []criterion
}

func (c *checker) find(name string, goroutines int, impl string) *result {
	for i := range c.results {
		r := &c.results[i]
		if r.name == name && r.goroutines == goroutines && r.impl == impl {
			return r
		}
	}
	return nil
}

func (c *checker) add(number int, what, wanted, got string, ok bool) {
	verdict := "no"
	if ok {
		verdict = "yes"
	}
	c.found = append(c.found, criterion{number, what, wanted, got, verdict})
}

func (c *checker) missing(number int, what, wanted string) {
	c.found = append(c.found, criterion{number, what, wanted, "-", "not measured"})
}

func (c *checker) atLeast(number int, what string, got, wanted float64) {
	c.add(number, what, fmt.Sprintf("≥ %g", wanted), fmt.Sprintf("%.2f", got), got >= wanted)
}

func (c *checker) atMost(number int, what string, got, wanted float64) {
	c.add(number, what, fmt.Sprintf("≤ %g", wanted), fmt.Sprintf("%.2f", got), got <= wanted)
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

func (c *checker) faster(number int, name string, goroutines int, than string, wanted float64) {
	what := fmt.Sprintf("%s, %s: %s / %s", name, plural(goroutines, "goroutine"), oursCombined, than)
	a, b := c.find(name, goroutines, oursCombined), c.find(name, goroutines, than)
	if a == nil || b == nil {
		c.missing(number, what, fmt.Sprintf("≥ %g", wanted))
		return
	}
	c.atLeast(number, what, throughput(a, b), wanted)
}

// lone compares times, which are the inverse of one goroutine's throughput.
func (c *checker) lone() {
	const what = grantedOneKey + ", 1 goroutine: time of " + oursCombined + " / " + plainUpdate
	a, b := c.find(grantedOneKey, 1, oursCombined), c.find(grantedOneKey, 1, plainUpdate)
	if a == nil || b == nil {
		c.missing(2, what, "≤ 1.15")
		return
	}
	c.atMost(2, what, throughput(b, a), 1.15)
}

func (c *checker) sharded() {
	const what = txOneKey + ", 64 goroutines, 32 shards: "
	ours, none := c.find(txOneKey, busy, oursTx32), c.find(txOneKey, busy, noLimit)
	if ours == nil || none == nil {
		c.missing(3, what+"ours / "+noLimit, "≥ 0.8")
		return
	}
	c.atLeast(3, what+"ours / "+noLimit, throughput(ours, none), 0.8)
	c.atMost(3, what+"p99 of ours / "+noLimit, float64(ours.p99)/float64(none.p99), 2)
	c.atMost(3, what+"retries", ours.perDecision, 0)
}

func (c *checker) unsharded() {
	const what = txOneKey + ", 64 goroutines, 1 row: "
	many, one := c.find(txOneKey, busy, oursTx), c.find(txOneKey, 1, oursTx)
	if many == nil || one == nil {
		c.missing(3, what+"64 goroutines / 1", "≥ 0.85")
		return
	}
	c.atLeast(3, what+"64 goroutines / 1", throughput(many, one), 0.85)
	c.atMost(3, what+"retries", many.perDecision, 0)
	lone := time.Duration(float64(time.Second) / one.opsPerSec)
	c.atMost(3, what+"p99 / (64 · a lone transaction's time)", float64(many.p99)/float64(busy*lone), 2)
}

func (c *checker) flood() {
	const what = refusedOneKey + ", 64 goroutines, remembered: "
	r := c.find(refusedOneKey, busy, oursRemembered)
	if r == nil {
		c.missing(4, what+"a second", "≥ 2,000,000")
		return
	}
	c.add(4, what+"a second", "≥ 2,000,000", thousands(r.opsPerSec), r.opsPerSec >= 2e6)
	c.atMost(4, what+"round trips", r.perDecision, 0)
}

func (c *checker) churned() {
	for _, name := range []string{churnOneKey, churn10k} {
		for _, impl := range []string{oursCombined, oursEach} {
			what := name + ", " + impl + ": "
			r := c.find(name, busy, impl)
			if r == nil {
				c.missing(5, what+"HOT updates", "> 99 %")
				continue
			}
			c.add(5, what+"HOT updates", "> 99 %", fmt.Sprintf("%.2f %%", r.churn.hotPercent), r.churn.hotPercent > 99)
			c.atMost(5, what+"size at end / early", float64(r.churn.endBytes)/float64(r.churn.firstBytes), 2)
		}
	}
}

// neverOver is for all that claim to be correct.
func (c *checker) neverOver() {
	const what = "granted too many, by all but the races"
	measured, tooMany := false, int64(0)
	for _, r := range c.results {
		if r.bound != nil && correct[r.impl] {
			measured = true
			tooMany += max(0, r.granted-*r.bound)
		}
	}
	if !measured {
		c.missing(6, what, "0")
		return
	}
	c.add(6, what, "0", fmt.Sprint(tooMany), tooMany == 0)
}
