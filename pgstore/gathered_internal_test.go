package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
)

// theRow is that of most tests.
var theRow = decide.Row{Key: decide.Key{Name: "l", Key: "k"}}

// gathered are limits of each kind, with and without a bound on debt.
var gathered = []ratelimit.Limit{
	ratelimit.TokenBucket{Name: "bucket", Rate: 7, Period: time.Minute, Capacity: 20},
	ratelimit.TokenBucket{Name: "bounded bucket", Rate: 0.5, Period: time.Second, Capacity: 12, MaxReserved: 9},
	ratelimit.FixedWindow{Name: "window", Rate: 20, Period: time.Minute, MaxReserved: 30},
	ratelimit.SlidingWindow{Name: "sliding", Rate: 20, Period: time.Minute, MaxReserved: 30},
	ratelimit.SlidingWindow{Name: "few slots", Rate: 12, Period: time.Second, Slots: 2},
}

// gathering returns a function by which calls come to wait for a row in their order, each of which
// closes a channel when its caller goes on, and one that has them decided together and returns when
// they are. Errors of those whose context is over are as they should be.
func gathering(t *testing.T, decide func(context.Context, []*engine.Ticket)) (join func(context.Context, *engine.Pending) <-chan struct{}, goOn func()) {
	t.Helper()
	first := &engine.Pending{}
	there, leave, decided := make(chan struct{}), make(chan struct{}), make(chan struct{})
	row := batch.New(conn.MostTogether, 0, func(ctx context.Context, tickets []*engine.Ticket) {
		if tickets[0].Value == first {
			close(there)
			<-leave
			tickets[0].Finish()
			return
		}
		defer close(decided)
		decide(ctx, tickets)
	}, nil)
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = row.Do(t.Context(), first) })
	<-there
	join = func(ctx context.Context, call *engine.Pending) <-chan struct{} {
		joined, over := make(chan struct{}), make(chan struct{})
		door := batch.New(1, 0, func(_ context.Context, tickets []*engine.Ticket) {
			row.Join(tickets...)
			close(joined)
		}, nil)
		wg.Go(func() {
			defer close(over)
			if _, err := door.Do(ctx, call); !errors.Is(err, ctx.Err()) {
				t.Errorf("got error %v, want %v", err, ctx.Err())
			}
		})
		<-joined
		return over
	}
	return join, func() { close(leave); wg.Wait(); <-decided }
}

// gather has calls wait for a row in their order, and then decided together.
func gather(t *testing.T, decide func(context.Context, []*engine.Ticket), calls ...*engine.Pending) {
	t.Helper()
	join, goOn := gathering(t, decide)
	for _, call := range calls {
		join(t.Context(), call)
	}
	goOn()
}

// randomCall is a call for a limit that is to be allowed, to reserve, or to take what there
// is; and how memory answers it.
func randomCall(t *testing.T, random *rand.Rand, limit ratelimit.Limit, atMost bool) (*engine.Pending, func(*memstore.Store) (ratelimit.Result, error)) {
	t.Helper()
	r := limit.ForN("k", float64(random.IntN(9)))
	if random.IntN(8) == 0 {
		r.Count += 0.3
	}
	var (
		call decide.Call
		err  error
		ask  func(*memstore.Store) (ratelimit.Result, error)
	)
	switch {
	case atMost:
		r.Count++
		call, err = decide.NewAtMost(r)
		ask = func(m *memstore.Store) (ratelimit.Result, error) { return m.AllowAtMost(t.Context(), r) }
	case random.IntN(3) == 0:
		call, err = decide.New(true, r)
		ask = func(m *memstore.Store) (ratelimit.Result, error) { return m.Reserve(t.Context(), r) }
	default:
		call, err = decide.New(false, r)
		ask = func(m *memstore.Store) (ratelimit.Result, error) { return m.Allow(t.Context(), r) }
	}
	must(t, err)
	return &engine.Pending{Call: call}, ask
}

// tables has the calls of a test be decided on plain PostgreSQL, and as where tables are
// distributed: then they wait for their row.
func tables(t *testing.T, test func(t *testing.T, portable bool, await *decide.Row)) {
	t.Helper()
	for name, portable := range map[string]bool{"plain": false, "portable": true} {
		t.Run(name, func(t *testing.T) {
			var await *decide.Row
			if portable {
				await = &decide.Row{Key: decide.Key{Name: "l", Key: "k"}}
			}
			test(t, portable, await)
		})
	}
}

