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

// Acquire takes all permits that are asked, or returns the refusal of a limit.
func (f *Permits) Acquire(ctx context.Context, asked []ratelimit.PermitRequest) (ratelimit.Permit, error) {
	if f.meet(asked) {
		return f.acquireSet(ctx, asked)
	}
	return f.acquire(ctx, search{limit: asked[0].Limit, look: table.PermitLook{Key: keyOf(asked[0])}})
}

// meet notes the limits of a caller, and reports whether it asks for several permits.
func (f *Permits) meet(asked []ratelimit.PermitRequest) (several bool) {
	for _, r := range asked {
		f.local.Meet(keyOf(r), r.Limit)
	}
	return len(asked) > 1 || asked[0].N > 1
}

// acquire runs a search. Its limit is the caller's, or the one that holds for a waiter.
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
		if len(s.vain) == 1 { // the first attempt is bounded by the queue, which costs less
			var cancel context.CancelFunc
			ctx, cancel = f.TimedFrom(ctx, begun)
			defer cancel()
		}
	}
}

// search searches for a free permit.
type search struct {
	*Permits
	limit ratelimit.InFlight
	look  table.PermitLook
	vain  []int // numbers that were tried in vain; they are not tried again
	asked time.Time

	hidden, alone bool // hidden: a permit that was tried in vain seems free; alone: see [table.PermitOp]
}

// next returns the operation that takes the next permit to try. It returns nil when none is left,
// or with an error.
func (s *search) next(look func(*table.PermitLook) error) (*table.PermitOp, error) {
	for {
		s.asked = time.Now()
		if choice, ok := s.local.Choose(s.look.Key, s.limit.Limit, s.asked); ok {
			row := decide.Row{Key: s.look.Key, Shard: choice.Number}
			return &table.PermitOp{Row: row, Lease: s.limit.LeaseOrDefault(), New: choice.New, Lock: s.lock(row), Alone: s.alone}, nil
		}
		seen := table.PermitLook{Key: s.look.Key, PartOf: s.look.PartOf} // a copy: a caller that gives up leaves its look under way
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

// saw notes which permits the look found free, and reports whether any is worth trying.
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

// permitOf returns the permit that an operation has taken or renewed.
func permitOf(limit ratelimit.InFlight, op *table.PermitOp, asked time.Time) ratelimit.Permit {
	return ratelimit.Permit{
		InFlight: limit, Key: op.Row.Key.Key, N: 1, OK: true, Number: op.Row.Shard,
		Fence: op.Done.Fence, At: op.Done.At, Until: op.Done.Until, Asked: asked,
	}
}

// refused returns err, or without one the refusal by the permits that were read.
func (s *search) refused(err error) (ratelimit.Permit, error) {
	if err != nil {
		return ratelimit.Permit{}, err
	}
	return refusal(s.limit.For(s.look.Key.Key), &s.look), nil
}

// AcquireIn does in a caller's transaction what Acquire does. Each attempt stands behind a
// savepoint. Without it, a failed attempt would keep the permit's row locked, and the permit's
// holder would wait for the transaction. Free permits are read on another connection if the pool
// has one, because reading in the transaction would abort others under SERIALIZABLE.
//
// Permits are passed over by advisory locks, and any role may hold such a lock. So if only
// passed-over permits seem free, a few are tried again without the lock.
func (f *Permits) AcquireIn(ctx context.Context, tx pgx.Tx, asked []ratelimit.PermitRequest, before func() (granted bool, err error)) (ratelimit.Permit, error) {
	if f.meet(asked) {
		return f.acquireSetIn(ctx, tx, asked, before)
	}
	limit, key := asked[0].Limit, keyOf(asked[0])
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
			return ratelimit.Permit{}, f.FaultOf("take a permit of", op.Names(), err)
		}
		if op.Done.OK { // the process does not learn how the transaction ends
			f.local.Lost(key, op.Row.Shard)
			return permitOf(limit, op, s.asked), nil
		}
		s.missed(op)
	}
}

// lookBeside looks on another connection, or in tx if the pool has none left.
func (f *Permits) lookBeside(ctx context.Context, tx pgx.Tx, look *table.PermitLook) error {
	if f.Pool != nil {
		if stat := f.Pool.Stat(); stat.AcquiredConns() < stat.MaxConns() {
			return f.look(f.Work.Part(ctx), look)
		}
	}
	if err := f.table.LookAtPermitsIn(ctx, tx, look, f.Clock()); err != nil {
		return f.FaultOf("look at", []string{look.Key.Name}, err)
	}
	return nil
}
