package pgstore_test

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// What Config.Escrow costs, by the table in docs/scaling.md. Other lines of it are measured by
// TestEscrowBesideEdits, TestRefusalsAreRemembered, TestEscrowInTransactions and
// TestEscrowTellsWhatIsThere.

// allowed takes tokens one by one until they are refused, and returns how many those were.
func allowed(t *testing.T, store *pgstore.Store, r ratelimit.Request) (n float64) {
	t.Helper()
	for {
		result, err := store.Allow(t.Context(), r)
		must(t, err)
		if !result.OK {
			return n
		}
		n++
	}
}

// The largest burst is lower by what is refilled in Escrow, once the process prefetches.
func TestEscrowCostsOfABurst(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket{Name: "bucket", Rate: 1000, Period: time.Second, Capacity: 1000}
	for name, test := range map[string]struct{ escrow, least, most float64 }{
		"without": {0, 1000, 1000},
		"with":    {0.1, 900, 999},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, _, _ := holding(t, time.Duration(test.escrow*float64(time.Second)), onClock(newClock()))
			defer store.Close()
			if n := allowed(t, store, limit.For("k")); n < test.least || n > test.most {
				t.Errorf("got %v at once, want from %v to %v", n, test.least, test.most)
			}
		})
	}
}

// Nothing is prefetched from a bucket that holds less than is refilled in Escrow.
func TestEscrowCostsNothingOfASmallBucket(t *testing.T) {
	t.Parallel()
	store, sent, _ := holding(t, time.Second, onClock(newClock()))
	defer store.Close()
	limit := ratelimit.TokenBucket{Name: "bucket", Rate: 1000, Period: time.Second, Capacity: 900}
	mustAllow(t, store, limit.For("k")) // makes the row
	before := sent.Sends()
	if n := allowed(t, store, limit.For("k")); n != 899 || sent.Sends()-before < 899 {
		t.Errorf("got %v of 899 by %d statements, want one for each", n, sent.Sends()-before)
	}
}

// What a process that is killed holds is not granted; others have the rest.
func TestEscrowCostsOfAKill(t *testing.T) {
	t.Parallel()
	limit, c := slow("bucket", 200), newClock()
	store, sent, db := holding(t, pgstore.MaxEscrow, onClock(c)) // it neither returns nor is closed while this runs
	used := warm(t, store, sent, limit.For("k"))
	rest := allowed(t, newStore(t, db, onClock(c)), limit.For("k"))
	if lost := 200 - used - rest; lost < 1 || lost > 100 {
		t.Errorf("%v granted, %v by others: %v lost, want some, and half at most", used, rest, lost)
	}
}

// What comes back more than a second after its end, since its process was stopped or the row was
// locked, may find no room: a row that is nearly full leaves room for what it counts as out. Then
// it is lost, until it is refilled.
func TestEscrowCostsOfALateReturn(t *testing.T) {
	t.Parallel()
	limit, c := slow("bucket", 1000), newClock()
	store, sent, db := holding(t, pgstore.MaxEscrow, onClock(c)) // its timer does not ring while this runs
	used := warm(t, store, sent, limit.For("k"))
	held := store.Stats().Held[0].Tokens
	c.add(pgstore.MaxEscrow + bucket.Grace)
	store.Close()
	if lost := lacks(t, db, limit) - used; lost < 0 || lost > held+0.5 {
		t.Errorf("%v of the %v held are lost, want no more", lost, held)
	}
}

// A pause by another process is heeded when what is held has ended.
func TestEscrowCostsOfAPauseByOthers(t *testing.T) {
	t.Parallel()
	const lasts = pgstore.MaxEscrow
	limit, c := slow("bucket", 1000), newClock()
	store, sent, db := holding(t, lasts, onClock(c))
	defer store.Close()
	warm(t, store, sent, limit.For("k"))
	must(t, errOf(newStore(t, db, onClock(c)).Pause(t.Context(), limit, "k", time.Hour)))
	mustAllow(t, store, limit.For("k"))
	c.add(lasts)
	if n := allowed(t, store, limit.For("k")); n != 0 {
		t.Errorf("got %v after Escrow, want none in the pause", n)
	}
}

// Tokens that a definition has prefetched are used when it has changed, until they end.
func TestEscrowCostsOfAChangedDefinition(t *testing.T) {
	t.Parallel()
	const lasts = pgstore.MaxEscrow
	limit, c := slow("bucket", 1000), newClock()
	store, sent, db := holding(t, lasts, onClock(c))
	defer store.Close()
	warm(t, store, sent, limit.For("k"))
	changed := newStore(t, db, onClock(c))
	must(t, changed.Take(t.Context(), slow("bucket", 10).ForN("k", 10)))
	if n := allowed(t, changed, slow("bucket", 10).For("k")); n != 0 {
		t.Fatalf("got %v more of 10", n)
	}
	mustAllow(t, store, limit.For("k"))
	c.add(lasts)
	if n := allowed(t, store, slow("bucket", 10).For("k")); n != 0 {
		t.Errorf("got %v after Escrow, want none", n)
	}
}
