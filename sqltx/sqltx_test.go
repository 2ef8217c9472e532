package sqltx_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

// counting is a transaction that counts the statements that it is sent.
type counting struct {
	*sql.Tx
	sent int
}

func (c *counting) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	c.sent++
	return c.Tx.ExecContext(ctx, query, args...)
}

func (c *counting) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	c.sent++
	return c.Tx.QueryContext(ctx, query, args...)
}

// withoutEnd is a transaction that does not say that it is one.
type withoutEnd struct{ sqltx.Tx }

// Each statement is a round trip: docs/setup.md says how many a call takes.
func TestRoundTrips(t *testing.T) {
	pgtest.Long(t)
	db := pgtest.New(t)
	store, err := pgstore.New(nil, &pgstore.Config{Schema: db.Schema})
	if err != nil {
		t.Fatal(err)
	}
	pool := stdlib.OpenDBFromPool(db.Pool)
	defer pool.Close()
	tx, err := pool.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()

	bucket := func(name string, rate float64) ratelimit.Limit {
		return ratelimit.TokenBucket{Name: name, Rate: rate, Period: 24 * time.Hour}
	}
	a, b, c, little := bucket("a", 100), bucket("b", 100), bucket("c", 100), bucket("little", 1)
	if err := store.TakeTx(t.Context(), sqltx.Of(tx), little.For("k")); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name     string
		requests []ratelimit.Request
		ok       bool
		want     int
	}{
		{"one granted", []ratelimit.Request{a.For("k")}, true, 1},
		{"one refused", []ratelimit.Request{little.For("k")}, false, 2},
		{"three granted", []ratelimit.Request{a.For("k"), b.For("k"), c.For("k")}, true, 6},
		{"three, of which one refuses", []ratelimit.Request{a.For("k"), b.For("k"), little.For("k")}, false, 9},
	} {
		counted := &counting{Tx: tx}
		result, err := store.AllowTx(t.Context(), sqltx.Of(counted), test.requests...)
		if err != nil || result.OK != test.ok || counted.sent != test.want {
			t.Errorf("%s: got %v, %v in %d statements, want %v in %d", test.name, result, err, counted.sent, test.ok, test.want)
		}
	}

	counted := &counting{Tx: tx}
	of := sqltx.Of(withoutEnd{counted})
	for i, want := range []int{3, 4} { // the first time, it is asked whether there is a transaction
		if err := store.TakeTx(t.Context(), of, a.For("k")); err != nil || counted.sent != want {
			t.Errorf("call %d: got %v, and %d statements so far, want %d", i, err, counted.sent, want)
		}
	}
}
