package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

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
	turnOf := func(reserve bool, requests ...ratelimit.Request) *turn {
		call, err := ratelimit.NewCall(reserve, requests...)
		if err != nil {
			t.Fatal(err)
		}
		return &turn{call: call}
	}
	check := turnOf(false, limit.For("a"))
	check.check = true
	tests := []struct {
		name        string
		turns       []*turn
		want        []string // keys of the groups
		total, need float64  // of the first
		grouped     int      // turns in the first
	}{
		{"alone", []*turn{turnOf(false, limit.ForN("a", 3))}, []string{"a"}, 3, 3, 1},
		{"a reservation may leave a debt", []*turn{turnOf(true, limit.ForN("a", 3))}, []string{"a"}, 3, -1, 1},
		{"together", []*turn{turnOf(false, limit.ForN("a", 3)), turnOf(false, limit.ForN("a", 2))}, []string{"a"}, 5, 5, 2},
		{
			"a reservation after a call that must leave none",
			[]*turn{turnOf(false, limit.ForN("a", 3)), turnOf(true, limit.ForN("a", 2))},
			[]string{"a"},
			5, 3, 2,
		},
		{
			"a call that must leave no debt after a reservation",
			[]*turn{turnOf(true, limit.ForN("a", 2)), turnOf(false, limit.ForN("a", 3))},
			[]string{"a"},
			5, 5, 2,
		},
		{
			"rows in their one order",
			[]*turn{turnOf(false, limit.For("c")), turnOf(false, limit.For("a")), turnOf(false, limit.For("b")), turnOf(false, limit.For("a"))},
			[]string{"a", "b", "c"},
			2, 2, 2,
		},
		{"two definitions", []*turn{turnOf(false, limit.For("a")), turnOf(false, other.For("a"))}, []string{"a"}, 1, 1, 1},
		{"what must be read", []*turn{check, turnOf(false, limit.For("a"), limit.For("b"))}, nil, 0, 0, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			groups := store.groups(tt.turns)
			if len(groups) != len(tt.want) {
				t.Fatalf("got %d groups, want %d", len(groups), len(tt.want))
			}
			for i, key := range tt.want {
				if got := groups[i].part.key; got != key {
					t.Errorf("group %d is of %q, want %q", i, got, key)
				}
			}
			if len(groups) == 0 {
				return
			}
			g := &groups[0]
			if g.part.count != tt.total || g.need != tt.need || len(g.turns) != tt.grouped {
				t.Errorf("got %v tokens, need %v, %d turns, want %v, %v, %d", g.part.count, g.need, len(g.turns), tt.total, tt.need, tt.grouped)
			}
		})
	}
}

