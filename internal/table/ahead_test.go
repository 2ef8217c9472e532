package table

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// What a grant takes ahead is what it said, or half of what is left if that is less; and
// what is left tells which, for each kind and for one row and several.
func TestTakeAhead(t *testing.T) {
	db := pgtest.New(t)
	now := quarterPast
	tokens := ratelimit.TokenBucket{Name: "bucket", Rate: 7, Period: time.Minute, Capacity: 20}
	window := ratelimit.FixedWindow{Name: "window", Rate: 7, Period: time.Minute, Capacity: 20}
	sliding := ratelimit.SlidingWindow{Name: "sliding", Rate: 20, Period: time.Minute, Slots: 6}
	random := rand.New(rand.NewPCG(3, 14))
	halves, wholes := 0, 0
	plain, portable := New(db.Schema, false, time.Second), New(db.Schema, true, time.Second)
	for _, test := range []struct {
		table  *Table
		limits []ratelimit.Limit
	}{
		{plain, []ratelimit.Limit{tokens}},
		{plain, []ratelimit.Limit{window}},
		{plain, []ratelimit.Limit{sliding}},
		{plain, []ratelimit.Limit{tokens, window}},
		{plain, []ratelimit.Limit{tokens, window, sliding}},
		{portable, []ratelimit.Limit{tokens}},
		{portable, []ratelimit.Limit{window}},
	} {
		table, limits := test.table, test.limits
		for n := range 60 {
			grants, before := randomGrants(t, random, limits, 1+n%3)
			for i := range grants {
				grants[i].Ahead = float64(random.IntN(8))
			}
			putAll(t, db, table, grants, before)
			if table == portable {
				for i := range grants {
					grants[i].Seen, grants[i].Over = before[i], now
					if err := table.TakeGrant(t.Context(), db.Pool, false, &grants[i], &now); err != nil {
						t.Fatal(err)
					}
				}
			} else if err := table.Grant(t.Context(), db.Pool, grants, &now); err != nil {
				t.Fatal(err)
			}
			for i := range grants {
				g := &grants[i]
				left, ok := g.Definition.Take(before[i], now, g.Count, g.Floor)
				if g.Taken.OK != ok {
					t.Fatalf("%v of %v: got %v, want %v", g.Count, before[i], g.Taken.OK, ok)
				}
				if !ok {
					continue
				}
				want := max(0, min(g.Ahead, left.Value/2))
				after := g.Definition.Spend(left, now, want)
				if ahead := g.TookAhead(); ahead != want || g.Taken.After.Value != left.Value-want || !reflect.DeepEqual(g.Taken.After.Slots, after.Slots) {
					t.Fatalf("%v and %v ahead of %v: took %v and left %v, want %v and %v", g.Count, g.Ahead, before[i], ahead, g.Taken.After, want, after)
				}
				if want == g.Ahead {
					wholes++
				} else {
					halves++
				}
			}
		}
	}
	if halves < 20 || wholes < 20 {
		t.Errorf("%d times half and %d times all, so this tests little", halves, wholes)
	}
}

// What is given back is less by what was refilled since, of a token bucket; and nothing
// when its end is over, and during a pause.
func TestGiveBack(t *testing.T) {
	db := pgtest.New(t)
	table, taken := New(db.Schema, false, time.Second), quarterPast
	forms := map[string]func(context.Context, Querier, decide.Row, *bucket.Definition, float64, time.Time, time.Time, *time.Time) (bool, error){
		"plain": table.GiveBack, "portable": New(db.Schema, true, time.Second).BringBack,
	}
	tokens := bucket.Definition(ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: time.Second, Capacity: 100}.Definition())
	window := bucket.Definition(ratelimit.FixedWindow{Name: "window", Rate: 100, Period: time.Second}.Definition())
	for _, test := range []struct {
		name         string
		definition   bucket.Definition
		count        float64
		after, lasts time.Duration
		paused       bool
		given        bool
		want         float64 // in the row then, as it is stored
	}{
		{"at once", tokens, 20, 0, time.Second, false, true, 30},
		{"with five refilled", tokens, 20, time.Second / 2, time.Second, false, true, 25},
		{"with more refilled than is given back", tokens, 3, time.Second / 2, time.Second, false, true, 10},
		{"just before the end", tokens, 20, time.Second - time.Microsecond, time.Second, false, true, 20.00001},
		{"at the end", tokens, 20, time.Second, time.Second, false, false, 10},
		{"in a pause", tokens, 20, time.Second / 2, time.Second, true, false, 10},
		{"from before the row", tokens, 20, -time.Second, time.Second, false, true, 30},
		{"above the capacity", tokens, 200, 0, time.Second, false, true, 100},
		{"a window", window, 20, time.Second / 2, time.Second, false, true, 30},
		{"a window, just before the end", window, 20, time.Second - time.Microsecond, time.Second, false, true, 30},
		{"a window that is over", window, 20, time.Second, time.Second, false, false, 10},
	} {
		testEach(t, test.name, forms, func(t *testing.T, form string) {
			row := decide.Row{Key: decide.Key{Name: test.definition.Name, Key: test.name + form}}
			g := Grant{Change: decide.Change{Row: row, Definition: test.definition}}
			state := bucket.State{Value: 10, TS: taken}
			if test.paused {
				state.Paused = taken.Add(time.Minute)
			}
			putAll(t, db, table, []Grant{g}, []bucket.State{state})
			now := taken.Add(test.after)
			given, err := forms[form](t.Context(), db.Pool, row, &test.definition, test.count, taken, taken.Add(test.lasts), &now)
			if err != nil || given != test.given {
				t.Fatalf("got %v, %v, want %v", given, err, test.given)
			}
			var value float64
			sql := `SELECT value FROM ` + db.Schema + `.rate_limits WHERE name = $1 AND key = $2`
			if err := db.Pool.QueryRow(t.Context(), sql, row.Name, row.Key.Key).Scan(&value); err != nil {
				t.Fatal(err)
			}
			if value-test.want > 1e-6 || test.want-value > 1e-6 {
				t.Errorf("got %v, want %v", value, test.want)
			}
		})
	}
}

