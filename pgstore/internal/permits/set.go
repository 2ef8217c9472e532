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

// Several permits that are acquired, renewed and released together are a set of operations, in the
// order of their rows. Most functions for a single permit are separate.

// several reports whether several permits are held together.
func several(permit ratelimit.Permit) bool { return len(permit.More) > 0 || len(permit.With) > 0 }

// opsOf returns the releases of all permits that are held together, in the order of their rows.
func opsOf(permit ratelimit.Permit) *table.PermitOp {
	var set table.PermitSet
	for _, part := range permit.Parts() {
		numbers := append([]ratelimit.PermitNumber{{Number: part.Number, Fence: part.Fence}}, part.More...)
		for _, n := range numbers {
			row := rowOf(part)
			row.Shard = n.Number
			set = append(set, &table.PermitOp{Row: row, Fence: n.Fence})
		}
	}
	return inOrder(set)
}

// inOrder sorts operations by their rows, and returns the first with the others as its Rest.
func inOrder(set table.PermitSet) *table.PermitOp {
	slices.SortFunc(set, func(a, b *table.PermitOp) int { return a.Row.Compare(b.Row) })
	set[0].Rest = set[1:]
	return set[0]
}

// held returns the permits that an operation and its Rest have taken. The first part is of the
// limit that was asked first.
func held(asked []ratelimit.PermitRequest, op *table.PermitOp, began time.Time) ratelimit.Permit {
	parts := make([]ratelimit.Permit, len(asked))
	places := make(map[decide.Key]int, len(asked))
	for i, r := range asked {
		places[keyOf(r)] = i
	}
	for _, o := range op.Set() {
		i := places[o.Row.Key]
		if p := &parts[i]; p.OK {
			p.More = append(p.More, ratelimit.PermitNumber{Number: o.Row.Shard, Fence: o.Done.Fence})
		} else {
			*p = permitOf(asked[i].Limit, o, began)
		}
		parts[i].N = 1 + len(parts[i].More)
	}
	permit := parts[0]
	if len(parts) > 1 {
		permit.With = parts[1:]
	}
	return permit
}

func keyOf(r ratelimit.PermitRequest) decide.Key { return decide.Key{Name: r.Limit.Name, Key: r.Key} }

// askedOf returns the requests of an operation and its Rest, one for each key, with name and lease
// only.
func askedOf(op *table.PermitOp) (asked []ratelimit.PermitRequest) {
	for _, o := range op.Set() {
		if n := len(asked); n == 0 || keyOf(asked[n-1]) != o.Row.Key {
			asked = append(asked, ratelimit.InFlight{Name: o.Row.Name, Lease: o.Lease}.For(o.Row.Key.Key))
		}
	}
	return asked
}

// releaseSet releases several permits. It hands none on, and wakes waiters here.
func (f *Permits) releaseSet(ctx context.Context, permit ratelimit.Permit) error {
	op := opsOf(permit)
	err := f.changeHeld(ctx, op)
	for _, o := range op.Set() {
		switch {
		case err != nil || o.Done.Given:
			f.local.Lost(o.Row.Key, o.Row.Shard)
		default:
			f.local.Freed(o.Row.Key, o.Row.Shard)
		}
	}
	return err
}

func (f *Permits) changeSetIn(ctx context.Context, tx pgx.Tx, op *table.PermitOp) error {
	set := op.Set()
	for _, o := range set {
		o.Lock = f.lock(o.Row)
	}
	return f.table.ChangePermitSetIn(ctx, tx, set, f.Clock())
}

// taken notes that permits are held here.
func (f *Permits) taken(op *table.PermitOp, until time.Time) {
	for _, o := range op.Set() {
		f.local.Taken(o.Row.Key, o.Row.Shard, until)
	}
}

// mostTries bounds the attempts at a set, and at passed-over permits in a caller's transaction.
const mostTries = 8

// setSearch searches for all permits of a call.
type setSearch struct {
	*Permits
	asked []ratelimit.PermitRequest
	parts []search // one for each request
	began time.Time
	alone bool // take without advisory locks; in a caller's transaction only from the second attempt on
	look  func(*table.PermitLook) error
	take  func(*table.PermitOp) (asked bool, err error)
}

// acquireSet takes all permits of requests. A waiter passes the limits that hold for it now, which
// may be smaller than those it asked for.
func (f *Permits) acquireSet(ctx context.Context, asked []ratelimit.PermitRequest) (ratelimit.Permit, error) {
	s := f.search(asked)
	s.alone = true
	s.look = func(look *table.PermitLook) error { return f.look(ctx, look) }
	s.take = func(op *table.PermitOp) (bool, error) { return true, f.apply(ctx, op) }
	permit, op, err := s.run()
	if op != nil {
		f.taken(op, permit.Ends())
	}
	return permit, err
}

