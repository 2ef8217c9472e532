package pgstore

import (
	"context"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/escrow"
)

// own is the decisions on their own that are under way.
type own struct {
	*base
	seed  maphash.Seed
	lanes [lanes]lane

	// together has a call decided with others: in its lane, or as Config.Portable has it.
	// The error is that of a caller who gave up.
	together func(context.Context, *pending) error

	mu     sync.Mutex
	locked map[decide.Row]*lane // of rows that somebody had locked
}

// lane is a queue of calls that are decided together.
type lane struct {
	queue    *batch.Queue[*pending]
	refusing bool      // most of the last calls were refused, so that granting is not worth an attempt
	used     time.Time // of a row's own queue: when a call last found it locked
}

// pending is a call that waits for its decision.
type pending struct {
	call  decide.Call
	one   [1]decide.Ask // for those of call, if it is one
	check bool
	wants want

	holder  *escrow.Holder // of its key, if it asks for one row and that is remembered; else nil
	changes int            // of the holder, before a statement was sent

	tokens *escrow.Tokens // that it got so
	result ratelimit.Result
	err    error

	row   decide.Row // from which it takes, as one of a group
	floor float64    // the lowest value that it may leave behind there
	place int        // in the order of arrival

	locked atomic.Pointer[decide.Row] // that it waits for
}

// want is what a call waits for.
type want uint8

const (
	aResult want = iota
	toHold       // tokens that can be put back, or nothing
	ahead        // that more is taken ahead, or nothing: for calls that come later
)

// callOf is the call of an ask whose holder is known, which wants something else than a result.
func callOf(a *decide.Ask, w want, h *escrow.Holder) *pending {
	return &pending{call: decide.Call{Asks: []decide.Ask{*a}}, wants: w, holder: h}
}

type ticket = batch.Ticket[*pending]

// lanes is how many statements, and so how many connections, decide at a time.
// Calls for one limit and key share a lane.
const lanes = 2

// mostTogether bounds the calls that one statement decides.
const mostTogether = 1024

// beginSQL begins a transaction in which a take is right, and nobody asks it again.
const beginSQL = "BEGIN ISOLATION LEVEL READ COMMITTED"

// mark notes that somebody was just found to have a row locked, in the place of those of
// which that is long past. It needs mu.
func (o *own) mark(row decide.Row) {
	l, ok := o.locked[row]
	if !ok {
		for other, l := range o.locked {
			if l.idle() {
				delete(o.locked, other)
			}
		}
		l = &lane{}
		o.locked[row] = l
	}
	l.used = time.Now()
}

// idle reports whether a row's queue is not needed any more.
func (l *lane) idle() bool {
	return time.Since(l.used) > contended && (l.queue == nil || l.queue.Idle())
}

// gaveUp is the error of a caller whose context ended.
func (o *own) gaveUp(p *pending, err error) error {
	if row := p.locked.Load(); row != nil {
		return locked(row.Key, err)
	}
	return o.fault("decide", err)
}

// noteAll remembers the definitions of calls, most of which are the same.
func (o *own) noteAll(tickets []*ticket) {
	var last bucket.Definition
	for _, t := range tickets {
		for i := range t.Value.call.Asks {
			if a := &t.Value.call.Asks[i]; a.Definition != last {
				last = a.Definition
				o.seen.Note(last)
			}
		}
	}
}

// wanting reports whether one of calls wants something.
func wanting(tickets []*ticket, w want) bool {
	return slices.ContainsFunc(tickets, func(t *ticket) bool { return t.Value.wants == w })
}

// unheld tells those who want to hold what they take, or more to be taken ahead, or nothing,
// that it is nothing.
func unheld(tickets []*ticket) []*ticket {
	return slices.DeleteFunc(slices.Clone(tickets), func(t *ticket) bool {
		if t.Value.wants != aResult {
			t.Finish()
		}
		return t.Value.wants != aResult
	})
}

// mostRefused reports whether most of the calls that wanted a result were refused.
func mostRefused(tickets []*ticket) bool {
	refused := 0
	for _, t := range tickets {
		if t.Finished() && t.Value.wants == aResult && !t.Value.result.OK {
			refused++
		}
	}
	return 2*refused > len(tickets)
}
