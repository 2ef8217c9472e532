package pgstore

import (
	"context"
	"errors"
	"math"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
	"github.com/pgratelimit/ratelimit/pgstore/internal/memory"
)

// newTicket is a call on its own that waits to be decided.
func newTicket(t *testing.T, reserve, check bool, requests ...ratelimit.Request) *engine.Ticket {
	t.Helper()
	call, err := decide.New(reserve, requests...)
	if err != nil {
		t.Fatal(err)
	}
	return batch.NewTicket(t.Context(), &engine.Pending{Call: call, Check: check})
}

func allowTicket(t *testing.T, requests ...ratelimit.Request) *engine.Ticket {
	t.Helper()
	return newTicket(t, false, false, requests...)
}

func prefetchTicket(t *testing.T, r ratelimit.Request) *engine.Ticket {
	t.Helper()
	r.Count = 0
	ticket := allowTicket(t, r)
	ticket.Value.Extra = true
	return ticket
}

// Callers may give up at any moment, also when their batch is about to be sent: all of them, or
// some of those whose statement fails.
func TestServeThoseThatAreGone(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), "postgres://127.0.0.1:1/nowhere")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	store, err := New(pool, &Config{Timeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Second}
	gone := func(check bool) *engine.Ticket {
		of := newTicket(t, false, check, limit.For("a"))
		return batch.NewTicket(ctx, of.Value)
	}
	for _, check := range []bool{false, true} {
		probe(store).Server(nil)(t.Context(), []*engine.Ticket{gone(check)})
		here := newTicket(t, false, check, limit.For("a"))
		probe(store).Server(nil)(t.Context(), []*engine.Ticket{gone(check), here, gone(check)})
		if !here.Finished() || here.Value.Err == nil {
			t.Errorf("check %v: got %v, want the error of a server that is not there", check, here.Value.Err)
		}
	}
}

// TestGroups: calls that take from one row are granted together if the row has
// what the neediest of them wants, after those before it.
func TestGroups(t *testing.T) {
	store, err := New(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	limit := ratelimit.TokenBucket{Name: "limit", Rate: 10, Period: time.Second, MaxReserved: 4}
	other := limit
	other.Rate = 20
	allow := func(key string, n float64) *engine.Ticket { return allowTicket(t, limit.ForN(key, n)) }
	reserve := func(key string, n float64) *engine.Ticket { return newTicket(t, true, false, limit.ForN(key, n)) }
	tests := []struct {
		name        string
		tickets     []*engine.Ticket
		want        []string // keys of the groups
		total, need float64  // of the first
		grouped     int      // calls in the first
		left        int      // calls in none
	}{
		{"alone", []*engine.Ticket{allow("a", 3)}, []string{"a"}, 3, 3, 1, 0},
		{"a reservation may leave a debt", []*engine.Ticket{reserve("a", 3)}, []string{"a"}, 3, -1, 1, 0},
		{"together", []*engine.Ticket{allow("a", 3), allow("a", 2)}, []string{"a"}, 5, 5, 2, 0},
		{"a reservation after a call that must leave none", []*engine.Ticket{allow("a", 3), reserve("a", 2)}, []string{"a"}, 5, 3, 2, 0},
		{"a call that must leave no debt after a reservation", []*engine.Ticket{reserve("a", 2), allow("a", 3)}, []string{"a"}, 5, 5, 2, 0},
		{"what prefetches asks for nothing", []*engine.Ticket{prefetchTicket(t, limit.For("a")), reserve("a", 3), prefetchTicket(t, limit.For("a"))}, []string{"a"}, 3, -1, 3, 0},
		{"but for a row without debt", []*engine.Ticket{prefetchTicket(t, limit.For("a"))}, []string{"a"}, 0, 0, 1, 0},
		{"rows in their one order", []*engine.Ticket{allow("c", 1), allow("a", 1), allow("b", 1), allow("a", 1)}, []string{"a", "b", "c"}, 2, 2, 2, 0},
		{"two definitions", []*engine.Ticket{allow("a", 1), allowTicket(t, other.For("a"))}, []string{"a"}, 1, 1, 1, 1},
		{
			"what must be read",
			[]*engine.Ticket{newTicket(t, false, true, limit.For("a")), allowTicket(t, limit.For("a"), limit.For("b"))},
			nil,
			0, 0, 0, 2,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			groups, grants, left := probe(store).Groups(tt.tickets)
			if len(groups) != len(tt.want) || len(grants) != len(tt.want) || len(left) != tt.left {
				t.Fatalf("got %d groups, %d grants and %d left, want %d, as many, and %d", len(groups), len(grants), len(left), len(tt.want), tt.left)
			}
			for i, key := range tt.want {
				if got := grants[i].Key.Key; got != key {
					t.Errorf("group %d is of %q, want %q", i, got, key)
				}
			}
			if len(groups) == 0 {
				return
			}
			if g := &grants[0]; g.Count != tt.total || g.Need != tt.need || len(groups[0]) != tt.grouped {
				t.Errorf("got %v tokens, need %v, %d calls, want %v, %v, %d", g.Count, g.Need, len(groups[0]), tt.total, tt.need, tt.grouped)
			}
		})
	}
}

