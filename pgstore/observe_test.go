package pgstore_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// heard is the events that Config.Observe was told.
type heard struct {
	mu     sync.Mutex
	events []ratelimit.Event
	of     []any // what their contexts have for callerKey
}

type callerKey struct{}

func (h *heard) observe(ctx context.Context, e ratelimit.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events, h.of = append(h.events, e), append(h.of, ctx.Value(callerKey{}))
}

// take returns what was heard, and forgets it.
func (h *heard) take() []ratelimit.Event {
	h.mu.Lock()
	defer h.mu.Unlock()
	events := h.events
	h.events, h.of = nil, nil
	return events
}

func observed(h *heard) func(*pgstore.Config) {
	return func(c *pgstore.Config) { c.Observe = h.observe }
}

// Each call is told once, with what it was and what became of it.
func TestObserve(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var h heard
	store := newStore(t, db, observed(&h))
	defer store.Close()
	ctx := t.Context()
	two := ratelimit.TokenBucket{Name: "two", Rate: 2, Period: time.Hour}
	many := ratelimit.FixedWindow{Name: "many", Rate: 100, Period: time.Hour}
	failed := errors.New("the function's")
	var receipt *ratelimit.Receipt
	inTx := func(do func(tx pgx.Tx)) {
		tx, err := db.Pool.Begin(ctx)
		must(t, err)
		defer tx.Rollback(ctx)
		do(tx)
	}
	permits := ratelimit.InFlight{Name: "permits", Limit: 1}
	var permit ratelimit.Permit
	for _, test := range []struct {
		name string
		do   func()
		want string // verb form outcome policy kind class, of each event
	}{
		{"granted", func() { store.Allow(ctx, two.For("a")) }, "allow own granted two token bucket "},
		{"granted in a transaction", func() { inTx(func(tx pgx.Tx) { store.TakeTx(ctx, tx, two.For("b")) }) }, "allow tx granted two token bucket "},
		{"granted to a function", func() {
			store.AllowFunc(ctx, []ratelimit.Request{two.For("a")}, func(pgx.Tx, ratelimit.Result) error { return nil })
		}, "allow runner granted two token bucket "},
		{"refused", func() { store.Take(ctx, two.For("a")) }, "allow own refused two token bucket "},
		{"refused to a function", func() {
			store.AllowFunc(ctx, []ratelimit.Request{two.For("a")}, func(pgx.Tx, ratelimit.Result) error { return nil })
		}, "allow runner refused two token bucket "},
		{"refused in a transaction", func() { inTx(func(tx pgx.Tx) { store.AllowTx(ctx, tx, two.For("a")) }) }, "allow tx refused two token bucket "},
		{"reserved", func() { r, _ := store.Reserve(ctx, two.For("a")); receipt = r.Receipt }, "reserve own granted two token bucket "},
		{"cancelled", func() { store.Cancel(ctx, receipt) }, "cancel own granted two token bucket "},
		{"cancelled twice", func() { store.Cancel(ctx, receipt) }, "cancel own refused two token bucket settled"},
		{"a function that fails", func() {
			store.ReserveFunc(ctx, []ratelimit.Request{many.For("a")}, func(pgx.Tx, ratelimit.Result) error { return failed })
		}, "reserve runner rolled_back many fixed window other"},
		{"a function that panics", func() {
			defer func() { _ = recover() }()
			store.AllowFunc(ctx, []ratelimit.Request{many.For("a")}, func(pgx.Tx, ratelimit.Result) error { panic("") })
		}, "allow runner rolled_back many fixed window "},
		{"at most", func() { store.AllowAtMost(ctx, many.ForN("b", 1000)) }, "allow_at_most own granted many fixed window "},
		{"the first", func() { store.AllowFirst(ctx, two.For("a"), many.For("a")) }, "allow_first own granted many fixed window "},
		{"several", func() { store.Allow(ctx, two.For("c"), many.For("b")) }, "allow own refused many fixed window "},
		{"settled", func() {
			r, _ := store.Allow(ctx, many.ForN("a", 5))
			h.take()
			store.Settle(ctx, r.Receipt, 2)
		}, "settle own granted many fixed window "},
		{"credited", func() { store.Credit(ctx, many.For("a")) }, "credit own granted many fixed window "},
		{"a pause", func() { store.Pause(ctx, many, "p", time.Hour) }, "pause own granted many fixed window "},
		{"paused", func() { store.Allow(ctx, many.For("p")) }, "allow own paused many fixed window "},
		{"the end of a pause", func() { store.Resume(ctx, many, "p") }, "resume own granted many fixed window "},
		{"a reset", func() { store.Reset(ctx, many, "p") }, "reset own granted many fixed window "},
		{"a check", func() { store.Check(ctx, two.For("a")) }, "check own refused two token bucket "},
		{"in shadow", func() { store.Allow(ctx, two.For("a").In(ratelimit.ModeShadow)) }, "allow own granted two token bucket "},
		{"in shadow in a transaction", func() {
			inTx(func(tx pgx.Tx) { store.AllowTx(ctx, tx, two.For("a").In(ratelimit.ModeShadow)) })
		}, "allow tx granted two token bucket "},
		{"a check in shadow", func() { store.Check(ctx, two.For("a").In(ratelimit.ModeShadow)) }, "check own granted two token bucket "},
		{"a check in shadow in a transaction", func() {
			inTx(func(tx pgx.Tx) { store.CheckTx(ctx, tx, two.For("a").In(ratelimit.ModeShadow)) })
		}, "check tx granted two token bucket "},
		{"too large", func() { store.Allow(ctx, two.ForN("a", 3)) }, "allow own too_large two token bucket too_large"},
		{"too large in a transaction", func() { inTx(func(tx pgx.Tx) { store.AllowTx(ctx, tx, two.ForN("a", 3)) }) }, "allow tx too_large two token bucket too_large"},
		{"invalid", func() { store.Allow(ctx, two.ForN("a", -3)) }, "allow own invalid two token bucket invalid"},
		{"no transaction", func() { store.AllowTx(ctx, nil, two.For("a")) }, "allow tx invalid two token bucket invalid"},
		{"a transaction that has failed", func() {
			inTx(func(tx pgx.Tx) {
				tx.Exec(ctx, "SELECT 1/0")
				store.AllowTx(ctx, tx, many.For("a"))
			})
		}, "allow tx failed many fixed window 25P02"},
		{"given up", func() {
			over, cancel := context.WithCancel(ctx)
			cancel()
			store.Allow(over, many.For("a"))
		}, "allow own failed many fixed window canceled"},
		{"a permit", func() { permit, _ = store.Permits().Acquire(ctx, permits.For("k")) }, "acquire own granted permits in flight "},
		{"no permit", func() { store.Permits().Acquire(ctx, permits.For("k")) }, "acquire own refused permits in flight "},
		{"kept", func() { permit, _ = store.Permits().Renew(ctx, permit) }, "renew own granted permits in flight "},
		{"released", func() { store.Permits().Release(ctx, permit) }, "release own granted permits in flight "},
		{"lost", func() { store.Permits().Release(ctx, permit) }, "release own lost permits in flight lease_lost"},
	} {
		t.Run(test.name, func(t *testing.T) {
			h.take()
			test.do()
			var got []string
			for _, e := range h.take() {
				got = append(got, fmt.Sprintf("%s %s %s %s %s %s", e.Verb, e.Form, e.Outcome, e.Policy(), e.Kind(), e.ErrorClass))
				if (e.Err != nil) != (e.ErrorClass != "") || e.Took <= 0 && e.Outcome == ratelimit.OutcomeGranted {
					t.Errorf("got the error %v of class %q, and took %v", e.Err, e.ErrorClass, e.Took)
				}
				if own := e.Form == ratelimit.FormOwn && e.Verb.Takes() && e.Permit == nil && e.Result.Request.Limit != nil; own && (e.Batch != 1 || e.Retries != 0) {
					t.Errorf("got a batch of %d with %d retries, want 1 and 0", e.Batch, e.Retries)
				}
			}
			if text := strings.Join(got, "; "); text != test.want {
				t.Errorf("got  %q\nwant %q", text, test.want)
			}
		})
	}
}

