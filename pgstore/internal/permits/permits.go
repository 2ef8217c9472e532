// Package permits takes, renews and releases permits in PostgreSQL, and waits for them. It knows no
// rate limit.
package permits

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/flight"
	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Permits makes operations on permits. It tries a permit by its number, which the process
// remembers; it looks only if it knows of no free permit. Operations gather while a statement is
// under way, like calls for tokens. One statement serves all keys, since a statement for many
// operations costs little more than one for few.
type Permits struct {
	*conn.Conn
	table *table.Table

	ops      *batch.Queue[*call]
	looks    *batch.Queue[*lookCall] // apart from ops, so that reading many permits delays no operation
	local    flight.Permits          // what this process knows of permits
	renewers flight.Renewers
}

// New returns the permits in a table.
func New(c *conn.Conn, t *table.Table) *Permits {
	f := &Permits{Conn: c, table: t}
	f.ops = batch.New(conn.MostTogether, c.Timeout, f.serve, c.Work.Spawn)
	f.looks = batch.New(conn.MostTogether, c.Timeout, f.serveLooks, c.Work.Spawn)
	return f
}

// rowOf returns the row of a permit.
func rowOf(permit ratelimit.Permit) decide.Row {
	return decide.Row{Key: decide.Key{Name: permit.InFlight.Name, Key: permit.Key}, Shard: permit.Number}
}

// changeHeld makes an operation on a permit that is held. If a transaction has locked its row,
// changeHeld waits for the transaction.
func (f *Permits) changeHeld(ctx context.Context, op *table.PermitOp) error {
	begun := time.Now()
	ctx = f.Work.Part(ctx) // also after the Store is closed
	err := f.changeOnce(ctx, op)
	if !errors.Is(err, errHeld) {
		return err
	}
	ctx, cancel := f.TimedFrom(ctx, begun)
	defer cancel()
	for pause := conn.Poll; errors.Is(err, errHeld); pause = min(2*pause, conn.SlowPoll) {
		if conn.Sleep(ctx, pause) == nil {
			err = f.changeOnce(ctx, op)
		}
		if ctx.Err() != nil && err != nil {
			return f.Locked(ctx.Err(), op.Row.Name)
		}
	}
	return err
}

// errHeld reports a permit that is held and whose row a transaction has locked.
var errHeld = errors.New("pgstore: the permit is locked")

// changeOnce makes an operation on a held permit, without waiting. It returns errHeld if a
// transaction has locked the permit's row.
func (f *Permits) changeOnce(ctx context.Context, op *table.PermitOp) error {
	next := op.Clone() // a caller that gives up must not share op with its next attempt
	err := f.apply(ctx, next)
	if err != nil {
		return err
	}
	if *op = *next; op.Done.OK {
		return nil
	}
	looking, cancel := f.Timed(ctx)
	defer cancel()
	held, err := f.table.HoldsPermits(looking, f.Pool, op.Set(), f.Clock())
	switch {
	case err != nil:
		return f.FaultOf("look at", op.Names(), err)
	case held:
		return errHeld
	}
	return lost(op.Row)
}

func lost(row decide.Row) error {
	return fmt.Errorf("pgstore: limit %q, permit %d: %w", row.Name, row.Shard, ratelimit.ErrLeaseLost)
}

// Release releases a permit, or hands it on to a waiter here.
func (f *Permits) Release(ctx context.Context, permit ratelimit.Permit) error {
	if several(permit) {
		return f.releaseSet(ctx, permit)
	}
	row, asked := rowOf(permit), time.Now()
	op := &table.PermitOp{Row: row, Fence: permit.Fence}
	next, hands := f.local.HandOn(row.Key, row.Shard, asked)
	if hands {
		op.Next, op.Lease = true, next.LeaseOrDefault()
	}
	err := f.changeHeld(ctx, op)
	switch {
	case err != nil:
		f.local.Lost(row.Key, row.Shard)
		return err
	case op.Done.Given:
		f.local.Lost(row.Key, row.Shard)
	case hands:
		if taken := permitOf(next, op, asked); !f.local.Hand(row.Key, taken) {
			f.GiveBack(ctx, taken)
		}
	case f.local.Waiting(row.Key) > 0:
		f.local.LetGo(row.Key, row.Shard)
	default:
		f.local.Freed(row.Key, row.Shard)
	}
	return nil
}

// GiveBack releases a permit that its caller does not want. It waits until the permit is released,
// ctx ends or RollbackTime is over. The release then goes on.
func (f *Permits) GiveBack(ctx context.Context, permit ratelimit.Permit) {
	ctx, cancel := context.WithTimeout(ctx, conn.RollbackTime)
	defer cancel()
	select {
	case <-f.giveBack(permit):
	case <-ctx.Done():
	}
}

// giveBack releases a permit, and closes done afterwards. It tries until the permit is released or
// its lease is over, since a transaction may have locked the row, or the database may be away.
// After the Store is closed it goes on for RollbackTime at most.
func (f *Permits) giveBack(permit ratelimit.Permit) (done <-chan struct{}) {
	over := make(chan struct{})
	f.Work.Spawn(func() {
		defer close(over)
		ctx, cancel := context.WithDeadline(context.Background(), permit.Ends())
		defer cancel()
		defer context.AfterFunc(f.Work.Opened, func() { time.AfterFunc(conn.RollbackTime, cancel) })()
		for pause := conn.SlowPoll; ; pause = min(2*pause, slowRetry) {
			err := f.tryRelease(ctx, permit)
			if err == nil || errors.Is(err, ratelimit.ErrLeaseLost) || conn.Sleep(ctx, pause) != nil {
				return
			}
		}
	})
	return over
}

