package pgstore_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// flooded are limits that more is wanted of than they have, and yet so much is granted of
// them that each of eight processes takes ahead. Nothing is reserved that is not there, so
// that all is used when it is granted.
var flooded = []ratelimit.Limit{
	ratelimit.TokenBucket{Name: "bucket", Rate: 1500, Period: time.Second, Capacity: 3000, MaxReserved: ratelimit.None},
	ratelimit.FixedWindow{Name: "window", Rate: 300, Period: 200 * time.Millisecond, MaxReserved: ratelimit.None},
	ratelimit.SlidingWindow{Name: "sliding", Rate: 300, Period: 200 * time.Millisecond, Slots: 4, MaxReserved: ratelimit.None},
}

const floodEscrow = 200 * time.Millisecond

// errUndone is the error of work that is undone.
var errUndone = errors.New("undone")

func judgeEvents(t *testing.T, limit ratelimit.Limit, events []curve.Event) (worst curve.Worst) {
	t.Helper()
	worst = curve.Judge(events, curve.Of(limit.Definition()))
	t.Logf("%s, %d grants, by what was told: %v", ratelimit.NameOf(limit), len(events), worst)
	if worst.Share > 1+1e-9 {
		t.Errorf("%s: too much", ratelimit.NameOf(limit))
	}
	return worst
}

// closeAll closes stores. What comes back too late is given up when its time is over, so the
// clock goes on meanwhile.
func closeAll(c *clock, stores ...*pgstore.Store) {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		for _, store := range stores {
			store.Close()
		}
	}()
	for !isClosed(closed) {
		time.Sleep(time.Millisecond)
		c.add(floodEscrow)
	}
}

// A flood of eight processes that nothing else happens to is granted what there is. The
// clock waits for all of them, so they are a flood on a busy machine, too.
func TestEscrowGrantsWhatThereIs(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, limit := range flooded {
		t.Run(ratelimit.NameOf(limit), func(t *testing.T) {
			t.Parallel()
			sent := &traced.Statements{}
			db := pgtest.New(t, maxConns(16), pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = sent }))
			d, now := bucket.Definition(limit.Definition()), newClock()
			if d.Kind == ratelimit.KindFixedWindow {
				now.set(d.Fresh("k", now.now()).TS.Add(d.Period * 3 / 4)) // so that two windows are used in less than one
			}
			var stores [8]*pgstore.Store
			for i := range stores {
				stores[i] = newStore(t, db, onClock(now), withEscrow(floodEscrow))
			}
			var events []curve.Event
			var mu sync.Mutex
			for range 100 {
				var group sync.WaitGroup
				for _, store := range stores {
					group.Go(func() {
						for {
							result, err := store.Allow(t.Context(), limit.For("k"))
							should(t, err)
							if !result.OK {
								return
							}
							mu.Lock()
							events = append(events, curve.Event{At: result.At, Count: 1})
							mu.Unlock()
						}
					})
				}
				group.Wait()
				now.add(5 * time.Millisecond)
			}
			t.Logf("%d grants, %d statements", len(events), sent.Sends())
			closeAll(now, stores[:]...)
			if worst := judgeEvents(t, limit, events); worst.Share < 0.9 { // the capacity is lower by what is refilled in floodEscrow
				t.Errorf("%v, want nearly all of it", worst)
			}
		})
	}
}

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
	return judgeEvents(t, limit, to.events)
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
