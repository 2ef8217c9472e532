package pgstore

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// SettleTx replaces, inside tx, the tokens that a call took by the tokens that it used: one count
// for each of its limits, in the order of the call. Unused tokens go back to their rows; in a
// sliding window to their slot, if a window still holds it. Tokens used above the estimate are
// spent, so they are taken unconditionally, also below MaxReserved. With shards they come from the
// fullest first, and in a sliding window they count in the newest slot.
//
// The result is OK, has the status of each limit afterwards, and no receipt. RetryAt is the end of
// any debt or pause.
//
// Settle in the transaction that finishes the work, so that work and price are recorded together.
// A receipt may come from this process or, as text, from another. Copies read from text do not know
// of each other: that transaction must check that the work is not finished yet.
//
// Errors change nothing:
//   - [ratelimit.ErrSettled]: the receipt was settled or cancelled before, or its call rolled back.
//   - [ratelimit.ErrInvalid]: invalid counts, an empty receipt, or a call whose transaction is open.
//   - [ErrOutcomeUnknown]: the server has restarted since the call, and the receipt was not stored as
//     text in the transaction that took.
//
// If tx is rolled back, the settlement did not happen, and can be repeated. After a rollback to a
// savepoint it cannot be repeated in tx, and the estimate stays.
//
// Do not settle a receipt from before a reset of its key, since the reset has given back already. A
// receipt from before a [Store.Change] of Shards may give back less than it should, never more.
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

// CancelTx gives back, inside tx, exactly the tokens that a call took, to the rows that they were
// taken from. It is [Store.SettleTx] with no tokens used. It reports false, without an error, if
// there is nothing to give back: the receipt is nil, or its call took nothing, was settled or
// cancelled before, or was rolled back.
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
