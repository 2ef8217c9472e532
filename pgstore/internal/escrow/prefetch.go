package escrow

import (
	"math"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Prefetch is a statement about to prefetch. The zero Prefetch is none.
type Prefetch struct {
	Entry        *Entry
	Count        float64 // tokens to prefetch, if the row has twice as many
	Capacity     float64 // with which the statement counts
	bucket.Spent         // to report to the row

	epoch   int
	lasting float64       // the tokens that can be used before they end
	begun   time.Duration // on the monotonic clock
	lease   *lease        // that was received
}

// Plan plans the prefetch of a statement about to be sent. The statement also takes tokens for its
// calls, if the row has need. Plan returns the zero Prefetch if prefetching does not pay.
func (e *Entry) Plan(takes, need float64) (p Prefetch) {
	if !e.CanPrefetch() || need > e.lowered {
		return p
	}
	now, lasts := e.lock(), e.config.Lasts
	defer e.mu.Unlock()
	left := e.remaining(now)
	if len(e.leases) == 0 && !e.demand.enough(now) {
		return p
	}
	pace := e.demand.want(takes, now, lasts) / float64(lasts)
	lasting := usedBy * pace * float64(usable(&e.template.Definition, time.Unix(0, 0), time.Unix(0, 0), lasts))
	spare := math.Inf(1)
	if newest := e.newest(); newest != nil {
		left = min(left, pace*float64(newest.remains(now)))
		row := e.template.Definition.Refill(newest.after, newest.databaseAt(now)) // it has more only if others have returned some
		spare = (row.Value - need) / 2
	}
	left = max(0, left-pace*float64(e.latency)) // when more arrives
	count := lasting - left
	if count >= 1 && e.abundant() { // no other process lacks them, and the next prefetch may have to wait
		count += lasting
	}
	count = math.Floor(count) // a part of a token would be left to return
	if min(count, spare) < 1 {
		return p
	}
	return Prefetch{
		Entry: e, Count: min(count, e.lowered), Capacity: e.lowered, Spent: e.spent.take(now),
		epoch: e.epoch, lasting: lasting, begun: now.mono,
	}
}

// Failed notes that the statement did nothing: the row was told of no spent tokens.
func (p *Prefetch) Failed() { p.Entry.restoreSpent(p.Spent) }

// restoreSpent adds spent tokens again that a statement was to report to the row, and did not.
func (e *Entry) restoreSpent(report bucket.Spent) {
	if e == nil || report.Spent == 0 {
		return
	}
	now := e.lock()
	defer e.mu.Unlock()
	e.spent.add(report.Spent, report.SpentEnd, now)
	e.setTimer()
}

// Receive adds the prefetched tokens to the entry. If they came late, or were planned before an
// edit, they go back instead.
func (p *Prefetch) Receive(l Lease) {
	e := p.Entry
	now := e.lock()
	defer e.mu.Unlock()
	e.RowChanged()
	d := &e.template.Definition
	at := d.Charged(l.After, l.At) // later than At if the clock was set back
	had := &lease{
		after: l.After, at: at, sent: e.config.sent(l.Sent, l.At), lasts: usable(d, l.After.TS, at, e.config.Lasts),
		outUntil: l.End, epoch: p.epoch, accounted: l.Count + l.Out,
	}
	had.left.add(l.Count)
	had.out.add(l.Out)
	left := e.sweep(now)
	e.latency = (e.latency + now.mono - p.begun) / 2
	e.service = (e.service + max(now.mono-had.sent.mono, 0)) / 2
	e.ahead = e.service + e.config.Lasts/4 // if the wait for the turn counted, processes would only queue sooner
	e.spent.follow(had)
	if e.epoch != p.epoch || had.over(now) {
		e.endLease(had, now)
	} else {
		if e.wanted = min(left+l.Count, p.lasting); l.Count < p.Count/2 {
			e.backOff(now)
		}
		e.insert(had)
		e.restock()
	}
	e.setTimer()
	p.lease = had
}

// Tokens returns tokens that the statement granted to a transaction. Receive was called before.
func (p *Prefetch) Tokens(n float64, after bucket.State) Tokens {
	return Tokens{Entry: p.Entry, Count: n, At: p.lease.at, After: after, part: part{p.lease, n}}
}

// Granted returns tokens that a statement granted to a transaction without prefetching.
func (e *Entry) Granted(n float64, after bucket.State, at time.Time) Tokens {
	return (&Prefetch{Entry: e, lease: &lease{after: after, at: at, epoch: -1}}).Tokens(n, after)
}

// prefetchAhead begins to prefetch, unless that is under way or tokens are scarce.
func (e *Entry) prefetchAhead(now moment) {
	if now.mono >= time.Duration(e.scarceUntil.Load()) && !e.prefetching.Load() && e.prefetching.CompareAndSwap(false, true) {
		e.config.Prefetch(e)
	}
}

// Prefetched ends what Config.Prefetch began, and reports whether it brought tokens.
func (e *Entry) Prefetched(ok bool) {
	if !ok {
		e.backOff(e.config.moment())
	}
	e.prefetching.Store(false)
}

// backOff stops prefetching ahead for a while, since tokens are scarce.
func (e *Entry) backOff(now moment) { e.scarceUntil.Store(int64(now.mono + e.config.Lasts/4)) }
