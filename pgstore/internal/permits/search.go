package permits

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/flight"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Acquire takes a free permit, or returns a refusal.
func (f *Permits) Acquire(ctx context.Context, limit ratelimit.InFlight, key decide.Key) (ratelimit.Permit, error) {
	f.local.Meet(key, limit)
	return f.acquire(ctx, search{limit: limit, look: table.PermitLook{Key: key}})
}

// acquire is Acquire by a search, also with the limit that holds for a waiter.
func (f *Permits) acquire(ctx context.Context, s search) (ratelimit.Permit, error) {
	s.Permits = f
	limit, key := s.limit, s.look.Key
	begun := time.Now()
	for {
		op, err := s.next(func(look *table.PermitLook) error { return f.look(ctx, look) })
		if op == nil {
			return s.refused(err)
		}
		if err := f.apply(ctx, op); err != nil {
			s.missed(op)
			return ratelimit.Permit{}, err
		}
		if op.Done.OK {
			permit := permitOf(limit, op, s.asked)
			f.local.Taken(key, op.Row.Shard, permit.Ends())
			return permit, nil
		}
		s.missed(op)
		if len(s.vain) == 1 { // until here the queue has bounded it, which costs less
			var cancel context.CancelFunc
			ctx, cancel = f.TimedFrom(ctx, begun)
			defer cancel()
		}
	}
}

// search is the search for a permit that is free.
type search struct {
	*Permits
	limit ratelimit.InFlight
	look  table.PermitLook
	vain  []int // permits that were tried, and are not tried again
	asked time.Time

	hidden, alone bool // see AcquireIn
}

// next is the taking of the next permit to try; nil when none is left, or with an error.
func (s *search) next(look func(*table.PermitLook) error) (*table.PermitOp, error) {
	for {
		s.asked = time.Now()
		if choice, ok := s.local.Choose(s.look.Key, s.limit.Limit, s.asked); ok {
			row := decide.Row{Key: s.look.Key, Shard: choice.Number}
			return &table.PermitOp{Row: row, Lease: s.limit.LeaseOrDefault(), New: choice.New, Lock: s.lock(row), Alone: s.alone}, nil
		}
		seen := table.PermitLook{Key: s.look.Key, PartOf: s.look.PartOf} // of its own, as a caller that gives up does not wait for it
		err := look(&seen)
		if err != nil {
			return nil, err
		}
		if s.look = seen; !s.saw() {
			return nil, nil
		}
	}
}

// missed notes that a permit was tried in vain.
func (s *search) missed(op *table.PermitOp) {
	s.vain = append(s.vain, op.Row.Shard)
	s.local.Missed(op.Row.Key, op.Row.Shard)
}

// saw notes which permits are free by the look, and reports whether some are worth trying.
func (s *search) saw() (some bool) {
	there := make(map[int]bool, len(s.look.Permits))
	var free []flight.Choice
	s.hidden = false
	offer := func(c flight.Choice) {
		if slices.Contains(s.vain, c.Number) {
			s.hidden = true
		} else {
			free = append(free, c)
		}
	}
	for _, v := range s.look.Permits {
		there[v.Number] = true
		if v.Number < s.limit.Limit && !v.Until.After(s.look.At) && !v.Locked {
			offer(flight.Choice{Number: v.Number})
		}
	}
	for n := s.look.From; n < min(s.look.To, s.limit.Limit); n++ {
		if !there[n] {
			offer(flight.Choice{Number: n, New: true})
		}
	}
	return s.local.Observe(s.look.Key, free, s.look.PartOf > 0, s.asked)
}

// permitOf is the permit that an operation has taken or renewed.
func permitOf(limit ratelimit.InFlight, op *table.PermitOp, asked time.Time) ratelimit.Permit {
	return ratelimit.Permit{
		InFlight: limit, Key: op.Row.Key.Key, N: 1, OK: true, Number: op.Row.Shard,
		Fence: op.Done.Fence, At: op.Done.At, Until: op.Done.Until, Asked: asked,
	}
}

// refused returns the refusal by the permits seen, unless there is an error. A permit without a
// holder is held by a transaction that has not committed, and may be free at once.
func (s *search) refused(err error) (ratelimit.Permit, error) {
	if err != nil {
		return ratelimit.Permit{}, err
	}
	permit := ratelimit.Permit{InFlight: s.limit, Key: s.look.Key.Key, N: 1, At: s.look.At.UTC()}
	held := 0
	for _, v := range s.look.Permits {
		if v.Number < s.limit.Limit && v.Until.After(s.look.At) {
			if held++; held == 1 || v.Until.Before(permit.NotBefore) {
				permit.NotBefore = v.Until
			}
		}
	}
	if held < s.limit.Limit {
		permit.NotBefore = permit.At
	}
	return permit, nil
}

// AcquireIn takes a permit in a caller's transaction. An attempt stands behind a savepoint, or
// the permit's holder would have to wait for the transaction if it fails. Free permits are read on
// another connection, since reading in the transaction would abort others under SERIALIZABLE.
//
// Any role may have the locks by which permits are passed over. So when only such permits seem free, a
// few are tried once more, without the lock.
func (f *Permits) AcquireIn(ctx context.Context, tx pgx.Tx, limit ratelimit.InFlight, key decide.Key, before func() (granted bool, err error)) (ratelimit.Permit, error) {
	f.local.Meet(key, limit)
	s := search{Permits: f, limit: limit, look: table.PermitLook{Key: key}}
	for first := true; ; first = false {
		if s.alone && len(s.vain) == mostTries {
			return s.refused(nil)
		}
		op, err := s.next(func(look *table.PermitLook) error { return f.lookBeside(ctx, tx, look) })
		switch {
		case op == nil && err == nil && s.hidden && !s.alone && f.table.PassesOver():
			s.alone, s.vain = true, nil
			continue
		case op == nil:
			return s.refused(err)
		}
		if first {
			if granted, err := before(); err != nil || !granted {
				f.local.Lost(key, op.Row.Shard)
				return ratelimit.Permit{InFlight: limit, Key: key.Key, N: 1}, err
			}
		}
		if err := f.table.ChangePermitSetIn(ctx, tx, table.PermitSet{op}, f.Clock()); err != nil {
			s.missed(op)
			return ratelimit.Permit{}, f.Fault("take a permit", err)
		}
		if op.Done.OK { // nobody here learns how the transaction ends
			f.local.Lost(key, op.Row.Shard)
			return permitOf(limit, op, s.asked), nil
		}
		s.missed(op)
	}
}

// lookBeside looks on another connection, if there is one to be had.
func (f *Permits) lookBeside(ctx context.Context, tx pgx.Tx, look *table.PermitLook) error {
	if f.Pool != nil {
		if stat := f.Pool.Stat(); stat.AcquiredConns() < stat.MaxConns() {
			return f.look(f.holding(ctx), look)
		}
	}
	return f.table.LookAtPermitsIn(ctx, tx, look, f.Clock())
}
