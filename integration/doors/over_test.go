package doors

import (
	"context"
	"database/sql"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

// Callers through every door at once, on one key, are together granted no more than the limit
// promises, by the database's clock; and each door is granted something.
func TestNeverOver(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, limit := range []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "bucket", Rate: 300, Period: time.Second, Capacity: 20},
		ratelimit.FixedWindow{Name: "window", Rate: 16, Period: 100 * time.Millisecond},
		ratelimit.SlidingWindow{Name: "sliding", Rate: 16, Period: 400 * time.Millisecond, Slots: 4},
		ratelimit.TokenBucket{Name: "bucket, 3 shards", Rate: 300, Period: time.Second, Capacity: 20, Shards: 3},
	} {
		t.Run(ratelimit.NameOf(limit), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			o := &over{granted: map[string]int{}, enough: int(4 * limit.Definition().Capacity)}
			var callers sync.WaitGroup
			for name, take := range takers(t, db, limit) {
				callers.Go(func() { o.ask(ctx, t, name, func() (ratelimit.Result, error) { return take(ctx, limit.For("k")) }) })
			}
			callers.Wait()
			worst := curve.Judge(o.events, curve.Of(limit.Definition()))
			t.Logf("%v, %d refused, at worst %v", o.granted, o.refused, worst)
			if worst.Share > 1+1e-9 {
				t.Errorf("at worst %v", worst)
			}
		})
	}
}

// taker takes on its own, or in a transaction that is committed when it returns.
type taker func(context.Context, ...ratelimit.Request) (ratelimit.Result, error)

// takers are a caller for each door.
func takers(t *testing.T, db *pgtest.DB, limit ratelimit.Limit) map[string]taker {
	t.Helper()
	own, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	must(t, err)
	all := map[string]taker{
		"own": own.Allow,
		"pgx, in a transaction": func(ctx context.Context, requests ...ratelimit.Request) (result ratelimit.Result, err error) {
			err = pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
				result, err = own.AllowTx(ctx, tx, requests...)
				return err
			})
			return result, err
		},
	}
	f := withFunctions(t, db, nil)
	must(t, f.catalog.Publish(t.Context(), limit))
	if plain(limit) {
		all["SQL functions"] = f.Allow
	}
	all["SQL functions, by name"] = (&functions{
		pool: f.pool, schema: f.schema, byName: true,
		taken: map[*ratelimit.Receipt][]ratelimit.Request{}, takenAt: map[*ratelimit.Receipt]time.Time{},
	}).Allow
	for _, d := range drivers {
		all["database/sql, "+d.name] = committed{store: newStore(t, db, nil), pool: d.open(t, db)}.Allow
	}
	return all
}

// over is what callers were granted.
type over struct {
	mu      sync.Mutex
	events  []curve.Event
	granted map[string]int
	refused int
	enough  int // to be granted, before everybody has stopped
}

// ask asks until enough is granted to all together, and something to this door.
func (o *over) ask(ctx context.Context, t *testing.T, door string, take func() (ratelimit.Result, error)) {
	for {
		result, err := take()
		if hasCode(err, "40001") || hasCode(err, "40P01") {
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", door, err)
			return
		}
		o.mu.Lock()
		if result.OK {
			o.events = append(o.events, curve.Event{At: result.At, Count: result.Taken})
			o.granted[door]++
		} else {
			o.refused++
		}
		done := len(o.events) >= o.enough && o.granted[door] > 0
		o.mu.Unlock()
		if done {
			return
		}
		if !result.OK {
			select {
			case <-ctx.Done():
				t.Errorf("%s: %v", door, ctx.Err())
				return
			case <-time.After(min(result.RetryAfter, 5*time.Millisecond)):
			}
		}
	}
}

// A roll-back gives back, to a savepoint too, and a commit spends, rows of others beside.
func TestSpentWithTheTransaction(t *testing.T) {
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
	sharded := ratelimit.TokenBucket{Name: "sharded", Rate: 40, Period: 24 * time.Hour, Shards: 4}
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		ctx, store := t.Context(), newStore(t, db, nil)
		left := func(l ratelimit.Limit) int64 {
			t.Helper()
			result, err := committed{store: store, pool: pool}.Check(ctx, l.For("k"))
			must(t, err)
			return result.Remaining
		}
		take := func(tx pgx.Tx, n float64) {
			t.Helper()
			must(t, store.TakeTx(ctx, tx, limit.ForN("k", n), sharded.ForN("k", n)))
		}
		for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
			must(t, (committed{store: store, pool: pool}).Reset(ctx, limit, "k"))
			must(t, (committed{store: store, pool: pool}).Reset(ctx, sharded, "k"))
			rolledBack := begin(t, pool, level)
			take(sqltx.Of(rolledBack), 4)
			must(t, rolledBack.Rollback())
			if got := left(limit); got != 10 {
				t.Errorf("%v: %d left after a roll-back, want 10", level, got)
			}
			tx := begin(t, pool, level)
			take(sqltx.Of(tx), 1)
			must(t, errOf(tx.ExecContext(ctx, "SAVEPOINT s")))
			take(sqltx.Of(tx), 5)
			must(t, errOf(tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT s")))
			result, err := store.AllowTx(ctx, sqltx.Of(tx), limit.ForN("k", 10))
			if err != nil || result.OK || result.Remaining != 9 {
				t.Errorf("%v: %v, %v, want a refusal with 9 left", level, result, err)
			}
			take(sqltx.Of(tx), 2) // a refusal leaves the transaction usable
			must(t, tx.Commit())
			if got, of := left(limit), left(sharded); got != 7 || of != 37 {
				t.Errorf("%v: %d and %d left after the commit, want 7 and 37", level, got, of)
			}
		}
	})
}
