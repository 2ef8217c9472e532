package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/relay"
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

// served is what somebody was granted: when, by what he was told, and between which
// instants for certain.
type served struct {
	limit int // of flooded
	at    time.Time
	curve.Served
}

// flood is somebody who takes from all limits, in every form that there is.
type flood struct {
	store *pgstore.Store
	pool  *pgxpool.Pool
	clock func() time.Time
	tell  func(served)
}

// once takes from one of flooded, in a form that goes by n, and reports whether that was
// granted.
func (f *flood) once(limit, n int) (granted bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	request := flooded[limit].ForN("k", float64(1+rand.IntN(3)))
	from := f.clock()
	result, err := f.take(ctx, request, n)
	switch {
	case errors.Is(err, errUndone):
		return true, nil
	case err == nil && result.OK:
		f.tell(served{limit, result.At, curve.Served{From: from, To: f.clock(), Count: request.Count}})
		return true, nil
	case errors.Is(err, ratelimit.ErrRefused):
		err = nil
	}
	return false, err
}

// errUndone is the error of work that is undone.
var errUndone = errors.New("undone")

// take takes on its own, in the runner with work that is done or undone, or in a
// transaction of its own.
func (f *flood) take(ctx context.Context, request ratelimit.Request, n int) (result ratelimit.Result, err error) {
	switch n % 16 {
	case 3, 7, 11:
		return f.store.AllowFunc(ctx, []ratelimit.Request{request}, func(pgx.Tx, ratelimit.Result) error {
			if n%16 == 3 {
				return errUndone
			}
			return nil
		})
	case 5:
		err = pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) (err error) {
			result, err = f.store.AllowTx(ctx, tx, request)
			return err
		})
		return result, err
	case 6, 9:
		return f.store.Reserve(ctx, request)
	}
	return f.store.Allow(ctx, request)
}

// judgeTold says by how much of their bounds limits were used by what callers were told: no
// more than all of it.
func judgeTold(t *testing.T, all [3][]served) {
	t.Helper()
	for i, limit := range flooded {
		var events []curve.Event
		for _, s := range all[i] {
			events = append(events, curve.Event{At: s.at, Count: s.Count})
		}
		judgeEvents(t, limit, events)
	}
}

func judgeEvents(t *testing.T, limit ratelimit.Limit, events []curve.Event) (worst curve.Worst) {
	t.Helper()
	worst = curve.Judge(events, curve.Of(limit.Definition()))
	t.Logf("%s, %d grants, by what was told: %v", ratelimit.NameOf(limit), len(events), worst)
	if worst.Share > 1+1e-9 {
		t.Errorf("%s: too much", ratelimit.NameOf(limit))
	}
	return worst
}

// judgeServed says the same by callers' own clocks.
func judgeServed(t *testing.T, all [3][]served) {
	t.Helper()
	for i, limit := range flooded {
		var spans []curve.Served
		for _, s := range all[i] {
			spans = append(spans, s.Served)
		}
		worst := curve.JudgeServed(spans, curve.Of(limit.Definition()))
		t.Logf("%s, for certain: %v", ratelimit.NameOf(limit), worst)
		if worst.Share > 1+1e-9 {
			t.Errorf("%s: too much", ratelimit.NameOf(limit))
		}
	}
}

// distant is stores that take ahead, each as in a process of its own, on a network on which
// what they send and are answered is late now and then: by one clock, that only the test
// moves, so a statement can be late by as much as it likes.
type distant struct {
	t     *testing.T
	db    *pgtest.DB // behind the network
	clock *clock
	sent  traced.Statements

	lateRequest, lateAnswer atomic.Bool // the next one is

	mu     sync.Mutex
	served [3][]served // by limit
	stores []*pgstore.Store
}

func newDistant(t *testing.T) *distant {
	t.Helper()
	d := &distant{t: t, clock: newClock()}
	r := newRelay(t)
	t.Cleanup(r.Close)
	d.db = pgtest.New(t, maxConns(16), r.through(), pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &d.sent }))
	late := func(next *atomic.Bool) relay.Judge {
		return func(int, []byte) relay.Fate {
			if next.CompareAndSwap(true, false) {
				d.clock.add(upTo(2 * floodEscrow))
			}
			return relay.Pass
		}
	}
	r.Interfere(late(&d.lateRequest), late(&d.lateAnswer))
	return d
}

// upTo returns a random duration below the longest.
func upTo(longest time.Duration) time.Duration { return rand.N(longest) }

// start returns what another process is, which takes ahead by either form of statements.
func (d *distant) start() *flood {
	d.t.Helper()
	store := newStore(d.t, d.db, onClock(d.clock), withEscrow(floodEscrow), isPortable(rand.IntN(3) == 0))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stores = append(d.stores, store)
	return &flood{store: store, pool: d.db.Pool, clock: d.clock.now, tell: func(s served) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.served[s.limit] = append(d.served[s.limit], s)
	}}
}

// run has one process, and those that come in its place, take until they are refused, turn by
// turn, and now and then has something happen to them.
func (d *distant) run(number, turns int) error {
	f := d.start()
	for turn := range turns {
		limit := (number + turn) % len(flooded)
		for n, more := turn, true; more && n < turn+60; n++ { // until it is refused
			granted, err := f.once(limit, n)
			if err != nil {
				return err
			}
			more = granted
		}
		d.clock.add(upTo(time.Millisecond))
		switch rand.IntN(100) {
		case 0:
			d.lateRequest.Store(true)
		case 1:
			d.lateAnswer.Store(true)
		case 2: // stands still, with what it holds
			d.clock.add(upTo(2 * floodEscrow))
		case 3: // is not heard of any more; what it holds is lost, or comes back at any time
			f = d.start()
		case 4: // somebody keeps all rows locked
			if err := d.hold(); err != nil {
				return err
			}
		}
	}
	return nil
}