// acquireSetIn is AcquireIn for several permits.
func (f *Permits) acquireSetIn(ctx context.Context, tx pgx.Tx, asked []ratelimit.PermitRequest, before func() (granted bool, err error)) (ratelimit.Permit, error) {
	s := f.search(asked)
	s.look = func(look *table.PermitLook) error { return f.lookBeside(ctx, tx, look) }
	s.take = func(op *table.PermitOp) (bool, error) {
		if granted, err := before(); err != nil || !granted {
			return false, err
		}
		if err := f.changeSetIn(ctx, tx, op); err != nil {
			return true, f.FaultOf("take a permit of", op.Names(), err)
		}
		return true, nil
	}
	permit, op, err := s.run()
	if op != nil { // the process does not learn how the transaction ends
		f.lose(op)
	}
	return permit, err
}

func (f *Permits) search(asked []ratelimit.PermitRequest) *setSearch {
	s := &setSearch{Permits: f, asked: asked, parts: make([]search, len(asked))}
	for i, r := range asked {
		s.parts[i] = search{Permits: f, limit: r.Limit, look: table.PermitLook{Key: keyOf(r)}}
	}
	return s
}

// lose notes that this process does not hold permits.
func (f *Permits) lose(op *table.PermitOp) {
	for _, o := range op.Set() {
		f.local.Lost(o.Row.Key, o.Row.Shard)
	}
}

// run tries sets of permits that are known to be free until one is taken. It returns the permit,
// with the operation that took it, or a refusal.
func (s *setSearch) run() (ratelimit.Permit, *table.PermitOp, error) {
	for range mostTries {
		op, refused, err := s.next()
		if op == nil {
			return refused, nil, err
		}
		asked, err := s.take(op)
		switch {
		case err == nil && op.Done.OK:
			return held(s.asked, op, s.began), op, nil
		case !asked:
			s.lose(op)
			return ratelimit.Permit{InFlight: s.asked[0].Limit, Key: s.asked[0].Key, N: s.asked[0].N}, nil, err
		}
		for _, o := range op.Set() {
			s.local.Missed(o.Row.Key, o.Row.Shard)
			for i := range s.parts {
				if o.New && s.alone && s.parts[i].look.Key == o.Row.Key { // another transaction may be making this row
					s.parts[i].vain = append(s.parts[i].vain, o.Row.Shard)
				}
			}
		}
		if err != nil {
			return ratelimit.Permit{}, nil, err
		}
		s.alone = true
	}
	return refusal(s.asked[0], &s.parts[0].look), nil, nil
}

// next chooses the permits to try. If too few of a limit are free, it returns the refusal.
func (s *setSearch) next() (*table.PermitOp, ratelimit.Permit, error) {
	var set table.PermitSet
	s.began = time.Now()
	for i, r := range s.asked {
		chosen, err := s.choose(i)
		if chosen == nil {
			for _, op := range set {
				s.local.Unchoose(op.Row.Key, []flight.Choice{{Number: op.Row.Shard, New: op.New}})
			}
			if err != nil {
				return nil, ratelimit.Permit{}, err
			}
			return nil, refusal(r, &s.parts[i].look), nil
		}
		for _, c := range chosen {
			set = append(set, &table.PermitOp{Row: decide.Row{Key: keyOf(r), Shard: c.Number}, Lease: r.Limit.LeaseOrDefault(), New: c.New, Alone: s.alone})
		}
	}
	return inOrder(set), ratelimit.Permit{}, nil
}

// choose returns as many permits of a request as it asks for, or nil.
func (s *setSearch) choose(i int) ([]flight.Choice, error) {
	r, part := s.asked[i], &s.parts[i]
	if chosen := s.local.ChooseAll(keyOf(r), r.N, r.Limit.Limit, s.began); chosen != nil {
		return chosen, nil
	}
	part.asked = time.Now()
	seen := table.PermitLook{Key: part.look.Key} // a copy: a caller that gives up leaves its look under way
	if err := s.look(&seen); err != nil {
		return nil, err
	}
	part.look = seen
	part.vain = slices.DeleteFunc(part.vain, func(number int) bool { // a number whose row exists by now can be tried again
		return slices.ContainsFunc(seen.Permits, func(v table.PermitView) bool { return v.Number == number })
	})
	part.saw()
	return s.local.ChooseAll(keyOf(r), r.N, r.Limit.Limit, part.asked), nil
}

// refusal returns the refusal of a request by the permits that were read. NotBefore is when so many
// leases have ended that enough permits are free. A permit without a holder belongs to a
// transaction that has not committed, and may be free at once.
func refusal(r ratelimit.PermitRequest, look *table.PermitLook) ratelimit.Permit {
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
