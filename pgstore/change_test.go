package pgstore_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
)

// A definition of another name or kind, or a malformed one, is an error that names both, and
// changes nothing.
func TestChangeInvalid(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Hour}
	mustAllow(t, store, limit.ForN("k", 4))
	before, other, many := tableOf(t, db), limit, limit
	other.Name = "m"
	many.Shards = 11 // more than there are tokens
	for name, test := range map[string]struct {
		from, to ratelimit.Limit
		want     string
	}{
		"another name": {limit, other, `limit "l": Name "m": must be the name`},
		"another kind": {limit, ratelimit.FixedWindow{Name: "l", Rate: 10, Period: time.Hour}, `limit "l": Kind fixed window: must be that of the definition that is replaced, token bucket`},
		"too many":     {limit, many, "Shards"},
		"no from":      {nil, limit, "Limit"},
		"no to":        {limit, (*ratelimit.TokenBucket)(nil), "Limit"},
	} {
		_, err := store.Change(t.Context(), test.from, test.to, "k")
		_, inMemory := memstore.New(nil).Change(t.Context(), test.from, test.to, "k")
		if !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), test.want) || err.Error() != inMemory.Error() {
			t.Errorf("%s: got %v and in memory %v, want %q", name, err, inMemory, test.want)
		}
	}
	if after := tableOf(t, db); !slices.Equal(after, before) {
		t.Errorf("the table is %v, want %v", after, before)
	}
}

// A change that is rolled back did not happen.
func TestChangeRolledBack(t *testing.T) {
	t.Parallel()
	db, c := pgtest.New(t), newClock()
	memory := memstore.New(c.now)
	store := newStore(t, db, onClock(c))
	small, large := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Hour}, ratelimit.TokenBucket{Name: "l", Rate: 30, Period: time.Hour}
	for name, s := range map[string]struct {
		verbs
		change func(tx pgx.Tx) (ratelimit.Status, error)
		begin  func(ctx context.Context) (pgx.Tx, error)
	}{
		"memory":   {memory, func(tx pgx.Tx) (ratelimit.Status, error) { return memory.ChangeTx(t.Context(), tx, small, large, "k") }, memory.Begin},
		"postgres": {store, func(tx pgx.Tx) (ratelimit.Status, error) { return store.ChangeTx(t.Context(), tx, small, large, "k") }, db.Pool.Begin},
	} {
		mustAllow(t, s, small.ForN("k", 10))
		tx, err := s.begin(t.Context())
		must(t, err)
		if status, err := s.change(tx); err != nil || status.Value != 20 {
			t.Errorf("%s: %v left in the transaction, %v, want 20", name, status.Value, err)
		}
		must(t, tx.Rollback(t.Context()))
		if result, err := s.Check(t.Context(), large.For("k")); err != nil || result.OK {
			t.Errorf("%s: %v left, %v, want none", name, result.Value, err)
		}
	}
}

// A process that still has the old definition cuts what a raise has added to the old capacity.
func TestChangeIsCutByTheOldDefinition(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, late := newStore(t, db), newStore(t, db)
	small, large := slowWindow("l", 50), slowWindow("l", 1000)
	large.Start = small.Start
	mustAllow(t, store, small.ForN("acme", 50))
	if status, err := store.Change(t.Context(), small, large, "acme"); err != nil || status.Value != 950 {
		t.Fatalf("%v left, %v, want 950", status.Value, err)
	}
	mustAllow(t, late, small.For("acme"))
	if left := leftOf(t, store, large, "acme"); left != 49 {
		t.Errorf("%v left, want 49", left)
	}
}

// Takes beside changes, by whichever definition, get no more than the last capacity together.
func TestChangeBesideTakes(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 4} {
		db := pgtest.New(t)
		limits := make([]ratelimit.Limit, 5)
		for i := range limits {
			limits[i] = shardedSlow("l", float64(40*(i+1)), shards)
		}
		store, granted := newStore(t, db), atomic.Int64{}
		var group sync.WaitGroup
		for i := range 4 {
			group.Go(func() {
				for n := range 60 {
					result, err := store.Allow(t.Context(), limits[(n/12+i%2)%len(limits)].For("k"))
					if err != nil {
						t.Error(err)
					} else if result.OK {
						granted.Add(1)
					}
				}
			})
		}
		for i := range limits[1:] {
			should(t, errOf(store.Change(t.Context(), limits[i], limits[i+1], "k")))
		}
		group.Wait()
		if left := leftOf(t, store, limits[4], "k"); float64(granted.Load())+left > 200+1e-6 {
			t.Errorf("%d shards: %d were granted, and %v are left, of 200", shards, granted.Load(), left)
		}
	}
}