// together decides calls in one go, in both ways: with an attempt to grant them by
// one statement, and without.
func together(t *testing.T, test func(t *testing.T, db *pgtest.DB, decide func(...*engine.Ticket))) {
	t.Helper()
	for name, granting := range map[string]bool{"granting": true, "settling": false} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.New(t)
			store, err := New(db.Pool, &Config{Schema: db.Schema})
			if err != nil {
				t.Fatal(err)
			}
			test(t, db, func(tickets ...*engine.Ticket) {
				t.Helper()
				if left := probe(store).DecideAll(t.Context(), tickets, granting, nil); len(left) != 0 {
					t.Errorf("%d calls wait for a row, want none", len(left))
				}
			})
		})
	}
}

// While a new number of shards is rolled out, two definitions can meet in one
// statement, at a row that is not there yet. Each takes what it says it took.
func TestCombinedShardCounts(t *testing.T) {
	together(t, func(t *testing.T, db *pgtest.DB, decide func(...*engine.Ticket)) {
		one := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
		two := one
		two.Shards = 2
		tickets := []*engine.Ticket{allowTicket(t, one.ForN("k", 2)), allowTicket(t, two.ForN("k", 3))}
		decide(tickets...)
		stored := 0.0 // what is missing in the rows
		for shard, full := range []float64{10, 5} {
			var value float64
			err := db.Pool.QueryRow(t.Context(), "SELECT coalesce(min(value), $2) FROM "+db.Schema+".rate_limits WHERE shard = $1", shard, full).Scan(&value)
			if err != nil {
				t.Fatal(err)
			}
			stored += full - value
		}
		for _, ticket := range tickets {
			if p := ticket.Value; p.Err != nil || !p.Result.OK {
				t.Errorf("got OK %v, error %v", p.Result.OK, p.Err)
			}
		}
		// To the one of two shards, 10 tokens in a row are 5.
		if stored < 5-0.001 {
			t.Errorf("%v tokens are missing in the rows, want 5 at least", stored)
		}
	})
}

// A limit's definitions can differ, as those of plans do. A key that has no row
// is full for each by its own.
func TestCombinedDefinitions(t *testing.T) {
	together(t, func(t *testing.T, _ *pgtest.DB, decide func(...*engine.Ticket)) {
		plain := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
		premium, other := plain, plain
		premium.Rate = 100
		other.Name = "other"
		for name, tickets := range map[string][]*engine.Ticket{
			"one":     {newTicket(t, false, true, plain.For("a")), allowTicket(t, premium.ForN("a", 50))},
			"several": {newTicket(t, false, true, plain.For("b")), allowTicket(t, premium.ForN("b", 50), other.For("b"))},
		} {
			decide(tickets...)
			if got := tickets[0].Value; got.Err != nil || got.Result.Remaining != 10 {
				t.Errorf("%s: plain has %d left, error %v, want 10", name, got.Result.Remaining, got.Err)
			}
			if got := tickets[1].Value; got.Err != nil || !got.Result.OK {
				t.Errorf("%s: premium got OK %v, error %v", name, got.Result.OK, got.Err)
			}
		}
	})
}

