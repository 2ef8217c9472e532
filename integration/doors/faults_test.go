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

var one = ratelimit.TokenBucket{Name: "one", Rate: 10, Period: 24 * time.Hour}

// blocked starts a call in a transaction and returns when it waits for a lock, with the process
// ID of its session and where its error will be.
func blocked(t *testing.T, db *pgtest.DB, tx *sql.Tx, call func() error) (pid int, done chan error) {
	t.Helper()
	if err := tx.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	result, err := store.Check(t.Context(), one.For("k"))
	if err != nil {
		t.Fatal(err)
	}
	return result.Value
}

// A transaction that PostgreSQL asks to be run again has no yes, and its error says so by the
// driver's own code.
func TestSerializationFailure(t *testing.T) {
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		store := newStore(t, db, nil)
		first, second := begin(t, pool, sql.LevelSerializable), begin(t, pool, sql.LevelSerializable)
		if err := store.TakeTx(t.Context(), sqltx.Of(first), one.For("k")); err != nil {
			t.Fatal(err)
		}
		var result ratelimit.Result
		_, done := blocked(t, db, second, func() (err error) {
			result, err = store.AllowTx(t.Context(), sqltx.Of(second), one.For("k"))
			return err
		})
		commit(t, first)
		if err := <-done; !hasCode(err, "40001") || result.OK {
			t.Errorf("got %v, %v, want 40001", result, err)
		}
		if got := left(t, db); got > 9.1 || got < 9 {
			t.Errorf("%v left, want 9", got)
		}
	})
}

func TestDeadlock(t *testing.T) {
	pgtest.Long(t)
	two := ratelimit.TokenBucket{Name: "two", Rate: 10, Period: 24 * time.Hour}
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		store := newStore(t, db, nil)
		first, second := begin(t, pool, sql.LevelReadCommitted), begin(t, pool, sql.LevelReadCommitted)
		take := func(tx *sql.Tx, limit ratelimit.Limit) error {
			return store.TakeTx(t.Context(), sqltx.Of(tx), limit.For("k"))
		}
		if err := errors.Join(take(first, one), take(second, two)); err != nil {
			t.Fatal(err)
		}
		_, done := blocked(t, db, first, func() error { return take(first, two) })
		err := take(second, one)
		if err != nil { // it was the victim
			if err := second.Rollback(); err != nil {
				t.Error(err)
			}
		} else {
			commit(t, second)
		}
		other := <-done
		if hasCode(err, "40P01") == hasCode(other, "40P01") || (err == nil) == (other == nil) {
			t.Errorf("got %v and %v, want 40P01 once", err, other)
		}
	})
}

// A session that is killed while it waits, and one that was killed before, have no yes.
func TestLostConnection(t *testing.T) {
	several := ratelimit.TokenBucket{Name: "two", Rate: 10, Period: 24 * time.Hour, Shards: 2}
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		store := newStore(t, db, nil)
		holder, waiter := begin(t, pool, sql.LevelReadCommitted), begin(t, pool, sql.LevelReadCommitted)
		if err := store.TakeTx(t.Context(), sqltx.Of(holder), one.For("k")); err != nil {
			t.Fatal(err)
		}
		of := sqltx.Of(waiter)
		var result ratelimit.Result
		pid, done := blocked(t, db, waiter, func() (err error) {
			result, err = store.AllowTx(t.Context(), of, one.For("k"), several.For("k"))
			return err
		})
		if _, err := db.Pool.Exec(t.Context(), "SELECT pg_terminate_backend($1)", pid); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err == nil || result.OK {
			t.Errorf("got %v, %v, want an error", result, err)
		}
		if result, err := store.AllowTx(t.Context(), of, one.For("k")); err == nil || result.OK {
			t.Errorf("got %v, %v on a lost connection, want an error", result, err)
		}
		if err := waiter.Commit(); err == nil {
			t.Error("committed on a lost connection")
		}
		commit(t, holder)
		if got := left(t, db); got > 9.1 || got < 9 {
			t.Errorf("%v left, want 9", got)
		}
	})
}

