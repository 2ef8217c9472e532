package permits

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Several permits that are acquired, renewed and released together are a set of operations, in the order
// of their rows.

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

// inOrder returns the operations as one with its Rest.
func inOrder(set table.PermitSet) *table.PermitOp {
	slices.SortFunc(set, func(a, b *table.PermitOp) int { return a.Row.Compare(b.Row) })
	set[0].Rest = set[1:]
	return set[0]
}

// held returns the permits that an operation and its Rest have taken. The first is of the limit that was
// asked first.
func held(asked []ratelimit.PermitRequest, op *table.PermitOp, began time.Time) ratelimit.Permit {
	if len(op.Rest) == 0 {
		return permitOf(asked[0].Limit, op, began)
	}
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

// askedOf returns what an operation and its Rest take, as far as they tell.
func askedOf(op *table.PermitOp) (asked []ratelimit.PermitRequest) {
	for _, o := range op.Set() {
		if n := len(asked); n == 0 || keyOf(asked[n-1]) != o.Row.Key {
			asked = append(asked, ratelimit.InFlight{Name: o.Row.Name, Lease: o.Lease}.For(o.Row.Key.Key))
		}
	}
	return asked
}

// releaseSet is Release of several permits. They are handed on to nobody: waiters here are told.
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

func (f *Permits) releaseSetIn(ctx context.Context, tx pgx.Tx, permit ratelimit.Permit) error {
	op := opsOf(permit)
	if err := f.changeSetIn(ctx, tx, op); err != nil {
		return f.Fault("release a permit", err)
	}
	if !op.Done.OK {
		return lost(op.Row)
	}
	return nil
}

func (f *Permits) changeSetIn(ctx context.Context, tx pgx.Tx, op *table.PermitOp) error {
	set := op.Set()
	for _, o := range set {
		o.Lock = f.lock(o.Row)
	}
	return f.table.ChangePermitSetIn(ctx, tx, set, f.Clock())
}

// Renew has each permit's lease end a Lease from now, and returns them so.
func (f *Permits) Renew(ctx context.Context, permit ratelimit.Permit) (ratelimit.Permit, error) {
	asked, op, parts := time.Now(), opsOf(permit), permit.Parts()
	for _, o := range op.Set() {
		for _, p := range parts {
			if p.InFlight.Name == o.Row.Name && p.Key == o.Row.Key.Key {
				o.Lease = p.InFlight.LeaseOrDefault()
			}
		}
	}
	if err := f.changeHeld(ctx, op); err != nil {
		return ratelimit.Permit{}, err
	}
	permit.At, permit.Until, permit.Asked = op.Done.At, op.Done.At.Add(permit.InFlight.LeaseOrDefault()), asked
	permit.With = slices.Clone(permit.With)
	for i := range permit.With {
		p := &permit.With[i]
		p.At, p.Until, p.Asked = permit.At, permit.At.Add(p.InFlight.LeaseOrDefault()), asked
	}
	f.taken(op, permit.Ends())
	return permit, nil
}

// taken notes that permits are held here.
func (f *Permits) taken(op *table.PermitOp, until time.Time) {
	for _, o := range op.Set() {
		f.local.Taken(o.Row.Key, o.Row.Shard, until)
	}
}

// lose notes that permits are not held here.
func (f *Permits) lose(op *table.PermitOp) {
	for _, o := range op.Set() {
		f.local.Lost(o.Row.Key, o.Row.Shard)
	}
}

// permitOf is the permit that an operation has taken.
func permitOf(limit ratelimit.InFlight, op *table.PermitOp, asked time.Time) ratelimit.Permit {
	return ratelimit.Permit{
		InFlight: limit, Key: op.Row.Key.Key, N: 1, OK: true, Number: op.Row.Shard,
		Fence: op.Done.Fence, At: op.Done.At, Until: op.Done.Until, Asked: asked,
	}
}
