package bucket_test

import (
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// kinds are limits of 10 tokens, of which a token bucket is refilled with one in d.
var kinds = []Limit{
	TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 10},
	FixedWindow{Name: "a", Rate: 10, Period: time.Second, Start: t0},
	sliding,
}

// Without anything that is out, what comes back does so as ever.
func TestNothingIsOut(t *testing.T) {
	for _, limit := range kinds {
		definition := definition(limit)
		taken, _ := definition.Take(definition.Fresh("k", t0), t0, 7, 0)
		for name, out := range map[string]bucket.Out{"never": {}, "nothing": {Until: t5}, "no more": {Tokens: 4, Until: t0.Add(-10 * d)}} {
			if owed := definition.Owed(out, t1); owed != 0 {
				t.Errorf("%v, %s: owes %v, want nothing", limit, name, owed)
			}
			if got, want := definition.CreditBeside(taken, out, t1, 30).Value, definition.Credit(taken, t1, 30).Value; got != want {
				t.Errorf("%v, %s: CreditBeside leaves %v, want %v", limit, name, got, want)
			}
			if got, want := definition.Full("k", taken, out, t1), definition.Fresh("k", t1); got.Value != want.Value || !got.TS.Equal(want.TS) {
				t.Errorf("%v, %s: Full() = %v, want %v", limit, name, got, want)
			}
		}
	}
}

// A row owes what is out and what is refilled until the end of it; and after that less and
// less, as leftovers are worth less. It is forgotten a grace after that, when it owes nothing.
func TestOwed(t *testing.T) {
	tokens, window := definition(kinds[0]), definition(kinds[1])
	out := bucket.Out{Tokens: 4, Until: t3}
	for _, tt := range []struct {
		name    string
		d       *bucket.Definition
		now     time.Time
		want    float64
		forgets bool
	}{
		{"before the end", tokens, t1, 6, false},
		{"at the end", tokens, t3, 4, false},
		{"after the end", tokens, t5, 2, false},
		{"when leftovers are worth nothing", tokens, t3.Add(4 * d), 0, false},
		{"in the grace", tokens, t3.Add(bucket.Grace - time.Microsecond), 0, false},
		{"after the grace", tokens, t3.Add(bucket.Grace), 0, true},
		{"in the window", window, t1, 4, false},
		{"after the window", window, t3, 0, true},
	} {
		if got := tt.d.Owed(out, tt.now); got != tt.want || tt.d.Forgets(out, tt.now) != tt.forgets {
			t.Errorf("%s: owes %v, forgets %v, want %v, %v", tt.name, got, tt.d.Forgets(out, tt.now), tt.want, tt.forgets)
		}
	}
	slow := *tokens
	slow.Period *= 1000
	if slow.Forgets(out, t3.Add(bucket.Grace)) {
		t.Error("a slow limit forgets leftovers that are worth something")
	}
}

// What comes back stays below the capacity, with what the row owes.
func TestCreditBeside(t *testing.T) {
	tokens, window := definition(kinds[0]), definition(kinds[1])
	for _, tt := range []struct {
		name string
		d    *bucket.Definition
		s    bucket.State
		out  bucket.Out
		now  time.Time
		n    float64
		want bucket.State
	}{
		{"below all", tokens, row(1, t0), bucket.Out{Tokens: 4, Until: t3}, t0, 2, row(3, t0)},
		{"refilled first", tokens, row(1, t0), bucket.Out{Tokens: 2, Until: t3}, t1, 2, row(4, t1)},
		{"above what is out and refilled", tokens, row(1, t0), bucket.Out{Tokens: 4, Until: t3}, t0, 9, row(3, t0)},
		{"nothing is taken off", tokens, row(8, t0), bucket.Out{Tokens: 4, Until: t3}, t0, 1, row(8, t0)},
		{"just after it ends", tokens, row(1, t0), bucket.Out{Tokens: 4, Until: t0}, t1, 9, row(7, t1)},
		{"in a pause, which is over later", tokens, bucket.State{Value: -1, TS: t5, Paused: t5}, bucket.Out{Tokens: 4, Until: t3}, t1, 9, bucket.State{Value: 4, TS: t5, Paused: t5}},
		{"of a window nothing is refilled", window, row(1, t0), bucket.Out{Tokens: 4, Until: t0.Add(time.Second)}, t5, 9, row(6, t0)},
	} {
		if got := tt.d.CreditBeside(tt.s, tt.out, tt.now, tt.n); got != tt.want {
			t.Errorf("%s: CreditBeside() = %v, want %v", tt.name, got, tt.want)
		}
	}
}

