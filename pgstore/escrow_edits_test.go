package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// editing is a key that a store edits, of which some was taken before it was refilled and some since.
type editing struct {
	by           *pgstore.Store
	limit        ratelimit.Limit
	key          string
	before, late *ratelimit.Receipt
}

// changeTo is the edit by which a limit has another rate and capacity.
func changeTo(ctx context.Context, rate float64) func(e editing) error {
	return func(e editing) error { return errOf(e.by.Change(ctx, e.limit, ofRate(e.limit, rate), e.key)) }
}

func ofRate(limit ratelimit.Limit, rate float64) ratelimit.Limit {
	d := limit.Definition()
	d.Rate, d.Capacity = rate, rate
	return d.Limit()
}

// Whatever is done to a key by anybody, what its row and a memory grant together afterwards
// is no more than the capacity, and no less than what it should be.
func TestEscrowBesideEdits(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db, ctx := pgtest.New(t), t.Context()
	limits := map[string]ratelimit.Limit{
		"bucket":         ratelimit.TokenBucket{Name: "bucket", Rate: 1000, Period: time.Hour},
		"window":         ratelimit.FixedWindow{Name: "window", Rate: 1000, Period: time.Hour},
		"sliding window": ratelimit.SlidingWindow{Name: "sliding", Rate: 1000, Period: time.Hour},
	}
	for name, test := range map[string]struct {
		edit        func(editing) error
		least, most float64 // granted since the limit was full, what was used before the edit included
		rate        float64 // of the limit after the edit, if that has changed it
	}{
		"nothing":                          {func(editing) error { return nil }, 995, 1000, 0},
		"cancel of what has come in again": {func(e editing) error { return errOf(e.by.Cancel(ctx, e.before)) }, 1300, 1400, 0},    // 400 were used before
		"settle for less":                  {func(e editing) error { return errOf(e.by.Settle(ctx, e.late, 100)) }, 1095, 1100, 0}, // 100 of 200 were not used
		"credit of all":                    {func(e editing) error { return errOf(e.by.Credit(ctx, e.limit.ForN(e.key, 1000))) }, 1300, 1400, 0},
		"reset":                            {func(e editing) error { return e.by.Reset(ctx, e.limit, e.key) }, 1300, 1400, 0},
		"pause and resume": {func(e editing) error {
			return errors.Join(errOf(e.by.Pause(ctx, e.limit, e.key, time.Minute)), e.by.Resume(ctx, e.limit, e.key))
		}, 400, 1000, 0},
		// What is held by the old definition is lost when the process takes by the new one.
		"raise": {changeTo(ctx, 1500), 1200, 1500, 1500},
		"cut":   {changeTo(ctx, 500), 400, 500, 500},
	} {
		for kind, limit := range limits {
			for _, who := range []string{"the same store", "another", "another with escrow"} {
				for _, portable := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s/%s by %s, portable %v", name, kind, who, portable), func(t *testing.T) {
						t.Parallel()
						now, key, limit := newClock(), t.Name(), limit
						escrow := newStore(t, db, withEscrow(time.Second), isPortable(portable), onClock(now))
						by := map[string]*pgstore.Store{
							"the same store":      escrow,
							"another":             newStore(t, db, isPortable(portable), onClock(now)),
							"another with escrow": newStore(t, db, withEscrow(time.Second), isPortable(portable), onClock(now)),
						}[who]
						take := func(from *pgstore.Store, n float64) *ratelimit.Receipt {
							result, err := from.Allow(ctx, limit.ForN(key, n))
							return mustTake(t, result, err).Receipt
						}
						before := take(escrow, 900)
						now.add(3 * time.Hour)
						during := take(by, 200)
						granted := 200.0
						for ; granted < 400; granted += 5 {
							take(escrow, 5)
						}
						must(t, test.edit(editing{by, limit, key, before, during}))
						if test.rate > 0 {
							limit = ofRate(limit, test.rate)
						}
						row := newStore(t, db, isPortable(portable), onClock(now))
						drain := func(from *pgstore.Store) {
							for n := 100.0; n > 0.9; {
								result, err := from.Allow(ctx, limit.ForN(key, n))
								must(t, err)
								if granted += result.Taken; !result.OK {
									n /= 10
								}
							}
						}
						drain(row)
						drain(escrow)
						escrow.Close()
						drain(row)
						least, most := test.least, test.most
						if strings.HasPrefix(name, "cancel") && kind == "sliding window" { // no window holds the slot any more
							least, most = 995, 1000
						}
						if granted < least || granted > most {
							t.Errorf("granted %v, want from %v to %v", granted, least, most)
						}
					})
				}
			}
		}
	}
}

// raises are definitions, and what they are raised to.
var raises = map[string]struct{ from, to ratelimit.Limit }{
	"bucket":  {slow("bucket", 1e5), slow("bucket", 1e6)},
	"window":  {slowWindow("window", 1e5), slowWindow("window", 1e6)},
	"sliding": {slowSliding("sliding", 1e5), slowSliding("sliding", 1e6)},
	"calendar": {
		ratelimit.FixedWindow{Name: "calendar", Rate: 1e5, Every: ratelimit.Year},
		ratelimit.FixedWindow{Name: "calendar", Rate: 1e6, Every: ratelimit.Year},
	},
}

// A prefetch that waits for its row while the definition is raised does not cut what that added, nor
// does a return of tokens that the old definition prefetched, nor a receipt from before the raise that is
// settled while tokens are held. Only these tokens may be lost.
func TestEscrowKeepsARaise(t *testing.T) {
	t.Parallel()
	for name, change := range raises {
		for mode, portable := range map[string]bool{"": false, " portable": true} {
			t.Run(name+mode, func(t *testing.T) {
				t.Parallel()
				still := onClock(newClock()) // so that nothing ends, and nothing is given back as not needed
				store, sent, db := holding(t, pgstore.MaxEscrow, isPortable(portable), still)
				paid, err := store.Allow(t.Context(), change.from.ForN("k", 2))
				mustTake(t, paid, err)
				by, used := newStore(t, db, still), 2+warm(t, store, sent, change.from.For("k"))
				must(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
					if _, err := by.ChangeTx(t.Context(), tx, change.from, change.to, "k"); err != nil {
						return err
					}
					for ; store.Stats().Held[0].Tokens >= 2; used++ { // from memory: the row would keep it waiting
						mustAllow(t, store, change.from.For("k"))
					}
					eventually(t, "the prefetch waits", func() bool { return pgtest.Blocks(t, db.Pool, tx) })
					return nil
				}))
				if name == "bucket" || name == "window" {
					must(t, errOf(by.Settle(t.Context(), paid.Receipt, 1)))
					used--
				}
				store.Close()
				if left := leftOf(t, by, change.to, "k"); left > 1e6-used+1 || left < 1e6-1000 {
					t.Errorf("%v are left of 1e6, want all but the %v that were used, and what was held", left, used)
				}
			})
		}
	}
}
