// Package receipt keeps the payments of a call, to settle them or give them back. It imports only
// the arithmetic, so the root package can import it.
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

// Limit is a limit and key that a call took from, with the limit's definition at that time.
type Limit struct {
	bucket.Definition
	Key string
}

// Payment is the tokens taken from one row.
type Payment struct {
	*Limit     // shared by the payments of one limit
	Place  int // of the limit in the order of the call
	Shard  int
	Slot   int64 // in a sliding window, the last microsecond of the slot that was given; otherwise 0
	Tokens float64
}

// none is the slot of a payment of nothing.
const none = math.MinInt64

// Nothing returns the payment of a limit that let a call go on without tokens. It has a place in
// the call, and a settlement takes nothing from it.
func Nothing(limit *Limit, place int) Payment {
	return Payment{Limit: limit, Place: place, Slot: none}
}

// IsNothing reports whether p comes from Nothing.
func (p *Payment) IsNothing() bool { return p.Slot == none }

// Left is the state that a reservation's payment left in its row.
type Left struct {
	Value      float64
	TS, Paused time.Time
}

// Receipt has the payments of a call, row by row. The root package documents it.
type Receipt struct {
	one  [1]Payment // a single payment; its Limit is nil if there are several
	at   int64      // in microseconds since 1970
	mu   sync.Mutex
	more atomic.Pointer[more] // nil if all its fields are zero
}

// more has fields that few receipts need. A call of one row that is decided alone or from memory
// does not need them until it is settled. A change of a field replaces the struct.
type more struct {
	several []Payment
	left    []Left // of a reservation's payments; not in the text
	taker   string
	conn    any
	read    bool // from text
	mark    string
}

// New returns a receipt of payments at an instant. taker names the transaction that paid, "" once
// it is committed; conn is its connection. For a reservation, left has the state that each payment
// left.
func New(payments []Payment, left []Left, taker string, conn any, at time.Time) *Receipt {
	r := &Receipt{at: at.UnixMicro()}
	if len(payments) == 1 {
		r.one[0], payments = payments[0], nil
	}
	r.keep(payments, left, taker, conn)
	return r
}

// One returns a receipt of tokens from the only row of a limit, outside of transactions. Without
// left it makes one allocation.
func One(limit *Limit, slot int64, tokens float64, left []Left, at time.Time) *Receipt {
	r := new(Receipt)
	r.one[0].Limit, r.one[0].Slot, r.one[0].Tokens, r.at = limit, slot, tokens, at.UnixMicro()
	r.keep(nil, left, "", nil)
	return r
}

// Own returns a receipt of one payment, with a limit of its own. If it is committed and no
// reservation, it makes one allocation.
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

// keep stores the fields of more, if one is set.
func (r *Receipt) keep(several []Payment, left []Left, taker string, conn any) {
	if several != nil || left != nil || taker != "" {
		r.more.Store(&more{several: several, left: left, taker: taker, conn: conn})
	}
}

// payments returns the payments. Do not change them.
func (r *Receipt) payments() []Payment {
	if r.one[0].Limit != nil {
		return r.one[:]
	}
	return r.rest().several
}

// rest returns the fields of more.
func (r *Receipt) rest() more {
	if m := r.more.Load(); m != nil {
		return *m
	}
	return more{}
}

// change changes fields of more. The caller holds mu.
func (r *Receipt) change(do func(*more)) {
	m := r.rest()
	do(&m)
	r.more.Store(&m)
}

// Lefts returns the state that each payment of a reservation left; nil if unknown.
func Lefts(r *Receipt) []Left { return r.rest().left }

// Part returns a receipt of some of r's payments.
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

// Put moves r's payments to other places in the call and adds payments of Nothing, at least one. No
// other goroutine may know r yet. A nil r has no payments.
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

// Payments returns the payments. Do not change them. It is a function, so that users of the root
// package do not see it.
func Payments(r *Receipt) []Payment {
	if r == nil {
		return nil
	}
	return r.payments()
}

// Pays reports whether a limit granted the receipt's call, even if 0 tokens. It is false if all its
// limits were in shadow and let the call go on without tokens.
func Pays(r *Receipt) bool {
	return slices.ContainsFunc(Payments(r), func(p Payment) bool { return !p.IsNothing() })
}

// Taker returns the transaction that paid, "" once it is committed. Call it in settle of Redeem, or
// before another goroutine knows r: only then it cannot change meanwhile.
func Taker(r *Receipt) string { return r.rest().taker }

// At returns the instant of the payments.
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

// Never is the mark of a receipt whose call was rolled back; it cannot be settled.
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

// Conn returns the connection of the transaction that paid; nil if unknown.
func Conn(r *Receipt) any { return r.rest().conn }

// A caller of Redeem that waits for another looks once per turn.
const turn = time.Millisecond

// Redeem calls settle for one caller at a time. The mark that settle gets is the one that it last
// returned without an error; "" at first. A caller waits for others until ctx ends.
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