// A call whose context ends while it waits has no yes; and nothing is spent, since the
// transaction does not commit any more.
func TestCancelledContext(t *testing.T) {
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		store := newStore(t, db, nil)
		holder, waiter := begin(t, pool, sql.LevelReadCommitted), begin(t, pool, sql.LevelReadCommitted)
		if err := store.TakeTx(t.Context(), sqltx.Of(holder), one.For("k")); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var result ratelimit.Result
		_, done := blocked(t, db, waiter, func() (err error) {
			result, err = store.AllowTx(ctx, sqltx.Of(waiter), one.For("k"))
			return err
		})
		cancel()
		if err := <-done; err == nil || result.OK {
			t.Errorf("got %v, %v, want an error", result, err)
		}
		commit(t, holder)
		if err := waiter.Commit(); err == nil {
			t.Error("committed what was cancelled")
		}
		if got := left(t, db); got > 9.1 || got < 9 {
			t.Errorf("%v left, want 9", got)
		}
		if result, err := store.AllowTx(ctx, sqltx.Of(begin(t, pool, sql.LevelReadCommitted)), one.For("k")); !errors.Is(err, context.Canceled) || result.OK {
			t.Errorf("got %v, %v for a context that is over, want %v", result, err, context.Canceled)
		}
	})
}

// What is no transaction takes nothing, and the error says so.
func TestNoTransaction(t *testing.T) {
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		ctx, store := t.Context(), newStore(t, db, nil)
		conn, err := pool.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ended := begin(t, pool, sql.LevelReadCommitted)
		commit(t, ended)
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
		for _, query := range []string{"BEGIN", "", "COMMIT"} {
			if query == "" {
				err = store.TakeTx(ctx, sqltx.Of(conn), one.For("k"))
			} else {
				_, err = conn.ExecContext(ctx, query)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if got := left(t, db); got > 9.1 || got < 9 {
			t.Errorf("%v left, want 9", got)
		}
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

// Through the SQL functions, too, what the server does not finish has no yes, and is not spent.
func TestFunctionFaults(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, call := range map[string]string{
		"arguments": "rate_limit_allow('one', 'k', rate => 10, period => '24 hours')",
		"by name":   "rate_limit_allow('one', 'k')",
		"several":   "rate_limit_allow_all(ARRAY['one', 'zwei'], ARRAY['k', ''])",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, _ := published(t, one, ratelimit.TokenBucket{Name: "zwei", Rate: 10, Period: 24 * time.Hour})
			query := "SELECT ok FROM " + db.Schema + "." + call
			opened := drivers[0].open(t, db)
			for fault, level := range map[string]sql.IsolationLevel{"40001": sql.LevelSerializable, "killed": sql.LevelReadCommitted, "cancelled": sql.LevelReadCommitted} {
				inSchema(t, db, "TRUNCATE rate_limits")
				first, second := begin(t, opened, level), begin(t, opened, level)
				if _, err := first.ExecContext(t.Context(), query); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				var ok bool
				pid, done := blocked(t, db, second, func() error { return second.QueryRowContext(ctx, query).Scan(&ok) })
				switch fault {
				case "killed":
					if _, err := db.Pool.Exec(t.Context(), "SELECT pg_terminate_backend($1)", pid); err != nil {
						t.Fatal(err)
					}
				case "cancelled":
					cancel()
				case "40001":
					commit(t, first)
				}
				if err := <-done; err == nil || ok || fault == "40001" && !hasCode(err, fault) {
					t.Errorf("%s: got %v, %v", fault, ok, err)
				}
				cancel()
				if fault != "40001" {
					commit(t, first)
				}
				if err := second.Commit(); err == nil {
					t.Errorf("%s: it was committed", fault)
				}
				if got := left(t, db); got > 9.1 || got < 9 {
					t.Errorf("%s: %v left, want 9", fault, got)
				}
			}
		})
	}
}

// Two transactions that ask in turn for what the other has are told so, one of them.
func TestFunctionDeadlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db, _ := published(t, one, ratelimit.TokenBucket{Name: "two", Rate: 10, Period: 24 * time.Hour})
	pool := drivers[3].open(t, db)
	first, second := begin(t, pool, sql.LevelReadCommitted), begin(t, pool, sql.LevelReadCommitted)
	take := func(tx *sql.Tx, name string) (ok bool, err error) {
		return ok, tx.QueryRowContext(t.Context(), "SELECT ok FROM "+db.Schema+".rate_limit_allow($1, 'k')", name).Scan(&ok)
	}
	for _, call := range []struct {
		tx   *sql.Tx
		name string
	}{{first, "one"}, {second, "two"}} {
		if _, err := take(call.tx, call.name); err != nil {
			t.Fatal(err)
		}
	}
	var ok bool
	_, done := blocked(t, db, first, func() (err error) {
		ok, err = take(first, "two")
		return err
	})
	also, err := take(second, "one")
	if err != nil {
		if err := second.Rollback(); err != nil {
			t.Error(err)
		}
	} else {
		commit(t, second)
	}
	other := <-done
	if hasCode(err, "40P01") == hasCode(other, "40P01") || (err == nil) == (other == nil) || also != (err == nil) || ok != (other == nil) {
		t.Errorf("got %v, %v and %v, %v, want 40P01 once, and one yes", also, err, ok, other)
	}
}
