package tx

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// begin begins a transaction and makes the call's takes, in one round trip if the rows that it
// tries first have enough. If they have not, it reads all shards outside of any transaction, where
// reading disturbs no other. Then it begins a new transaction, which takes from the shards that had
// enough. The caller must end the transaction, which may be there even with an error.
func (a *attempt) begin(ctx context.Context) (pgx.Tx, error) {
	b := a.taker
	if a.queued != nil {
		return a.beginOnCommit(ctx), nil
	}
	if a.held {
		return a.beginHeld(ctx)
	}
	if len(a.call.Demands) == 0 {
		return a.beginNoTake(ctx)
	}
	if a.lockAll {
		return a.beginLocked(ctx)
	}
	changes, ok := b.known.Guess(a.call, func(i int) int { return a.shards[i] })
	for round := 0; ; round++ {
		if ok {
			tx, err := a.try(ctx, changes)
			if err != nil || a.result.OK || a.lockAll { // decided on locked rows
				return tx, err
			}
			if err := tx.Rollback(ctx); err != nil {
				return tx, b.Fault("roll back", err)
			}
			a.turn.locks, a.turn.had = nil, 0 // the next one may take from other rows
		}
		view, err := b.Look(ctx, a.conn, &pgx.Batch{}, a.call, All)
		if err != nil {
			return nil, b.FaultOf("look at", a.call.Names(), err)
		}
		if changes, ok = a.call.Plan(view); !ok || round == rounds {
			a.answer(a.call.Refused(view))
			return nil, nil
		}
		if err := b.renew(ctx, a.conn, changes, view.At); err != nil {
			return nil, b.faultOf(a.call, err)
		}
	}
}

// try begins a transaction that tries changes. Afterwards a.result tells whether they were granted.
func (a *attempt) try(ctx context.Context, changes []decide.Change) (pgx.Tx, error) {
	if a.call.Divides(changes) { // as in Taker.takeSeveral
		a.lockAll = true
		a.turn = a.turnOf(ctx)
		return a.beginLocked(ctx)
	}
	tx, err := a.take(ctx, changes)
	if err != nil {
		return tx, a.taker.faultOf(a.call, err)
	}
	if a.taken.granted() {
		a.answer(a.taken.result(tx))
	}
	return tx, nil
}

// answer sets the attempt's result: result is what rows have granted, and the claim adds the rest.
func (a *attempt) answer(result ratelimit.Result) {
	if a.claim != nil {
		result = a.claim.Result(result)
	}
	a.result = result
}

// beginHeld begins a transaction for tokens that are held already. It sends BEGIN only, and does
// not read the transaction's ID, so its outcome cannot be read later.
func (a *attempt) beginHeld(ctx context.Context) (pgx.Tx, error) {
	tx, err := a.conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: a.taker.table.Level()})
	if err != nil {
		return nil, a.taker.Fault("begin", err)
	}
	a.result = a.claim.Result(ratelimit.Result{})
	return tx, nil
}

// beginNoTake begins a transaction that takes nothing, and asks for its ID.
func (a *attempt) beginNoTake(ctx context.Context) (pgx.Tx, error) {
	a.taken = try{taker: a.taker, call: a.call, taken: make([]table.Taken, 1)}
	batch := a.turn.begin(ctx)
	table.QueueXid(batch, &a.taken.taken[0].Xid)
	results := a.conn.SendBatch(ctx, batch)
	if err := results.Close(); err != nil {
		return results.Tx(), a.taker.Fault("begin", err)
	}
	a.result.OK = true
	return results.Tx(), nil
}

// beginLocked begins a transaction that decides the call on its rows.
func (a *attempt) beginLocked(ctx context.Context) (pgx.Tx, error) {
	results := a.conn.SendBatch(ctx, a.turn.begin(ctx))
	tx := results.Tx()
	if err := results.Close(); err != nil {
		return tx, a.taker.Fault("begin", err)
	}
	result, taken, err := a.taker.takeLocked(ctx, tx, &pgx.Batch{}, a.call)
	if err == nil {
		a.taken = *taken
		a.answer(result)
	}
	return tx, err
}

// take begins a transaction and tries changes in it, in one round trip.
func (a *attempt) take(ctx context.Context, changes []decide.Change) (pgx.Tx, error) {
	a.taken = try{taker: a.taker, call: a.call, changes: changes, taken: make([]table.Taken, len(changes))}
	batch := a.turn.begin(ctx)
	now := a.taker.Clock()
	for i := range changes {
		a.taker.table.QueueTake(batch, a.call.Reserve, &changes[i], now, &a.taken.taken[i])
	}
	results := a.conn.SendBatch(ctx, batch)
	err := results.Close()
	return results.Tx(), err
}

// turnOf returns the turn of an attempt at its rows. After a turn that came too late, the attempt
// waits for none.
func (a *attempt) turnOf(ctx context.Context) turn {
	l := turn{table: a.taker.table, conn: a.conn, contention: a.contention, owed: a.turn.owed, left: a.turn.left}
	if a.held || l.left || a.queued != nil {
		return l
	}
	if locks := a.contention.Among(a.locks); len(locks) > 0 {
		if locks = a.taker.table.Lines(locks); len(locks) > 0 && ownSession(ctx, a.conn) {
			l.locks = locks
		}
	}
	return l
}

// locks returns the locks of the rows that an attempt asks first: one row of each limit, or all
// rows if it locks them all.
func (a *attempt) locks() (locks []int64) {
	for i := range a.call.Demands {
		rows := []decide.Row{{Key: a.call.Demands[i].KeyOf(), Shard: a.shards[i]}}
		if a.lockAll {
			rows = a.call.Demands[i].Rows()
		}
		for _, row := range rows {
			locks = append(locks, table.Lock(a.taker.Schema, row))
		}
	}
	return locks
}

// meet notes that other transactions were at the rows of an attempt.
func (a *attempt) meet() {
	a.met = true
	if !a.taker.table.PassesOver() { // a distributed table has no turns
		return
	}
	for _, lock := range a.locks() {
		a.contention.Note(lock, engine.Contended)
	}
}
