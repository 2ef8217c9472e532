package pgstore_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

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
