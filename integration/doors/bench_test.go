package doors

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// BenchmarkFunctions is what a call costs by the SQL functions, beside Go: one caller, on one
// row, each call committed.
func BenchmarkFunctions(b *testing.B) {
	db := pgtest.New(b)
	ctx := b.Context()
	for _, set := range []migrations.Set{migrations.Catalog, migrations.Functions} {
		err := pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "SET LOCAL search_path = "+db.Schema+"; "+set.UpSQL())
			return err
		})
		must(b, err)
	}
	_, err := db.Pool.Exec(ctx, "INSERT INTO "+db.Schema+`.rate_limit_definitions (name, kind, rate, period, max_reserved, shards)
		VALUES ('one', 'token bucket', 1e9, '1 s', 0, 1), ('two', 'token bucket', 1e9, '1 s', 0, 1), ('eight', 'token bucket', 1e9, '1 s', 0, 8);
		INSERT INTO `+db.Schema+`.rate_limit_definitions (name, kind, rate, period, max_reserved, shards, slots, every, zone, anchor)
		VALUES ('month', 'fixed window', 1e9, '31 days', 0, 1, NULL, 'month', 'Europe/Berlin', '2026-01-31'),
			('sliding', 'sliding window', 1e9, '1 minute', 0, 1, 16, NULL, NULL, NULL)`)
	must(b, err)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	must(b, err)
	one, two := ratelimit.TokenBucket{Name: "one", Rate: 1e9, Period: time.Second}, ratelimit.TokenBucket{Name: "two", Rate: 1e9, Period: time.Second}
	inGo := func(requests ...ratelimit.Request) func(context.Context) error {
		return func(ctx context.Context) error {
			return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return store.TakeTx(ctx, tx, requests...) })
		}
	}
	// As many round trips as in Go, in a transaction as well.
	inSQL := func(call string) func(context.Context) error {
		return func(ctx context.Context) error {
			return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT ok FROM "+db.Schema+"."+call)
				return err
			})
		}
	}
	for _, way := range []struct {
		name string
		call func(context.Context) error
	}{
		{"one/Go", inGo(one.For("k"))},
		{"one/arguments", inSQL("rate_limit_take('one', 'k', rate => 1e9, period => '1 s')")},
		{"one/name", inSQL("rate_limit_take('one', 'k')")},
		{"month/Go", inGo(ratelimit.FixedWindow{Name: "month", Rate: 1e9, Every: ratelimit.Month, Zone: "Europe/Berlin", Anchor: ratelimit.Date{Year: 2026, Month: 1, Day: 31}}.For("k"))},
		{"month/name", inSQL("rate_limit_take('month', 'k')")},
		{"sliding/Go", inGo(ratelimit.SlidingWindow{Name: "sliding", Rate: 1e9, Period: time.Minute, Slots: 16}.For("k"))},
		{"sliding/name", inSQL("rate_limit_take('sliding', 'k')")},
		{"8 shards/Go", inGo(ratelimit.TokenBucket{Name: "eight", Rate: 1e9, Period: time.Second, Shards: 8}.For("k"))},
		{"8 shards/name", inSQL("rate_limit_take('eight', 'k')")},
		{"two/Go", inGo(one.For("k"), two.For("k"))},
		{"two/name", inSQL("rate_limit_take_all(ARRAY['one', 'two'], ARRAY['k', 'k'])")},
	} {
		b.Run(way.name, func(b *testing.B) {
			for b.Loop() {
				must(b, way.call(b.Context()))
			}
		})
	}
}