// A row that turns out to be locked when the statement for many is at it delays
// nobody: the calls for others are decided, and those for it wait apart. (A lock
// behind a savepoint is one that the statement does not see before.)
func TestLockedWhileGranting(t *testing.T) {
	db := pgtest.New(t)
	store, err := New(db.Pool, &Config{Schema: db.Schema})
	if err != nil {
		t.Fatal(err)
	}
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Hour}
	for _, key := range []string{"free", "locked"} {
		if _, err := store.Allow(t.Context(), limit.For(key)); err != nil {
			t.Fatal(err)
		}
	}
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	inner, err := tx.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := inner.Exec(t.Context(), "SELECT 1 FROM "+db.Schema+".rate_limits WHERE key = 'locked' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Allow(t.Context(), limit.For("later")); err != nil { // so that the snapshot ends behind the savepoint
		t.Fatal(err)
	}
	free, locked := newTicket(t, false, false, limit.For("free")), newTicket(t, false, false, limit.For("locked"))
	left := probe(store).DecideAll(t.Context(), []*engine.Ticket{free, locked}, true, nil)
	if len(left) != 1 || left[0] != locked || locked.Value.Waits() == nil {
		t.Errorf("%d calls wait, want that for the locked row", len(left))
	}
	if !free.Finished() || free.Value.Err != nil || !free.Value.Result.OK {
		t.Errorf("the other: got OK %v, error %v, want a grant", free.Value.Result.OK, free.Value.Err)
	}
}

// remembered is a limit of whose key "k" a store that is knowing knows.
var remembered = ratelimit.TokenBucket{Name: "limit", Rate: 1, Period: time.Hour, Capacity: 1000}

// knowing is a store that prefetches and has taken 10 tokens of remembered, and what it knows.
func knowing(t *testing.T, db *pgtest.DB, portable bool) (*Store, *escrow.Entry) {
	t.Helper()
	store, err := New(db.Pool, &Config{Schema: db.Schema, Escrow: 10 * time.Second, Portable: portable})
	if err != nil {
		t.Fatal(err)
	}
	if result, err := store.Allow(t.Context(), remembered.ForN("k", 10)); err != nil || !result.OK {
		t.Fatalf("%v, %v, want a grant", result, err)
	}
	return store, store.memory.Remembered(&ratelimit.Request{Limit: remembered, Key: "k"})
}

// TestPrefetchGoesWithOthers: what is prefetched goes by the same statement as the calls for
// its row that found nothing held, and is told of it; if nothing can be, it waits for nothing.
func TestPrefetchGoesWithOthers(t *testing.T) {
	row := decide.Row{Key: decide.Key{Name: remembered.Name, Key: "k"}}
	for name, await := range map[string]*decide.Row{"plain": nil, "portable": &row} {
		t.Run(name, func(t *testing.T) {
			sent := &traced.Statements{}
			db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = sent }))
			store, h := knowing(t, db, name == "portable")
			h.CountDemand(100, 100)
			var calls []*engine.Pending
			for _, n := range []float64{3, 0, 4} {
				p := allowTicket(t, remembered.ForN("k", n)).Value
				if n != 3 { // a call for the first of several does not know it
					memory.Attach(p, h, nil)
				}
				if n == 0 {
					p.Extra = true
				}
				calls = append(calls, p)
			}
			sent.Reset()
			gather(t, func(ctx context.Context, tickets []*engine.Ticket) {
				if left := probe(store).DecideAll(ctx, tickets, true, await); len(left) != 0 {
					t.Errorf("%d calls wait for a row, want none", len(left))
				}
			}, calls...)
			sends := int64(1)
			if await != nil { // the row is locked and read, and then written
				sends = 2
			}
			if n := sent.Sends(); n != sends {
				t.Errorf("%d times something was sent, want %d", n, sends)
			}
			for i, p := range calls {
				if p.Err != nil || !p.Result.OK {
					t.Errorf("call %d: OK %v, %v", i, p.Result.OK, p.Err)
				}
			}
			var tokens escrow.Tokens
			if !h.Take(5, false, &tokens) {
				t.Error("nothing is held")
			}
			store.Close()
			var left float64
			if err := db.Pool.QueryRow(t.Context(), "SELECT value FROM "+db.Schema+".rate_limits").Scan(&left); err != nil || math.Abs(left-978) > 0.01 {
				t.Errorf("%v left, %v, want 978", left, err)
			}
		})
	}
}

