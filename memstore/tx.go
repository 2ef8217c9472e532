package memstore

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

var _ ratelimit.TxStore[pgx.Tx] = (*Store)(nil)

// The verbs in a transaction of [Store.Begin] or [Store.Join]. In another one, and in nil,
// they are [ratelimit.ErrInvalid]; in one that has ended, [pgx.ErrTxClosed].

// AllowTx is [Store.Allow] inside tx: the tokens are spent if and only if tx commits. Rolling
// back, to a savepoint before it too, gives it back.
func (s *Store) AllowTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.in(tx).decide(ctx, decide.All, false, requests)
}

// ReserveTx is [Store.Reserve] inside tx.
func (s *Store) ReserveTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.in(tx).decide(ctx, decide.All, true, requests)
}

// CheckTx returns the result that [Store.AllowTx] would return, with tx's changes so far. It
// takes nothing, and never waits.
func (s *Store) CheckTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.in(tx).decide(ctx, decide.Look, false, requests)
}

// CheckReserveTx returns the result that [Store.ReserveTx] would return.
func (s *Store) CheckReserveTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.in(tx).decide(ctx, decide.Look, true, requests)
}

// TakeTx is [Store.Take] inside tx.
func (s *Store) TakeTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) error {
	_, err := ratelimit.Granted(s.AllowTx(ctx, tx, requests...))
	return err
}

// AllowAtMostTx is [Store.AllowAtMost] inside tx.
func (s *Store) AllowAtMostTx(ctx context.Context, tx pgx.Tx, r ratelimit.Request) (ratelimit.Result, error) {
	return s.in(tx).decide(ctx, decide.AtMost, false, []ratelimit.Request{r})
}

// AllowFirstTx is [Store.AllowFirst] inside tx.
func (s *Store) AllowFirstTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.in(tx).decide(ctx, decide.First, false, requests)
}

// SettleTx is [Store.Settle] inside tx. A settlement that is rolled back did not happen,
// and can be made again.
func (s *Store) SettleTx(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt, used ...float64) (ratelimit.Result, error) {
	return s.in(tx).settle(ctx, r, append([]float64{}, used...))
}

// CancelTx is [Store.Cancel] inside tx.
func (s *Store) CancelTx(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt) (cancelled bool, err error) {
	return s.in(tx).cancel(ctx, r)
}

// CreditTx is [Store.Credit] inside tx.
func (s *Store) CreditTx(ctx context.Context, tx pgx.Tx, r ratelimit.Request) (ratelimit.Status, error) {
	return s.in(tx).credit(ctx, r)
}

// PauseTx is [Store.Pause] inside tx.
func (s *Store) PauseTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string, lasts time.Duration) (until time.Time, err error) {
	return s.in(tx).pause(ctx, lasts, ratelimit.Request{Limit: limit, Key: key})
}

// PauseEachTx is [Store.PauseEach] inside tx.
func (s *Store) PauseEachTx(ctx context.Context, tx pgx.Tx, requests []ratelimit.Request, lasts time.Duration) (until time.Time, err error) {
	return s.in(tx).pause(ctx, lasts, requests...)
}

// ResumeTx is [Store.Resume] inside tx.
func (s *Store) ResumeTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string) error {
	return s.in(tx).resume(ctx, limit, key)
}

// ResetTx is [Store.Reset] inside tx.
func (s *Store) ResetTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string) error {
	return s.in(tx).reset(ctx, limit, key)
}

// ChangeTx is [Store.Change] inside tx.
func (s *Store) ChangeTx(ctx context.Context, tx pgx.Tx, from, to ratelimit.Limit, key string) (ratelimit.Status, error) {
	return s.in(tx).change(ctx, from, to, key)
}

// ReplaceTx is called by package catalog; it does what pgstore's does, but at once, and outside of
// a transaction if tx is nil. No process takes by another definition here, so nothing is marked.
func (s *Store) ReplaceTx(ctx context.Context, tx pgx.Tx, replacements ...ratelimit.Replacement) ([]ratelimit.Status, error) {
	of := s.own()
	if tx != nil {
		of = s.in(tx)
	}
	before := make([]ratelimit.Request, len(replacements))
	for i, r := range replacements {
		before[i] = ratelimit.Request{Limit: r.From, Key: r.Key, Overridden: true}
	}
	statuses, err := s.CheckEach(ctx, before...)
	for i := 0; i < len(replacements) && err == nil; i++ {
		_, err = of.change(ctx, replacements[i].From, replacements[i].To, replacements[i].Key)
	}
	return statuses, err
}

// ReplaceFunc is called by package catalog. It runs do, without a transaction.
func (*Store) ReplaceFunc(ctx context.Context, _ []ratelimit.Request, do func(context.Context, pgx.Tx) error) error {
	return do(ctx, nil)
}

// AllowFunc takes the count of each request from its limit and runs do in a transaction of
// [Store.Begin], which it commits: the tokens are spent if and only if do returns no error. A
// refusal runs nothing and is an error, [ratelimit.ErrRefused]; the result is returned with it.
// An error of do rolls everything back and is returned as it is, and so does a panic. If do has
// ended the transaction itself and returns no error, AllowFunc returns none if and only if it
// was committed.
func (s *Store) AllowFunc(ctx context.Context, requests []ratelimit.Request, do func(tx pgx.Tx, result ratelimit.Result) error) (ratelimit.Result, error) {
	return s.run(ctx, false, requests, do)
}

// ReserveFunc is [Store.AllowFunc] with a reservation: do schedules its work for the
// result's RetryAt.
func (s *Store) ReserveFunc(ctx context.Context, requests []ratelimit.Request, do func(tx pgx.Tx, result ratelimit.Result) error) (ratelimit.Result, error) {
	return s.run(ctx, true, requests, do)
}

func (s *Store) run(ctx context.Context, reserve bool, requests []ratelimit.Request, do func(tx pgx.Tx, result ratelimit.Result) error) (ratelimit.Result, error) {
	w := s.own().watch(ctx, decide.All.Observed(reserve), requests...)
	w.Form = ratelimit.FormRunner
	w.Start()
	var made ratelimit.Result
	var err error
	defer func() { w.Report(&made, err) }() // also when the function panics
	made, err = s.runWatched(ctx, &w, reserve, requests, do)
	if err != nil && made.OK {
		return ratelimit.Result{}, err
	}
	return made, err
}

// runWatched runs do as run does, and also returns a result that was rolled back.
func (s *Store) runWatched(ctx context.Context, w *watch.Watch, reserve bool, requests []ratelimit.Request, do func(tx pgx.Tx, result ratelimit.Result) error) (ratelimit.Result, error) {
	if err := s.own().usable(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	if do == nil {
		return ratelimit.Result{}, &ratelimit.FieldError{Field: "Func", Value: nil, Reason: "must not be nil"}
	}
	tx := s.join(noDatabase{})
	defer tx.Rollback(ctx) // unless it has ended
	result, err := ratelimit.Granted(s.in(tx).inside().decide(ctx, decide.All, reserve, requests))
	if err != nil {
		return result, err
	}
	w.Outcome = ratelimit.OutcomeRolledBack
	if err := do(tx, result); err != nil {
		return result, err
	}
	if err := tx.Commit(ctx); err != nil && !tx.committed {
		return result, fmt.Errorf("memstore: commit: %w", err)
	}
	w.Outcome = ""
	return result, nil
}
