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

// What comes back beside tokens that are held in memory, and what is left of them.

// A transaction that is rolled back when what it had from memory is over there has cost
// nothing, as without memory.
func TestEscrowRollbackAfterTheEnd(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	failed := errors.New("failed")
	for name, portable := range map[string]bool{"plain": false, "portable": true} {
		for _, limit := range []ratelimit.Limit{slow("bucket", 1000), slowWindow("window", 1000)} {
			t.Run(name+" "+ratelimit.NameOf(limit), func(t *testing.T) {
				t.Parallel()
				const lasts = 50 * time.Millisecond
				store, sent, db := holding(t, lasts, isPortable(portable))
				used := 0.0
				for lost := 0; lost < 3; {
					used += warm(t, store, sent, limit.For("k"))
					before := sent.Sends()
					_, err := store.AllowFunc(t.Context(), []ratelimit.Request{limit.ForN("k", 2)}, func(pgx.Tx, ratelimit.Result) error {
						if sent.Sends() == before+1 { // BEGIN alone: it is from memory
							lost++
						}
						time.Sleep(2 * lasts) // longer than what is held lasts
						return failed
					})
					if !errors.Is(err, failed) {
						t.Fatal(err)
					}
				}
				store.Close()
				if lacks := lacks(t, db, limit); lacks < used-0.5 || lacks > used+0.5 {
					t.Errorf("the row lacks %v, want %v", lacks, used)
				}
			})
		}
	}
}

type editing func(ctx context.Context, by *pgstore.Store, limit ratelimit.Limit, key string, receipts []*ratelimit.Receipt) error

// changeTo is the edit by which a limit has another rate and capacity.
func changeTo(rate float64) editing {
	return func(ctx context.Context, by *pgstore.Store, limit ratelimit.Limit, key string, _ []*ratelimit.Receipt) error {
		return errOf(by.Change(ctx, limit, ofRate(limit, rate), key))
	}
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
	db := pgtest.New(t)
	limits := map[string]ratelimit.Limit{
		"bucket":         ratelimit.TokenBucket{Name: "bucket", Rate: 1000, Period: time.Hour},
		"window":         ratelimit.FixedWindow{Name: "window", Rate: 1000, Period: time.Hour},
		"sliding window": ratelimit.SlidingWindow{Name: "sliding", Rate: 1000, Period: time.Hour},
	}
	for name, test := range map[string]struct {
		edit        editing
		least, most float64 // granted since the limit was full, what was used before the edit included
		rate        float64 // of the limit after the edit, if that has changed it
	}{
		"nothing": {edit: func(context.Context, *pgstore.Store, ratelimit.Limit, string, []*ratelimit.Receipt) error { return nil }, least: 995, most: 1000},
		"cancel of what has come in again": {edit: func(ctx context.Context, by *pgstore.Store, _ ratelimit.Limit, _ string, receipts []*ratelimit.Receipt) error {
			return errOf(by.Cancel(ctx, receipts[0]))
		}, least: 1300, most: 1400}, // 400 were used before
		"settle for less": {edit: func(ctx context.Context, by *pgstore.Store, _ ratelimit.Limit, _ string, receipts []*ratelimit.Receipt) error {
			return errOf(by.Settle(ctx, receipts[1], 100))
		}, least: 1095, most: 1100}, // 100 of 200 were not used
		"credit of all": {edit: func(ctx context.Context, by *pgstore.Store, limit ratelimit.Limit, key string, _ []*ratelimit.Receipt) error {
			return errOf(by.Credit(ctx, limit.ForN(key, 1000)))
		}, least: 1300, most: 1400},
		"reset": {edit: func(ctx context.Context, by *pgstore.Store, limit ratelimit.Limit, key string, _ []*ratelimit.Receipt) error {
			return by.Reset(ctx, limit, key)
		}, least: 1300, most: 1400},
		"pause and resume": {edit: func(ctx context.Context, by *pgstore.Store, limit ratelimit.Limit, key string, _ []*ratelimit.Receipt) error {
			if _, err := by.Pause(ctx, limit, key, time.Minute); err != nil {
				return err
			}
			return by.Resume(ctx, limit, key)
		}, least: 400, most: 1000},
		// What is held by the old definition is lost when the process takes by the new one.
		"raise": {edit: changeTo(1500), least: 1200, most: 1500, rate: 1500},
		"cut":   {edit: changeTo(500), least: 400, most: 500, rate: 500},
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
							result, err := from.Allow(t.Context(), limit.ForN(key, n))
							if err != nil || !result.OK {
								t.Fatalf("%v, %v", result, err)
							}
							return result.Receipt
						}
						before := take(escrow, 900)
						now.add(3 * time.Hour)
						during := take(by, 200)
						granted := 200.0
						for ; granted < 400; granted += 5 {
							take(escrow, 5)
						}
						must(t, test.edit(t.Context(), by, limit, key, []*ratelimit.Receipt{before, during}))
						if test.rate > 0 {
							limit = ofRate(limit, test.rate)
						}
						row := newStore(t, db, isPortable(portable), onClock(now))
						drain := func(from func(n float64) (ratelimit.Result, error)) {
							for n := 100.0; n > 0.9; {
								result, err := from(n)
								must(t, err)
								if result.OK {
									granted += n
								} else {
									n /= 10
								}
							}
						}
						drain(func(n float64) (ratelimit.Result, error) { return row.Allow(t.Context(), limit.ForN(key, n)) })
						drain(func(n float64) (ratelimit.Result, error) { return escrow.Allow(t.Context(), limit.ForN(key, n)) })
						escrow.Close()
						drain(func(n float64) (ratelimit.Result, error) { return row.Allow(t.Context(), limit.ForN(key, n)) })
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