// The slots keep as much as is out, in the newest of them.
func TestCreditBesideSlots(t *testing.T) {
	definition := definition(sliding)
	first, _ := definition.Take(definition.Fresh("k", t0), t0, 4, 0)
	second, _ := definition.Take(first, t5, 3, 0)
	for _, tt := range []struct {
		name  string
		out   float64
		n     float64
		want  float64
		later float64 // when the first slot has left the window
	}{
		{"less than the others have", 3, 2, 5, 7},
		{"all that the others have", 3, 4, 7, 7},
		{"more", 3, 100, 7, 7},
		{"a part is out", 1, 100, 9, 9},
		{"more is out than there is", 9, 100, 3, 7},
		{"all is out", 7, 1, 3, 7},
	} {
		out := bucket.Out{Tokens: tt.out, Until: t6}
		got := definition.CreditBeside(second, out, t5, tt.n)
		if got.Value != tt.want || definition.Refill(got, slot(11)).Value != tt.later {
			t.Errorf("%s: %v tokens and later %v, want %v and %v", tt.name, got.Value, definition.Refill(got, slot(11)).Value, tt.want, tt.later)
		}
	}
}

// A row that is reset is full less what is out, and not more when that has ended.
func TestFull(t *testing.T) {
	tokens, window, slots := definition(kinds[0]), definition(kinds[1]), definition(sliding)
	if got, want := tokens.Full("k", row(-2, t0), bucket.Out{Tokens: 4, Until: t3}, t0), row(3, t0); got != want {
		t.Errorf("a token bucket: %v, want %v", got, want)
	}
	if got, want := window.Full("k", row(-2, t0), bucket.Out{Tokens: 4, Until: t0.Add(time.Second)}, t3), row(6, t0); got != want {
		t.Errorf("a fixed window: %v, want %v", got, want)
	}
	// Since it was paused, its edges are not those of a fresh row, which would be refilled
	// before what is out has ended.
	moved := window.Full("k", row(-2, t0.Add(3*d)), bucket.Out{Tokens: 4, Until: t0.Add(13 * d)}, t5)
	if got := window.Refill(moved, t0.Add(13*d-1)).Value; got != 6 {
		t.Errorf("a fixed window that was paused: %v tokens before it ends, want 6", got)
	}
	if got := window.Refill(moved, t0.Add(13*d)).Value; got != 10 {
		t.Errorf("a fixed window that was paused: %v tokens when it has ended, want 10", got)
	}
	paused := row(-2, t0.Add(10*d))
	paused.Paused = t0.Add(20 * d)
	moved = window.Full("k", paused, bucket.Out{Tokens: 4, Until: t0.Add(13 * d)}, t5)
	if before, after := window.Refill(moved, t0.Add(13*d-1)).Value, window.Refill(moved, t0.Add(13*d)).Value; before != 6 || after != 10 {
		t.Errorf("a fixed window in a pause: %v tokens before it ends, and %v when it has ended, want 6 and 10", before, after)
	}
	full := slots.Full("k", slots.Fresh("k", t0), bucket.Out{Tokens: 4, Until: t6}, t5)
	if at := slots.Refill(full, slot(16).Add(-1)); full.Value != 6 || at.Value != 6 || slots.Refill(full, slot(16)).Value != 10 {
		t.Errorf("a sliding window: %v, and %v before the slot leaves the window, want 6 until then", full.Value, at.Value)
	}
	if got := time.UnixMicro(slots.Slot(full)).UTC(); got != t6.Add(-time.Microsecond) {
		t.Errorf("a sliding window: it is in the slot until %v, want %v", got, t6)
	}
}

// A lease that comes back by a definition of less capacity leaves what a raise has added.
func TestReturnAfterARaise(t *testing.T) {
	for _, limit := range []Limit{
		TokenBucket{Name: "a", Rate: 10, Period: 10 * d, Capacity: 20}, kinds[1], FixedWindow{Name: "a", Rate: 10, Every: Year, Zone: "UTC"},
	} {
		d := definition(limit)
		for _, out := range []float64{0, 5, 8} {
			s, _ := d.Return(row(950, t0), bucket.Out{Tokens: out, Until: t5}, &bucket.Return{Count: 5, Taken: t0, End: t5}, t3)
			if s.Value != 950 {
				t.Errorf("%T, %v out: %v left, want 950", limit, out, s.Value)
			}
		}
	}
}

// The tokens of a transaction that was rolled back are the window's in which they were taken: the
// next one was filled without them, and grants no more than its rate.
func TestReturnAfterTheEdge(t *testing.T) {
	window := definition(kinds[1])
	used := window.Refill(row(4, t0), t0.Add(time.Duration(window.Period)))
	used.Value = 2
	for _, tt := range []struct {
		name string
		s    bucket.State
		r    bucket.Return
		want float64
	}{
		{"rolled back in its window", row(4, t0), bucket.Return{Count: 3, Taken: t0}, 7},
		{"and before the next one has been used", row(4, t0), bucket.Return{Count: 3, Taken: t0, Known: used.TS}, 7},
		{"rolled back after the edge", used, bucket.Return{Count: 3, Taken: t0}, 2},
		{"left of a lease, after the edge", used, bucket.Return{Count: 3, Taken: t0, End: used.TS}, 2},
	} {
		if s, _ := window.Return(tt.s, bucket.Out{}, &tt.r, used.TS.Add(1)); s.Value != tt.want {
			t.Errorf("%s: %v tokens, want %v", tt.name, s.Value, tt.want)
		}
	}
}