// Calls that gather at a row are granted, in the order of their arrival, if they would be one
// after another, with the same answers; whether the row is looked at first or not. Those
// that are refused count from what was there, before others took from it.
func TestGatheredOneAfterAnother(t *testing.T) {
	pgtest.Long(t)
	tables(t, func(t *testing.T, portable bool, await *decide.Row) {
		db := pgtest.New(t)
		now := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
		clock := func() time.Time { return now }
		random := rand.New(rand.NewPCG(1, 4))
		store := open(t, db, Config{Portable: portable, Clock: clock})
		outcomes := map[string]int{}
		for history := range 100 {
			limit := gathered[history%len(gathered)]
			if await != nil {
				await.Name = ratelimit.NameOf(limit)
			}
			memory := memstore.New(clock)
			must(t, store.Reset(t.Context(), limit, "k"))
			for batch := range 6 {
				now = now.Add(time.Duration(random.IntN(30)) * time.Second / time.Duration(1+random.IntN(20)))
				if random.IntN(12) == 0 {
					lasts := time.Duration(1+random.IntN(20)) * time.Second
					must(t, errOf(store.Pause(t.Context(), limit, "k", lasts)))
					must(t, errOf(memory.Pause(t.Context(), limit, "k", lasts)))
				}
				var calls []*engine.Pending
				var wants []ratelimit.Result
				atMost := random.IntN(4) == 0
				for range 1 + random.IntN(10) {
					call, ask := randomCall(t, random, limit, atMost)
					want, err := ask(memory)
					must(t, err)
					calls, wants = append(calls, call), append(wants, want)
				}
				grant := random.IntN(3) > 0
				gather(t, func(ctx context.Context, tickets []*engine.Ticket) {
					if left := probe(store).DecideAll(ctx, tickets, grant, await); len(left) > 0 {
						t.Errorf("%d calls wait for a row, want none", len(left))
					}
				}, calls...)
				for i, call := range calls {
					if want := wants[i]; call.Err != nil || !alike(call.Result, want) {
						t.Fatalf("history %d, batch %d, call %d of %d, %+v:\ngot  %v %+v\nwant %+v", history, batch, i+1, len(calls), call.Call, call.Err, call.Result.Status, want.Status)
					}
					outcomes[fmt.Sprint(call.Call.Reserve, call.Call.AtMost(), wants[i].OK)]++
				}
			}
		}
		for _, want := range []string{"false false true", "false false false", "true false true", "true false false", "false true true", "false true false"} {
			if outcomes[want] < 20 {
				t.Errorf("%q came %d times, so this tests little: %v", want, outcomes[want], outcomes)
			}
		}
	})
}

// alike reports whether two results say the same, but for rounding, and but for what a
// refusal says of those that came before.
func alike(got, want ratelimit.Result) bool {
	near := func(a, b time.Duration) bool { return (a - b).Abs() <= time.Microsecond }
	if !want.OK {
		return !got.OK && got.Taken == 0 && got.Receipt == nil && got.Request.Count == want.Request.Count &&
			got.RetryAfter > 0 && got.RetryAfter <= want.RetryAfter+time.Microsecond && got.PausedUntil.Equal(want.PausedUntil)
	}
	return got.OK && got.At.Equal(want.At) && near(got.RetryAfter, want.RetryAfter) && near(got.ResetAfter, want.ResetAfter) &&
		math.Abs(got.Value-want.Value) < 1e-9 && got.Remaining == want.Remaining && got.Taken == want.Taken && got.Capacity == want.Capacity &&
		got.PausedUntil.Equal(want.PausedUntil) && got.Request.Count == want.Request.Count && (got.Receipt == nil) == (want.Receipt == nil)
}

