package pgstore

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// SettleTx replaces, inside tx, the tokens that a call took by the tokens that it used: one count
// for each of its limits, in the order of the call. Unused tokens go back to their rows. In a
// sliding window they go back to their slot, if a window still holds it. Tokens used above the
// estimate are taken unconditionally, also below MaxReserved, since they are spent. With shards
// they come from the fullest first; in a sliding window they count in the newest slot.
//
// The result has the status of each limit afterwards, and no receipt. It is OK. While there is debt
// or a pause, RetryAt is the end of that.
//
// The receipt is in a call's result, of this process or as text of another. Settle in the
// transaction that finishes the work: work, price and the note that it is finished are then there
// all or none. Within a process a receipt is settled once. For copies that were read from text,
// that transaction must see to it.
//
// Errors change nothing. [ratelimit.ErrSettled] means that the receipt was settled or cancelled
// before, or that its call was rolled back. [ratelimit.ErrInvalid] means invalid counts, an empty
// receipt, or a call whose transaction has not ended. If the server was started anew since the
// call, its outcome is [ErrOutcomeUnknown], unless the receipt was stored as text in the
// transaction that took. A settlement that was rolled back with tx did not happen, and can be
// repeated; after a rollback to a savepoint in the same transaction it cannot, and the estimate
// stays.
//
// Do not settle a receipt from before a reset of its key, which has given back already. One from
// before a [Store.Change] of Shards can give back less than it should, and never more.
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