// What is given back to a slot of a sliding window is what the algebra gives back, be it
// that the row is ahead or long past; and nothing to one that another definition has
// written, or that somebody else has locked.
func TestGiveBackSlots(t *testing.T) {
	db := pgtest.New(t)
	table := New(db.Schema, false, time.Second)
	limit := ratelimit.SlidingWindow{Name: "sliding", Rate: 20, Period: time.Minute, Slots: 6}
	d := bucket.Definition(limit.Definition())
	random := rand.New(rand.NewPCG(3, 14))
	outcomes := make(map[bool]int)
	for n := range 300 {
		row := decide.Row{Key: decide.Key{Name: "sliding", Key: fmt.Sprint(n)}}
		before := randomSlots(random, d)
		before.Paused = []time.Time{{}, quarterPast.Add(time.Hour)}[random.IntN(2)]
		taken := before.TS.Add(d.SlotWidth() * time.Duration(random.IntN(12)-8))
		count, now := float64(random.IntN(9)), quarterPast.Add(time.Duration(random.IntN(120)-60)*time.Second)
		end := taken.Add(7 * d.SlotWidth())
		putAll(t, db, table, []Grant{{Change: decide.Change{Row: row, Definition: d}}}, []bucket.State{before})
		given, err := table.GiveBack(t.Context(), db.Pool, row, &d, count, taken, end, &now)
		if err != nil {
			t.Fatal(err)
		}
		rows := Rows{Rows: []decide.Row{row}}
		if err := table.Read(t.Context(), db.Pool, &rows, &now); err != nil {
			t.Fatal(err)
		}
		after, want := rows.States[0], before
		if given {
			want = d.Refund(before, before.TS, count, d.Slot(bucket.State{TS: taken, Slots: d.Fresh("", taken).Slots}))
		}
		if after.Value != want.Value || !after.TS.Equal(want.TS) || !after.Paused.Equal(want.Paused) || !reflect.DeepEqual(after.Slots, want.Slots) {
			t.Fatalf("%v to %v of %v: got %v, want %v", count, taken, before, after, want)
		}
		last := before.TS.Add(d.SlotWidth() * time.Duration(before.Slots.Ahead))
		there := !taken.After(last) && !taken.Before(last.Add(-6*d.SlotWidth())) && now.Before(end)
		if given != there {
			t.Fatalf("%v to %v of %v, at %v: given %v, want %v", count, taken, before, now, given, there)
		}
		outcomes[given]++
	}
	if outcomes[true] < 50 || outcomes[false] < 50 {
		t.Errorf("%d given and %d not, so this tests little", outcomes[true], outcomes[false])
	}
	other := limit
	other.Slots = 7
	otherwise := bucket.Definition(other.Definition())
	for name, change := range map[string]func(*bucket.Definition, *bucket.State){
		"by the same":         func(*bucket.Definition, *bucket.State) {},
		"by another":          func(_ *bucket.Definition, s *bucket.State) { *s = otherwise.Settle(*s, quarterPast) },
		"by one without them": func(_ *bucket.Definition, s *bucket.State) { s.Slots = nil },
	} {
		row := decide.Row{Key: decide.Key{Name: "sliding", Key: name}}
		state := d.Spend(d.Fresh("", quarterPast), quarterPast, 9)
		taken := state.TS
		change(&d, &state)
		putAll(t, db, table, []Grant{{Change: decide.Change{Row: row, Definition: d}}}, []bucket.State{state})
		given, err := table.GiveBack(t.Context(), db.Pool, row, &d, 5, taken, taken.Add(time.Minute), &taken)
		if want := name == "by the same"; err != nil || given != want {
			t.Errorf("written %s: given %v, %v, want %v", name, given, err, want)
		}
	}
}

// testEach runs a test once for each form.
func testEach[F any](t *testing.T, name string, forms map[string]F, test func(t *testing.T, form string)) {
	t.Helper()
	for form := range forms {
		t.Run(form+"/"+name, func(t *testing.T) { test(t, form) })
	}
}

// What is brought back to a row that is not there leaves it full.
func TestBringBackToNoRow(t *testing.T) {
	db := pgtest.New(t)
	table, taken := New(db.Schema, true, time.Second), quarterPast
	tokens := ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: time.Second, Capacity: 100}
	d, call := bucket.Definition(tokens.Definition()), mustCall(t, tokens.For("k"))
	if _, err := table.BringBack(t.Context(), db.Pool, call.Asks[0].Rows()[0], &d, 5, taken, taken.Add(time.Second), &taken); err != nil {
		t.Fatal(err)
	}
	view, err := table.Look(t.Context(), db.Pool, new(pgx.Batch), &call, func(*decide.Ask) bool { return true }, &taken)
	if err != nil || view.States[0][0].Value != 100 {
		t.Errorf("got %v, %v, want 100", view.States, err)
	}
}

func mustCall(t *testing.T, r ratelimit.Request) decide.Call {
	t.Helper()
	call, err := decide.New(false, r)
	if err != nil {
		t.Fatal(err)
	}
	return call
}
