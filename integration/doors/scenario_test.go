package doors

import (
	"database/sql"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/scenario"
)

// usual is the instant at which clocks of tests begin.
var usual = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

// story is a scenario of testdata/conformance under way.
type story struct {
	store ratelimit.Store
	now   time.Time
	after func(limit ratelimit.Limit, key string) // is called after each call of one limit, if not nil
}

// play plays a scenario, and returns how many calls it made of the store.
func (s *story) play(t *testing.T, file string) (calls int) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	of, err := scenario.Parse(file, text)
	must(t, err)
	var taken scenario.Receipts
	for _, c := range of.Calls {
		s.now = c.At
		got, err := c.Ask(t.Context(), s.store, &taken)
		if err != nil {
			t.Fatalf("%s:%d: %v", file, c.Line, err)
		}
		if c.Want != nil {
			if field := c.Want.Differs(got); field != "" {
				t.Fatalf("%s:%d: %s differs: got %+v, want %+v", file, c.Line, field, got, *c.Want)
			}
		}
		if s.after != nil && len(c.Requests) == 1 {
			s.after(c.Requests[0].Limit, c.Requests[0].Key)
		}
	}
	return len(of.Calls)
}

// scenarios plays all scenarios, each on a store of its own.
func scenarios(t *testing.T, open func(clock func() time.Time) ratelimit.Store) {
	t.Helper()
	calls := 0
	files, err := filepath.Glob("../../testdata/conformance/*.jsonl")
	if err != nil || len(files) < 15 {
		t.Fatalf("got %d scenarios, %v", len(files), err)
	}
	for _, file := range files {
		s := &story{}
		s.store = open(func() time.Time { return s.now })
		calls += s.play(t, file)
	}
	if calls < 150 {
		t.Errorf("%d calls, want at least 150", calls)
	}
}

func TestScenarios(t *testing.T) {
	pgtest.Long(t)
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		scenarios(t, func(clock func() time.Time) ratelimit.Store {
			must(t, errOf(db.Pool.Exec(t.Context(), "TRUNCATE "+db.Schema+".rate_limits")))
			return committed{store: newStore(t, db, clock), pool: pool}
		})
	})
}
