package pgstore

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

// SettleTx replaces, inside tx, the tokens that a call took by those really used: one count for
// each of its limits, in the order of the call, which is that of the result's Each. Unused
// tokens go back to the rows that they were taken from, and to the slots of a sliding window,
// which has them back already when no window holds the slot any more. Tokens used besides are
// taken unconditionally, below MaxReserved too, since they are spent: of a limit with shards
// from the fullest first, so that they all are left with as much, and of a sliding window in
// its newest slot. The result has the status of each limit then; it is OK, and while there is
// debt or a pause its RetryAt is when that is over. It has no receipt.
//
// The receipt is that of a call's result, also one that another process has stored.
// Settle in the transaction that finishes the work: work, price and the note that it
// is finished are then there all or none. Within a process a receipt is settled once.
// Of two copies that were read from text, that transaction sees to it.
//
// It is [ratelimit.ErrSettled], and changes nothing, when the receipt was settled or cancelled
// before, or was taken in a transaction that was rolled back. A settlement that was rolled back
// with tx did not happen, and can be made again. (After a roll-back to a savepoint in the same
// transaction it can not: the estimate then stays.) Invalid counts, and an empty receipt, are
// [ratelimit.ErrInvalid], and so is the receipt of another transaction that has not ended; once
// it was read from text, also that of a savepoint of tx that was released. If the server has
// crashed or was started anew since a transaction of this process took, it is unknown whether
// that was committed: that is [ErrOutcomeUnknown]. A receipt that was read from text is proof
// of it, if it was stored in the transaction that took.
//
// Do not settle a receipt from before a reset of its key: that has given back already. One
// from before [Store.Reshard] can give back less than it should, and never more.
func (s *Store) SettleTx(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt, used ...float64) (result ratelimit.Result, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbSettle, ratelimit.FormTx)
	defer func() { w.ReportReceipt(r, &result, err) }()
	if err := s.usableIn(tx); err != nil {
		return ratelimit.Result{}, err
	}
	return s.settleTx(ctx, tx, r, append([]float64{}, used...))
}

// Settle is [Store.SettleTx] on its own.
func (s *Store) Settle(ctx context.Context, r *ratelimit.Receipt, used ...float64) (result ratelimit.Result, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbSettle, ratelimit.FormOwn)
	defer func() { w.ReportReceipt(r, &result, err) }()
	if err := s.usable(); err != nil {
		return ratelimit.Result{}, err
	}
	return s.settleOwn(ctx, r, append([]float64{}, used...))
}

// CancelTx gives back, inside tx, exactly the tokens that a call took, to the rows that they
// were taken from. It is [Store.SettleTx] with no tokens used, but that it reports false,
// rather than an error, when there is nothing to give back: when the receipt is nil or of a
// call that took nothing, was settled or cancelled before, or was taken in a transaction that
// was rolled back.
func (s *Store) CancelTx(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt) (cancelled bool, err error) {
	err = s.usableIn(tx)
	if len(receipt.Payments(r)) == 0 {
		return false, err
	}
	w := s.parts().watch(ctx, ratelimit.VerbCancel, ratelimit.FormTx)
	if err == nil {
		_, err = s.settleTx(ctx, tx, r, nil)
	}
	w.ReportReceipt(r, nil, err)
	return cancelledBy(err)
}

// Cancel is [Store.CancelTx] on its own.
func (s *Store) Cancel(ctx context.Context, r *ratelimit.Receipt) (cancelled bool, err error) {
	if err := s.usable(); err != nil || len(receipt.Payments(r)) == 0 {
		return false, err
	}
	w := s.parts().watch(ctx, ratelimit.VerbCancel, ratelimit.FormOwn)
	_, err = s.settleOwn(ctx, r, nil)
	w.ReportReceipt(r, nil, err)
	return cancelledBy(err)
}

// cancelledBy returns the result of Cancel for the error of a settlement.
func cancelledBy(err error) (bool, error) {
	if errors.Is(err, ratelimit.ErrSettled) {
		return false, nil
	}
	return err == nil, err
}

