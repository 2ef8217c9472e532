package sqltx_test

import (
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

// BenchmarkTx calls verbs in a transaction of pgx and in one of database/sql with pgx's driver,
// on the same server: what is sent together there is sent one after another here.
func BenchmarkTx(b *testing.B) {
	db := pgtest.New(b)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	if err != nil {
		b.Fatal(err)
	}
	bucket := func(name string, rate float64) ratelimit.Limit {
		return ratelimit.TokenBucket{Name: name, Rate: rate, Period: time.Hour}
	}
	plenty, more, most, little := bucket("plenty", 1e9), bucket("more", 1e9), bucket("most", 1e9), bucket("little", 1)
	calls := map[string]struct {
		requests []ratelimit.Request
		ok       bool
	}{
		"one granted":   {[]ratelimit.Request{plenty.For("k")}, true},
		"one refused":   {[]ratelimit.Request{little.For("k")}, false},
		"three granted": {[]ratelimit.Request{plenty.For("k"), more.For("k"), most.For("k")}, true},
		"three refused": {[]ratelimit.Request{plenty.For("k"), more.For("k"), little.For("k")}, false},
	}
	pool := stdlib.OpenDBFromPool(db.Pool)
	defer pool.Close()
	begin := map[string]func(b *testing.B) pgx.Tx{
		"pgx": func(b *testing.B) pgx.Tx {
			tx, err := db.Pool.Begin(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = tx.Rollback(b.Context()) })
			return tx
		},
		"database/sql": func(b *testing.B) pgx.Tx {
			tx, err := pool.BeginTx(b.Context(), &sql.TxOptions{})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = tx.Rollback() })
			return sqltx.Of(tx)
		},
	}
	for name, call := range calls {
		for by, begin := range begin {
			b.Run(name+"/"+by, func(b *testing.B) {
				tx := begin(b)
				if _, err := store.AllowTx(b.Context(), tx, little.For("k")); err != nil {
					b.Fatal(err)
				}
				for b.Loop() {
					result, err := store.AllowTx(b.Context(), tx, call.requests...)
					if err != nil || result.OK != call.ok {
						b.Fatal(result, err)
					}
				}
			})
		}
	}
}
