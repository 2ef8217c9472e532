package edit

import (
	"context"
	"errors"
	"math"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// SettleTx settles a receipt by what was used, in tx.
func (e *Editor) SettleTx(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt, used []float64) (ratelimit.Result, error) {
	settlement, err := e.known.Definitions.Settle(r, used)
	if err != nil {
		return ratelimit.Result{}, err
	}
	return e.settle(ctx, tx, r, &settlement)
}

// Settle is [Editor.SettleTx] in a transaction of its own.
func (e *Editor) Settle(ctx context.Context, r *ratelimit.Receipt, used []float64) (result ratelimit.Result, err error) {
	settlement, err := e.known.Definitions.Settle(r, used)
	if err != nil {
		return ratelimit.Result{}, err
	}
	err = e.transact(ctx, settlement.Rows(), func(ctx context.Context, tx pgx.Tx) error {
		result, err = e.settle(ctx, tx, r, &settlement)
		return err
	})
	if err != nil {
		return ratelimit.Result{}, err
	}
	e.changedBy(&settlement) // again, now that others see it
	return result, nil
}

// changedBy forgets the known state of the limits of a settlement.
func (e *Editor) changedBy(settlement *decide.Settlement) {
	for i := range settlement.Call.Demands {
		e.known.Forget(settlement.Call.Demands[i].KeyOf())
	}
}

// settle makes a settlement, unless there is nothing to settle any more.
func (e *Editor) settle(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt, settlement *decide.Settlement) (result ratelimit.Result, err error) {
	// The receipt is marked with the transaction that settled it, so that a later call can read
	// its outcome.
	err = receipt.Redeem(ctx, r, func(before string) (xid string, err error) {
		owed, err := e.owed(ctx, tx, r, before)
		if err != nil {
			return before, err
		}
		if !owed {
			return before, ratelimit.ErrSettled
		}
		after, xid, err := e.apply(ctx, tx, settlement)
		if err != nil {
			return before, err
		}
		result = settlement.Result(after)
		return xid, nil
	})
	switch {
	case err == nil:
		return result, nil
	case errors.Is(err, ratelimit.ErrSettled), errors.Is(err, ratelimit.ErrInvalid):
		return ratelimit.Result{}, err
	}
	return ratelimit.Result{}, e.FaultOf("settle", settlement.Call.Names(), err)
}

// owed reports whether a receipt's tokens are to be settled: the transaction that took them was
// not rolled back, and the one that settled them before, if any, was.
func (e *Editor) owed(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt, before string) (bool, error) {
	if before == receipt.Never {
		return false, nil
	}
	if before != "" {
		became, err := table.Outcome(ctx, tx, before, false)
		if err != nil || became != table.Aborted {
			return false, err
		}
	}
	taker := receipt.Taker(r)
	if taker == "" {
		return true, nil
	}
	session, _ := conn.Session(tx)
	own := session != nil && receipt.Conn(r) == session
	became, err := table.Outcome(ctx, tx, taker, own)
	if err != nil || became == table.Aborted {
		return false, err
	}
	if became == table.Committed && !own && !receipt.Read(r) && e.Now == nil {
		// A crash gives IDs out again, so this may be another transaction's.
		if same, err := table.UpSince(ctx, tx, receipt.At(r)); err != nil || !same {
			return false, errors.Join(err, conn.ErrOutcomeUnknown)
		}
	}
	if became == table.InProgress && receipt.Read(r) {
		if own, err = table.Holds(ctx, tx, taker); err != nil {
			return false, err
		}
	}
	if became == table.InProgress && !own {
		return false, &ratelimit.FieldError{Field: "Receipt", Value: taker, Reason: "was taken in a transaction that has not ended"}
	}
	return true, nil
}

// apply makes a settlement, and returns the states of the limits' rows afterwards, and the
// transaction's ID. It is one round trip if nothing is to be taken. Otherwise it locks and reads
// the rows by giving them 0 tokens, which leaves no predicate locks under SERIALIZABLE, and takes
// in a second. Refunds to the slots of a sliding window also need the second.
func (e *Editor) apply(ctx context.Context, tx pgx.Tx, settlement *decide.Settlement) (after decide.View, xid string, err error) {
	var batch, write pgx.Batch
	changes := settlement.Changes
	given := make([]table.Give, len(changes))
	for i := range changes {
		c := &changes[i]
		given[i] = table.Give{Change: c, Tokens: max(0, -c.Count), Most: math.MaxFloat64, Spent: e.spent(ctx, &c.Definition, c.Key)}
	}
	table.QueueXid(&batch, &xid)
	if after.At, err = e.table.Give(ctx, tx, &batch, given, e.Clock()); err != nil {
		return after, "", err
	}
	e.settled(settlement, given, &after)
	for i := range changes {
		switch c := &changes[i]; {
		case c.Count > 0 || !given[i].Given && !given[i].Taken.Made:
			e.table.QueuePut(&write, c.Row, c.After)
		case given[i].Taken.Made: // full, perhaps by a definition that is not known here
			e.table.QueueRemove(&write, c.Row)
		}
	}
	if write.Len() > 0 {
		err = tx.SendBatch(ctx, &write).Close()
	}
	return after, xid, err
}

// settled completes the changes of a settlement by the states of the locked rows, and sets the
// states of the limits' rows afterwards. For shards that the call did not take from it sets cached
// states.
func (e *Editor) settled(settlement *decide.Settlement, given []table.Give, after *decide.View) {
	call, changes := &settlement.Call, settlement.Changes
	after.States = make([][]bucket.State, len(call.Demands))
	for i := range call.Demands {
		if a := &call.Demands[i]; a.Sharded() {
			after.States[i] = e.known.Shards.Cached(a, after.At)
		} else {
			after.States[i] = []bucket.State{a.Definition.Fresh(a.Key, after.At)}
		}
	}
	states := make([]bucket.State, len(given))
	for i := range given {
		states[i] = given[i].Taken.After
	}
	settlement.Spread(states, after.At)
	for i := range changes {
		c, state := &changes[i], states[i]
		if i > 0 && changes[i-1].Row == c.Row { // another slot of it
			state, given[i].Taken.Made = changes[i-1].After, given[i-1].Taken.Made
		}
		if c.Count > 0 || !given[i].Given {
			state = c.Refill(state, after.At)
		}
		changes[i].After = state
		after.States[c.Demand][c.Shard] = state
	}
	e.changedBy(settlement)
	e.known.Observe(call, *after)
}
