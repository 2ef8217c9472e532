package doors

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

var (
	one = ratelimit.TokenBucket{Name: "one", Rate: 10, Period: 24 * time.Hour}
	two = ratelimit.TokenBucket{Name: "two", Rate: 10, Period: 24 * time.Hour}
)

// blocked starts a call in a transaction and returns when it waits for a lock, with the process
// ID of its session and where its error will be.
func blocked(t *testing.T, db *pgtest.DB, tx *sql.Tx, call func() error) (pid int, done chan error) {
	t.Helper()
	must(t, tx.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
	done = make(chan error, 1)
	go func() { done <- call() }()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		var waits bool
		err := db.Pool.QueryRow(t.Context(), "SELECT cardinality(pg_blocking_pids($1)) > 0", pid).Scan(&waits)
		if err != nil || time.Now().After(end) {
			t.Fatalf("the call does not wait for a lock: %v", err)
		}
		if waits {
			return pid, done
		}
	}
}

// left returns how many tokens are left, as a store says that nothing ails.
func left(t *testing.T, db *pgtest.DB) float64 {
	t.Helper()
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	must(t, err)
	result, err := store.Check(t.Context(), one.For("k"))
	must(t, err)
	return result.Value
}

// wantNineLeft wants one of ten tokens to be spent.
func wantNineLeft(t *testing.T, db *pgtest.DB, what any) {
	t.Helper()
	if got := left(t, db); got > 9.1 || got < 9 {
		t.Errorf("%v: %v left, want 9", what, got)
	}
}

// wantFaults has one transaction take a token, and another one wait for it that PostgreSQL asks to be
// run again, that is killed, or whose context ends. It has no yes, then and later, and does not
// commit, so that it spends nothing; and the first error says so by the driver's own code.
func wantFaults(t *testing.T, db *pgtest.DB, pool *sql.DB, take func(ctx context.Context, tx *sql.Tx) (ok bool, err error)) {
	t.Helper()
	for fault, level := range map[string]sql.IsolationLevel{"40001": sql.LevelSerializable, "killed": sql.LevelReadCommitted, "cancelled": sql.LevelReadCommitted} {
		inSchema(t, db, "TRUNCATE rate_limits")
		holder, waiter := begin(t, pool, level), begin(t, pool, level)
		must(t, errOf(take(t.Context(), holder)))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var ok bool
		pid, done := blocked(t, db, waiter, func() (err error) {
			ok, err = take(ctx, waiter)
			return err
		})
		switch fault {
		case "killed":
			must(t, errOf(db.Pool.Exec(t.Context(), "SELECT pg_terminate_backend($1)", pid)))
		case "cancelled":
			cancel()
		case "40001":
			must(t, holder.Commit())
		}
		if err := <-done; err == nil || ok || fault == "40001" && !hasCode(err, fault) {
			t.Errorf("%s: got %v, %v, want an error", fault, ok, err)
		}
		if ok, err := take(ctx, waiter); err == nil || ok {
			t.Errorf("%s: got %v, %v after it, want an error", fault, ok, err)
		}
		if fault != "40001" {
			must(t, holder.Commit())
		}
		if err := waiter.Commit(); err == nil {
			t.Errorf("%s: it was committed", fault)
		}
		wantNineLeft(t, db, fault)
	}
}

// wantDeadlock has two transactions ask in turn for what the other has: one of them is told so.
func wantDeadlock(t *testing.T, db *pgtest.DB, pool *sql.DB, take func(tx *sql.Tx, limit ratelimit.Limit) error) {
	t.Helper()
	first, second := begin(t, pool, sql.LevelReadCommitted), begin(t, pool, sql.LevelReadCommitted)
	must(t, errors.Join(take(first, one), take(second, two)))
	_, done := blocked(t, db, first, func() error { return take(first, two) })
	err := take(second, one)
	if err != nil { // it was the victim
		must(t, second.Rollback())
	} else {
		must(t, second.Commit())
	}
	other := <-done
	if hasCode(err, "40P01") == hasCode(other, "40P01") || (err == nil) == (other == nil) {
		t.Errorf("got %v and %v, want 40P01 once", err, other)
	}
}

func TestFaults(t *testing.T) {
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		store := newStore(t, db, nil)
		several := ratelimit.TokenBucket{Name: "several", Rate: 10, Period: 24 * time.Hour, Shards: 2}
		wantFaults(t, db, pool, func(ctx context.Context, tx *sql.Tx) (bool, error) {
			result, err := store.AllowTx(ctx, sqltx.Of(tx), one.For("k"), several.For("k"))
			return result.OK, err
		})
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if result, err := store.AllowTx(ended, sqltx.Of(begin(t, pool, sql.LevelReadCommitted)), one.For("k")); !errors.Is(err, context.Canceled) || result.OK {
			t.Errorf("got %v, %v for a context that is over, want %v", result, err, context.Canceled)
		}
	})
}