// TestTokensOfOneWhoLeft: of transactions that share a statement, the tokens of one whose caller
// gives up while it is under way are put back.
func TestTokensOfOneWhoLeft(t *testing.T) {
	for name, test := range map[string]struct {
		await *decide.Row
		reads int // before they are decided, in memory with their row locked
	}{
		"plain":    {},
		"portable": {await: &decide.Row{Key: decide.Key{Name: remembered.Name, Key: "k"}}},
		"locked":   {reads: 1},
	} {
		t.Run(name, func(t *testing.T) {
			var sends onSend
			db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &sends }))
			store, h := knowing(t, db, name == "portable")
			h.CountDemand(100, 100)
			var calls []*engine.Pending
			var tokens []*escrow.Tokens
			for _, n := range []float64{3, 4} {
				p := allowTicket(t, remembered.ForN("k", n)).Value
				tokens = append(tokens, &escrow.Tokens{})
				memory.Attach(p, h, tokens[len(tokens)-1])
				calls = append(calls, p)
			}
			join, goOn := gathering(t, func(ctx context.Context, tickets []*engine.Ticket) {
				if left := probe(store).DecideAll(ctx, tickets, test.reads == 0, test.await); len(left) != 0 {
					t.Errorf("%d calls wait for a row, want none", len(left))
				}
			})
			ctx, giveUp := context.WithCancel(t.Context())
			gone := join(ctx, calls[0])
			join(t.Context(), calls[1])
			sends.after(test.reads, func() { giveUp(); <-gone })
			goOn()
			if !calls[1].Result.OK || tokens[1].Count != 4 {
				t.Fatalf("the other: got OK %v, %v, %v tokens, want 4", calls[1].Result.OK, calls[1].Err, tokens[1].Count)
			}
			tokens[1].Spend()
			store.Close()
			var left float64
			if err := db.Pool.QueryRow(t.Context(), "SELECT value FROM "+db.Schema+".rate_limits").Scan(&left); err != nil || math.Abs(left-986) > 0.01 {
				t.Errorf("%v left, %v, want 986", left, err)
			}
		})
	}
}

// onSend is a tracer that does something once, when something is sent.
type onSend struct {
	traced.Statements
	next atomic.Pointer[func()]
}

// after has it done when so many others have been sent.
func (o *onSend) after(others int, do func()) {
	next := do
	if others > 0 {
		next = func() { o.after(others-1, do) }
	}
	o.next.Store(&next)
}

func (o *onSend) once() {
	if next := o.next.Swap(nil); next != nil {
		(*next)()
	}
}

func (o *onSend) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	o.once()
	return ctx
}

func (o *onSend) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	o.once()
	return ctx
}

