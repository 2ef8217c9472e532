package pgstore_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// flooded are limits that more is wanted of than they have.
var flooded = map[string]ratelimit.Limit{
	"bucket":  ratelimit.TokenBucket{Name: "bucket", Rate: 500, Period: time.Second, Capacity: 100},
	"window":  ratelimit.FixedWindow{Name: "window", Rate: 100, Period: 200 * time.Millisecond},
	"sliding": ratelimit.SlidingWindow{Name: "sliding", Rate: 100, Period: 200 * time.Millisecond, Slots: 4},
}

const floodEscrow = 100 * time.Millisecond

// flood takes from a limit for a while, with pauses, in every form that can be served
// from memory, and tells what was granted.
func flood(ctx context.Context, store *pgstore.Store, limit ratelimit.Limit, lasts time.Duration, granted func(curve.Event)) error {
	var (
		group  sync.WaitGroup
		errs   = make([]error, 8)
		end    = time.Now().Add(lasts)
		failed = errors.New("failed")
	)
	for i := range errs {
		group.Go(func() {
			for n := 0; time.Now().Before(end) && errs[i] == nil; n++ {
				request := limit.ForN("k", float64(1+n%3))
				var result ratelimit.Result
				var err error
				switch {
				case n%4 == 3:
					result, err = store.AllowFunc(ctx, []ratelimit.Request{request}, func(pgx.Tx, ratelimit.Result) error {
						if n%8 == 7 {
							return failed
						}
						return nil
					})
				default:
					result, err = store.Allow(ctx, request)
				}
				switch {
				case err == nil && result.OK:
					granted(curve.Event{At: result.At, Count: request.Count})
				case err == nil, errors.Is(err, ratelimit.ErrRefused):
					time.Sleep(time.Duration(rand.IntN(5)) * time.Millisecond)
				case !errors.Is(err, failed):
					errs[i] = err
				}
				if n%200 == 199 {
					time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
				}
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

const (
	floodSchema = "RATELIMIT_TEST_ESCROW_SCHEMA"
	floodURL    = childURL + "_ESCROW"
	floodLimit  = "RATELIMIT_TEST_ESCROW_LIMIT"
)

// floodChild is what another process does.
func floodChild(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), os.Getenv(floodURL))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	store, err := pgstore.New(pool, &pgstore.Config{Schema: os.Getenv(floodSchema), Escrow: floodEscrow})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	var mu sync.Mutex
	err = flood(t.Context(), store, flooded[os.Getenv(floodLimit)], 4*time.Second, func(e curve.Event) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf("granted %d %g\n", e.At.UnixMicro(), e.Count)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// events reads what another process was granted.
func events(r io.Reader) (events []curve.Event, rest string) {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) != 3 || f[0] != "granted" {
			rest += lines.Text() + "\n"
			continue
		}
		at, _ := strconv.ParseInt(f[1], 10, 64)
		count, _ := strconv.ParseFloat(f[2], 64)
		events = append(events, curve.Event{At: time.UnixMicro(at), Count: count})
	}
	return events, rest
}

// Processes that take ahead, one of which is stopped for longer than what it holds lasts
// and goes on, and one of which is killed, use together what the limit grants at most, in
// every stretch of time.
func TestEscrowNeverOverInTwoProcesses(t *testing.T) {
	if os.Getenv(floodSchema) != "" {
		floodChild(t)
		return
	}
	for name, limit := range flooded {
		t.Run(name, func(t *testing.T) {
			db := pgtest.New(t, maxConns(8))
			var children [2]*exec.Cmd
			var outs [2]strings.Builder
			begun := dbNow(t, db)
			for i := range children {
				children[i] = exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestEscrowNeverOverInTwoProcesses$")
				children[i].Env = append(os.Environ(), floodURL+"="+db.URL, floodSchema+"="+db.Schema, floodLimit+"="+name)
				children[i].Stdout, children[i].Stderr = &outs[i], &outs[i]
				if err := children[i].Start(); err != nil {
					t.Fatal(err)
				}
			}
			for range 3 {
				time.Sleep(700 * time.Millisecond)
				signal(t, children[0], syscall.SIGSTOP)
				time.Sleep(3 * floodEscrow)
				signal(t, children[0], syscall.SIGCONT)
			}
			signal(t, children[1], syscall.SIGKILL)
			_ = children[1].Wait() // it was killed
			if err := children[0].Wait(); err != nil {
				t.Fatalf("%v\n%s", err, outs[0].String())
			}
			elapsed := dbNow(t, db).Sub(begun)
			var all []curve.Event
			total := 0.0
			for i := range outs {
				granted, rest := events(strings.NewReader(outs[i].String()))
				if len(granted) == 0 {
					t.Errorf("process %d was granted nothing:\n%s", i, rest)
				}
				for _, e := range granted {
					total += e.Count
				}
				all = append(all, granted...)
			}
			promised := curve.Of(limit.Definition())
			worst := curve.Judge(all, promised)
			t.Logf("%v; %g of %g in all", worst, total, promised(elapsed))
			if worst.Share > 1 || total > promised(elapsed) {
				t.Errorf("too much: %v; in all %g, bound %g", worst, total, promised(elapsed))
			}
			if worst.Share < 0.5 {
				t.Errorf("%v: too little to be a test", worst)
			}
		})
	}
}

func signal(t *testing.T, child *exec.Cmd, s syscall.Signal) {
	t.Helper()
	if err := child.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

func dbNow(t *testing.T, db *pgtest.DB) (now time.Time) {
	t.Helper()
	if err := db.Pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&now); err != nil {
		t.Fatal(err)
	}
	return now
}

// One process, on the database's clock and on one that is given and runs ahead by leaps.
func TestEscrowNeverOver(t *testing.T) {
	for name, limit := range flooded {
		for _, given := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, clock given %v", name, given), func(t *testing.T) {
				db := pgtest.New(t, maxConns(8))
				var stores [2]*pgstore.Store
				clock := newClock()
				for i := range stores {
					stores[i] = newStore(t, db, withEscrow(floodEscrow), func(c *pgstore.Config) {
						if given {
							c.Clock = clock.now
						}
					})
				}
				var (
					mu  sync.Mutex
					all []curve.Event
					wg  sync.WaitGroup
				)
				stop := make(chan struct{})
				if given {
					wg.Go(func() {
						for {
							select {
							case <-stop:
								return
							case <-time.After(time.Millisecond):
								clock.add(time.Duration(rand.IntN(10)*rand.IntN(10)*rand.IntN(3)) * 100 * time.Microsecond)
							}
						}
					})
				}
				var floods sync.WaitGroup
				for _, store := range stores {
					floods.Go(func() {
						err := flood(t.Context(), store, limit, 2*time.Second, func(e curve.Event) {
							mu.Lock()
							defer mu.Unlock()
							all = append(all, e)
						})
						if err != nil {
							t.Error(err)
						}
						store.Close()
					})
				}
				floods.Wait()
				close(stop)
				wg.Wait()
				worst := curve.Judge(all, curve.Of(limit.Definition()))
				t.Log(worst)
				if worst.Share > 1 || worst.Share < 0.5 {
					t.Errorf("%v", worst)
				}
			})
		}
	}
}

