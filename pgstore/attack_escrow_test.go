package pgstore_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// What is told of tokens from memory, and what the rows lack in the end: the same. Nothing
// is refilled, as the clock stands still, so what was taken ahead has no end either.

// scant are limits of each kind that a test uses up now and then.
var scant = []ratelimit.Limit{
	ratelimit.TokenBucket{Name: "bucket", Rate: 2000, Period: 1e5 * time.Hour, MaxReserved: ratelimit.None},
	ratelimit.FixedWindow{Name: "window", Rate: 2000, Period: 1e5 * time.Hour, MaxReserved: ratelimit.None},
	ratelimit.SlidingWindow{Name: "sliding", Rate: 2000, Period: 1e5 * time.Hour, MaxReserved: ratelimit.None},
}

// books are what was told: of each limit, by its name, how much was used at least and at
// most. Most callers know exactly.
type books struct {
	t     *testing.T
	least [3]float64
	most  [3]float64
	mu    sync.Mutex
	taken []*ratelimit.Receipt // to be settled
	each  [][3]float64         // of what those say
	done  map[string]int       // what happened
}

// note notes what somebody was told of a call: that its tokens are used, that they are
// not, or neither.
func (b *books) note(what string, counts [3]float64, used, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done[what]++
	for i, n := range counts {
		if used {
			b.least[i] += n
			b.most[i] += n
		} else if !known {
			b.most[i] += n
		}
	}
}

// keep keeps the receipt of what is used, to be settled by somebody.
func (b *books) keep(r *ratelimit.Receipt, counts [3]float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.taken, b.each = append(b.taken, r), append(b.each, counts)
}

// pick takes a receipt out of those that were kept.
func (b *books) pick() (r *ratelimit.Receipt, counts [3]float64, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.taken) == 0 {
		return nil, counts, false
	}
	i, last := rand.IntN(len(b.taken)), len(b.taken)-1
	r, counts = b.taken[i], b.each[i]
	b.taken[i], b.each[i] = b.taken[last], b.each[last]
	b.taken, b.each = b.taken[:last], b.each[:last]
	return r, counts, true
}

// customer is somebody who asks a store in every way that there is.
type customer struct {
	*books
	store *pgstore.Store
	pool  *pgxpool.Pool
	unit  float64 // of counts
}

// requests are for one limit or several, and how much they are for of each.
func (c *customer) requests() (requests []ratelimit.Request, counts [3]float64) {
	for i, limit := range scant {
		if rand.IntN(3) == 0 {
			counts[i] = c.unit * float64(1+rand.IntN(8))
			requests = append(requests, limit.ForN("k", counts[i]))
		}
	}
	if requests == nil {
		i := rand.IntN(len(scant))
		counts[i] = c.unit
		requests = append(requests, scant[i].ForN("k", c.unit))
	}
	return requests, counts
}

// once does one of all things that can be done.
func (c *customer) once(ctx context.Context) {
	requests, counts := c.requests()
	switch n := rand.IntN(20); n {
	case 0, 1, 2, 3, 4, 5, 6:
		result, err := c.store.Allow(ctx, requests...)
		c.told("allow", result, err, counts, false)
	case 7, 8:
		result, err := c.store.Reserve(ctx, requests...)
		c.told("reserve", result, err, counts, false)
	case 9:
		result, err := c.store.Wait(ctx, requests...)
		if errors.Is(err, ratelimit.ErrRefused) {
			err = nil
		}
		c.told("wait", result, err, counts, false)
	case 10:
		c.inOwn(ctx, requests, counts)
	case 11, 12, 13, 14, 15, 16:
		c.inRunner(ctx, requests, counts)
	case 17:
		i := rand.IntN(len(scant))
		result, err := c.store.AllowAtMost(ctx, scant[i].ForN("k", 3))
		counts = [3]float64{}
		counts[i] = result.Taken
		c.told("at most", result, err, counts, false)
	default:
		c.settle(ctx)
	}
}

// told notes a call that was answered. If it was ended by its function, or by nobody
// knows whom, its tokens may be used when it is told an error.
func (c *customer) told(what string, result ratelimit.Result, err error, counts [3]float64, ended bool) {
	switch {
	case err == nil && result.OK:
		c.note(what+", granted", counts, true, true)
		if rand.IntN(2) == 0 {
			c.keep(result.Receipt, counts)
		}
	case err == nil || errors.Is(err, ratelimit.ErrRefused):
		c.note(what+", refused", counts, false, true)
	case errors.Is(err, pgstore.ErrOutcomeUnknown) || ended:
		c.note(what+", not known", counts, false, false)
	case errors.Is(err, errUndone) || errors.Is(err, context.Canceled):
		c.note(what+", undone", counts, false, true)
	default:
		c.t.Errorf("%s: %v", what, err)
	}
}