// Of a call in modes there is one event, too, in both stores and every form: Each has what a limit
// in ModeShadow would have done, and which were not asked.
func TestObserveInModes(t *testing.T) {
	t.Parallel()
	observing(t, func(t *testing.T, h *heard, store ratelimit.TxStore[pgx.Tx], _ permits, begin func(context.Context) (pgx.Tx, error)) {
		ctx := t.Context()
		many := ratelimit.FixedWindow{Name: "many", Rate: 100, Period: time.Hour}
		spent := ratelimit.FixedWindow{Name: "spent", Rate: 1, Period: time.Hour}
		must(t, store.Take(ctx, spent.For("k"), spent.For("other")))
		tried, twice, off := spent.For("k").In(ratelimit.ModeShadow), many.ForN("k", 101).In(ratelimit.ModeShadow), many.For("off").In(ratelimit.ModeRefuse)
		both := []ratelimit.Request{tried, many.For("k")}
		runner := func(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
			return store.AllowFunc(ctx, requests, func(pgx.Tx, ratelimit.Result) error { return nil })
		}
		for _, test := range []struct {
			want     string // verb outcome policy outcome, of each limit
			own      func(context.Context, ...ratelimit.Request) (ratelimit.Result, error)
			tx       func(context.Context, pgx.Tx, ...ratelimit.Request) (ratelimit.Result, error)
			requests []ratelimit.Request
		}{
			{"allow granted spent shadowed many granted", store.Allow, store.AllowTx, both},
			{"allow refused spent shadowed spent refused", store.Allow, store.AllowTx, []ratelimit.Request{tried, spent.For("other")}},
			{"allow granted many shadowed spent shadowed", store.Allow, store.AllowTx, []ratelimit.Request{twice, tried}},
			{"allow refused many refused many withheld", store.Allow, store.AllowTx, []ratelimit.Request{off, many.For("k")}},
			{"allow granted spent shadowed many granted", runner, nil, both},
			{"allow refused many refused many withheld", runner, nil, []ratelimit.Request{off, many.For("k")}},
			{"reserve granted spent shadowed many granted", store.Reserve, store.ReserveTx, both},
			{"check granted spent shadowed many granted", store.Check, store.CheckTx, both},
			{"check granted spent shadowed many granted", store.CheckReserve, store.CheckReserveTx, both},
			{"allow_first granted many granted", store.AllowFirst, store.AllowFirstTx, both},
			{
				"allow_at_most refused spent refused",
				func(ctx context.Context, r ...ratelimit.Request) (ratelimit.Result, error) {
					return store.AllowAtMost(ctx, r[0])
				},
				func(ctx context.Context, tx pgx.Tx, r ...ratelimit.Request) (ratelimit.Result, error) {
					return store.AllowAtMostTx(ctx, tx, r[0])
				},
				[]ratelimit.Request{tried},
			},
		} {
			want := func(form string) {
				t.Helper()
				var got []string
				for _, e := range h.take() {
					text := fmt.Sprint(e.Verb, " ", e.Outcome)
					for p := range e.Each() {
						text += fmt.Sprint(" ", p.Name(), " ", p.Outcome)
					}
					got = append(got, text)
					if e.Took < e.Queued || e.Retries != 0 {
						t.Errorf("%s: took %v of which %v queued, with %d retries", form, e.Took, e.Queued, e.Retries)
					}
				}
				if fmt.Sprint(got) != fmt.Sprint([]string{test.want}) {
					t.Errorf("%s: got %q, want %q", form, got, test.want)
				}
			}
			h.take()
			test.own(ctx, test.requests...)
			want("on its own")
			if test.tx == nil {
				continue
			}
			tx, err := begin(ctx)
			must(t, err)
			test.tx(ctx, tx, test.requests...)
			tx.Rollback(ctx)
			want("in a transaction")
		}
	}, "memstore", "pgstore", "escrow")
}