// What others took ahead and do not need is there for the one who needs it: when one of
// eight is busy, and when demand moves from one to the next.
func TestEscrowStrandsLittle(t *testing.T) {
	for kind, limit := range map[string]ratelimit.Limit{
		"bucket":  ratelimit.TokenBucket{Name: "bucket", Rate: 1000, Period: time.Second, Capacity: 200},
		"window":  ratelimit.FixedWindow{Name: "window", Rate: 200, Period: 200 * time.Millisecond},
		"sliding": ratelimit.SlidingWindow{Name: "sliding", Rate: 1000, Period: time.Second},
	} {
		for name, test := range map[string]struct {
			moves time.Duration
			least float64
		}{
			"one is busy":  {time.Hour, 0.95},
			"demand moves": {100 * time.Millisecond, 0.9},
		} {
			t.Run(kind+", "+name, func(t *testing.T) { strands(t, limit, test.moves, test.least) })
		}
	}
}

// strands has demand of the first of eight stores, or of each for a while in turn, and
// wants them to get so large a part of what the limit grants to a flood.
func strands(t *testing.T, limit ratelimit.Limit, moves time.Duration, least float64) {
	db := pgtest.New(t, maxConns(8))
	var stores [8]*pgstore.Store
	for i := range stores {
		stores[i] = newStore(t, db, withEscrow(floodEscrow))
		defer stores[i].Close()
		for range 16 { // so that each has some to give back
			if _, err := stores[i].Allow(t.Context(), limit.For("k")); err != nil {
				t.Fatal(err)
			}
		}
	}
	d := limit.Definition()
	rate := d.Rate / d.Period.Seconds()
	if d.Kind == ratelimit.KindSlidingWindow {
		rate *= float64(d.Slots) / float64(d.Slots+1)
	}
	const settles, lasts = time.Second, 3 * time.Second // after the burst
	var granted atomic.Int64
	var wg sync.WaitGroup
	begun := time.Now()
	for range 16 {
		wg.Go(func() {
			for past := time.Duration(0); past < settles+lasts; past = time.Since(begun) {
				store := stores[int(past/moves)%len(stores)]
				result, err := store.Allow(t.Context(), limit.For("k"))
				switch {
				case err != nil:
					t.Error(err)
					return
				case !result.OK:
					time.Sleep(min(result.RetryAfter, moves))
				case past >= settles:
					granted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	share := float64(granted.Load()) / (rate * lasts.Seconds())
	t.Logf("granted %d, %.3f of the rate", granted.Load(), share)
	if share < least {
		t.Errorf("got %.3f of the rate, want %v", share, least)
	}
}

// Demand that is less than what a limit grants is granted, as it is without memory: what
// one process took ahead and did not need does not stay counted.
func TestEscrowRefusesNothingThatIsThere(t *testing.T) {
	for name, limit := range map[string]ratelimit.Limit{
		"bucket":  ratelimit.TokenBucket{Name: "bucket", Rate: 1000, Period: time.Second, Capacity: 300},
		"window":  ratelimit.FixedWindow{Name: "window", Rate: 1000, Period: time.Second},
		"sliding": ratelimit.SlidingWindow{Name: "sliding", Rate: 1000, Period: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			store := newStore(t, pgtest.New(t), withEscrow(floodEscrow))
			defer store.Close()
			begun, asked, granted := time.Now(), 0, 0
			for past := time.Duration(0); past < 3*time.Second; past = time.Since(begun) {
				for ; float64(asked) < 750*past.Seconds(); asked++ {
					result, err := store.Allow(t.Context(), limit.For("k"))
					if err != nil {
						t.Fatal(err)
					}
					if result.OK {
						granted++
					}
				}
				time.Sleep(time.Millisecond)
			}
			t.Logf("granted %d of %d", granted, asked)
			if granted < asked*95/100 {
				t.Errorf("granted %d of %d", granted, asked)
			}
		})
	}
}

// While somebody holds what he took ahead, the row does not fill up so far that both are
// more than the capacity; and what is given back just before its end counts for less, or
// the row would fill up while somebody else holds what he took in the meantime.
func TestEscrowAndRowTogether(t *testing.T) {
	limit := ratelimit.TokenBucket{Name: "bucket", Rate: 5, Period: time.Second, Capacity: 200}
	const almost = pgstore.MaxEscrow - time.Millisecond
	for name, between := range map[string]func(*sharing){
		"held until the end": func(to *sharing) {
			to.warm(0)
			to.clock.add(almost)
		},
		"given back before the end": func(to *sharing) {
			to.warm(0)
			to.clock.add(almost)
			to.warm(1)
			to.stores[0].Close()
			to.clock.add(almost)
		},
	} {
		t.Run(name, func(t *testing.T) {
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
			t.Log(worst)
			if worst.Share > 1 || worst.Share < 0.8 {
				t.Errorf("%v", worst)
			}
		})
	}
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
	for range 16 {
		to.allow(to.stores[i])
	}
}

func (to *sharing) allow(store *pgstore.Store) bool {
	to.t.Helper()
	result, err := store.Allow(to.t.Context(), to.limit.For("k"))
	if err != nil {
		to.t.Fatal(err)
	}
	if result.OK {
		to.events = append(to.events, curve.Event{At: result.At, Count: 1})
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
