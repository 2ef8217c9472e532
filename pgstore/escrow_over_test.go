package pgstore_test

import (
	"errors"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// While somebody holds what he took ahead, the row does not fill up so far that both are
// more than the capacity, and it is not used after its end; and what is given back just
// before its end counts for less, or the row would fill up while somebody else holds what he
// took in the meantime.
func TestEscrowAndRowTogether(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket{Name: "bucket", Rate: 5, Period: time.Second, Capacity: 400}
	const almost = pgstore.MaxEscrow - time.Millisecond
	for name, between := range map[string]func(*sharing){
		"held until the end": func(to *sharing) {
			to.warm(0)
			to.clock.add(almost)
		},
		"held until long after": func(to *sharing) {
			to.warm(0)
			to.clock.add(19 * pgstore.MaxEscrow / 10)
		},
		"given back before the end": func(to *sharing) {
			to.warm(0)
			to.clock.add(almost)
			to.warm(1)
			to.stores[0].Close()
			to.clock.add(almost)
		},
		"held while the clock is set back": func(to *sharing) {
			to.warm(0)
			to.clock.add(almost)
			to.warm(1)
			to.clock.add(-almost)
		},
	} {
		t.Run(name, func(t *testing.T) {
			var worst curve.Worst
			// Much of it, since nothing but the test's clock goes on, or it has tried nothing. But in a
			// run that takes long, memory gives back meanwhile, by the machine's clock.
			const much = 0.6
			for n := 0; n < 5 && worst.Share < much; n++ {
				if w := shareOut(t, limit, between); w.Share > worst.Share {
					worst = w
				}
			}
			if worst.Share < much {
				t.Errorf("%v", worst)
			}
		})
	}
}

// shareOut has stores take ahead, and then hands out what is in the row and in their memories.
func shareOut(t *testing.T, limit ratelimit.Limit, between func(*sharing)) curve.Worst {
	t.Helper()
	to := &sharing{t: t, clock: newClock(), limit: limit}
	db := pgtest.New(t)
	for range 2 {
		to.stores = append(to.stores, newStore(t, db, onClock(to.clock), withEscrow(pgstore.MaxEscrow)))
	}
	between(to)
	to.stores = append([]*pgstore.Store{newStore(t, db, onClock(to.clock))}, to.stores...)
	for i, store := range to.stores {
		for i > 0 && to.held(store) || i == 0 && to.allow(store) {
		}
	}
	worst := curve.Judge(to.events, curve.Of(limit.Definition()))
	if worst.Share > 1+1e-9 {
		t.Errorf("too much: %v", worst)
	}
	return worst
}

// sharing is stores that share a limit, and what was granted.
type sharing struct {
	t      *testing.T
	clock  *clock
	limit  ratelimit.Limit
	stores []*pgstore.Store
	events []curve.Event
}

func (to *sharing) warm(i int) {
	for range 34 { // of which the last are from memory
		to.allow(to.stores[i])
	}
}

func (to *sharing) allow(store *pgstore.Store) bool {
	to.t.Helper()
	result, err := store.Allow(to.t.Context(), to.limit.For("k"))
	must(to.t, err)
	if at := result.At; result.OK {
		if n := len(to.events); n > 0 && to.events[n-1].At.After(at) {
			at = to.events[n-1].At // by a clock that never goes back
		}
		to.events = append(to.events, curve.Event{At: at, Count: 1})
	}
	return result.OK
}

// held is allow, but for a store that is closed.
func (to *sharing) held(store *pgstore.Store) bool {
	if _, err := store.Check(to.t.Context(), to.limit.For("k")); errors.Is(err, pgstore.ErrClosed) {
		return false
	}
	return to.allow(store)
}
