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
	f.meet(asked)
	return f.acquire(ctx, asked, 0)
}

func (f *Permits) meet(asked []ratelimit.PermitRequest) {
	for _, r := range asked {
		f.local.Meet(keyOf(r), r.Limit)
	}
}

// acquire is Acquire also with the limits that hold for a waiter, which looks at parts of a limit with
// so many permits.
func (f *Permits) acquire(ctx context.Context, asked []ratelimit.PermitRequest, partOf int) (ratelimit.Permit, error) {
	begun, cancel := time.Now(), context.CancelFunc(nil)
	s := f.search(asked)
	s.parts[0].look.PartOf = partOf
	s.look = func(look *table.PermitLook) error { return f.look(ctx, look) }
	s.take = func(op *table.PermitOp) (bool, error) {
		if s.tries == 2 { // until here the queue has bounded it, which costs less
			ctx, cancel = f.TimedFrom(ctx, begun)
		}
		return true, f.apply(ctx, op)
	}
	permit, op, err := s.run()
	if cancel != nil {
		cancel()
	}
	if op != nil {
		f.taken(op, permit.Ends())
	}
	return permit, err
}

// AcquireIn is Acquire in a caller's transaction. An attempt stands behind a savepoint, or the permit's
// holder would have to wait for the transaction if it fails. Free permits are read on another connection,
// since reading in the transaction would abort others under SERIALIZABLE.
func (f *Permits) AcquireIn(ctx context.Context, tx pgx.Tx, asked []ratelimit.PermitRequest, before func() (granted bool, err error)) (ratelimit.Permit, error) {
	f.meet(asked)
	s := f.search(asked)
	s.look = func(look *table.PermitLook) error { return f.lookBeside(ctx, tx, look) }
	s.take = func(op *table.PermitOp) (bool, error) {
		if granted, err := before(); err != nil || !granted {
			return false, err
		}
		if err := f.changeSetIn(ctx, tx, op); err != nil {
			return true, f.Fault("take a permit", err)
		}
		return true, nil
	}
	permit, op, err := s.run()
	if op != nil { // nobody here learns how the transaction ends
		f.lose(op)
	}
	return permit, err
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

// mostTries is how often a set is tried, again if another caller has taken one of it meanwhile. One
// permit is tried until all have been.
const mostTries = 8

// search is the search for the permits of a call.
type search struct {
	*Permits
	asked []ratelimit.PermitRequest
	parts []part // for each that is asked
	tries int
	began time.Time
	look  func(*table.PermitLook) error
	take  func(*table.PermitOp) (asked bool, err error)
}

// part is the search for the permits of a limit.
type part struct {
	look table.PermitLook
	vain []int // permits that were tried, and are not tried again
}

func (f *Permits) search(asked []ratelimit.PermitRequest) *search {
	s := &search{Permits: f, asked: asked, parts: make([]part, len(asked))}
	for i, r := range asked {
		s.parts[i].look.Key = keyOf(r)
	}
	return s
}

// run tries permits that are known to be free until they are taken, and returns how.
func (s *search) run() (ratelimit.Permit, *table.PermitOp, error) {
	for {
		op, refused, err := s.next()
		if op == nil {
			return refused, nil, err
		}
		s.tries++
		s.began = time.Now()
		asked, err := s.take(op)
		switch {
		case err == nil && op.Done.OK:
			return held(s.asked, op, s.began), op, nil
		case !asked:
			s.lose(op)
			return ratelimit.Permit{InFlight: s.asked[0].Limit, Key: s.asked[0].Key, N: s.asked[0].N}, nil, err
		}
		if s.missed(op); err != nil {
			return ratelimit.Permit{}, nil, err
		}
		if s.tries == mostTries && !s.alone() {
			return s.refused(0), nil, nil
		}
	}
}

// missed notes that permits were tried in vain. Which one of a set is not known, unless another transaction
// may be making it.
func (s *search) missed(op *table.PermitOp) {
	for _, o := range op.Set() {
		s.local.Missed(o.Row.Key, o.Row.Shard)
		for i := range s.parts {
			if (o.New || s.alone()) && s.parts[i].look.Key == o.Row.Key {
				s.parts[i].vain = append(s.parts[i].vain, o.Row.Shard)
			}
		}
	}
}

// next chooses the permits to try. If too few of a limit are free, it returns the refusal.
func (s *search) next() (*table.PermitOp, ratelimit.Permit, error) {
	var set table.PermitSet
	for i, r := range s.asked {
		chosen, err := s.choose(i)
		if chosen == nil {
			for _, op := range set {
				s.local.Unchoose(op.Row.Key, []flight.Choice{{Number: op.Row.Shard, New: op.New}})
			}
			if err != nil {
				return nil, ratelimit.Permit{}, err
			}
			return nil, s.refused(i), nil
		}
		for _, c := range chosen {
			set = append(set, &table.PermitOp{Row: decide.Row{Key: s.parts[i].look.Key, Shard: c.Number}, Lease: r.Limit.LeaseOrDefault(), New: c.New})
		}
	}
	return inOrder(set), ratelimit.Permit{}, nil
}

// choose returns as many permits of a limit as are asked, or nothing. For one alone it looks again while
// callers here choose all that it has seen.
func (s *search) choose(i int) ([]flight.Choice, error) {
	r, p := s.asked[i], &s.parts[i]
	for looked := false; ; looked = true {
		now := time.Now()
		if chosen := s.local.Choose(p.look.Key, r.N, r.Limit.Limit, s.alone(), now); chosen != nil || looked && !s.alone() {
			return chosen, nil
		}
		seen := table.PermitLook{Key: p.look.Key, PartOf: p.look.PartOf} // of its own, as a caller that gives up does not wait for it
		if err := s.look(&seen); err != nil {
			return nil, err
		}
		if p.look = seen; !s.saw(p, r.Limit.Limit, now) {
			return nil, nil
		}
	}
}

// alone reports whether one permit of one limit is asked.
func (s *search) alone() bool { return len(s.asked) == 1 && s.asked[0].N == 1 }

// saw notes which permits of a limit are free by a look, and reports whether some are worth trying.
func (s *search) saw(p *part, limit int, asked time.Time) (some bool) {
	there := make(map[int]bool, len(p.look.Permits))
	for _, v := range p.look.Permits {
		there[v.Number] = true
	}
	if !s.alone() {
		p.vain = slices.DeleteFunc(p.vain, func(number int) bool { return there[number] }) // it has been made by now
	}
	var free []flight.Choice
	for _, v := range p.look.Permits {
		if v.Number < limit && !v.Until.After(p.look.At) && !v.Locked && !slices.Contains(p.vain, v.Number) {
			free = append(free, flight.Choice{Number: v.Number})
		}
	}
	for n := p.look.From; n < min(p.look.To, limit); n++ {
		if !there[n] && !slices.Contains(p.vain, n) {
			free = append(free, flight.Choice{Number: n, New: true})
		}
	}
	return s.local.Observe(p.look.Key, free, p.look.PartOf > 0, asked)
}

// refused returns the refusal by a limit. Its NotBefore is the first instant at which leases have ended
// of as many permits as are missing. A permit without a holder is held by a transaction that has not
// committed, and may be free at once.
func (s *search) refused(i int) ratelimit.Permit {
	r, look := s.asked[i], s.parts[i].look
	permit := ratelimit.Permit{InFlight: r.Limit, Key: r.Key, N: r.N, At: look.At.UTC(), NotBefore: look.At.UTC()}
	var ends []time.Time
	for _, v := range look.Permits {
		if v.Number < r.Limit.Limit && v.Until.After(look.At) {
			ends = append(ends, v.Until)
		}
	}
	slices.SortFunc(ends, time.Time.Compare)
	if missing := r.N - (r.Limit.Limit - len(ends)); missing > 0 {
		permit.NotBefore = ends[missing-1]
	}
	return permit
}
