package pgstore_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// quotas are limits of each kind, with and without shards, that are not refilled while a test
// runs.
var quotas = []ratelimit.Limit{
	ratelimit.FixedWindow{Name: "window", Rate: 60, Period: 1e5 * time.Hour},
	ratelimit.FixedWindow{Name: "window, 4 shards", Rate: 60, Period: 1e5 * time.Hour, Shards: 4},
	ratelimit.TokenBucket{Name: "bucket", Rate: 60, Period: 1e5 * time.Hour},
	ratelimit.SlidingWindow{Name: "sliding", Rate: 60, Period: 1e5 * time.Hour},
	ratelimit.SlidingWindow{Name: "sliding, 2 shards", Rate: 60, Period: 1e5 * time.Hour, Slots: 4, Shards: 2},
}

const escrowed = 5 * time.Second

// withMemory is takeForms and those that hand out from memory.
func withMemory() []takeForm {
	return append([]takeForm{
		{"from memory", allowOwn, withEscrow(escrowed)},
		{"from memory, portable", allowOwn, func(c *pgstore.Config) { c.Portable, c.Escrow = true, escrowed }},
		{"from memory, in transactions", allowFunc, withEscrow(escrowed)},
	}, takeForms...)
}

// untilRefused asks until it is refused twice, and returns how often it was granted.
func untilRefused(t *testing.T, ask func() (ratelimit.Result, error)) (granted int64) {
	for refused := 0; refused < 2; {
		result, err := ask()
		if err != nil {
			t.Error(err)
			return granted
		}
		if result.OK {
			granted++
		} else {
			refused++
		}
	}
	return granted
}

// floorsOf are those of three classes: batch work, normal calls and critical ones.
var floorsOf = []float64{0.5, 0.2, 0}

// Under overload each of three classes gets what it may. One after another, batch work gets the
// upper half, others what is above a fifth, and critical calls the rest; all at once, none gets
// more, and together they get all. (Memories may hold some of what critical calls may have.)
func TestAboveIsKeptUnderOverload(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const callers = 6
	pools := newTwoPools(t, callers)
	for _, limit := range quotas {
		for _, form := range withMemory() {
			t.Run(ratelimit.NameOf(limit)+"/"+form.name, func(t *testing.T) {
				t.Parallel()
				take, ctx := pools.taking(t, form), within(t, time.Minute)
				inMemory := strings.HasPrefix(form.name, "from memory")
				flood := func(key string, class func(i int) int) (granted [3]int64) {
					var counts [3]atomic.Int64
					together(callers, func(i int) {
						class := class(i)
						counts[class].Add(untilRefused(t, func() (ratelimit.Result, error) {
							return take(ctx, i, limit.For(key).Above(floorsOf[class]))
						}))
					})
					for class := range counts {
						granted[class] = counts[class].Load()
					}
					return granted
				}
				for class, want := range []int64{30, 18, 12} {
					got := flood(form.name, func(int) int { return class })[class]
					if got != want && (class < 2 || !inMemory || got > want) {
						t.Errorf("granted %d above %v, want %d", got, floorsOf[class], want)
					}
				}
				all := flood(form.name+" at once", func(i int) int { return i % 3 })
				t.Logf("at once: %v", all)
				if sum := all[0] + all[1] + all[2]; all[0] > 30 || all[0]+all[1] > 48 || sum > 60 || sum < 60 && !inMemory {
					t.Errorf("granted %v, want at most 30, 48 with those above a fifth, and 60 in all", all)
				}
			})
		}
	}
}

// What is kept is not in the way of those for whom it is kept, and every refusal tells the
// instant at which the call is granted, whatever shards hold.
func TestAboveBesideMemory(t *testing.T) {
	t.Parallel()
	store, sent, db := holding(t, escrowed)
	limit, ctx := sluggish["window"], t.Context()
	warm(t, store, sent, limit.For("k"))
	capacity := limit.Definition().Capacity
	held := capacity - lacks(t, db, limit) // what the row has
	result, err := store.Allow(ctx, limit.For("k").Above(held/capacity))
	if err != nil || result.OK {
		t.Errorf("got %v, %v, want a refusal by the row, which has %v of %v", result, err, held, capacity)
	}
	result, err = store.Allow(ctx, limit.For("k").Above(held/capacity/2))
	mustTake(t, result, err)
	result, err = store.Allow(ctx, limit.For("k"))
	mustTake(t, result, err)
}

