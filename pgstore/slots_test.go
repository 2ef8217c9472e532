package pgstore_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// What one call takes from several shards of a sliding window counts in one slot, while
// other calls move the shards on. In several slots, a row would forget its part before a
// period was over.
func TestShardsOfSlidingWindowCountInOneSlot(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const enough = 12 // calls that took from several shards
	db := pgtest.New(t)
	for i, form := range append(takeForms, reserveForms...) {
		t.Run(fmt.Sprint(i, " ", form.name), func(t *testing.T) {
			t.Parallel()
			// Slots of 2 ms, so that one often begins within a call.
			limit := ratelimit.SlidingWindow{Name: "l", Rate: 30, Period: 20 * time.Millisecond, Slots: 10, Shards: 3, MaxReserved: 30}
			var (
				mu    sync.Mutex
				paid  [][]receipt.Payment
				group sync.WaitGroup
				key   = t.Name()
			)
			until := time.Now().Add(time.Minute)
			for n := range 6 {
				store, random := newStore(t, db, form.change), rand.New(rand.NewPCG(uint64(n), uint64(i)))
				group.Go(func() {
					for found := 0; found < enough && time.Now().Before(until); {
						result, err := form.take(t.Context(), db.Pool, store, limit.ForN(key, float64(1+random.IntN(14))))
						if err != nil && !errors.Is(err, ratelimit.ErrRefused) {
							t.Error(err)
							return
						}
						mu.Lock()
						if result.OK {
							if p := receipt.Payments(result.Receipt); len(p) > 1 {
								paid = append(paid, p)
							}
						}
						found = len(paid)
						mu.Unlock()
					}
				})
			}
			group.Wait()
			if len(paid) < enough {
				t.Errorf("%d calls took from several shards, want %d", len(paid), enough)
			}
			for _, p := range paid {
				for _, part := range p {
					if part.Slot != p[0].Slot {
						t.Errorf("paid %+v, want one slot", p)
						break
					}
				}
			}
		})
	}
}
