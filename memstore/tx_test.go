package memstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// slow is so slow that nothing comes in during a test.
var slow = ratelimit.TokenBucket{Name: "slow", Rate: 10, Period: 1000 * time.Hour, Capacity: 10}

func begin(t *testing.T, from interface {
	Begin(context.Context) (pgx.Tx, error)
},
) pgx.Tx {
	t.Helper()
	tx, err := from.Begin(t.Context())
	must(t, err)
	return tx
}

// wantLeft wants a number of tokens for "k", by what tx sees, or if that is nil, all others.
func wantLeft(t *testing.T, s *memstore.Store, tx pgx.Tx, want float64) {
	t.Helper()
	result, err := s.Check(t.Context(), slow.ForN("k", 0))
	if tx != nil {
		result, err = s.CheckTx(t.Context(), tx, slow.ForN("k", 0))
	}
	if err != nil || result.Value != want {
		t.Errorf("got %v left, %v, want %v", result.Value, err, want)
	}
}

// half is a store in which 5 of 10 tokens are left, and the receipt of those.
func half(t *testing.T) (*memstore.Store, *ratelimit.Receipt) {
	t.Helper()
	s := memstore.New(func() time.Time { return t0 })
	result, err := ratelimit.Granted(s.Allow(t.Context(), slow.ForN("k", 5)))
	must(t, err)
	return s, result.Receipt
}

// txVerb is a verb in a transaction, and how many of half's tokens it leaves.
type txVerb struct {
	do   func(tx pgx.Tx) error
	want float64
}

// txVerbs are the verbs of a store of half, and its receipt.
func txVerbs(ctx context.Context, s *memstore.Store, r *ratelimit.Receipt) map[string]txVerb {
	granted := func(result ratelimit.Result, err error) error { return errOf(ratelimit.Granted(result, err)) }
	return map[string]txVerb{
		"AllowTx":       {func(tx pgx.Tx) error { return granted(s.AllowTx(ctx, tx, slow.ForN("k", 2))) }, 3},
		"ReserveTx":     {func(tx pgx.Tx) error { return granted(s.ReserveTx(ctx, tx, slow.ForN("k", 7))) }, -2},
		"TakeTx":        {func(tx pgx.Tx) error { return s.TakeTx(ctx, tx, slow.ForN("k", 5)) }, 0},
		"AllowAtMostTx": {func(tx pgx.Tx) error { return granted(s.AllowAtMostTx(ctx, tx, slow.ForN("k", 100))) }, 0},
		"AllowFirstTx":  {func(tx pgx.Tx) error { return granted(s.AllowFirstTx(ctx, tx, slow.ForN("k", 4), other.For("k"))) }, 1},
		"SettleTx":      {func(tx pgx.Tx) error { return errOf(s.SettleTx(ctx, tx, r, 1)) }, 9},
		"CancelTx": {func(tx pgx.Tx) error {
			if ok, err := s.CancelTx(ctx, tx, r); !ok || err != nil {
				return fmt.Errorf("cancelled %v, %w", ok, err)
			}
			return nil
		}, 10},
		"CreditTx": {func(tx pgx.Tx) error { return errOf(s.CreditTx(ctx, tx, slow.ForN("k", 3))) }, 8},
		"PauseTx":  {func(tx pgx.Tx) error { return errOf(s.PauseTx(ctx, tx, slow, "k", time.Hour)) }, 0},
		"PauseEachTx": {func(tx pgx.Tx) error {
			return errOf(s.PauseEachTx(ctx, tx, []ratelimit.Request{other.For("k"), slow.For("k")}, time.Hour))
		}, 0},
		"ResetTx": {func(tx pgx.Tx) error { return s.ResetTx(ctx, tx, slow, "k") }, 10},
	}
}