// observing runs a test on stores that tell what is heard.
func observing(t *testing.T, run func(t *testing.T, h *heard, store ratelimit.TxStore[pgx.Tx], held permits, begin func(context.Context) (pgx.Tx, error)), names ...string) {
	t.Helper()
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			var h heard
			if name == "memstore" {
				store := memstore.NewWithConfig(memstore.Config{Observe: h.observe})
				run(t, &h, store, store.Permits(), store.Begin)
				return
			}
			db := pgtest.New(t)
			store := newStore(t, db, observed(&h), func(c *pgstore.Config) {
				if name == "escrow" {
					c.Escrow = 100 * time.Millisecond
				}
			})
			defer store.Close()
			run(t, &h, store, store.Permits(), db.Pool.Begin)
		})
	}
}

// Of a permit there is one event, also of one that is refused by its mode.
func TestObservePermitsInModes(t *testing.T) {
	t.Parallel()
	observing(t, func(t *testing.T, h *heard, _ ratelimit.TxStore[pgx.Tx], store permits, begin func(context.Context) (pgx.Tx, error)) {
		ctx := t.Context()
		full := ratelimit.InFlight{Name: "full", Limit: 1}
		rate := plenty(1)
		if permit, err := store.Acquire(ctx, full.For("k")); err != nil || !permit.OK {
			t.Fatalf("got %v, %v", permit, err)
		}
		tx, err := begin(ctx)
		must(t, err)
		defer tx.Rollback(ctx)
		refuse := full.In(ratelimit.ModeRefuse)
		const refused = "acquire refused full"
		for _, test := range []struct {
			want string // verb outcome policy, of each event
			do   func()
		}{
			{refused, func() { store.Acquire(ctx, full.For("k"), rate.For("k")) }},
			{refused, func() { store.Acquire(ctx, refuse.For("k")) }},
			{refused, func() { store.AcquireWait(ctx, refuse.For("k")) }},
			{refused, func() { store.AcquireTx(ctx, tx, refuse.For("k")) }},
			{"allow granted plenty_1, acquire granted full", func() { store.Acquire(ctx, full.For("another"), rate.For("k")) }},
			{"allow granted plenty_1, acquire granted full", func() { store.AcquireTx(ctx, tx, full.For("a third"), rate.For("k")) }},
		} {
			h.take()
			test.do()
			var got []string
			for _, e := range h.take() {
				got = append(got, fmt.Sprintf("%s %s %s", e.Verb, e.Outcome, e.Policy()))
			}
			if strings.Join(got, ", ") != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		}
	}, "memstore", "pgstore")
}

