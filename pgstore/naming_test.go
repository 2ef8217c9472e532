package pgstore_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// A name is that of limits of one kind: those of another are refused by a store that has met
// the first, in every verb that decides or edits, and change nothing.
func TestOneKindForAName(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	bucket, window := slow("l", 10), slowWindow("l", 10)
	mustAllow(t, store, bucket.For("k"))
	tx := begin(t, db, pgx.ReadCommitted)
	wantKind := func(verb string, err error) {
		t.Helper()
		var field *ratelimit.FieldError
		switch strings.TrimSuffix(verb, "Tx") {
		case "Cancel", "Settle", "Rows", "Prune": // go by what was taken, or by rows
			return
		}
		if !errors.As(err, &field) || field.Field != "Kind" || field.Limit != "l" {
			t.Errorf("%s: got %v, want an error that names the kind", verb, err)
		}
	}
	for _, verb := range ownVerbs {
		wantKind(verb.name, errOf(verb.do(t.Context(), store, window.For("k"))))
	}
	for _, verb := range verbsInTx {
		wantKind(verb.name, errOf(verb.do(t.Context(), store, tx, window.For("k"))))
	}
	end(t, tx.Commit)
	wantLeft(t, store, bucket.For("k"), 9)
}

// An error of a statement that waited for a row, until its context or the server's lock_timeout ended
// that, names the limit whose row is locked, whatever the verb and whichever of its limits that is.
func TestWaitInATransactionIsNamed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store := newStore(t, db)
	const key = "the key"
	a, b, empty := slow("limit a", 10), slow("limit b", 10), slow("limit 0", 1)
	mustAllow(t, store, empty.For(key))
	ofBoth, err := store.Allow(t.Context(), a.For(key), b.For(key))
	mustTake(t, ofBoth, err)
	change := func(l ratelimit.TokenBucket) ratelimit.Replacement {
		to := l
		to.Rate++
		return ratelimit.Replacement{Key: key, From: l, To: to}
	}
	for _, l := range []ratelimit.TokenBucket{a, b} {
		ofOne, err := store.Allow(t.Context(), l.For(key))
		mustTake(t, ofOne, err)
		holder := begin(t, db, pgx.ReadCommitted)
		takeIn(t, store, holder, l.For(key))
		for verb, do := range map[string]func(context.Context, pgx.Tx) error{
			"AllowTx":        func(ctx context.Context, tx pgx.Tx) error { return store.TakeTx(ctx, tx, l.For(key)) },
			"AllowTx of two": func(ctx context.Context, tx pgx.Tx) error { return store.TakeTx(ctx, tx, a.For(key), b.For(key)) },
			"ReserveTx of two": func(ctx context.Context, tx pgx.Tx) error {
				return errOf(store.ReserveTx(ctx, tx, a.For(key), b.For(key)))
			},
			"AllowFirstTx": func(ctx context.Context, tx pgx.Tx) error {
				return errOf(store.AllowFirstTx(ctx, tx, empty.For(key), l.For(key)))
			},
			"AllowAtMostTx": func(ctx context.Context, tx pgx.Tx) error { return errOf(store.AllowAtMostTx(ctx, tx, l.For(key))) },
			"CreditTx":      func(ctx context.Context, tx pgx.Tx) error { return errOf(store.CreditTx(ctx, tx, l.For(key))) },
			"PauseTx":       func(ctx context.Context, tx pgx.Tx) error { return errOf(store.PauseTx(ctx, tx, l, key, time.Hour)) },
			"PauseEachTx of two": func(ctx context.Context, tx pgx.Tx) error {
				return errOf(store.PauseEachTx(ctx, tx, []ratelimit.Request{a.For(key), b.For(key)}, time.Hour))
			},
			"ResumeTx": func(ctx context.Context, tx pgx.Tx) error { return store.ResumeTx(ctx, tx, l, key) },
			"ResetTx":  func(ctx context.Context, tx pgx.Tx) error { return store.ResetTx(ctx, tx, l, key) },
			"SettleTx": func(ctx context.Context, tx pgx.Tx) error { return errOf(store.SettleTx(ctx, tx, ofOne.Receipt, 2)) },
			"SettleTx of two": func(ctx context.Context, tx pgx.Tx) error {
				return errOf(store.SettleTx(ctx, tx, ofBoth.Receipt, 2, 2))
			},
			"CancelTx of two": func(ctx context.Context, tx pgx.Tx) error { return errOf(store.CancelTx(ctx, tx, ofBoth.Receipt)) },
			"ChangeTx": func(ctx context.Context, tx pgx.Tx) error {
				return errOf(store.ChangeTx(ctx, tx, l, change(l).To, key))
			},
			"ReplaceTx of two": func(ctx context.Context, tx pgx.Tx) error {
				return errOf(store.ReplaceTx(ctx, tx, change(a), change(b)))
			},
		} {
			for _, cause := range []error{context.Canceled, pgstore.ErrLocked} {
				tx := begin(t, db, pgx.ReadCommitted)
				ctx, cancel := context.WithCancel(t.Context())
				if cause == pgstore.ErrLocked {
					mustExec(t, tx, "SET LOCAL lock_timeout = 10")
				}
				ended := make(chan error, 1)
				go func() { ended <- do(ctx, tx) }()
				if cause == context.Canceled {
					waitsForLock(t, db, tx)
					cancel()
				}
				err := <-ended
				if !errors.Is(err, cause) || !strings.Contains(err.Error(), strconv.Quote(l.Name)) || strings.Contains(err.Error(), key) {
					t.Errorf("%s, %s is locked: got %v, want %v that names it", verb, l.Name, err, cause)
				}
				cancel()
				_ = tx.Rollback(t.Context())
			}
		}
		end(t, holder.Rollback)
	}
}

