package pgstore_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

const (
	serializationFailure = "40001"
	deadlockDetected     = "40P01"
)

// hasCode reports whether PostgreSQL's answer is within reach of errors.As.
func hasCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

// takes is a way to take from a limit, with all that belongs to it: the
// transaction is committed when it returns.
type takes func(context.Context, *pgxpool.Pool, *pgstore.Store, ...ratelimit.Request) (ratelimit.Result, error)

// allowAt takes in a transaction of the given level, from BEGIN again when
// PostgreSQL asks for that.
func allowAt(level pgx.TxIsoLevel) takes {
	return func(ctx context.Context, pool *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (result ratelimit.Result, err error) {
		for {
			err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				result, err = store.AllowTx(ctx, tx, requests...)
				return err
			})
			if err == nil {
				return result, nil
			}
			if !hasCode(err, serializationFailure) {
				return ratelimit.Result{}, err
			}
		}
	}
}

func allowFunc(ctx context.Context, _ *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (ratelimit.Result, error) {
	result, err := store.AllowFunc(ctx, requests, func(pgx.Tx, ratelimit.Result) error { return nil })
	if errors.Is(err, ratelimit.ErrRefused) {
		err = nil
	}
	return result, err
}

func allowOwn(ctx context.Context, _ *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return store.Allow(ctx, requests...)
}

// takeForm is a way to take, with the Config that it needs.
type takeForm struct {
	name   string
	take   takes
	change func(*pgstore.Config)
}

// takeForms are all the ways to take.
var takeForms = []takeForm{
	{"read committed", allowAt(pgx.ReadCommitted), unchanged},
	{"repeatable read", allowAt(pgx.RepeatableRead), unchanged},
	{"serializable", allowFunc, unchanged},
	{"on its own", allowOwn, unchanged},
	{"on its own, portable", allowOwn, portable},
}

func unchanged(*pgstore.Config) {}

func portable(c *pgstore.Config) { c.Portable = true }

// burst is 10 tokens at once and 10 a second.
var burst = ratelimit.TokenBucket{Name: "burst", Rate: 10, Period: time.Second}

// strict is 10 tokens in any half second.
var strict = ratelimit.SlidingWindow{Name: "strict", Rate: 10, Period: 500 * time.Millisecond, Slots: 5}

// judges are what is asked for, and how it is judged.
var judges = []struct {
	name  string
	limit ratelimit.Limit
	judge func(*testing.T, []decision)
}{
	{"token bucket", burst, judge},
	{"sliding window", strict, judgeByCurve},
}

// window is for how long burst is asked, on the database's clock.
func window() time.Duration {
	if testing.Short() {
		return time.Second
	}
	return 3 * time.Second
}

// decision is what one call was told, as committed.
type decision struct {
	At    time.Time // on the database's clock
	OK    bool
	Value float64 // left behind
}

// decided is the decision that a result tells of. A grant's instant is that by
// which the row was settled, which can be a little before At: it follows from
// when the row is full.
func decided(r ratelimit.Result) decision {
	if r.Request.Limit != ratelimit.Limit(burst) || !r.OK {
		return decision{At: r.At, OK: r.OK, Value: r.Value}
	}
	toFull := time.Duration((burst.Rate - r.Value) / burst.Rate * float64(burst.Period))
	return decision{At: r.At.Add(r.ResetAfter - toFull), OK: true, Value: r.Value}
}

// connectAll opens all connections of a pool, so that the first callers do not
// wait for them.
func connectAll(ctx context.Context, pool *pgxpool.Pool) error {
	for range pool.Config().MaxConns {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
	}
	return nil
}

// askForLong has 64 goroutines ask for a token of key, each as fast as it can,
// for a little longer than window. It leaves out refusals that came shortly
// after another.
func askForLong(ctx context.Context, pool *pgxpool.Pool, store *pgstore.Store, take takes, limit ratelimit.Limit, key string) ([]decision, error) {
	const (
		goroutines = 64
		shortly    = time.Millisecond
	)
	var (
		mu        sync.Mutex
		decisions []decision
		errs      []error
		group     sync.WaitGroup
	)
	if err := connectAll(ctx, pool); err != nil {
		return nil, err
	}
	end := time.Now().Add(window() + 200*time.Millisecond)
	for range goroutines {
		group.Go(func() {
			var last time.Time
			for time.Now().Before(end) {
				result, err := take(ctx, pool, store, limit.For(key))
				if d := decided(result); err != nil || d.OK || d.At.Sub(last) > shortly {
					mu.Lock()
					decisions, errs = append(decisions, d), append(errs, err)
					mu.Unlock()
					last = d.At
				}
			}
		})
	}
	group.Wait()
	return decisions, errors.Join(errs...)
}

// judge says what is wrong with decisions, all of which burst made for one
// key. It counts by the database's clock alone, in the window that begins with
// the first decision, so its bounds are exact however busy the machine is.
func judge(t *testing.T, decisions []decision) {
	t.Helper()
	slices.SortStableFunc(decisions, func(a, b decision) int { return a.At.Compare(b.At) })
	first := decisions[0].At
	tokens := func(d time.Duration) float64 { return burst.Rate * d.Seconds() }
	var (
		granted, inTime        int
		lastGrant, lastRefusal time.Time
		spilled                float64 // came in while the bucket was full
		before                 = decision{At: first, Value: burst.Rate}
	)
	for _, d := range decisions {
		within := d.At.Sub(first) <= window()
		if !d.OK {
			if within {
				lastRefusal = d.At
			}
			continue
		}
		granted, lastGrant = granted+1, d.At
		spilled += max(0, before.Value+tokens(d.At.Sub(before.At))-burst.Rate)
		before = d
		if within {
			inTime++
		}
	}
	if lastRefusal.IsZero() {
		t.Fatalf("nobody was refused in %v, want more callers than tokens", window())
	}
	t.Logf("%d decisions, %d granted in %v, %d in %v", len(decisions), inTime, window(), granted, lastGrant.Sub(first))
	if most := burst.Rate + tokens(window()); float64(inTime) > most {
		t.Errorf("granted %d in %v, want at most %g", inTime, window(), most)
	}
	const rounding = 4 * time.Microsecond // of the instants
	if most := burst.Rate + tokens(lastGrant.Sub(first)+rounding); float64(granted) > most {
		t.Errorf("granted %d in %v, want at most %g", granted, lastGrant.Sub(first), most)
	}
	// Until the last who was refused in the window, which is its end but for
	// the time that a call takes, or that the machine stood still.
	if least := burst.Rate + tokens(lastRefusal.Sub(first)) - 2 - spilled; float64(inTime) < least {
		t.Errorf("granted %d in %v, want at least %g", inTime, lastRefusal.Sub(first), least)
	}
}

// judgeByCurve says by how much of strict's bound its decisions for one key have used,
// in any window: all of it, and no more.
func judgeByCurve(t *testing.T, decisions []decision) {
	t.Helper()
	var events []curve.Event
	for _, d := range decisions {
		if d.OK {
			events = append(events, curve.Event{At: d.At, Count: 1})
		}
	}
	worst := curve.Judge(events, curve.Of(strict.Definition()))
	t.Logf("%d decisions, %d granted, at worst %v", len(decisions), len(events), worst)
	if worst.Share != 1 {
		t.Errorf("at worst %v, want all of it and no more", worst)
	}
}

func TestNeverOver(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, maxConns(48))
	for _, j := range judges {
		for _, form := range takeForms {
			t.Run(j.name+"/"+form.name, func(t *testing.T) {
				decisions, err := askForLong(t.Context(), db.Pool, newStore(t, db, form.change), form.take, j.limit, form.name)
				if err != nil {
					t.Fatal(err)
				}
				j.judge(t, decisions)
			})
		}
	}
}

