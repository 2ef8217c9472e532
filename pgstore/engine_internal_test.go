package pgstore

import (
	"context"
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
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
	"github.com/pgratelimit/ratelimit/pgstore/internal/memory"
)

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }

// open is a store on a schema.
func open(t *testing.T, db *pgtest.DB, config Config) *Store {
	t.Helper()
	config.Schema = db.Schema
	store, err := New(db.Pool, &config)
	must(t, err)
	return store
}

// newTicket is a call on its own that waits to be decided.
func newTicket(t *testing.T, reserve, check bool, requests ...ratelimit.Request) *engine.Ticket {
	t.Helper()
	call, err := decide.New(reserve, requests...)
	must(t, err)
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
	must(t, err)
	defer pool.Close()
	store, err := New(pool, &Config{Timeout: time.Second})
	must(t, err)
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
	must(t, err)
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

// While a new number of shards is rolled out, two definitions can meet in one
// statement, at a row that is not there yet. Each takes what it says it took.
func TestCombinedShardCounts(t *testing.T) {
	for name, granting := range map[string]bool{"granting": true, "settling": false} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.New(t)
			one := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
			two := one
			two.Shards = 2
			tickets := []*engine.Ticket{allowTicket(t, one.ForN("k", 2)), allowTicket(t, two.ForN("k", 3))}
			if left := probe(open(t, db, Config{})).DecideAll(t.Context(), tickets, granting, nil); len(left) != 0 {
				t.Errorf("%d calls wait for a row, want none", len(left))
			}
			stored := 0.0 // what is missing in the rows
			for shard, full := range []float64{10, 5} {
				var value float64
				must(t, db.Pool.QueryRow(t.Context(), "SELECT coalesce(min(value), $2) FROM "+db.Schema+".rate_limits WHERE shard = $1", shard, full).Scan(&value))
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
}

// remembered is a limit of whose key "k" a store that is knowing knows.
var remembered = ratelimit.TokenBucket{Name: "limit", Rate: 1, Period: time.Hour, Capacity: 1000}

// knowing is a store that prefetches and has taken 10 tokens of remembered, and what it knows.
func knowing(t *testing.T, db *pgtest.DB, portable bool) (*Store, *escrow.Entry) {
	t.Helper()
	store := open(t, db, Config{Escrow: 10 * time.Second, Portable: portable})
	must(t, store.Take(t.Context(), remembered.ForN("k", 10)))
	return store, store.memory.Remembered(&ratelimit.Request{Limit: remembered, Key: "k"})
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

// probe looks into the engine of a store.
func probe(s *Store) engine.Probe { return engine.Probe{Engine: s.engine} }