// TestPrefetchKeepsItsSeat: a statement that waits for a row when its callers have gone counts among
// the connections that may.
func TestPrefetchKeepsItsSeat(t *testing.T) {
	db := pgtest.New(t)
	store, e := knowing(t, db, false)
	defer store.Close()
	e.CountDemand(100, 100)
	tx := lockRows(t, db)
	for waits := false; !waits; {
		store.givesUp(t, e)
		seated := store.conn.Seated()
		if waits = pgtest.Blocks(t, db.Pool, tx); waits && seated != 1 {
			t.Errorf("%d seats are taken, want 1", seated)
		}
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestPrefetchHasItsTurn: from a row that somebody has locked is prefetched when it is free,
// known to be locked or not, for as long as that is of use; and nothing from one of which
// nothing is to be had.
func TestPrefetchHasItsTurn(t *testing.T) {
	db := pgtest.New(t)
	store, e := knowing(t, db, false)
	defer store.Close()
	if store.prefetches(t.Context(), e) {
		t.Error("it was prefetched when nobody had taken much")
	}
	for range 2 { // the second time it is known to be locked
		e.CountDemand(100, 100)
		tx := lockRows(t, db)
		store.givesUp(t, e)
		got := make(chan bool, 1)
		go func() { got <- store.prefetches(t.Context(), e) }()
		for !pgtest.Blocks(t, db.Pool, tx) && len(got) == 0 {
			time.Sleep(time.Millisecond)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		// By the one that waited, or by the statement of the one that gave up, which is heard to
		// its end: then that leaves the other no more to prefetch.
		<-got
		for begun := time.Now(); !e.Take(1, false, new(escrow.Tokens)); time.Sleep(time.Millisecond) {
			if time.Since(begun) > 10*time.Second {
				t.Fatal("it was not prefetched when the row was free")
			}
		}
		store.memory.Evict(e.Template().KeyOf())
		for begun := time.Now(); store.conn.Work.UnderWay() > 0; time.Sleep(time.Millisecond) { // the row has it, before it is locked again
			if time.Since(begun) > 10*time.Second {
				t.Fatal("the tokens did not return to their row")
			}
		}
	}
}

// TestPrefetchedRowKeepsItsQueue: a row that was locked is waited for later, too, although it is
// prefetched from only now and then.
func TestPrefetchedRowKeepsItsQueue(t *testing.T) {
	db := pgtest.New(t)
	store, e := knowing(t, db, false)
	defer store.Close()
	row := decide.Row{Key: e.Template().KeyOf()}
	queued := func(unused time.Duration) bool {
		probe(store).Unused(row, unused)
		return store.engine.LockedRows() == 1
	}
	store.engine.MarkLocked(row)
	if queued(engine.Contended + time.Second) {
		t.Error("a row that was not prefetched from keeps its queue for longer than others")
	}
	store.engine.MarkLocked(row)
	if e.CountDemand(100, 100); !store.prefetches(t.Context(), e) {
		t.Fatal("nothing was prefetched")
	}
	if !queued(10*time.Second - time.Second) {
		t.Error("a row that is prefetched from has lost its queue")
	}
	if queued(10*time.Second + time.Second) {
		t.Error("a row that is not locked any more keeps its queue")
	}
}

// prefetches reports whether it has tokens of an entry prefetched.
func (s *Store) prefetches(ctx context.Context, e *escrow.Entry) bool {
	p := &engine.Pending{Call: decide.Call{Demands: []decide.Demand{*e.Template()}}, Extra: true}
	memory.Attach(p, e, nil)
	result, err := s.engine.Decide(ctx, nil, p)
	return err == nil && result.OK
}

// givesUp has tokens prefetched from a row that is locked, and gives up, for which nobody waits.
func (s *Store) givesUp(t *testing.T, e *escrow.Entry) {
	t.Helper()
	soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if s.prefetches(soon, e) {
		t.Error("it was prefetched from a locked row")
	}
	for !s.idle(e) {
		time.Sleep(time.Millisecond)
	}
}

// lockRows begins a transaction that has all rows locked.
func lockRows(t *testing.T, db *pgtest.DB) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	return tx
}

// idle reports whether nobody waits for the row of an entry.
func (s *Store) idle(e *escrow.Entry) bool {
	return probe(s).Idle(decide.Row{Key: e.Template().KeyOf()})
}

// A call for a row that is waited for does not wait for a lane before.
func TestRowsWaitForNoLane(t *testing.T) {
	db := pgtest.New(t)
	store, err := New(db.Pool, &Config{Schema: db.Schema})
	if err != nil {
		t.Fatal(err)
	}
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
	if _, err := store.Allow(t.Context(), limit.For("k")); err != nil {
		t.Fatal(err)
	}
	probe(store).Stop()
	store.engine.Shared(theRow)
	if result, err := store.Allow(t.Context(), limit.For("k")); err != nil || !result.OK || result.Remaining != 8 {
		t.Errorf("got %+v, %v, want 8 left", result.Status, err)
	}
	// One that was given up before has waited for nothing.
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := store.Allow(over, limit.For("k")); !errors.Is(err, context.Canceled) || errors.Is(err, conn.ErrLocked) {
		t.Errorf("given up before: %v, want %v only", err, context.Canceled)
	}
	// It is checked there all the same.
	window := ratelimit.FixedWindow{Name: "l", Rate: 10, Period: time.Hour}
	if _, err := store.Allow(t.Context(), window.For("k")); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("another kind of limit by the same name: %v, want %v", err, ratelimit.ErrInvalid)
	}
}

// TestPrefetchIsAChange: when a row has changed, by what a transaction holds or was prefetched
// as well, what was told to those who were refused before is not told again.
func TestPrefetchIsAChange(t *testing.T) {
	for name, tokens := range map[string]*escrow.Tokens{"held": {}, "prefetched": nil} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.New(t)
			store, e := knowing(t, db, false)
			defer store.Close()
			if result, err := store.Allow(t.Context(), remembered.ForN("k", 995)); err != nil || result.OK {
				t.Fatalf("%v, %v, want a refusal", result, err)
			}
			if _, _, told := e.Refusal(); !told {
				t.Error("the refusal is not remembered")
			}
			e.CountDemand(100, 100)
			ask := *e.Template()
			if tokens != nil {
				ask.Count = 1
			}
			p := &engine.Pending{Call: decide.Call{Demands: []decide.Demand{ask}}, Extra: tokens == nil}
			memory.Attach(p, e, tokens)
			probe(store).Granting() // as if others had been granted what they asked for
			if result, err := store.engine.Decide(t.Context(), nil, p); err != nil || !result.OK {
				t.Fatalf("%v, %v", result, err)
			}
			if _, _, told := e.Refusal(); told {
				t.Error("the refusal is remembered")
			}
		})
	}
}

// probe looks into the engine of a store.
func probe(s *Store) engine.Probe { return engine.Probe{Engine: s.engine} }