func TestAboveInvalid(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, memory := newStore(t, db), memstore.New(nil)
	limit := ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Second}
	for _, s := range []ratelimit.Store{store, memory} {
		for name, call := range map[string]func(ratelimit.Request) error{
			"reserve":       func(r ratelimit.Request) error { _, err := s.Reserve(t.Context(), r); return err },
			"check reserve": func(r ratelimit.Request) error { _, err := s.CheckReserve(t.Context(), r); return err },
			"wait":          func(r ratelimit.Request) error { _, err := s.Wait(t.Context(), r); return err },
			"credit":        func(r ratelimit.Request) error { _, err := s.Credit(t.Context(), r); return err },
			"below 0":       func(r ratelimit.Request) error { return s.Take(t.Context(), r.Above(-0.1)) },
			"above 1":       func(r ratelimit.Request) error { return s.Take(t.Context(), r.Above(1.1)) },
		} {
			var field *ratelimit.FieldError
			if err := call(limit.For("k").Above(0.2)); !errors.As(err, &field) || field.Field != "Above" || field.Limit != "api" {
				t.Errorf("%T, %s: got %v, want a FieldError of Above", s, name, err)
			}
		}
		var exceeds *ratelimit.ExceedsCapacityError
		if _, err := s.Allow(t.Context(), limit.ForN("k", 9).Above(0.2)); !errors.As(err, &exceeds) || exceeds.Most != 8 {
			t.Errorf("%T: got %v, want at most 8", s, err)
		}
		result, err := s.AllowAtMost(t.Context(), limit.ForN("k", 9).Above(0.2))
		if mustTake(t, result, err); result.Taken != 8 {
			t.Errorf("%T: got %v, want 8 taken", s, result)
		}
	}
}

// A settlement for more, several limits, and a reservation cross as a grant does. What comes
// back makes room for another crossing, and a transaction that is rolled back is told again.
func TestCrossed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, memory, ctx := newStore(t, db), memstore.New(nil), t.Context()
	for _, s := range []ratelimit.TxStore[pgx.Tx]{store, memory} {
		limit := ratelimit.FixedWindow{Name: "quota", Rate: 100, Period: 1e5 * time.Hour, MaxReserved: 100}
		other := ratelimit.SlidingWindow{Name: "other", Rate: 100, Period: 1e5 * time.Hour}
		check := func(want bool) func(ratelimit.Result, error) ratelimit.Result {
			return func(result ratelimit.Result, err error) ratelimit.Result {
				t.Helper()
				if err != nil || result.Crossed(0.8) != want {
					t.Errorf("%T: got %v (%v before), error %v, want crossed %v", s, result, result.Before, err, want)
				}
				return result
			}
		}
		taken := check(false)(s.Allow(ctx, limit.ForN("k", 70)))
		check(false)(s.Check(ctx, limit.ForN("k", 20)))
		check(true)(s.Settle(ctx, taken.Receipt, 85))
		check(false)(s.Allow(ctx, limit.ForN("k", 100))) // refused
		check(false)(s.Allow(ctx, limit.ForN("k", 1)))
		should(t, errOf(s.Credit(ctx, limit.ForN("k", 30))))
		check(true)(s.AllowAtMost(ctx, limit.ForN("k", 25)))
		check(false)(s.Reserve(ctx, limit.ForN("k", 50)))
		if both := check(true)(s.Allow(ctx, limit.ForN("l", 80), other.ForN("l", 1))); both.Several[1].Crossed(0.8) {
			t.Errorf("%T: crossed by %v", s, both.Several[1])
		}
		check(true)(s.Reserve(ctx, other.ForN("m", 80)))
		for range 2 {
			_, err := s.AllowFunc(ctx, []ratelimit.Request{limit.ForN("n", 80)}, func(_ pgx.Tx, result ratelimit.Result) error {
				check(true)(result, nil)
				return errRolledBack
			})
			if !errors.Is(err, errRolledBack) {
				t.Error(err)
			}
		}
	}
}

var errRolledBack = errors.New("rolled back")