// hold keeps all rows locked for a while.
func (d *distant) hold() error {
	return pgx.BeginFunc(d.t.Context(), d.db.Pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(d.t.Context(), "SELECT FROM "+d.db.Schema+".rate_limits FOR UPDATE")
		d.clock.add(upTo(2 * floodEscrow))
		pauseFor(d.t.Context(), 5*time.Millisecond) // so that somebody comes to it
		return err
	})
}

// Stores that take ahead use together what a limit grants at most, in every stretch of time:
// whichever of them stand still for longer than what they hold lasts, or are gone; however
// late a statement or its answer is; and while rows are locked. (The report does this to
// processes, and to the server.)
func TestEscrowNeverOver(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const processes, turns = 8, 25
	d := newDistant(t)
	first := d.start()
	warm(t, first.store, &d.sent, flooded[0].For("k")) // or nothing is held, and this tests nothing
	together(processes, func(i int) {
		if err := d.run(i, turns); err != nil {
			t.Error(err)
		}
	})
	judgeTold(t, d.read())
	judgeServed(t, d.served)
	closeAll(d.clock, d.stores...)
}

// read returns what was served by the clock as it was read last. Others may have written a row
// since an earlier reading, and what is taken then counts at the row's instant, while the caller
// is told that of his own.
func (d *distant) read() (read [3][]served) {
	for i, all := range d.served {
		for _, s := range all {
			if !s.To.After(s.at) {
				read[i] = append(read[i], s)
			}
		}
	}
	return read
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

// setClock is a database whose clock can be set, or a clock that is given, and those who
// take by it. It is set when none of them is under way.
type setClock struct {
	t      *testing.T
	db     *pgtest.DB
	ahead  atomic.Int64 // microseconds, of the given one
	moving sync.RWMutex
	rows   [3]time.Time // the instants of the limits' rows when it was last set

	mu     sync.Mutex
	served [3][]served
}

// newSetClock has the statements on a pool read clocks that are behind or ahead of the
// server's, by what the schema says.
func newSetClock(t *testing.T) (*setClock, *pgxpool.Pool) {
	t.Helper()
	db := pgtest.New(t, maxConns(2))
	execIn(t, db, "CREATE TABLE {schema}.ahead AS SELECT interval '0' AS by")
	for clock, kind := range map[string]string{"clock_timestamp": "VOLATILE", "statement_timestamp": "STABLE"} {
		execIn(t, db, "CREATE FUNCTION {schema}."+clock+"() RETURNS timestamptz LANGUAGE sql "+kind+
			" AS 'SELECT pg_catalog."+clock+"() + by FROM {schema}.ahead'")
	}
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 8
	config.ConnConfig.RuntimeParams["search_path"] = db.Schema + ", pg_catalog"
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return &setClock{t: t, db: db}, pool
}

// given is the clock that is given.
func (c *setClock) given() time.Time {
	return time.Now().Add(time.Duration(c.ahead.Load()) * time.Microsecond)
}

// move sets both clocks by so much.
func (c *setClock) move(by time.Duration) {
	c.moving.Lock()
	defer c.moving.Unlock()
	for i, limit := range flooded {
		err := c.db.Pool.QueryRow(c.t.Context(), "SELECT ts FROM "+c.db.Schema+".rate_limits WHERE name = $1", ratelimit.NameOf(limit)).Scan(&c.rows[i])
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			c.t.Error(err)
		}
	}
	c.ahead.Add(by.Microseconds())
	execIn(c.t, c.db, fmt.Sprintf("UPDATE {schema}.ahead SET by = by + interval '%d microseconds'", by.Microseconds()))
}

// take takes with the clock at rest. While it is behind a row, that row's instant counts.
func (c *setClock) take(f *flood, limit, n int) (granted bool, err error) {
	c.moving.RLock()
	defer c.moving.RUnlock()
	f.tell = func(s served) {
		if row := c.rows[s.limit]; row.After(s.at) {
			s.at = row
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.served[s.limit] = append(c.served[s.limit], s)
	}
	return f.once(limit, n)
}

// grants returns how often something was granted so far.
func (c *setClock) grants() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, served := range c.served {
		n += len(served)
	}
	return n
}

// The clock that decides is set forward and back.
func TestEscrowNeverOverWhenTheClockIsSet(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, given := range map[string]bool{"the database's": false, "one that is given": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, pool := newSetClock(t)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var group sync.WaitGroup
			for range 2 {
				store := newStore(t, &pgtest.DB{Schema: c.db.Schema, Pool: pool}, withEscrow(floodEscrow), func(config *pgstore.Config) {
					if given {
						config.Clock = c.given
					}
				})
				defer store.Close()
				for i := range 2 * len(flooded) {
					f := &flood{store: store, pool: pool, clock: time.Now}
					group.Go(func() {
						for n := i; ctx.Err() == nil; n++ {
							granted, err := c.take(f, i%len(flooded), n)
							if err != nil {
								t.Error(err)
								return
							}
							if !granted {
								pauseFor(ctx, upTo(5*time.Millisecond))
							}
						}
					})
				}
			}
			for range 12 {
				before := c.grants()
				pauseFor(ctx, 20*time.Millisecond)
				eventually(t, "somebody is granted something", func() bool { return c.grants() > before })
				c.move(upTo(400*time.Millisecond) - 200*time.Millisecond)
			}
			stop()
			group.Wait()
			judgeTold(t, c.served)
		})
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
							if err != nil {
								t.Error(err)
							}
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