// A function that has ended the transaction itself, and then fails, may have committed it: nobody
// has asked, and the event does not say that it was rolled back.
func TestObserveEndedByTheFunction(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var h heard
	store := newStore(t, db, observed(&h))
	failed := errors.New("the function's")
	for _, panics := range []bool{false, true} {
		func() {
			defer func() { _ = recover() }()
			store.AllowFunc(t.Context(), []ratelimit.Request{plenty(1).For("k")}, func(tx pgx.Tx, _ ratelimit.Result) error {
				if err := tx.Commit(t.Context()); err != nil || !panics {
					return errors.Join(err, failed)
				}
				panic(failed)
			})
		}()
		if events := h.take(); len(events) != 1 || events[0].Outcome != ratelimit.OutcomeUnknown {
			t.Errorf("panics %t: heard %v, want that it is not known", panics, events)
		}
	}
}

// What PostgreSQL asked to run again is told once, with how often, and in its caller's context.
func TestObserveRunAgain(t *testing.T) {
	t.Parallel()
	var h heard
	store := newStore(t, pgtest.New(t), observed(&h))
	runs := 0
	ctx := context.WithValue(t.Context(), callerKey{}, "the caller")
	_, err := store.AllowFunc(ctx, []ratelimit.Request{plenty(1).For("k")}, func(pgx.Tx, ratelimit.Result) error {
		if runs++; runs < 3 {
			return &pgconn.PgError{Code: serializationFailure}
		}
		return nil
	})
	if err != nil || runs != 3 || store.Stats().Retries != 2 {
		t.Errorf("got error %v, %d runs, and %+v, want 2 retries", err, runs, store.Stats())
	}
	if len(h.events) != 1 || h.events[0].Retries != 2 || h.events[0].Result.Taken != 1 || h.of[0] != "the caller" {
		t.Errorf("heard %+v by %v, want one event of the caller with 2 retries", h.events, h.of)
	}
}

// Calls that go together say how many they were, and how long they waited.
func TestObserveBatches(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var h heard
	store := newStore(t, db, observed(&h))
	defer store.Close()
	limit := plenty(1)
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for range 10 {
				should(t, store.Take(t.Context(), limit.For("k")))
			}
		})
	}
	wg.Wait()
	events := h.take()
	largest := slices.MaxFunc(events, func(a, b ratelimit.Event) int { return cmp.Compare(a.Batch, b.Batch) })
	stats := store.Stats()
	if len(events) != 640 || largest.Batch < 2 || largest.Queued <= 0 || stats.Calls < 640 || stats.Statements >= stats.Calls {
		t.Errorf("got %d events, a batch of %d that waited for %v, and %+v", len(events), largest.Batch, largest.Queued, stats)
	}
}

// What is held in memory is told limit by limit.
func TestStatsHeld(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store := newStore(t, db, func(c *pgstore.Config) { c.Escrow = pgstore.MaxEscrow })
	limit := ratelimit.TokenBucket{Name: "held", Rate: 10, Period: time.Second, Capacity: 1e6}
	for range 1000 {
		must(t, store.Take(t.Context(), limit.For("k")))
	}
	held := store.Stats().Held
	if len(held) != 1 || held[0].Limit != "held" || held[0].Keys != 1 || held[0].Tokens <= 0 {
		t.Errorf("got %+v, want some tokens of one key", held)
	}
	store.Close()
	if held := store.Stats().Held; len(held) != 0 {
		t.Errorf("%+v is held after Close", held)
	}
	if stats := (*pgstore.Store)(nil).Stats(); stats.Calls != 0 {
		t.Errorf("got %+v of no store", stats)
	}
}

// The error of a row that is locked names the key; what is printed of the event does not.
func TestObserveMasksErrors(t *testing.T) {
	e := ratelimit.Event{
		Verb: ratelimit.VerbAllow, Form: ratelimit.FormTx, Outcome: ratelimit.OutcomeFailed,
		Err: fmt.Errorf("%w: row of key %q", pgstore.ErrLocked, "\x1b[31msecret"), Requests: []ratelimit.Request{plenty(1).For("\x1b[31msecret")},
	}
	permit := e // whose rates could not be asked
	permit.Permit = &ratelimit.Permit{InFlight: ratelimit.InFlight{Name: "permits", Limit: 1}, Key: "other"}
	for _, e := range []ratelimit.Event{e, permit} {
		if text := e.String(); strings.Contains(text, "secret") || !strings.Contains(text, "waited for a lock") {
			t.Errorf("got %q", text)
		}
	}
}
