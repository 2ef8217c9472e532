package memory

import (
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// This file implements [engine.Memory]: grants prefetch, and calls are answered by tokens that
// another call has prefetched.

// attachment is what memory keeps with a call.
type attachment struct {
	entry    *escrow.Entry  // of its key; nil if that is not remembered
	tokens   *escrow.Tokens // of a call for a transaction, which may put them back; else nil
	received *escrow.Prefetch

	// Before the last statement was sent: the entry's changes, and the instant.
	changes int64
	sent    time.Time
}

// Attach attaches an entry to a call, and the tokens that its transaction may put back; nil for none.
func Attach(p *engine.Pending, entry *escrow.Entry, tokens *escrow.Tokens) {
	h := &attachment{entry: entry, tokens: tokens}
	p.Attachment = h
	if tokens != nil {
		p.Granted, p.Abandoned = h.granted, tokens.PutBack
	}
}

// attachmentOf returns the attachment of a call; an empty one if it has none.
func attachmentOf(p *engine.Pending) *attachment {
	if h, ok := p.Attachment.(*attachment); ok {
		return h
	}
	return &attachment{}
}

// entryOf returns the entry of the key of a group of calls; nil if none of them has it.
func entryOf(calls []*engine.Ticket) *escrow.Entry {
	for _, t := range calls {
		if entry := attachmentOf(t.Value).entry; entry != nil {
			return entry
		}
	}
	return nil
}

// granted keeps the tokens that a row has granted to a transaction.
func (h *attachment) granted(count float64, after bucket.State, at time.Time) {
	if h.received != nil {
		*h.tokens = h.received.Tokens(count, after)
		return
	}
	*h.tokens = h.entry.Granted(count, after, at)
}

// sentPrefetch is a prefetch and the instant before its statement was sent.
type sentPrefetch struct {
	escrow.Prefetch
	sent time.Time
}

// Answer answers calls for which enough has been prefetched since they arrived, and returns the
// others.
func (m *Memory) Answer(calls []*engine.Ticket) (left []*engine.Ticket) {
	sent := m.cache.Now()
	return slices.DeleteFunc(calls, func(t *engine.Ticket) bool {
		p := t.Value
		h := attachmentOf(p)
		if h.entry == nil {
			return false
		}
		if p.Extra {
			return finishExtra(t, h)
		}
		var tokens escrow.Tokens
		if !h.entry.Take(p.Call.Demands[0].Count, h.tokens != nil, &tokens) {
			h.changes, h.sent = h.entry.Changes(), sent
			return false
		}
		tokens.Result(p.Call.Reserve, &p.Result)
		if h.tokens != nil {
			*h.tokens = tokens
		}
		engine.Finish(t)
		return true
	})
}

// finishExtra finishes a call that prefetches, if that does not pay any more.
func finishExtra(t *engine.Ticket, h *attachment) bool {
	prefetch := h.entry.Plan(0, 0)
	prefetch.Failed() // this one is not sent
	if prefetch.Count > 0 {
		return false
	}
	t.Finish()
	return true
}

// Add makes a grant prefetch, if that pays for its key.
func (m *Memory) Add(calls []*engine.Ticket, g *table.Grant) {
	prefetch := entryOf(calls).Plan(g.Count, g.Need)
	if prefetch.Count == 0 {
		return
	}
	g.Prefetch, g.Lowered, g.Lasts, g.Spent = prefetch.Count, prefetch.Capacity, m.lasts, prefetch.Spent
	for _, t := range calls {
		if attachmentOf(t.Value).tokens != nil {
			g.Out += t.Value.Call.Demands[0].Count
		}
	}
	g.Added = &sentPrefetch{prefetch, m.cache.Now()}
}

// Done receives the tokens that a grant has prefetched, and counts what its calls took. The tokens
// of transactions whose callers have gone are put into memory, too.
func (m *Memory) Done(calls []*engine.Ticket, g *table.Grant, err error) {
	added, _ := g.Added.(*sentPrefetch)
	switch {
	case err != nil && (!intx.Answered(err) || intx.InPart(err)) && !table.Unsent(err): // it may have been done
		return
	case err != nil || !g.Taken.OK:
		if added != nil {
			added.Failed()
		}
		return
	}
	if calls != nil {
		countDemand(calls, g)
	}
	if added == nil {
		return
	}
	added.Receive(m.leaseOf(g, added.sent))
	for _, t := range calls {
		if h := attachmentOf(t.Value); h.tokens != nil {
			h.received = &added.Prefetch
		}
	}
	if calls == nil && g.Out > 0 {
		tokens := added.Tokens(g.Out, g.Taken.After)
		tokens.PutBack()
	}
}

// countDemand counts the demand of a grant's calls, without those that only the row decides.
func countDemand(calls []*engine.Ticket, g *table.Grant) {
	n, count := 0, g.Count
	for _, t := range calls {
		switch a := &t.Value.Call.Demands[0]; {
		case t.Value.Extra:
		case a.RowOnly():
			count -= a.Count
		default:
			n++
		}
	}
	entry := entryOf(calls)
	entry.CountDemand(count, n)
	if g.Waited >= conn.PassOver { // to take from the row would take even longer
		entry.Contended()
	}
}

// leaseOf returns the lease that a grant sent at an instant has prefetched. Its time begins with the
// grant's turn at the row, unless the database's clock was set meanwhile.
func (m *Memory) leaseOf(g *table.Grant, sent time.Time) escrow.Lease {
	if g.Waited > 0 && g.Waited <= m.cache.Now().Sub(sent) {
		sent = sent.Add(g.Waited)
	}
	return escrow.Lease{Count: g.Taken.Extra, Out: g.Out, After: g.Taken.After, At: g.Taken.At.UTC(), End: g.End().UTC(), Sent: sent}
}

// Refused remembers the row that refused a call.
func (m *Memory) Refused(p *engine.Pending, state bucket.State, at time.Time) {
	if h := attachmentOf(p); h.entry != nil {
		h.entry.Refused(state, at, h.sent, h.changes)
	}
}

// Waits notes that a call waits for its row.
func (m *Memory) Waits(p *engine.Pending) { attachmentOf(p).entry.Contended() }
