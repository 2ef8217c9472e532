package pgstore_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
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

// run takes until its time is over, or its context.
func (f *flood) run(ctx context.Context, lasts time.Duration) error {
	var group sync.WaitGroup
	errs := make([]error, 4*len(flooded))
	end := time.Now().Add(lasts)
	for i := range errs {
		group.Go(func() {
			for n := i; time.Now().Before(end) && ctx.Err() == nil && errs[i] == nil; n++ {
				errs[i] = f.once(i%len(flooded), n)
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

func (f *flood) once(limit, n int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	request := flooded[limit].ForN("k", float64(1+rand.IntN(3)))
	from := f.clock()
	result, err := f.take(ctx, request, n)
	switch {
	case errors.Is(err, errUndone):
		return nil
	case err == nil && result.OK:
		f.tell(served{limit, result.At, curve.Served{From: from, To: f.clock(), Count: request.Count}})
		return nil
	case err == nil || errors.Is(err, ratelimit.ErrRefused):
		time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
		return nil
	}
	return err
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

const (
	floodSchema = "RATELIMIT_TEST_ESCROW_SCHEMA"
	floodURL    = childURL + "_ESCROW"
	floodRelay  = "RATELIMIT_TEST_ESCROW_RELAY"
)

// floodChild is what another process does, until its stdin ends.
func floodChild(t *testing.T) {
	config, err := pgxpool.ParseConfig(os.Getenv(floodURL))
	if err != nil {
		t.Fatal(err)
	}
	host, port, _ := net.SplitHostPort(os.Getenv(floodRelay))
	n, _ := strconv.ParseUint(port, 10, 16)
	config.MaxConns = 6
	config.ConnConfig.Host, config.ConnConfig.Port = host, uint16(n)
	config.ConnConfig.Fallbacks, config.ConnConfig.TLSConfig = nil, nil
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	store, err := pgstore.New(pool, &pgstore.Config{Schema: os.Getenv(floodSchema), Escrow: floodEscrow})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	ctx, stop := context.WithCancel(t.Context())
	go func() {
		defer stop()
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	var mu sync.Mutex
	f := flood{store: store, pool: pool, clock: time.Now, tell: func(s served) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf("granted %d %d %d %d %g\n", s.limit, s.at.UnixMicro(), s.From.UnixMicro(), s.To.UnixMicro(), s.Count)
	}}
	if err := f.run(ctx, time.Minute); err != nil {
		t.Fatal(err)
	}
}

// flooding is processes that flood, and what they were granted.
type flooding struct {
	t     *testing.T
	db    *pgtest.DB
	relay string

	processes []*process
	quiet     atomic.Bool  // nothing is late
	stalled   atomic.Int64 // nothing arrives until then

	mu     sync.Mutex
	served [3][]served // by limit
	rest   strings.Builder
}

// process is one of them.
type process struct {
	*exec.Cmd
	stop  io.Closer
	begun chan struct{} // it was granted something
	read  chan struct{} // all that it says
}

func (f *flooding) start() *process {
	f.t.Helper()
	p := &process{Cmd: exec.CommandContext(f.t.Context(), os.Args[0], "-test.run=^TestEscrowNeverOverInProcesses$"), begun: make(chan struct{}), read: make(chan struct{})}
	p.Env = append(os.Environ(), floodURL+"="+f.db.URL, floodSchema+"="+f.db.Schema, floodRelay+"="+f.relay)
	stop, err := p.StdinPipe()
	if err != nil {
		f.t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		f.t.Fatal(err)
	}
	p.stop, p.Stderr = stop, os.Stderr
	if err := p.Start(); err != nil {
		f.t.Fatal(err)
	}
	go func() {
		defer close(p.read)
		var begun sync.Once
		for lines := bufio.NewScanner(out); lines.Scan(); {
			f.heard(lines.Text())
			begun.Do(func() { close(p.begun) })
		}
	}()
	return p
}

// heard notes a line that a process has written.
func (f *flooding) heard(line string) {
	var limit int
	var at, from, to int64
	var count float64
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := fmt.Sscanf(line, "granted %d %d %d %d %g", &limit, &at, &from, &to, &count); err != nil {
		f.rest.WriteString(line + "\n")
		return
	}
	f.served[limit] = append(f.served[limit], served{limit, time.UnixMicro(at), curve.Served{From: time.UnixMicro(from), To: time.UnixMicro(to).Add(time.Microsecond), Count: count}})
}

// end has a process end, by itself or not.
func (f *flooding) end(p *process, kill bool) {
	f.t.Helper()
	if kill {
		signal(f.t, p, syscall.SIGKILL)
	}
	p.stop.Close()
	<-p.read
	if err := p.Wait(); err != nil && !kill {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.t.Errorf("%v\n%s", err, f.rest.String())
	}
}

// judgeTold says by how much of their bounds limits were used by what callers were told: no
// more than all of it, and at least so much.
func judgeTold(t *testing.T, all [3][]served, least float64) {
	t.Helper()
	for i, limit := range flooded {
		var events []curve.Event
		for _, s := range all[i] {
			events = append(events, curve.Event{At: s.at, Count: s.Count})
		}
		judgeEvents(t, limit, events, least)
	}
}

func judgeEvents(t *testing.T, limit ratelimit.Limit, events []curve.Event, least float64) {
	t.Helper()
	d := bucket.Definition(limit.Definition())
	worst := curve.Judge(events, curve.Of(ratelimit.Definition(d)))
	if worst.Share > 1+1e-9 {
		t.Errorf("%s: too much", d.Name)
	}
	t.Logf("%s, %d grants, by what was told: %v", d.Name, len(events), worst)
	if worst.Share < least {
		t.Errorf("%s: %v, want %v", d.Name, worst, least)
	}
}

// disturbed is the least share for a test to have tried something. What stopped and killed
// processes held is not granted, and on a busy machine there is no flood.
const disturbed = 0.6

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

// Processes that take ahead use together what a limit grants at most, in every stretch of
// time: while they are stopped for longer than what they hold lasts, and killed, with
// others in their place; while statements and their answers are late, those of all at
// once too; and while somebody keeps rows locked, or the whole server is stopped.
func TestEscrowNeverOverInProcesses(t *testing.T) {
	if os.Getenv(floodSchema) != "" {
		floodChild(t)
		return
	}
	for _, n := range []int{1, 2, 8} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			f := newFlooding(t, n)
			f.disturb()
			f.judge()
		})
	}
	t.Run("8, the server is stopped", func(t *testing.T) {
		f := newFlooding(t, 8)
		for range 3 {
			resume := pgtest.Suspend(t)
			time.Sleep(2 * floodEscrow)
			resume()
			time.Sleep(300 * time.Millisecond)
		}
		f.judge()
	})
}

// newFlooding is so many processes, that have flooded for a second.
func newFlooding(t *testing.T, n int) *flooding {
	t.Helper()
	r := newRelay(t)
	t.Cleanup(r.Close)
	f := &flooding{t: t, db: pgtest.New(t, maxConns(4)), relay: r.Address().String()}
	late := func(int, []byte) relay.Fate {
		if !f.quiet.Load() && rand.IntN(200) == 0 {
			time.Sleep(time.Duration(rand.IntN(150)) * time.Millisecond)
		}
		time.Sleep(time.Until(time.UnixMicro(f.stalled.Load())))
		return relay.Pass
	}
	f.quiet.Store(true)
	r.Interfere(late, late)
	for range n {
		f.processes = append(f.processes, f.start())
	}
	for _, p := range f.processes {
		select {
		case <-p.begun:
		case <-p.read:
		}
	}
	time.Sleep(time.Second)
	return f
}

// disturb does everything to processes that they are to bear.
func (f *flooding) disturb() {
	f.t.Helper()
	f.quiet.Store(false)
	for i := range 4 {
		p := &f.processes[i%len(f.processes)]
		signal(f.t, *p, syscall.SIGSTOP)
		time.Sleep(2 * floodEscrow)
		if i%2 == 0 {
			signal(f.t, *p, syscall.SIGCONT)
		} else {
			f.end(*p, true)
			*p = f.start()
		}
		time.Sleep(200 * time.Millisecond)
		f.stalled.Store(time.Now().Add(2 * floodEscrow).UnixMicro())
		time.Sleep(300 * time.Millisecond)
		holdRows(f.t, f.db, floodEscrow)
	}
}

// judge ends all processes, and judges what they were granted.
func (f *flooding) judge() {
	f.t.Helper()
	for _, p := range f.processes {
		p.stop.Close()
	}
	for _, p := range f.processes {
		f.end(p, false)
	}
	judgeTold(f.t, f.served, disturbed)
	judgeServed(f.t, f.served)
}

// holdRows keeps all rows of limits locked for a while.
func holdRows(t *testing.T, db *pgtest.DB, lasts time.Duration) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE")
		time.Sleep(lasts)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func signal(t *testing.T, p *process, s syscall.Signal) {
	t.Helper()
	if err := p.Process.Signal(s); err != nil {
		t.Fatal(err)
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
func (c *setClock) take(f *flood, limit, n int) error {
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

// The clock that decides is set forward and back.
func TestEscrowNeverOverWhenTheClockIsSet(t *testing.T) {
	for _, given := range []bool{false, true} {
		t.Run(map[bool]string{false: "the database's", true: "one that is given"}[given], func(t *testing.T) {
			c, pool := newSetClock(t)
			var group sync.WaitGroup
			ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
			defer stop()
			for range 2 {
				store := newStore(t, &pgtest.DB{Schema: c.db.Schema, Pool: pool}, withEscrow(floodEscrow), func(config *pgstore.Config) {
					if given {
						config.Clock = c.given
					}
				})
				defer store.Close()
				for i := range 3 * len(flooded) {
					f := &flood{store: store, pool: pool, clock: time.Now}
					group.Go(func() {
						for n := i; ctx.Err() == nil; n++ {
							if err := c.take(f, i%len(flooded), n); err != nil {
								t.Error(err)
								return
							}
						}
					})
				}
			}
			for ctx.Err() == nil {
				time.Sleep(70 * time.Millisecond)
				c.move(time.Duration(rand.IntN(400)-200) * time.Millisecond)
			}
			group.Wait()
			judgeTold(t, c.served, disturbed)
		})
	}
}

// A flood of eight processes that nothing else happens to is granted what there is. The
// clock waits for all of them, so they are a flood on a busy machine, too.
func TestEscrowGrantsWhatThereIs(t *testing.T) {
	for _, limit := range flooded {
		t.Run(ratelimit.NameOf(limit), func(t *testing.T) {
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
			for range 400 {
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
			closed := make(chan struct{})
			go func() {
				defer close(closed)
				for _, store := range stores {
					store.Close()
				}
			}()
			for open := true; open; { // what comes too late is given up when its time is over
				select {
				case <-closed:
					open = false
				case <-time.After(time.Millisecond):
					now.add(floodEscrow)
				}
			}
			judgeEvents(t, limit, events, 0.95)
		})
	}
}

// What others took ahead and do not need is there for the one who needs it: when one of
// eight is busy, and when demand moves from one to the next.
func TestEscrowStrandsLittle(t *testing.T) {
	for kind, limit := range map[string]ratelimit.Limit{
		"bucket":  ratelimit.TokenBucket{Name: "bucket", Rate: 2000, Period: time.Second, Capacity: 500},
		"window":  ratelimit.FixedWindow{Name: "window", Rate: 400, Period: 200 * time.Millisecond},
		"sliding": ratelimit.SlidingWindow{Name: "sliding", Rate: 2000, Period: time.Second},
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
		stores[i] = newStore(t, db, withEscrow(100*time.Millisecond))
		defer stores[i].Close()
		for range 40 { // so that each has some to give back
			if _, err := stores[i].Allow(t.Context(), limit.For("k")); err != nil {
				t.Fatal(err)
			}
		}
	}
	d := bucket.Definition(limit.Definition())
	rate := d.Rate / d.Period.Seconds()
	if d.Kind == ratelimit.KindSlidingWindow {
		rate *= float64(d.Slots) / float64(d.Slots+1)
	}
	const settles, lasts = time.Second / 2, 2 * time.Second // after the burst
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
			store := newStore(t, pgtest.New(t), withEscrow(100*time.Millisecond))
			defer store.Close()
			begun, asked, granted := time.Now(), 0, 0
			for past := time.Duration(0); past < 2*time.Second; past = time.Since(begun) {
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
// more than the capacity, and it is not used after its end; and what is given back just
// before its end counts for less, or the row would fill up while somebody else holds what he
// took in the meantime.
func TestEscrowAndRowTogether(t *testing.T) {
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
			if worst.Share > 1 || worst.Share < disturbed {
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