// Each verb is seen by its transaction at once, by others once that has committed, and by
// nobody when it was rolled back, whole or to a savepoint.
func TestVerbsInTransactions(t *testing.T) {
	for name := range txVerbs(t.Context(), nil, nil) {
		t.Run(name, func(t *testing.T) {
			s, r := half(t)
			verb := txVerbs(t.Context(), s, r)[name]
			tx := begin(t, s)
			savepoint := begin(t, tx)
			undone := begin(t, savepoint)
			must(t, verb.do(undone))
			wantLeft(t, s, undone, verb.want)
			wantLeft(t, s, nil, 5)
			must(t, undone.Rollback(t.Context()))
			wantLeft(t, s, tx, 5)
			if err := verb.do(tx); err != nil { // in the savepoint that is open, as in PostgreSQL
				t.Fatalf("after a rollback: %v", err)
			}
			must(t, savepoint.Rollback(t.Context()))
			wantLeft(t, s, tx, 5)
			kept := begin(t, tx)
			must(t, verb.do(kept))
			must(t, kept.Commit(t.Context()))
			wantLeft(t, s, tx, verb.want)
			wantLeft(t, s, nil, 5)
			must(t, tx.Commit(t.Context()))
			wantLeft(t, s, nil, verb.want)
			for _, ended := range []pgx.Tx{tx, savepoint, undone, kept} {
				if err := errors.Join(ended.Commit(t.Context()), ended.Rollback(t.Context())); !errors.Is(err, pgx.ErrTxClosed) {
					t.Errorf("ended again: %v, want ErrTxClosed", err)
				}
				if err := verb.do(ended); !errors.Is(err, pgx.ErrTxClosed) {
					t.Errorf("used after its end: %v, want ErrTxClosed", err)
				}
			}
			wantLeft(t, s, nil, verb.want)
		})
	}

	t.Run("ResumeTx", func(t *testing.T) {
		s, _ := half(t)
		must(t, errOf(s.Pause(t.Context(), slow, "k", time.Hour)))
		tx := begin(t, s)
		must(t, s.ResumeTx(t.Context(), tx, slow, "k"))
		if result, err := s.CheckReserveTx(t.Context(), tx, slow.ForN("k", 0)); err != nil || !result.PausedUntil.IsZero() {
			t.Errorf("paused until %v, %v, want no pause", result.PausedUntil, err)
		}
		if result, err := s.Check(t.Context(), slow.ForN("k", 0)); err != nil || result.PausedUntil.IsZero() {
			t.Errorf("others see it: %v, %v", result, err)
		}
	})
}

// A parent's commit keeps what an open savepoint has, and its rollback undoes it.
func TestSavepointsThatAreOpen(t *testing.T) {
	for commit, want := range map[bool]float64{true: 3, false: 5} {
		s, _ := half(t)
		tx := begin(t, s)
		inner := begin(t, begin(t, tx))
		must(t, s.TakeTx(t.Context(), inner, slow.ForN("k", 2)))
		end := tx.Rollback
		if commit {
			end = tx.Commit
		}
		must(t, end(t.Context()))
		wantLeft(t, s, nil, want)
		if err := inner.Commit(t.Context()); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("a savepoint outlives its transaction: %v", err)
		}
	}
}

// What others take from the keys of an open transaction waits for its end; a savepoint that
// is rolled back lets go of its keys.
func TestOthersWait(t *testing.T) {
	for name, end := range map[string]func(tx, savepoint pgx.Tx) error{
		"a commit":             func(tx, _ pgx.Tx) error { return tx.Commit(context.Background()) },
		"a rollback":           func(tx, _ pgx.Tx) error { return tx.Rollback(context.Background()) },
		"that of a savepoint":  func(_, savepoint pgx.Tx) error { return savepoint.Rollback(context.Background()) },
		"a commit that failed": func(tx, _ pgx.Tx) error { tx.Commit(ended()); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := memstore.New(nil)
				tx := begin(t, s)
				savepoint := begin(t, tx)
				must(t, s.TakeTx(t.Context(), savepoint, slow.ForN("k", 4)))
				waits := map[string]func() error{
					"Allow": func() error { return s.Take(t.Context(), slow.For("k")) },
					"AllowFunc": func() error {
						return errOf(s.AllowFunc(t.Context(), []ratelimit.Request{other.For("k"), slow.For("k")}, func(pgx.Tx, ratelimit.Result) error { return nil }))
					},
					"Credit": func() error { _, err := s.Credit(t.Context(), slow.ForN("k", 0)); return err },
				}
				var done sync.WaitGroup
				begun := time.Now()
				for name, do := range waits {
					done.Go(func() {
						if err := do(); err != nil || time.Since(begun) != time.Second {
							t.Errorf("%s: %v after %v, want it to wait for a second", name, err, time.Since(begun))
						}
					})
				}
				if err := s.Take(t.Context(), slow.For("another"), other.For("k")); err != nil || time.Since(begun) > 0 {
					t.Errorf("other keys: %v after %v", err, time.Since(begun))
				}
				wantLeft(t, s, nil, 10) // a check waits for nobody
				time.Sleep(time.Second)
				must(t, end(tx, savepoint))
				done.Wait()
			})
		})
	}
}

// ended is a context that has ended.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func TestWaitingEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(nil)
		tx := begin(t, s)
		must(t, s.TakeTx(t.Context(), tx, slow.For("k")))
		for _, timeout := range []time.Duration{0, time.Second, time.Minute} {
			ctx, cancel, want := t.Context(), context.CancelFunc(func() {}), 5*time.Second
			if timeout > 0 {
				ctx, cancel = context.WithTimeout(ctx, timeout)
				want = timeout
			}
			begun := time.Now()
			err := s.Take(ctx, slow.For("k")) // the caller's own transaction has it
			cancel()
			if !errors.Is(err, memstore.ErrLocked) || !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != want {
				t.Errorf("%v after %v, want ErrLocked after %v", err, time.Since(begun), want)
			}
		}
		must(t, tx.Rollback(t.Context()))
		wantLeft(t, s, nil, 10)
	})
}

