package pgstore

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/receipt"
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
// from before a [Store.Change] of Shards can give back less than it should, and never more.
func (s *Store) SettleTx(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt, used ...float64) (result ratelimit.Result, err error) {
	w := s.watch(ctx, ratelimit.VerbSettle, ratelimit.FormTx)
	defer func() { w.ReportReceipt(r, &result, err) }()
	if err := s.usableIn(tx); err != nil {
		return ratelimit.Result{}, err
	}
	return s.editor.SettleTx(ctx, tx, r, append([]float64{}, used...))
}

// Settle is [Store.SettleTx] on its own.
func (s *Store) Settle(ctx context.Context, r *ratelimit.Receipt, used ...float64) (result ratelimit.Result, err error) {
	w := s.watch(ctx, ratelimit.VerbSettle, ratelimit.FormOwn)
	defer func() { w.ReportReceipt(r, &result, err) }()
	if err := s.usable(); err != nil {
		return ratelimit.Result{}, err
	}
	return s.editor.Settle(ctx, r, append([]float64{}, used...))
}

// CancelTx gives back, inside tx, exactly the tokens that a call took, to the rows that they
// were taken from. It is [Store.SettleTx] with no tokens used, but that it reports false,
// rather than an error, when there is nothing to give back: when the receipt is nil or of a
// call that took nothing, was settled or cancelled before, or was taken in a transaction that
// was rolled back.
func (s *Store) CancelTx(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt) (cancelled bool, err error) {
	err = s.usableIn(tx)
	if !receipt.Pays(r) {
		return false, err
	}
	w := s.watch(ctx, ratelimit.VerbCancel, ratelimit.FormTx)
	if err == nil {
		_, err = s.editor.SettleTx(ctx, tx, r, nil)
	}
	w.ReportReceipt(r, nil, err)
	return cancelledBy(err)
}

// Cancel is [Store.CancelTx] on its own.
func (s *Store) Cancel(ctx context.Context, r *ratelimit.Receipt) (cancelled bool, err error) {
	if err := s.usable(); err != nil || !receipt.Pays(r) {
		return false, err
	}
	w := s.watch(ctx, ratelimit.VerbCancel, ratelimit.FormOwn)
	_, err = s.editor.Settle(ctx, r, nil)
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