// inOwn takes in a transaction of its own.
func (c *customer) inOwn(ctx context.Context, requests []ratelimit.Request, counts [3]float64) {
	var result ratelimit.Result
	err := pgx.BeginTxFunc(ctx, c.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) {
		if result, err = c.store.AllowTx(ctx, tx, requests...); err == nil && rand.IntN(2) == 0 {
			err = errUndone
		}
		return err
	})
	c.told("in a transaction", result, err, counts, false)
}

// customs are what a function of the runner can come to.
var customs = []struct {
	name  string
	end   func(ctx context.Context, cancel func(), tx pgx.Tx) error
	ended bool // it ends the transaction itself
}{
	{"commit", func(context.Context, func(), pgx.Tx) error { return nil }, false},
	{"error", func(context.Context, func(), pgx.Tx) error { return errUndone }, false},
	{"panic", func(context.Context, func(), pgx.Tx) error { panic(errUndone) }, false},
	{"goexit", func(context.Context, func(), pgx.Tx) error { runtime.Goexit(); return nil }, false},
	{"cancel", func(_ context.Context, cancel func(), _ pgx.Tx) error { cancel(); return nil }, false},
	{"cancel and error", func(_ context.Context, cancel func(), _ pgx.Tx) error { cancel(); return errUndone }, false},
	{"commit itself", func(ctx context.Context, _ func(), tx pgx.Tx) error { return tx.Commit(ctx) }, true},
	{"commit itself and panic", func(ctx context.Context, _ func(), tx pgx.Tx) error {
		if err := tx.Commit(ctx); err != nil {
			return err
		}
		panic(errUndone)
	}, true},
	{"roll back itself", func(ctx context.Context, _ func(), tx pgx.Tx) error {
		return errors.Join(tx.Rollback(ctx), errUndone)
	}, true},
}

// inRunner takes in a transaction of the runner, on a goroutine that may end there.
func (c *customer) inRunner(ctx context.Context, requests []ratelimit.Request, counts [3]float64) {
	ending := customs[rand.IntN(len(customs))]
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	run := c.store.AllowFunc
	if rand.IntN(3) == 0 {
		run = c.store.ReserveFunc
	}
	var result ratelimit.Result
	err := errUndone // if the goroutine ends
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				err = p.(error)
			}
		}()
		result, err = run(ctx, requests, func(tx pgx.Tx, _ ratelimit.Result) error { return ending.end(ctx, cancel, tx) })
	}()
	<-done
	if err != nil {
		result = ratelimit.Result{}
	}
	c.told("runner, "+ending.name, result, err, counts, ending.ended)
}

// settle settles what somebody has taken, for less or more, or cancels it.
func (c *customer) settle(ctx context.Context) {
	r, counts, ok := c.pick()
	if !ok {
		return
	}
	if rand.IntN(2) == 0 {
		cancelled, err := c.store.Cancel(ctx, r)
		if err == nil && !cancelled {
			c.t.Error("there was nothing to cancel")
		}
		c.settled("cancel", [3]float64{-counts[0], -counts[1], -counts[2]}, err)
		return
	}
	var used []float64
	var more [3]float64
	for i, had := range counts {
		if had > 0 { // in the order of the call, too
			n := c.unit * float64(rand.IntN(10))
			used = append(used, n)
			more[i] = n - had
		}
	}
	_, err := c.store.Settle(ctx, r, used...)
	c.settled("settle", more, err)
}