// childURL and childSchema name the environment variables that make
// TestNeverOverInTwoProcesses the second process.
const (
	childURL    = "RATELIMIT_TEST_CHILD_URL"
	childSchema = "RATELIMIT_TEST_CHILD_SCHEMA"
)

// The parent tells the child, by its stdin, which form to use, and is told the
// child's decisions.
func TestNeverOverInTwoProcesses(t *testing.T) {
	if os.Getenv(childURL) != "" {
		beChild(t)
		return
	}
	t.Parallel()
	db := pgtest.New(t, maxConns(24))
	child := startChild(t, db)
	for k, j := range judges {
		for i, form := range takeForms {
			t.Run(j.name+"/"+form.name, func(t *testing.T) {
				child.ask(t, k, i)
				decisions, err := askForLong(t.Context(), db.Pool, newStore(t, db, form.change), form.take, j.limit, form.name)
				if err != nil {
					t.Fatal(err)
				}
				childs := child.answer(t)
				t.Logf("%d decisions in this process, %d in the other", len(decisions), len(childs))
				j.judge(t, append(decisions, childs...))
			})
		}
	}
}

type child struct {
	in  io.Writer
	out *bufio.Reader
}

func startChild(t *testing.T, db *pgtest.DB) child {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestNeverOverInTwoProcesses$", fmt.Sprintf("-test.short=%v", testing.Short()))
	cmd.Env = append(os.Environ(), childURL+"="+db.URL, childSchema+"="+db.Schema)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(out)
	t.Cleanup(func() {
		in.Close() // the child ends when there is nothing more to do
		rest, _ := io.ReadAll(reader)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the other process: %v\n%s", err, rest)
		}
	})
	c := child{in, reader}
	c.answer(t) // it is ready
	return c
}