// Of calls that gather, only the one with which the database finds fault fails.
func TestGatheredFault(t *testing.T) {
	db := pgtest.New(t)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 100, Period: 24 * time.Hour}
	store := open(t, db, Config{Portable: true})
	must(t, store.Take(t.Context(), limit.For("k")))
	must(t, errOf(db.Pool.Exec(t.Context(), `SET search_path = `+db.Schema+`;
		CREATE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''too much at once''; END';
		CREATE TRIGGER fault BEFORE UPDATE ON rate_limits FOR EACH ROW WHEN (OLD.value - NEW.value > 6) EXECUTE FUNCTION fault();
		RESET search_path`)))
	var calls []*engine.Pending
	for _, n := range []float64{1, 2, 7, 1, 3} {
		calls = append(calls, allowTicket(t, limit.ForN("k", n)).Value)
	}
	gather(t, func(ctx context.Context, tickets []*engine.Ticket) {
		probe(store).DecideAll(ctx, tickets, true, &theRow)
	}, calls...)
	for i, call := range calls {
		if (call.Err != nil) != (i == 2) || call.Result.OK != (i != 2) {
			t.Errorf("call %d: got OK %v, error %v", i, call.Result.OK, call.Err)
		}
	}
	if check, err := store.Check(t.Context(), limit.For("k")); err != nil || math.Round(check.Value) != 92 {
		t.Errorf("got %v left, error %v, want 92", check.Value, err)
	}
}

// Calls of two plans that gather at a row are each decided by their own.
func TestGatheredDefinitions(t *testing.T) {
	db := pgtest.New(t)
	store := open(t, db, Config{Portable: true})
	basic := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
	premium := basic
	premium.Rate = 100
	var calls []*engine.Pending
	for _, r := range []ratelimit.Request{basic.ForN("k", 3), premium.ForN("k", 50), basic.ForN("k", 4), premium.ForN("k", 1), basic.ForN("k", 5)} {
		calls = append(calls, allowTicket(t, r).Value)
	}
	gather(t, probe(store).Server(&theRow), calls...)
	// The basic plan makes the row, with ten tokens, and the premium one finds what is left.
	for i, want := range []bool{true, false, true, true, false} {
		got := calls[i]
		if got.Err != nil || got.Result.OK != want || got.Result.Capacity != got.Call.Demands[0].Definition.Capacity {
			t.Errorf("call %d: got %+v, error %v, want OK %v", i, got.Result.Status, got.Err, want)
		}
	}
}

// A flood of calls that are refused writes next to nothing.
func TestGatheredRefusals(t *testing.T) {
	db := pgtest.New(t)
	store := open(t, db, Config{Portable: true})
	limit := ratelimit.TokenBucket{Name: "l", Rate: 1, Period: 24 * time.Hour}
	must(t, store.Take(t.Context(), limit.For("k")))
	row := probe(store).Server(&theRow)
	version := func() (version string) {
		t.Helper()
		must(t, db.Pool.QueryRow(t.Context(), "SELECT concat_ws(' ', xmin, xmax, ctid) FROM "+db.Schema+".rate_limits").Scan(&version))
		return version
	}
	for round, before := 0, ""; round < 3; round++ {
		var calls []*engine.Pending
		for range 5 {
			calls = append(calls, allowTicket(t, limit.For("k")).Value)
		}
		gather(t, row, calls...)
		for _, call := range calls {
			if call.Err != nil || call.Result.OK || call.Result.RetryAfter <= 0 {
				t.Errorf("got %+v, error %v, want a refusal", call.Result.Status, call.Err)
			}
		}
		if after := version(); round > 0 && after != before {
			t.Errorf("round %d has touched the row", round)
		} else {
			before = after
		}
	}
}

// Who gives up between two statements for those who gathered is not charged.
func TestGatheredGivingUp(t *testing.T) {
	var sends onSend
	ctx, cancel := context.WithCancel(t.Context())
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &sends }))
	store := open(t, db, Config{Portable: true})
	limit := ratelimit.TokenBucket{Name: "l", Rate: 6, Period: 24 * time.Hour}
	must(t, store.Take(t.Context(), limit.For("k")))
	join, goOn := gathering(t, func(ctx context.Context, tickets []*engine.Ticket) {
		probe(store).DecideAll(ctx, tickets, true, &theRow)
	})
	gone := join(ctx, allowTicket(t, limit.ForN("k", 4)).Value)
	sends.after(0, func() { cancel(); <-gone })
	stays := allowTicket(t, limit.ForN("k", 2)).Value
	join(t.Context(), stays)
	goOn()
	if stays.Err != nil || !stays.Result.OK || stays.Result.Remaining != 3 {
		t.Errorf("got %+v, error %v, want 3 left", stays.Result.Status, stays.Err)
	}
}