// So is an error of permits.
func TestLockTimeoutOfPermitsIsNamed(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	one, two := ratelimit.InFlight{Name: "limit 1", Limit: 1}, ratelimit.InFlight{Name: "limit 2", Limit: 2}
	for name, request := range map[string]ratelimit.PermitRequest{
		`limit "limit 1"`:              one.For("the key"),
		`limit "limit 1" or "limit 2"`: one.For("another key").And(two.For("another key")),
	} {
		permit, err := store.Permits().Acquire(t.Context(), request)
		must(t, err)
		holder := begin(t, db, pgx.ReadCommitted)
		must(t, store.Permits().ReleaseTx(t.Context(), holder, permit))
		tx := begin(t, db, pgx.ReadCommitted)
		mustExec(t, tx, "SET LOCAL lock_timeout = 10")
		if err := store.Permits().ReleaseTx(t.Context(), tx, permit); !isLocked(err) || !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), " key") {
			t.Errorf("got %v, want ErrLocked that names %s", err, name)
		}
		end(t, tx.Rollback)
		end(t, holder.Rollback)
	}
}

// So does a transaction of the store's that its session's lock_timeout ended.
func TestLockTimeoutOfTheRunnerIsNamed(t *testing.T) {
	t.Parallel()
	db, store := setUp(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["lock_timeout"] = "10" }))
	limit := slow("the limit", 10)
	mustAllow(t, store, limit.For("the key"))
	holder := begin(t, db, pgx.ReadCommitted)
	defer end(t, holder.Rollback)
	must(t, errOf(store.AllowTx(t.Context(), holder, limit.For("the key"))))
	_, err := store.AllowFunc(t.Context(), []ratelimit.Request{limit.For("the key")}, func(pgx.Tx, ratelimit.Result) error { return nil })
	if !errors.Is(err, pgstore.ErrLocked) || !strings.Contains(err.Error(), `limit "the limit"`) {
		t.Errorf("got %v, want ErrLocked that names the limit", err)
	}
}

// Statements that pgx prepared on another connection, which a pooler has put in place of its
// own, are an error that says what to set.
func TestPreparedElsewhereIsExplained(t *testing.T) {
	t.Parallel()
	db, store := setUp(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.MaxConns = 1 }))
	limit := slow("l", 10)
	take := func() error {
		return pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return store.TakeTx(t.Context(), tx, limit.For("k")) })
	}
	must(t, take())
	must(t, errOf(db.Pool.Exec(t.Context(), "DEALLOCATE ALL")))
	if err := take(); err == nil || !strings.Contains(err.Error(), "default_query_exec_mode=exec") {
		t.Errorf("got %v, want a hint", err)
	}
}