func (c child) ask(t *testing.T, limit, form int) {
	t.Helper()
	if _, err := fmt.Fprintln(c.in, limit, form); err != nil {
		t.Fatal(err)
	}
}

func (c child) answer(t *testing.T) (decisions []decision) {
	t.Helper()
	line, err := c.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &decisions)
	}
	if err != nil {
		t.Fatalf("the other process said %q: %v", line, err)
	}
	return decisions
}

func beChild(t *testing.T) {
	config, err := pgxpool.ParseConfig(os.Getenv(childURL))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 24
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	db := &pgtest.DB{Schema: os.Getenv(childSchema), Pool: pool}
	if err := pool.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	answers := json.NewEncoder(os.Stdout)
	answers.Encode([]decision{})
	for {
		var k, i int
		if _, err := fmt.Scan(&k, &i); err != nil {
			return // the parent has no more to ask
		}
		form := takeForms[i]
		decisions, err := askForLong(t.Context(), pool, newStore(t, db, form.change), form.take, judges[k].limit, form.name)
		if err != nil {
			t.Fatal(err)
		}
		answers.Encode(decisions)
	}
}

// A transaction that was opened long ago, with the snapshot and the now() of
// then, neither gets tokens that are gone nor brings them back for others.
func TestOldTransactionCreatesNoTokens(t *testing.T) {
	db := pgtest.New(t)
	store := newStore(t, db)
	limit := slow("drained", 10)
	for _, test := range []struct {
		level  pgx.TxIsoLevel
		before float64 // taken before the old transaction's snapshot
		want   string  // the error's code
	}{
		{pgx.ReadCommitted, 0, ""},
		{pgx.ReadCommitted, 3, ""},
		{pgx.RepeatableRead, 0, serializationFailure},
		{pgx.RepeatableRead, 3, serializationFailure},
		{pgx.Serializable, 0, serializationFailure},
		{pgx.Serializable, 3, serializationFailure},
	} {
		t.Run(fmt.Sprintf("%s after %g", test.level, test.before), func(t *testing.T) {
			ctx, key := t.Context(), t.Name()
			if test.before > 0 {
				mustAllow(t, store, limit.ForN(key, test.before))
			}
			old := begin(t, db, test.level)
			mustExec(t, old, "SELECT pg_sleep(0.2)")
			mustAllow(t, store, limit.ForN(key, limit.Rate-test.before))
			want := tableOf(t, db)

			result, err := store.AllowTx(ctx, old, limit.For(key))
			if result.OK || hasCode(err, serializationFailure) != (test.want != "") || err != nil && test.want == "" {
				t.Errorf("got OK %v, error %v; want a refusal or code %q", result.OK, err, test.want)
			}
			_ = old.Commit(ctx) // fails after an error
			if got := tableOf(t, db); !slices.Equal(got, want) {
				t.Errorf("got row\n%s, want\n%s", got, want)
			}
			if result, err := store.Allow(ctx, limit.For(key)); err != nil || result.OK {
				t.Errorf("afterwards: got OK %v, error %v, want a refusal", result.OK, err)
			}
		})
	}
}

