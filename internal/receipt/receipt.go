// Package receipt is the payments of a call, for settling them or giving them back. It imports
// of the library only the arithmetic, so that the root package can name it.
package receipt

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Limit is a limit and key from which a call took, and the definition by which it did.
type Limit struct {
	bucket.Definition
	Key string
}

// Payment is tokens that were taken from one row.
type Payment struct {
	*Limit     // which those of one limit share
	Place  int // of the limit in the order of the call
	Shard  int
	Slot   int64 // of a sliding window: the last microsecond of the slot that was given; otherwise 0
	Tokens float64
}

// none is the slot of a payment of a limit that let the call go on without tokens.
const none = math.MinInt64

// Nothing returns the payment of such a limit: it has a place in the call, and a settlement takes
// nothing from it.
func Nothing(limit *Limit, place int) Payment {
	return Payment{Limit: limit, Place: place, Slot: none}
}

// IsNothing reports whether p is of a limit that let the call go on without tokens.
func (p *Payment) IsNothing() bool { return p.Slot == none }

// Left is the state that a reservation's payment left in its row.
type Left struct {
	Value      float64
	TS, Paused time.Time
}

// Receipt is the payments of a call, row by row; the root package documents it.
type Receipt struct {
	one  [1]Payment // if there is one; otherwise its Limit is nil
	at   int64      // in microseconds since 1970
	mu   sync.Mutex
	more atomic.Pointer[more] // nil if all of it is zero
}

// more is the fields that few receipts have: not those of calls for one row that were decided
// by themselves, or from memory, until they are settled. It is replaced when a field changes.
type more struct {
	several []Payment
	left    []Left // of a reservation, for each payment; not in the text
	taker   string
	conn    any
	read    bool // from text
	mark    string
}

// New returns the receipt of payments, made at an instant. taker names the transaction that
// paid, "" when it is committed, and conn is its connection. For a reservation, left is the
// state that each payment left.
func New(payments []Payment, left []Left, taker string, conn any, at time.Time) *Receipt {
	r := &Receipt{at: at.UnixMicro()}
	if len(payments) == 1 {
		r.one[0], payments = payments[0], nil
	}
	r.keep(payments, left, taker, conn)
	return r
}

// One returns the receipt of tokens that were taken from the only row of a limit, in no
// transaction of the caller's: one allocation, if there is nothing left to tell.
func One(limit *Limit, slot int64, tokens float64, left []Left, at time.Time) *Receipt {
	r := new(Receipt)
	r.one[0].Limit, r.one[0].Slot, r.one[0].Tokens, r.at = limit, slot, tokens, at.UnixMicro()
	r.keep(nil, left, "", nil)
	return r
}

// Own is New of a single payment of a limit that it has for itself: one allocation, if it
// is of no reservation, and committed.
func Own(limit Limit, p Payment, left []Left, taker string, conn any, at time.Time) *Receipt {
	r := new(struct {
		Receipt
		limit Limit
	})
	r.limit = limit
	p.Limit = &r.limit
	r.one[0], r.at = p, at.UnixMicro()
	r.keep(nil, left, taker, conn)
	return &r.Receipt
}

// keep stores the fields that few receipts have, if a new one has any.
func (r *Receipt) keep(several []Payment, left []Left, taker string, conn any) {
	if several != nil || left != nil || taker != "" {
		r.more.Store(&more{several: several, left: left, taker: taker, conn: conn})
	}
}

// payments returns the payments, which must not be changed.
func (r *Receipt) payments() []Payment {
	if r.one[0].Limit != nil {
		return r.one[:]
	}
	return r.rest().several
}

// rest returns the fields that few receipts have.
func (r *Receipt) rest() more {
	if m := r.more.Load(); m != nil {
		return *m
	}
	return more{}
}

// change changes the fields that few receipts have. It needs mu.
func (r *Receipt) change(do func(*more)) {
	m := r.rest()
	do(&m)
	r.more.Store(&m)
}

// Lefts returns the state that each payment of a reservation left; nil if it is not known.
func Lefts(r *Receipt) []Left { return r.rest().left }

// Part returns the receipt of some of r's payments.
func Part(r *Receipt, payments []Payment) *Receipt {
	r.mu.Lock()
	defer r.mu.Unlock()
	of := r.rest()
	part := New(payments, nil, of.taker, of.conn, At(r))
	if of.read {
		part.change(func(m *more) { m.read = true })
	}
	return part
}

// Put gives r's payments, which nobody has seen yet, other places in the call, and adds
// payments of Nothing, of which there is one at least. A nil receipt is of nothing.
func Put(r *Receipt, places []int, nothing []Payment, at time.Time) *Receipt {
	if r == nil {
		r = &Receipt{at: at.UnixMicro()}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	payments := slices.Concat(r.payments(), nothing)
	for i := range payments[:len(payments)-len(nothing)] {
		payments[i].Place = places[payments[i].Place]
	}
	r.one[0] = Payment{}
	r.change(func(m *more) {
		if m.several = payments; m.left != nil {
			m.left = slices.Concat(m.left, make([]Left, len(nothing)))
		}
	})
	return r
}

// Payments returns the payments, which must not be changed. It is a function, not a method, so
// that users of the root package do not see it.
func Payments(r *Receipt) []Payment {
	if r == nil {
		return nil
	}
	return r.payments()
}

// Pays reports whether a limit has granted the receipt's call, if 0 tokens. Limits in shadow that let
// it go on without have a place in it, and nothing to give back.
func Pays(r *Receipt) bool {
	return slices.ContainsFunc(Payments(r), func(p Payment) bool { return !p.IsNothing() })
}

// Taker returns the transaction that paid, "" when it is committed. Only the redeemer of the
// receipt may call it.
func Taker(r *Receipt) string { return r.rest().taker }

// At returns when it paid.
func At(r *Receipt) time.Time { return time.UnixMicro(r.at).UTC() }

// Read reports whether the receipt was read from text.
func Read(r *Receipt) bool { return r.rest().read }

// Committed notes that the transaction that paid is committed.
func Committed(r *Receipt) {
	if r == nil { // a transaction that took nothing
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rest().taker != "" {
		r.change(func(m *more) { m.taker = "" })
	}
}

// Never marks the receipt of a call that was rolled back, which cannot be settled.
const Never = "never"

// RolledBack notes that the transaction that paid was rolled back.
func RolledBack(r *Receipt) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.change(func(m *more) { m.mark = Never })
}

// Conn returns the connection of the transaction that paid, nil if it is not known.
func Conn(r *Receipt) any { return r.rest().conn }

// turn is how often a caller looks whether another has redeemed the receipt.
const turn = time.Millisecond

// Redeem calls settle, one caller at a time, with the mark that the last call
// left, "" at first. The mark that settle returns is kept when it returns no
// error. A caller that waits for another does so no longer than for ctx.
func Redeem(ctx context.Context, r *Receipt, settle func(mark string) (string, error)) error {
	for !r.mu.TryLock() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(turn):
		}
	}
	defer r.mu.Unlock()
	mark, err := settle(r.rest().mark)
	if err == nil {
		r.change(func(m *more) { m.mark = mark })
	}
	return err
}