func (s *Store) settleTx(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt, used []float64) (ratelimit.Result, error) {
	settlement, err := s.seen.Settle(r, used)
	if err != nil {
		return ratelimit.Result{}, err
	}
	return s.settle(ctx, tx, r, &settlement)
}

func (s *Store) settleOwn(ctx context.Context, r *ratelimit.Receipt, used []float64) (result ratelimit.Result, err error) {
	settlement, err := s.seen.Settle(r, used)
	if err != nil {
		return ratelimit.Result{}, err
	}
	err = s.ownTx(ctx, settlement.Rows(), func(ctx context.Context, tx pgx.Tx) error {
		result, err = s.settle(ctx, tx, r, &settlement)
		return err
	})
	if err != nil {
		return ratelimit.Result{}, err
	}
	s.changedBy(&settlement) // again, now that others see it
	return result, nil
}

// changedBy forgets the known state of the limits of a settlement.
func (s *Store) changedBy(settlement *decide.Settlement) {
	for i := range settlement.Call.Demands {
		s.changed(settlement.Call.Demands[i].KeyOf())
	}
}

// settle makes a settlement, unless there is nothing to settle any more.
func (s *Store) settle(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt, settlement *decide.Settlement) (result ratelimit.Result, err error) {
	// The receipt is marked with the transaction that settled it, so that a later call can read
	// its outcome.
	err = receipt.Redeem(ctx, r, func(before string) (xid string, err error) {
		owed, err := s.owed(ctx, tx, r, before)
		if err != nil {
			return before, err
		}
		if !owed {
			return before, ratelimit.ErrSettled
		}
		after, xid, err := s.make(ctx, tx, settlement)
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
	return ratelimit.Result{}, s.Fault("settle", err)
}

// owed reports whether a receipt's tokens are to be settled: the transaction that took them was
// not rolled back, and the one that settled them before, if any, was.
func (s *Store) owed(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt, before string) (bool, error) {
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
	if became == table.Committed && !own && !receipt.Read(r) && s.config.Clock == nil {
		// A crash gives IDs out again, so this may be somebody else's.
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

// make makes a settlement, in one round trip if nothing is to be taken, otherwise in two:
// tokens are taken from rows that are locked and were read, and so are refunds made to the
// slots of a sliding window. (They are given nothing for that, which leaves no predicate locks
// under SERIALIZABLE.) It returns the states of the limits' rows then, and the transaction's ID.
func (s *Store) make(ctx context.Context, tx pgx.Tx, settlement *decide.Settlement) (after decide.View, xid string, err error) {
	var batch, write pgx.Batch
	changes := settlement.Changes
	given := make([]table.Give, len(changes))
	for i := range changes {
		c := &changes[i]
		given[i] = table.Give{Change: c, Tokens: max(0, -c.Count), Most: math.MaxFloat64, Spent: s.spent(ctx, &c.Definition, c.Key)}
	}
	table.QueueXid(&batch, &xid)
	if after.At, err = s.table.Give(ctx, tx, &batch, given, s.Clock()); err != nil {
		return after, "", err
	}
	s.settled(settlement, given, &after)
	for i := range changes {
		switch c := &changes[i]; {
		case c.Count > 0 || !given[i].Given && !given[i].Taken.Made:
			s.table.QueuePut(&write, c.Row, c.After)
		case given[i].Taken.Made: // full, perhaps by a definition that is not known here
			s.table.QueueRemove(&write, c.Row)
		}
	}
	if write.Len() > 0 {
		err = tx.SendBatch(ctx, &write).Close()
	}
	return after, xid, err
}

// settled completes the changes of a settlement, whose rows were given as they are, and sets the states of the
// limits' rows after them: as far as those of shards are known that the call did not take from.
func (s *Store) settled(settlement *decide.Settlement, given []table.Give, after *decide.View) {
	call, changes := &settlement.Call, settlement.Changes
	after.States = make([][]bucket.State, len(call.Demands))
	for i := range call.Demands {
		if a := &call.Demands[i]; a.Sharded() {
			after.States[i] = s.shards.Cached(a, after.At)
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
	s.changedBy(settlement)
	s.saw(call, *after)
}