// The receipt of what was rolled back is worth nothing, and a settlement that was rolled
// back can be made again.
func TestReceiptsInTransactions(t *testing.T) {
	s, paid := half(t)
	tx := begin(t, s)
	taken, err := s.AllowTx(t.Context(), tx, slow.ForN("k", 2))
	must(t, err)
	must(t, errOf(s.SettleTx(t.Context(), tx, paid, 0)))
	if _, err := s.SettleTx(t.Context(), tx, paid, 0); !errors.Is(err, ratelimit.ErrSettled) {
		t.Errorf("settled twice in one transaction: %v", err)
	}
	wantLeft(t, s, tx, 8)
	must(t, tx.Rollback(t.Context()))
	if ok, err := s.Cancel(t.Context(), taken.Receipt); ok || err != nil {
		t.Errorf("cancelled what was rolled back: %v, %v", ok, err)
	}
	if _, err := s.Settle(t.Context(), paid, 1); err != nil {
		t.Errorf("settled again after a rollback: %v", err)
	}
	wantLeft(t, s, nil, 9)
}

func TestAllowFunc(t *testing.T) {
	failed := errors.New("failed")
	end := func(end func(pgx.Tx) error, err error) func(pgx.Tx, ratelimit.Result) error {
		return func(tx pgx.Tx, _ ratelimit.Result) error { return errors.Join(end(tx), err) }
	}
	commit := func(tx pgx.Tx) error { return tx.Commit(context.Background()) }
	rollback := func(tx pgx.Tx) error { return tx.Rollback(context.Background()) }
	nothing := func(pgx.Tx) error { return nil }
	savepoint := func(tx pgx.Tx) error { _, err := tx.Begin(context.Background()); return err }
	for _, test := range []struct {
		name  string
		count float64
		do    func(pgx.Tx, ratelimit.Result) error
		want  error
		left  float64
	}{
		{"done", 2, end(nothing, nil), nil, 3},
		{"fails", 2, end(nothing, failed), failed, 5},
		{"is refused", 6, func(pgx.Tx, ratelimit.Result) error { panic("it ran") }, ratelimit.ErrRefused, 5},
		{"can never be granted", 11, func(pgx.Tx, ratelimit.Result) error { panic("it ran") }, ratelimit.ErrExceedsCapacity, 5},
		{"is nil", 2, nil, ratelimit.ErrInvalid, 5},
		{"commits itself", 2, end(commit, nil), nil, 3},
		{"commits itself, and fails", 2, end(commit, failed), failed, 3},
		{"rolls back itself", 2, end(rollback, nil), pgx.ErrTxClosed, 5},
		{"leaves a savepoint open", 2, end(savepoint, nil), nil, 3},
	} {
		s, _ := half(t)
		result, err := s.AllowFunc(t.Context(), []ratelimit.Request{slow.ForN("k", test.count)}, test.do)
		if !errors.Is(err, test.want) || test.want == nil && (err != nil || !result.OK) {
			t.Errorf("%s: %v, %v, want %v", test.name, result.OK, err, test.want)
		}
		if refused := (*ratelimit.RefusedError)(nil); errors.As(err, &refused) && result.RetryAfter == 0 {
			t.Errorf("%s: refused without saying until when", test.name)
		}
		wantLeft(t, s, nil, test.left)
	}

	s, _ := half(t)
	func() {
		defer func() {
			if r := recover(); r != failed {
				t.Errorf("recovered %v", r)
			}
		}()
		s.AllowFunc(t.Context(), []ratelimit.Request{slow.For("k")}, func(pgx.Tx, ratelimit.Result) error { panic(failed) })
	}()
	wantLeft(t, s, nil, 5)
	if err := s.Take(t.Context(), slow.For("k")); err != nil {
		t.Errorf("a panic has left the key locked: %v", err)
	}
	result, err := s.ReserveFunc(t.Context(), []ratelimit.Request{slow.ForN("k", 9)}, func(tx pgx.Tx, result ratelimit.Result) error {
		return s.TakeTx(t.Context(), tx, other.For("k")) // in the same transaction
	})
	if err != nil || result.RetryAfter == 0 {
		t.Errorf("reserved: %v, %v", result, err)
	}
	wantLeft(t, s, nil, -5)
}

// fakeTx is the transaction of a fake that knows SQL.
type fakeTx struct {
	pgx.Tx
	commits, rollbacks int
	fails              error
}

