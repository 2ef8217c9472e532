package catalog_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// process is a process with a catalog and a store of its own.
type process struct {
	c     *catalog.Catalog
	store *pgstore.Store
	fresh bool // it has seen every change
}

// grant is what was granted at an instant, and to the larger of the definitions that some
// process may have gone by since.
type grant struct {
	at    time.Time
	n     float64
	most  ratelimit.Definition
	epoch int // of the changes that every process had seen
}

// Two processes take from one key while it is changed, and look at instants of their own. Each
// call is answered as memory answers it, by the definition that the process goes by. In any
// stretch of time in which both had seen all there was to see, no more is granted than by what
// holds; and otherwise, no more than by the larger of the definitions that held.
func TestProcessesWhileTheCatalogChanges(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const rounds = 4
	for _, limit := range []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "l", Rate: 30, Period: time.Minute, Capacity: 20},
		ratelimit.FixedWindow{Name: "l", Rate: 20, Period: 30 * time.Second, Start: noon},
		ratelimit.SlidingWindow{Name: "l", Rate: 20, Period: 30 * time.Second, Slots: 5, Start: noon},
	} {
		for range rounds {
			seed := rand.Uint64()
			t.Run(fmt.Sprint(limit.Definition().Kind, " ", seed), func(t *testing.T) {
				t.Parallel()
				processesAgainstMemory(t, limit, rand.New(rand.NewPCG(seed, 0)))
			})
		}
	}
}

func processesAgainstMemory(t *testing.T, limit ratelimit.Limit, r *rand.Rand) {
	db, now := newDB(t), noon
	clock := func() time.Time { return now }
	memory := memstore.New(clock)
	processes := make([]*process, 2)
	for i := range processes {
		p := &process{fresh: true}
		p.c, _ = newCatalog(t, db, func(c *catalog.Config) { c.Clock = clock })
		p.store = newStore(t, db, pgstore.Config{Clock: clock})
		must(t, p.c.Publish(t.Context(), limit))
		processes[i] = p
	}
	hands, _ := newCatalog(t, db, func(c *catalog.Config) { c.Clock = clock }) // somebody's in psql
	var grants []grant
	most, epoch := limit.Definition(), 0
	settled := func() bool { return processes[0].fresh && processes[1].fresh }
	for step := 0; step < 250 || epoch < 4 && step < 2500; step++ {
		now = now.Add(time.Duration(r.IntN(700)) * time.Millisecond)
		p := processes[r.IntN(2)]
		switch r.IntN(12) {
		case 0:
			o := catalog.Override{Clear: catalog.AllFields, Rate: float64(5 + r.IntN(40)), Mode: []ratelimit.Mode{0, 0, ratelimit.ModeEnforce, ratelimit.ModeRefuse, ratelimit.ModeShadow}[r.IntN(5)]}
			edited(t)(hands.Set(t.Context(), "l", "k", o))
			holds := hands.For(limit, "k").Limit.Definition()
			if settled() {
				epoch++
			}
			most.Rate, most.Capacity = max(most.Rate, holds.Rate), max(most.Capacity, holds.Capacity)
			processes[0].fresh, processes[1].fresh = false, false
		case 1, 2:
			must(t, p.c.Refresh(t.Context()))
			if was := settled(); !p.fresh {
				if p.fresh = true; !was && settled() {
					epoch++
					most = p.c.For(limit, "k").Limit.Definition()
				}
			}
		default:
			request := p.c.ForN(limit, "k", float64(1+r.IntN(5)))
			got, err := p.store.Allow(t.Context(), request)
			want, wantErr := memory.Allow(t.Context(), request)
			if errors.Is(err, ratelimit.ErrExceedsCapacity) && errors.Is(wantErr, ratelimit.ErrExceedsCapacity) {
				continue
			}
			must(t, errors.Join(err, wantErr))
			if got.String() != want.String() || got.Value-want.Value > 1e-9 || want.Value-got.Value > 1e-9 || got.RetryAfter != want.RetryAfter || got.Shadowed != want.Shadowed || request.Mode == ratelimit.ModeRefuse && got.OK {
				t.Fatalf("at %v: got %v, value %g, and memory %v, value %g", now.Sub(noon), got, got.Value, want, want.Value)
			}
			if got.OK {
				grants = append(grants, grant{at: now, n: got.Taken, most: most, epoch: epoch})
			}
		}
	}
	if epoch < 4 || len(grants) < 8 {
		t.Fatalf("got %d epochs and %d grants, so this tests nothing", epoch, len(grants))
	}
	wantNeverOver(t, limit, grants)
}

// wantNeverOver wants that between no two grants more was granted than by the largest of the
// definitions that held meanwhile.
func wantNeverOver(t *testing.T, limit ratelimit.Limit, grants []grant) {
	t.Helper()
	for i := range grants {
		sum, most := 0.0, grants[i].most
		for _, g := range grants[i:] {
			sum += g.n
			most.Rate, most.Capacity = max(most.Rate, g.most.Rate), max(most.Capacity, g.most.Capacity)
			took := g.at.Sub(grants[i].at)
			bound := most.Capacity
			switch most.Kind {
			case ratelimit.KindTokenBucket:
				bound += most.Rate * float64(took) / float64(most.Period)
			case ratelimit.KindFixedWindow:
				bound += most.Rate * float64(g.at.Sub(noon)/most.Period-grants[i].at.Sub(noon)/most.Period)
			case ratelimit.KindSlidingWindow:
				if took >= most.Period {
					continue
				}
			}
			if sum > bound+1e-6 {
				t.Fatalf("%v: %g granted in %v, from %v on, of at most %g by %v", limit, sum, took, grants[i].at.Sub(noon), bound, most)
			}
		}
	}
}

// With Escrow, a definition that is lowered or raised holds after that time at the latest, in a
// process that holds tokens and remembers refusals.
func TestChangesHoldAfterEscrow(t *testing.T) {
	t.Parallel()
	const escrow = 500 * time.Millisecond
	db := newDB(t)
	ctx := t.Context()
	c, _ := newCatalog(t, db)
	limit := ratelimit.TokenBucket{Name: "hot", Rate: 10, Period: time.Hour, Capacity: 100_000}
	must(t, c.Publish(ctx, limit))
	store := newStore(t, db, pgstore.Config{Escrow: escrow})
	allow := func() bool {
		t.Helper()
		result, err := store.Allow(ctx, c.For(limit, ""))
		must(t, err)
		return result.OK
	}
	for range 5000 { // hot, so that tokens are held
		if !allow() {
			t.Fatal("refused")
		}
	}

	edited(t)(c.Set(ctx, "hot", "", catalog.Override{Capacity: 50}))
	time.Sleep(escrow) // for which tokens that are held may be handed out
	granted := 0
	for allow() {
		granted++
	}
	if granted > 50 {
		t.Errorf("lowered: %d granted, want at most 50", granted)
	}

	for range 1000 {
		allow() // refused, and remembered
	}
	edited(t)(c.Set(ctx, "hot", "", catalog.Override{Rate: 1e6, Period: time.Second, Capacity: 100}))
	raised := time.Now()
	for !allow() {
		if time.Since(raised) > escrow+5*time.Second {
			t.Fatal("raised, and still refused")
		}
	}
	t.Logf("raised after %v", time.Since(raised))
}
