package escrow

import (
	"cmp"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// ledger is the leases of a key: what is left of them, what was used, and what goes back. All but
// stock needs the entry's lock.
type ledger struct {
	config   *Config
	template decide.Demand         // for 0 tokens of the key; results are made from it
	lowered  float64               // see Lowered
	stock    atomic.Pointer[stock] // nil if nothing is held

	leases  []*lease // oldest first
	epoch   int      // an edit begins another: older leases go back
	demand  demand
	spent   spent
	used    float64  // tokens, since the timer was set
	returns []Return // to give back

	wanted float64       // tokens held once the last prefetch had arrived
	ahead  time.Duration // how long before the tokens are used up, or end, more is prefetched
}

// stock is the lease from which tokens are handed out without a lock. Apart from its lease it is
// immutable: a new stock takes its place.
type stock struct {
	*lease
	newest *lease
	others float64       // tokens in later leases
	low    float64       // more is prefetched if fewer tokens are left,
	fresh  time.Duration // or the newest lease is older
}

// usedBy is the share of a lease's time in which steady demand uses up the tokens, so that none
// are left to be returned.
const usedBy = 0.9

// restock makes the first lease with tokens the stock.
func (g *ledger) restock() {
	newest := g.newest()
	if newest == nil {
		g.stock.Store(nil)
		return
	}
	first := 0
	for g.leases[first] != newest && g.leases[first].left.load() == 0 {
		first++
	}
	share := float64(g.ahead) / (usedBy * float64(g.config.Lasts))
	s := &stock{lease: g.leases[first], newest: newest, low: g.wanted * min(share, 1), fresh: newest.lasts - g.ahead}
	for _, l := range g.leases[first+1:] {
		s.others += l.left.load()
	}
	g.stock.Store(s)
}

// newest returns the lease that was prefetched last; nil if none is held.
func (g *ledger) newest() *lease {
	if len(g.leases) == 0 {
		return nil
	}
	return g.leases[len(g.leases)-1]
}

// left returns the tokens left in all leases.
func (g *ledger) left() (n float64) {
	for _, l := range g.leases {
		n += l.left.load()
	}
	return n
}

// sweep counts the tokens used of all leases, ends those that are over, and returns the tokens left
// in the others.
func (g *ledger) sweep(now moment) (left float64) {
	held := len(g.leases)
	g.leases = slices.DeleteFunc(g.leases, func(l *lease) bool {
		if l.over(now) {
			g.endLease(l, now)
			return true
		}
		g.account(l, now)
		return false
	})
	if len(g.leases) < held {
		g.restock()
	}
	return g.left()
}

// remaining sweeps for a call about to take. If nothing is left, it notes that calls wait for the
// row.
func (g *ledger) remaining(now moment) (left float64) {
	if left = g.sweep(now); left == 0 {
		g.demand.block(now)
	}
	return left
}

// account counts the tokens used of a lease since it did so last.
func (g *ledger) account(l *lease, now moment) {
	unspent := l.left.load() + l.out.load() // out may come back
	n := l.accounted - unspent
	l.accounted = unspent
	g.used += n
	g.spent.add(n, l.outUntil, now)
	g.demand.add(n, int(l.calls.Swap(0)), now, g.config.Lasts)
}

// insert puts a lease among the others by age, if it is not there.
func (g *ledger) insert(l *lease) {
	if !slices.Contains(g.leases, l) {
		g.leases = append(g.leases, l)
		slices.SortStableFunc(g.leases, func(a, b *lease) int { return cmp.Compare(a.sent.mono, b.sent.mono) })
	}
}

// endLease returns the rest of a lease to its row, unless that has abundance. The caller removes
// the lease. Tokens that transactions still have of it are accounted when these end.
func (g *ledger) endLease(l *lease, now moment) {
	l.ended.Store(true)
	if n := l.withdraw(math.Inf(1)); n > 0 {
		if g.abundant() {
			g.spent.add(n, l.outUntil, now)
		} else {
			g.returns = append(g.returns, g.returnOf(l, n))
		}
	}
	g.account(l, now)
}

// returnOf returns n tokens of a lease. Those of a slot can go back to it for as long as the slot
// counts in the sliding window.
func (g *ledger) returnOf(l *lease, n float64) Return {
	d := g.template.Definition
	end := l.outUntil.Add(time.Duration(d.Slots) * d.SlotWidth())
	return Return{
		Row: decide.Row{Key: g.template.KeyOf()}, Definition: d,
		Return: bucket.Return{Count: n, Taken: l.after.TS, End: end}, lease: l,
	}
}

// abundant reports whether the row is full again within two leases' time, whatever its last lease
// took. The rest of a lease is not returned to such a row: no call lacks the tokens, and the next
// prefetch would wait while the row is written.
func (g *ledger) abundant() bool {
	capacity, latest := g.template.Definition.Capacity, g.spent.latest
	inflow := capacity - g.lowered
	return inflow > 0 && latest != nil && latest.after.Value >= capacity-2*inflow
}

// release returns the rest of leases that are about to end, and tokens beyond those needed, newest
// first; a small excess is kept. Spent tokens are reported with a return, or when no lease is left.
// To a row with abundance the next prefetch reports them.
func (g *ledger) release(needed float64, now moment) {
	g.leases = slices.DeleteFunc(g.leases, func(l *lease) bool {
		ends := l.remains(now) <= 2*g.config.margin()
		if ends {
			g.endLease(l, now)
		}
		return ends
	})
	left := g.left()
	if (needed == 0 || left >= 2*needed) && !g.abundant() {
		for _, l := range slices.Backward(g.leases) {
			if n := l.withdraw(max(0, left-needed)); n > 0 {
				left -= n
				g.returns = append(g.returns, g.returnOf(l, n))
			}
		}
	}
	g.restock()
	if len(g.returns) > 0 || len(g.leases) == 0 && !g.abundant() {
		g.reportSpent(now)
	}
}

// takeReturns takes out the returns.
func (g *ledger) takeReturns() (returns []Return) {
	returns, g.returns = g.returns, nil
	return returns
}

// reportSpent reports the spent tokens to the row by a return, if there are any.
func (g *ledger) reportSpent(now moment) {
	report := g.spent.take(now)
	if report.Spent == 0 {
		return
	}
	if len(g.returns) == 0 {
		g.returns = append(g.returns, g.returnOf(g.spent.latest, 0))
	}
	g.returns[0].Spent = report
}

// spent counts the tokens spent from memory that the row counts as out, since they were not
// reported.
type spent struct {
	definition *bucket.Definition
	count      float64
	latest     *lease // the lease with the latest end, by which they are reported
}

// counts reports whether the row counts tokens that are out until an instant together with the
// latest lease. In a window that is so if both are of one window or slot. In a token bucket it is
// so for some time after the instant.
func (s *spent) counts(until time.Time, now moment) bool {
	switch {
	case s.latest == nil:
		return false
	case s.definition.Stepped():
		return until.Equal(s.latest.outUntil)
	default:
		return s.latest.databaseAt(now).Before(s.definition.Counted(until))
	}
}

// add adds n spent tokens of a lease that ends at until, if the row still counts them as out.
func (s *spent) add(n float64, until time.Time, now moment) {
	if s.counts(until, now) {
		s.count += n
	}
}

// follow makes a lease the latest, if it ends last. Tokens spent before are reported with it,
// unless the row may have begun to count anew meanwhile.
func (s *spent) follow(l *lease) {
	before := s.latest
	if before != nil && l.outUntil.Before(before.outUntil) {
		return
	}
	if s.latest = l; before != nil && !l.at.Before(s.definition.Counted(before.outUntil)) {
		s.count = 0
	}
}

// any reports whether there is something to report that the row still counts.
func (s *spent) any(now moment) bool {
	return s.count > 0 && s.latest != nil && s.latest.databaseAt(now).Before(s.definition.Counted(s.latest.outUntil))
}

// take takes out the tokens to report, and the instant until when the row counts them as out.
func (s *spent) take(now moment) bucket.Spent {
	if !s.any(now) {
		s.count = min(s.count, 0)
		return bucket.Spent{}
	}
	n := s.count
	s.count = 0
	return bucket.Spent{Spent: n, SpentEnd: s.latest.outUntil}
}