func (f *fakeTx) Begin(context.Context) (pgx.Tx, error) { return f, f.fails }
func (f *fakeTx) Commit(context.Context) error          { f.commits++; return f.fails }
func (f *fakeTx) Rollback(context.Context) error        { f.rollbacks++; return f.fails }

func TestJoin(t *testing.T) {
	failed := errors.New("failed")
	for _, test := range []struct {
		name     string
		fails    error
		commit   bool
		want     float64
		commits  int
		rollback int
	}{
		{"committed", nil, true, 3, 1, 0},
		{"rolled back", nil, false, 5, 0, 1},
		{"not committed", failed, true, 5, 1, 0},
		{"not rolled back", failed, false, 5, 0, 1},
	} {
		s, _ := half(t)
		fake := &fakeTx{fails: test.fails}
		tx, err := s.Join(fake)
		must(t, err)
		must(t, s.TakeTx(t.Context(), tx, slow.ForN("k", 2)))
		if _, err := tx.Begin(t.Context()); !errors.Is(err, test.fails) {
			t.Errorf("%s: a savepoint: %v, want %v", test.name, err, test.fails)
		}
		end := tx.Rollback
		if test.commit {
			end = tx.Commit
		}
		if err := end(t.Context()); !errors.Is(err, test.fails) {
			t.Errorf("%s: %v, want %v", test.name, err, test.fails)
		}
		wantLeft(t, s, nil, test.want)
		if fake.commits != test.commits || fake.rollbacks != test.rollback {
			t.Errorf("%s: %d commits and %d rollbacks of the fake, want %d and %d", test.name, fake.commits, fake.rollbacks, test.commits, test.rollback)
		}
	}
}

func TestBadTransactions(t *testing.T) {
	s, _ := half(t)
	elsewhere, err := memstore.New(nil).Begin(t.Context())
	must(t, err)
	for name, tx := range map[string]pgx.Tx{"nil": nil, "a foreign one": &fakeTx{}, "another store's": elsewhere} {
		var field *ratelimit.FieldError
		if err := s.TakeTx(t.Context(), tx, slow.For("k")); !errors.As(err, &field) || field.Field != "Tx" {
			t.Errorf("%s: %v, want Tx to be at fault", name, err)
		}
	}
	if _, err := s.Join(nil); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("Join(nil): %v", err)
	}
	var none *memstore.Store
	if _, err := none.Begin(t.Context()); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("Begin of no store: %v", err)
	}
	if _, err := none.Join(&fakeTx{}); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("Join of no store: %v", err)
	}
	if err := none.TakeTx(t.Context(), elsewhere, slow.For("k")); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("TakeTx of no store: %v", err)
	}
	wantLeft(t, s, nil, 5)
}

// SQL in a transaction that has none is an error in every form, and never a panic.
func TestNoDatabase(t *testing.T) {
	s, _ := half(t)
	tx := begin(t, s)
	ctx := t.Context()
	results := tx.SendBatch(ctx, &pgx.Batch{})
	_, exec := tx.Exec(ctx, "SELECT 1")
	_, query := tx.Query(ctx, "SELECT 1")
	_, copied := tx.CopyFrom(ctx, nil, nil, nil)
	_, prepared := tx.Prepare(ctx, "", "")
	_, batchExec := results.Exec()
	_, batchQuery := results.Query()
	for i, err := range []error{
		exec, query, copied, prepared, tx.QueryRow(ctx, "SELECT 1").Scan(),
		batchExec, batchQuery, results.QueryRow().Scan(), results.Close(),
	} {
		if !errors.Is(err, memstore.ErrNoDatabase) {
			t.Errorf("form %d: %v, want ErrNoDatabase", i, err)
		}
	}
	if tx.Conn() != nil || results.Tx() != nil {
		t.Error("there is a connection")
	}
}

// What a store's users wrote for PostgreSQL runs without it.
func ExampleStore_Begin() {
	ctx := context.Background()
	store := memstore.New(func() time.Time { return t0 })
	orders := ratelimit.TokenBucket{Name: "orders", Rate: 2, Period: time.Hour}

	// place is the code under test.
	place := func(tx pgx.Tx, works bool) error {
		if err := store.TakeTx(ctx, tx, orders.For("ann")); err != nil {
			return err
		}
		if !works {
			return errors.New("out of stock")
		}
		return nil
	}
	for _, works := range []bool{true, false, true, true} {
		fmt.Println(pgx.BeginFunc(ctx, store, func(tx pgx.Tx) error { return place(tx, works) }))
	}
	// Output:
	// <nil>
	// out of stock
	// <nil>
	// ratelimit: limit "orders" refused, retry after 30m0s
}