func TestDeadlock(t *testing.T) {
	pgtest.Long(t)
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		store := newStore(t, db, nil)
		wantDeadlock(t, db, pool, func(tx *sql.Tx, limit ratelimit.Limit) error {
			return store.TakeTx(t.Context(), sqltx.Of(tx), limit.For("k"))
		})
	})
}

// Through the SQL functions, too, what the server does not finish has no yes, and is not spent.
func TestFunctionFaults(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, call := range map[string]string{
		"arguments": "rate_limit_allow('one', 'k', rate => 10, period => '24 hours')",
		"by name":   "rate_limit_allow('one', 'k')",
		"several":   "rate_limit_allow_all(ARRAY['one', 'two'], ARRAY['k', ''])",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, _ := published(t, one, two)
			wantFaults(t, db, drivers[0].open(t, db), func(ctx context.Context, tx *sql.Tx) (ok bool, err error) {
				err = tx.QueryRowContext(ctx, "SELECT ok FROM "+db.Schema+"."+call).Scan(&ok)
				return ok, err
			})
		})
	}
}

func TestFunctionDeadlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db, _ := published(t, one, two)
	wantDeadlock(t, db, drivers[3].open(t, db), func(tx *sql.Tx, limit ratelimit.Limit) error {
		return errOf(tx.ExecContext(t.Context(), "SELECT "+db.Schema+".rate_limit_take($1, 'k')", ratelimit.NameOf(limit)))
	})
}

// What is no transaction takes nothing, and the error says so.
func TestNoTransaction(t *testing.T) {
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		ctx, store := t.Context(), newStore(t, db, nil)
		conn, err := pool.Conn(ctx)
		must(t, err)
		defer conn.Close()
		ended := begin(t, pool, sql.LevelReadCommitted)
		must(t, ended.Commit())
		var none *sql.Tx
		for name, tx := range map[string]sqltx.Tx{"pool": pool, "connection": conn, "nil": nil, "nil *sql.Tx": none} {
			for _, requests := range [][]ratelimit.Request{{one.For("k")}, {one.For("k"), one.For("l")}} {
				result, err := store.AllowTx(ctx, sqltx.Of(tx), requests...)
				var field *ratelimit.FieldError
				if !errors.As(err, &field) || field.Field != "Tx" || result.OK {
					t.Errorf("%s: got %v, %v, want an error of Tx", name, result, err)
				}
			}
		}
		if result, err := store.AllowTx(ctx, sqltx.Of(ended), one.For("k")); !errors.Is(err, sql.ErrTxDone) || result.OK {
			t.Errorf("got %v, %v, want %v", result, err, sql.ErrTxDone)
		}
		if got := left(t, db); got != 10 {
			t.Errorf("%v left, want 10", got)
		}
		// On a connection a transaction can be begun by hand.
		must(t, errOf(conn.ExecContext(ctx, "BEGIN")))
		must(t, store.TakeTx(ctx, sqltx.Of(conn), one.For("k")))
		must(t, errOf(conn.ExecContext(ctx, "COMMIT")))
		wantNineLeft(t, db, "by hand")
	})
}

// A statement that fails after it has returned a row has failed.
func TestErrorAfterARow(t *testing.T) {
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		of := sqltx.Of(begin(t, pool, sql.LevelReadCommitted))
		var n int
		if err := of.QueryRow(t.Context(), "SELECT 1 / (2 - i) FROM generate_series(1, 2) AS i").Scan(&n); !hasCode(err, "22012") { // division_by_zero
			t.Errorf("got %d, %v, want a division by zero", n, err)
		}
	})
}

// Of makes no transaction to be used otherwise: what is not for a verb is an error.
func TestUnsupported(t *testing.T) {
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		ctx, of := t.Context(), sqltx.Of(begin(t, pool, sql.LevelReadCommitted))
		_, beginning := of.Begin(ctx)
		_, copying := of.CopyFrom(ctx, pgx.Identifier{"t"}, nil, nil)
		_, preparing := of.Prepare(ctx, "p", "SELECT 1")
		for _, err := range []error{beginning, copying, preparing, of.Commit(ctx), of.Rollback(ctx)} {
			if !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("got %v, want %v", err, errors.ErrUnsupported)
			}
		}
		var n int
		if err := of.QueryRow(ctx, "SELECT 1 WHERE false").Scan(&n); !errors.Is(err, pgx.ErrNoRows) {
			t.Errorf("got %v, want %v", err, pgx.ErrNoRows)
		}
		if err := of.QueryRow(ctx, "SELECT $1::int4", "x").Scan(&n); err == nil {
			t.Error("got no error for x as a number")
		}
	})
}