// An old transaction that gets a token leaves behind what a new one would.
func TestOldTransactionTakesByTheClock(t *testing.T) {
	db := pgtest.New(t)
	store := newStore(t, db)
	limit := ratelimit.TokenBucket{Name: "quick", Rate: 100, Period: time.Second, Capacity: 10}
	old := begin(t, db, pgx.ReadCommitted)
	mustExec(t, old, "SELECT pg_sleep(0.2)")
	mustAllow(t, store, limit.ForN("k", 10))
	mustExec(t, old, "SELECT pg_sleep(0.05)") // five tokens
	before := stateOf(t, db, limit.Name)

	result, err := store.AllowTx(t.Context(), old, limit.For("k"))
	if err != nil || !result.OK {
		t.Fatalf("got OK %v, error %v", result.OK, err)
	}
	if err := old.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := stateOf(t, db, limit.Name)
	d := bucket.Definition(limit.Definition())
	want, ok := d.Take(before, got.TS, 1, 0)
	if !ok || got.Value != want.Value || got.Value != result.Value {
		t.Errorf("got %v and in the result %v, want %v from %v", got, result.Value, want, before)
	}
	if waited := got.TS.Sub(before.TS); waited < 50*time.Millisecond || got.TS.After(result.At) {
		t.Errorf("got %v, %v after the take before and at %v; want at least 50ms and not after", got.TS, waited, result.At)
	}
}

// A caller reads the clock and then waits for the row. The time that it
// waited was counted by those it waited for, so it must not count again.
func TestWaitingCreatesNoTokens(t *testing.T) {
	db := pgtest.New(t)
	store := newStore(t, db)
	limit := ratelimit.TokenBucket{Name: "quick", Rate: 100, Period: time.Second}
	ctx := t.Context()
	first, second := begin(t, db, pgx.ReadCommitted), begin(t, db, pgx.ReadCommitted)
	if _, err := store.AllowTx(ctx, first, limit.ForN("k", 50)); err != nil {
		t.Fatal(err)
	}
	later := allowLater(store, second, limit.For("k"))
	waitsForLock(t, db, second)
	mustExec(t, first, "SELECT pg_sleep(0.1)")
	last, err := store.AllowTx(ctx, first, limit.ForN("k", 40))
	if err != nil || !last.OK {
		t.Fatalf("got OK %v, error %v", last.OK, err)
	}
	if err := first.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	got := <-later
	if got.err != nil || !got.OK {
		t.Fatalf("got OK %v, error %v", got.OK, got.err)
	}
	before := stateOf(t, db, limit.Name) // as the first left it
	if err := second.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	want := bucket.State{Value: before.Value - 1, TS: before.TS}
	if after := stateOf(t, db, limit.Name); after != want || got.Value != want.Value {
		t.Errorf("got %v and in the result %v, want %v", after, got.Value, want)
	}
}

// The first callers ever of a key, two of each and all at once.
func TestFirstCallers(t *testing.T) {
	const (
		goroutines = 64
		rounds     = 6
	)
	db := pgtest.New(t, maxConns(goroutines))
	limit := slow("first", goroutines)
	for _, form := range takeForms {
		t.Run(form.name, func(t *testing.T) {
			store := newStore(t, db, form.change)
			for round := range rounds {
				// Half of the rounds are two to a key, and half all to one.
				callers := []int{2, goroutines}[round%2]
				key := func(i int) string { return fmt.Sprintf("%s/%d/%d", form.name, round, i/callers) }
				together(goroutines, func(i int) {
					result, err := form.take(t.Context(), db.Pool, store, limit.For(key(i)))
					if err != nil || !result.OK {
						t.Errorf("got OK %v, error %v", result.OK, err)
					}
				})
				for i := 0; i < goroutines; i += callers {
					result, err := store.Check(t.Context(), limit.For(key(i)))
					if want := int64(goroutines - callers); err != nil || result.Remaining != want {
						t.Errorf("%s: got %d left, error %v; want %d", key(i), result.Remaining, err, want)
					}
				}
			}
		})
	}
}

