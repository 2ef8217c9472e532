package pgstore_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// queryModes are pgx's, and one of them without the cache of prepared statements, as PgBouncer
// wants it: to those that prepare nothing it makes no other difference.
var queryModes = []struct {
	name  string
	mode  pgx.QueryExecMode
	cache bool
}{
	{"cache statement", pgx.QueryExecModeCacheStatement, true},
	{"cache describe", pgx.QueryExecModeCacheDescribe, true},
	{"describe exec", pgx.QueryExecModeDescribeExec, true},
	{"exec", pgx.QueryExecModeExec, true},
	{"simple protocol", pgx.QueryExecModeSimpleProtocol, true},
	{"exec without statement cache", pgx.QueryExecModeExec, false},
}

// TestQueryExecModes runs the same histories of all verbs in each mode.
func TestQueryExecModes(t *testing.T) {
	t.Parallel()
	modes := queryModes
	if testing.Short() {
		modes = modes[:2]
	}
	for _, mode := range modes {
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = mode.mode
				if !mode.cache {
					c.ConnConfig.StatementCacheCapacity = 0
				}
			}))
			runHistories(t, db, 9100)
		})
	}
}

// runHistories runs histories of all verbs, in the forms that send other statements, until
// all that a history can have came in one.
func runHistories(t *testing.T, db *pgtest.DB, seed uint64) {
	t.Helper()
	total := newTally()
	for round := range 5 {
		for i, f := range forms {
			if f.inTx && f.level != pgx.Serializable || f.remember > 0 {
				continue // whose statements are those of another
			}
			total.add(runHistory(t, db, f, seed+uint64(10*i+round), 60))
		}
		if len(total.lacking(1)) == 0 {
			break
		}
	}
	total.wantBroad(t, 1)
	for _, portable := range []bool{false, true} {
		shardedVerbs(t, db, portable)
	}
}

// shardedVerbs is a story of all verbs on a sharded limit, which memstore does
// not know: on their own, in a caller's transaction and in the runner's.
func shardedVerbs(t *testing.T, db *pgtest.DB, portable bool) {
	t.Helper()
	ctx := t.Context()
	c := newClock()
	store := newStore(t, db, onClock(c), isPortable(portable))
	l := ratelimit.FixedWindow{Name: "sharded", Rate: 8, Period: time.Hour, Start: noon, Shards: 4}
	plain := perDay("with sharded", 100)
	wantTaken := func(n float64, ok bool, left float64) {
		t.Helper()
		err := pgx.BeginTxFunc(ctx, db.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
			result, err := store.AllowTx(ctx, tx, l.ForN("k", n), plain.For("k"))
			if err == nil && result.OK != ok {
				t.Errorf("%v: got OK %v", n, result.OK)
			}
			return err
		})
		must(t, err)
		wantLeft(t, store, l.ForN("k", 0), left)
	}
	for i := range 5 {
		wantTaken(1, true, float64(7-i))
	}
	wantTaken(4, false, 3)
	wantTaken(3, true, 0) // of two shards at least

	reserved, err := store.ReserveFunc(ctx, []ratelimit.Request{l.ForN("k", 5)}, func(pgx.Tx, ratelimit.Result) error { return nil })
	mustTake(t, reserved, err)
	if reserved.RetryAfter != time.Hour {
		t.Errorf("reserved: got %v, want an hour", reserved.RetryAfter)
	}
	cancelled, err := store.Cancel(ctx, reserved.Receipt)
	wantSaid(t, "cancel", cancelled, err, true)
	if status, err := store.Credit(ctx, l.ForN("k", 2)); err != nil || status.Value != 2 {
		t.Errorf("credit: got %v, error %v", status.Value, err)
	}
	wantTaken(2, true, 0)
	wantPaused(t, store, l, "k", c.now(), noon.Add(70*time.Minute))
	c.add(65 * time.Minute)
	wantTaken(1, false, 0)
	c.add(5 * time.Minute)
	wantTaken(8, true, 0)
	c.add(3 * time.Hour)
	if n, err := store.Prune(ctx, l); err != nil || n != 4 {
		t.Errorf("pruned %d, error %v, want 4", n, err)
	}
	wantTaken(8, true, 0)
	for _, r := range []ratelimit.Request{l.For("k"), plain.For("k")} {
		should(t, store.Reset(ctx, r.Limit, r.Key))
	}
	wantLeft(t, store, l.ForN("k", 0), 8)
}

// TestDisabledStatementCache: pgx's default mode does not work without its
// cache. It says so, and nothing is granted.
func TestDisabledStatementCache(t *testing.T) {
	t.Parallel()
	_, store := setUp(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.StatementCacheCapacity = 0 }))
	result, err := store.Allow(t.Context(), slow("l", 1).For(""))
	if err == nil || result.OK {
		t.Errorf("got OK %v, error %v", result.OK, err)
	}
}

// Where instants come as text, another DateStyle than ISO is never a yes; where they do not,
// it does not matter.
func TestDateStyle(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, style string
		mode        pgx.QueryExecMode
		works       bool
	}{
		{"cache statement", "German", pgx.QueryExecModeCacheStatement, true},
		{"cache describe", "German", pgx.QueryExecModeCacheDescribe, true},
		{"exec", "German", pgx.QueryExecModeExec, false},
		{"simple protocol", "German", pgx.QueryExecModeSimpleProtocol, false},
		{"exec and ISO", "ISO", pgx.QueryExecModeExec, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = test.mode
				c.ConnConfig.RuntimeParams["datestyle"] = test.style
			}))
			result, err := newStore(t, db).Allow(t.Context(), slow("l", 10).For("k"))
			if result.OK != test.works || (err == nil) != test.works {
				t.Errorf("got %v, %v, want OK and no error %v", result.OK, err, test.works)
			}
		})
	}
}