// TestGroupsAgree: what groups take in one statement, or one group in one of its
// own, is what the algebra takes, for each kind and for both at once.
func TestGroupsAgree(t *testing.T) {
	db := pgtest.New(t)
	now := time.Date(2026, 3, 14, 15, 9, 26, 535897000, time.UTC)
	store := internalStore(t, db, Config{Clock: func() time.Time { return now }})
	bucket := ratelimit.TokenBucket{Name: "bucket", Rate: 7, Period: time.Minute, Capacity: 20, MaxReserved: 15}
	window := ratelimit.FixedWindow{Name: "window", Rate: 7, Period: time.Minute, Capacity: 20, MaxReserved: 15}
	random := rand.New(rand.NewPCG(3, 14))
	outcomes := make(map[bool]int)
	for _, limits := range [][]ratelimit.Limit{{bucket}, {window}, {bucket, window}} {
		for n := range 100 {
			groups, before := make([]group, 1+n%5), make([]ratelimit.State, 1+n%5)
			for i := range groups {
				limit, count := limits[random.IntN(len(limits))], float64(random.IntN(12))
				call, err := ratelimit.NewCall(random.IntN(2) == 0, limit.ForN(fmt.Sprint(i), count))
				if err != nil {
					t.Fatal(err)
				}
				groups[i] = group{part: newPart(0, call.Asks[0], 0, count), need: count + call.Asks[0].Floor}
				before[i] = ratelimit.State{Value: float64(random.IntN(20)) - 6, TS: now.Add(time.Minute - time.Duration(random.IntN(300))*time.Second)}
				p := &groups[i].part
				if _, err := db.Pool.Exec(t.Context(), store.sql.put, p.definition.Name, p.key, 0, before[i].Value, before[i].TS); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := store.takeGroups(t.Context(), groups); err != nil {
				t.Fatal(err)
			}
			for i := range groups {
				p, got := &groups[i].part, groups[i].after
				want, ok := p.definition.Take(before[i], now, p.count, p.floor)
				if got.taken != ok || ok && (got.after.Value != want.Value || !got.after.TS.Equal(want.TS)) {
					t.Fatalf("%v of a %s with %v: got %v, want %v %v", p.count, p.definition.Name, before[i], got, want, ok)
				}
				outcomes[ok]++
			}
		}
	}
	if outcomes[true] < 100 || outcomes[false] < 100 {
		t.Errorf("%d taken and %d refused, so this test tells little", outcomes[true], outcomes[false])
	}
}

// TestGiveUpTogether: of callers whose calls are decided by one statement, one
// who gives up fails alone, and when all have the statement is cancelled.
func TestGiveUpTogether(t *testing.T) {
	for _, all := range []bool{false, true} {
		t.Run(fmt.Sprintf("all %v", all), func(t *testing.T) {
			db := pgtest.New(t)
			store := internalStore(t, db, Config{})
			request := ratelimit.TokenBucket{Name: "limit", Rate: 10, Period: time.Hour}.For("k")
			if _, err := store.Allow(t.Context(), request); err != nil {
				t.Fatal(err)
			}
			call, err := ratelimit.NewCall(false, request)
			if err != nil {
				t.Fatal(err)
			}
			lane := store.combiner.lane(call)
			tx, err := db.Pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer rollback(t.Context(), tx)
			if _, err := tx.Exec(t.Context(), "SELECT FROM "+pgx.Identifier{db.Schema, Table}.Sanitize()+" FOR UPDATE"); err != nil {
				t.Fatal(err)
			}

			type answer struct {
				result ratelimit.Result
				err    error
			}
			ask := func() (<-chan answer, context.CancelFunc) {
				ctx, cancel := context.WithCancel(t.Context())
				answers := make(chan answer, 1)
				go func() {
					result, err := store.Allow(ctx, request)
					answers <- answer{result, err}
				}()
				return answers, cancel
			}
			wantCancelled := func(answers <-chan answer) {
				t.Helper()
				if a := <-answers; a.result.OK || !errors.Is(a.err, context.Canceled) {
					t.Errorf("got OK %v, %v, want %v", a.result.OK, a.err, context.Canceled)
				}
			}
			alone, giveUpAlone := ask()
			eventually(t, "one is being decided", func() bool { busy, _ := lane.state(); return busy })
			first, giveUpFirst := ask()
			second, giveUpSecond := ask()
			defer giveUpSecond()
			eventually(t, "two wait", func() bool { _, waiting := lane.state(); return waiting == 2 })
			giveUpAlone()
			wantCancelled(alone)
			eventually(t, "both are being decided", func() bool { _, waiting := lane.state(); return waiting == 0 })
			giveUpFirst()
			wantCancelled(first)
			if all {
				giveUpSecond()
				wantCancelled(second)
				eventually(t, "the statement is cancelled", func() bool { busy, _ := lane.state(); return !busy })
				return
			}
			rollback(t.Context(), tx)
			if a := <-second; !a.result.OK || a.err != nil {
				t.Errorf("got OK %v, %v, want a grant", a.result.OK, a.err)
			}
		})
	}
}

func (l *lane) state() (busy bool, waiting int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.busy, len(l.waiting)
}