// At the higher levels, one of two first callers may be told to come again, and
// nothing else: not that a key is there already.
func TestFirstCallersErrors(t *testing.T) {
	db := pgtest.New(t)
	store := newStore(t, db)
	limit := slow("first", 10)
	for _, test := range []struct {
		level pgx.TxIsoLevel
		want  string
	}{
		{pgx.ReadCommitted, ""},
		{pgx.RepeatableRead, serializationFailure},
		{pgx.Serializable, serializationFailure},
	} {
		t.Run(string(test.level), func(t *testing.T) {
			first, second := begin(t, db, test.level), begin(t, db, test.level)
			if _, err := store.AllowTx(t.Context(), first, limit.For(t.Name())); err != nil {
				t.Fatal(err)
			}
			later := allowLater(store, second, limit.For(t.Name()))
			waitsForLock(t, db, second)
			if err := first.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			got := <-later
			if codeOf(got.err) != test.want || got.OK != (test.want == "") {
				t.Errorf("got OK %v, error %v, want code %q", got.OK, got.err, test.want)
			}
		})
	}
}

// Two callers who name the same two limits in opposite orders never meet in a
// deadlock, and a refusal by one limit takes nothing from the other.
func TestOppositeOrders(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		take   takes
		calls  int // of each of two goroutines
		change func(*pgstore.Config)
	}{
		{"read committed", allowAt(pgx.ReadCommitted), 10_000, unchanged},
		{"repeatable read", allowAt(pgx.RepeatableRead), 10_000, unchanged},
		{"serializable", allowAt(pgx.Serializable), 10_000, unchanged},
		{"AllowFunc", allowFunc, 500, unchanged},
		{"on its own", allowOwn, 1_000, unchanged},
		{"on its own, portable", allowOwn, 1_000, portable},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			calls := test.calls
			if testing.Short() {
				calls /= 20
			}
			db := pgtest.New(t)
			store := newStore(t, db, test.change)
			// The last tenth of the calls is refused, by B alone.
			a, b := slow("A", float64(4*calls)), slow("B", float64(2*calls-calls/5))
			orders := [][]ratelimit.Request{{a.For(""), b.For("")}, {b.For(""), a.For("")}}
			var granted atomic.Int64
			together(len(orders), func(i int) {
				for range calls {
					result, err := test.take(t.Context(), db.Pool, store, orders[i]...)
					if err != nil {
						t.Error(err)
						return
					}
					if result.OK {
						granted.Add(1)
					}
				}
			})
			wantLeft(t, store, a.For(""), a.Rate-float64(granted.Load()))
			wantLeft(t, store, b.For(""), 0)
			if want := int64(b.Rate); granted.Load() != want {
				t.Errorf("granted %d, want %d", granted.Load(), want)
			}
		})
	}
}

// tooLate is a pgx tracer that makes the traced pool's takes too late: what a
// look finds is gone by the time of the take.
type tooLate struct {
	drain, fill func()
	takes       int
}

func (a *tooLate) before(sql string) {
	switch {
	case strings.Contains(sql, "INSERT INTO"):
		a.takes++
		a.drain()
	case strings.Contains(sql, "array_agg"):
		a.fill()
	}
}

func (a *tooLate) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	a.before(data.SQL)
	return ctx
}

func (a *tooLate) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		a.before(q.SQL)
	}
	return ctx
}

func (*tooLate) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)     {}
func (*tooLate) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*tooLate) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// A caller whom others forestall every time is refused in the end: it neither
// fails, nor tries for ever, nor gets what is not there. (Decisions that are
// not portable lock the rows in the end, so nobody comes before.)
func TestAlwaysTooLate(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	limit := slow("contested", 1)
	tracer := &tooLate{}
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer }))
	store := newStore(t, db, portable)
	others := newStore(t, &pgtest.DB{Schema: db.Schema, Pool: newPool(t, db.URL)})
	tracer.drain = func() {
		if _, err := others.Allow(ctx, limit.For("k")); err != nil {
			t.Error(err)
		}
	}
	tracer.fill = func() {
		if err := others.Reset(ctx, limit, "k"); err != nil {
			t.Error(err)
		}
	}
	result, err := store.Allow(ctx, limit.For("k"))
	if err != nil || result.OK || result.RetryAfter <= 0 {
		t.Errorf("got OK %v after %v, error %v, want a refusal", result.OK, result.RetryAfter, err)
	}
	if tracer.takes < 2 {
		t.Errorf("got %d takes, want it to have tried again", tracer.takes)
	}
}