// settled notes by how much more is used. If that failed, it may be or not.
func (c *customer) settled(what string, more [3]float64, err error) {
	if err == nil {
		c.note(what, more, true, true)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t.Logf("%s: %v", what, err)
	for i, n := range more {
		c.least[i] += min(n, 0)
		c.most[i] += max(n, 0)
	}
}

// balance compares the books with the rows.
func (b *books) balance(db *pgtest.DB, tolerance float64) {
	b.t.Helper()
	if b.done["allow, granted"] < 50 || b.done["runner, panic, undone"] < 3 || b.done["cancel"] < 3 {
		b.t.Errorf("too little to be a test: %v", b.done)
	}
	for i, limit := range scant {
		lacks := lacks(b.t, db, limit)
		if lacks < b.least[i]-tolerance || lacks > b.most[i]+tolerance {
			b.t.Errorf("the row of %s lacks %v, used were from %v to %v", ratelimit.NameOf(limit), lacks, b.least[i], b.most[i])
		}
	}
}

// TestEscrowAccounts has customers of stores, that take ahead for different times and not
// at all, do all that can be done.
func TestEscrowAccounts(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, test := range map[string]struct {
		unit   float64
		escrow []time.Duration
		conns  int32
		role   string // settings of connections
	}{
		"one store":             {1, []time.Duration{pgstore.MaxEscrow}, 8, ""},
		"three, and one by row": {1, []time.Duration{pgstore.MaxEscrow, time.Second, 10 * time.Millisecond, 0}, 8, ""},
		"a pool of one":         {1, []time.Duration{pgstore.MaxEscrow}, 1, ""},
		"tenths":                {0.1, []time.Duration{pgstore.MaxEscrow, time.Second}, 8, ""},
		"serializable":          {1, []time.Duration{pgstore.MaxEscrow, time.Second}, 8, "serializable"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, maxConns(test.conns), pgtest.WithConfig(func(c *pgxpool.Config) {
				if test.role != "" {
					c.ConnConfig.RuntimeParams["default_transaction_isolation"] = test.role
				}
			}))
			b := &books{t: t, done: make(map[string]int)}
			ctx, stop := context.WithTimeout(t.Context(), time.Minute)
			defer stop()
			var stores []*pgstore.Store
			var group sync.WaitGroup
			for _, lasts := range test.escrow {
				store := newStore(t, db, onClock(newClock()), withEscrow(lasts))
				stores = append(stores, store)
				for range 6 {
					c := customer{b, store, db.Pool, test.unit}
					group.Go(func() {
						for range 96 / len(test.escrow) {
							c.once(ctx)
						}
					})
				}
			}
			done := make(chan struct{})
			var pruning sync.WaitGroup
			pruning.Go(func() {
				for pruner := newStore(t, db, onClock(newClock())); ; {
					select {
					case <-done:
						return
					case <-time.After(10 * time.Millisecond):
						if _, err := pruner.Prune(t.Context(), scant...); err != nil {
							t.Error(err)
						}
					}
				}
			})
			group.Wait()
			close(done)
			pruning.Wait()
			for _, store := range stores {
				store.Close()
			}
			b.balance(db, 1e-3) // a row that was full is lowered by what is refilled in MaxEscrow
		})
	}
}

// What somebody else has locked for a while is given back afterwards.
func TestEscrowGivesBackToALockedRow(t *testing.T) {
	t.Parallel()
	for name, limit := range sluggish {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, sent, db := holding(t, pgstore.MaxEscrow)
			used := warm(t, store, sent, limit.For("k"))
			tx := begin(t, db, pgx.ReadCommitted)
			if _, err := tx.Exec(t.Context(), "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE"); err != nil {
				t.Fatal(err)
			}
			closed := make(chan struct{})
			go func() {
				defer close(closed)
				store.Close()
			}()
			time.Sleep(300 * time.Millisecond)
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			<-closed
			if lacks := lacks(t, db, limit); !tallies(lacks, used) {
				t.Errorf("the row lacks %v, used %v", lacks, used)
			}
		})
	}
}

// What a transaction puts back that outlasts its store is not handed out: the store is closed.
func TestEscrowPutBackAfterClose(t *testing.T) {
	t.Parallel()
	for name, limit := range sluggish {
		t.Run(name, func(t *testing.T) {
			store, sent, _ := holding(t, pgstore.MaxEscrow)
			warm(t, store, sent, limit.For("k"))
			_, err := store.AllowFunc(t.Context(), []ratelimit.Request{limit.For("k")}, func(pgx.Tx, ratelimit.Result) error {
				store.Close()
				return errUndone
			})
			if !errors.Is(err, errUndone) {
				t.Fatal(err)
			}
			result, err := store.Allow(t.Context(), limit.For("k"))
			if !errors.Is(err, pgstore.ErrClosed) {
				t.Errorf("after Close: got %v, %v, want ErrClosed", result.OK, err)
			}
		})
	}
}

// What is told to be there is: the row's and what the process holds, be it granted by the
// row or from memory.
func TestEscrowTellsWhatIsThere(t *testing.T) {
	t.Parallel()
	for name, limit := range sluggish {
		t.Run(name, func(t *testing.T) {
			db := pgtest.New(t)
			store := newStore(t, db, onClock(newClock()), withEscrow(pgstore.MaxEscrow))
			defer store.Close()
			for n := range 50 {
				result, err := store.Allow(t.Context(), limit.For("k"))
				if err != nil || !result.OK {
					t.Fatal(err)
				}
				if want := limit.Definition().Capacity - float64(n+1); result.Value < want-1 || result.Value > want+1 {
					t.Errorf("call %d: got %v, want %v", n, result.Value, want)
				}
			}
		})
	}
}