// slowRetry is the longest pause between tries of a release.
const slowRetry = time.Second

// tryRelease calls Release for RollbackTime at most.
func (f *Permits) tryRelease(ctx context.Context, permit ratelimit.Permit) error {
	ctx, cancel := context.WithTimeout(ctx, conn.RollbackTime)
	defer cancel()
	return f.Release(ctx, permit)
}

// ReleaseIn releases a permit in a caller's transaction.
func (f *Permits) ReleaseIn(ctx context.Context, tx pgx.Tx, permit ratelimit.Permit) error {
	op := opsOf(permit)
	switch err := f.releaseOps(ctx, tx, op); {
	case err != nil:
		return f.FaultOf("release a permit of", op.Names(), err)
	case !op.Done.OK:
		return lost(op.Row)
	}
	return nil
}

func (f *Permits) releaseOps(ctx context.Context, tx pgx.Tx, op *table.PermitOp) error {
	if len(op.Rest) > 0 {
		return f.changeSetIn(ctx, tx, op)
	}
	op.Lock = f.lock(op.Row)
	var batch pgx.Batch
	f.table.QueuePermit(&batch, op, f.Clock())
	return tx.SendBatch(ctx, &batch).Close()
}

// ReleaseFunc runs a transaction that releases a permit and then runs do.
func (f *Permits) ReleaseFunc(ctx context.Context, permit ratelimit.Permit, do func(pgx.Tx) error) error {
	err := intx.Do(ctx, f.Pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if err := f.ReleaseIn(ctx, tx, permit); err != nil {
			return err
		}
		return do(tx)
	})
	if err != nil {
		return err
	}
	f.renewers.Gone(permit)
	for _, p := range permit.Parts() {
		key := decide.Key{Name: p.InFlight.Name, Key: p.Key}
		f.local.Freed(key, p.Number)
		for _, m := range p.More {
			f.local.Freed(key, m.Number)
		}
	}
	return nil
}

// Renew extends a permit's lease to end one Lease from now, and returns the renewed permit.
func (f *Permits) Renew(ctx context.Context, permit ratelimit.Permit) (ratelimit.Permit, error) {
	op, parts, asked := opsOf(permit), permit.Parts(), time.Now()
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

// Keep runs do and renews a permit meanwhile by the verbs of a store.
func (f *Permits) Keep(ctx context.Context, store flight.Store, permit ratelimit.Permit, do func(context.Context, ratelimit.Permit) error) error {
	return f.renewers.Keep(ctx, store, permit, do)
}

// Released notes that a holder has released its permit, perhaps in a transaction that is not
// committed.
func (f *Permits) Released(permit ratelimit.Permit) { f.renewers.Released(permit) }

// Held returns the permits that are held of a limit's key, in the order of their numbers.
func (f *Permits) Held(ctx context.Context, limit ratelimit.InFlight, key decide.Key) (held []ratelimit.Permit, err error) {
	look := &table.PermitLook{Key: key}
	if err := f.look(ctx, look); err != nil {
		return nil, err
	}
	for _, v := range look.Permits {
		if v.Until.After(look.At) {
			held = append(held, ratelimit.Permit{InFlight: limit, Key: key.Key, OK: true, Number: v.Number, Fence: v.Fence, At: look.At.UTC(), Until: v.Until})
		}
	}
	return held, nil
}

// Reset frees all permits of a key.
func (f *Permits) Reset(ctx context.Context, key decide.Key) error {
	err := f.Standalone(ctx, "reset permits", func(ctx context.Context) error { return f.table.ResetPermits(ctx, f.Pool, key) })
	f.local.Forget(key)
	return err
}

// Prune deletes the rows of a name's permits that have been free for flight.IdleFor, in batches.
func (f *Permits) Prune(ctx context.Context, name string) (deleted int64, err error) {
	for more := true; more && err == nil; {
		err = f.Standalone(ctx, "prune permits", func(ctx context.Context) error {
			now, err := table.Now(ctx, f.Pool, f.Clock())
			if err != nil {
				return err
			}
			n, err := f.table.PrunePermits(ctx, f.Pool, name, now.Add(-flight.IdleFor), f.table.Batch())
			deleted, more = deleted+n, n >= int64(f.table.Batch())
			return err
		})
	}
	return deleted, err
}

// Prunable returns how many rows Prune would delete.
func (f *Permits) Prunable(ctx context.Context, name string) (n int64, err error) {
	err = f.Standalone(ctx, "count free permits", func(ctx context.Context) error {
		now, err := table.Now(ctx, f.Pool, f.Clock())
		if err == nil {
			n, err = f.table.PrunablePermits(ctx, f.Pool, name, now.Add(-flight.IdleFor))
		}
		return err
	})
	return n, err
}

// Waiting returns how many callers of this process wait for a permit of a key.
func (f *Permits) Waiting(key decide.Key) int { return f.local.Waiting(key) }
