package bucket_test

import (
	"math/rand/v2"
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
		slot := definition.Slot(taken)
		for name, out := range map[string]bucket.Out{"never": {}, "no more": {Tokens: 4, Until: t1}} {
			if got, want := definition.RefundBeside(taken, out, t1, 3, slot).Value, definition.Refund(taken, t1, 3, slot).Value; got != want {
				t.Errorf("%v, %s: RefundBeside leaves %v, want %v", limit, name, got, want)
			}
			if got, want := definition.CreditBeside(taken, out, t1, 30).Value, definition.Credit(taken, t1, 30).Value; got != want {
				t.Errorf("%v, %s: CreditBeside leaves %v, want %v", limit, name, got, want)
			}
			if got, want := definition.Full("k", out, t1), definition.Fresh("k", t1); got.Value != want.Value || !got.TS.Equal(want.TS) {
				t.Errorf("%v, %s: Full() = %v, want %v", limit, name, got, want)
			}
		}
	}
}

// What comes back stays below the capacity, with what is out and what is refilled until
// that ends.
func TestRefundBeside(t *testing.T) {
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
		{"just before it ends", tokens, row(1, t0), bucket.Out{Tokens: 4, Until: t3}, t3.Add(-time.Microsecond), 9, row(6-1e-5, t3.Add(-time.Microsecond))},
		{"in a pause, which is over later", tokens, bucket.State{Value: -1, TS: t5, Paused: t5}, bucket.Out{Tokens: 4, Until: t3}, t1, 9, bucket.State{Value: 6, TS: t5, Paused: t5}},
		{"of a window nothing is refilled", window, row(1, t0), bucket.Out{Tokens: 4, Until: t0.Add(time.Second)}, t5, 9, row(6, t0)},
	} {
		if got := tt.d.RefundBeside(tt.s, tt.out, tt.now, tt.n, 0); got != tt.want {
			t.Errorf("%s: RefundBeside() = %v, want %v", tt.name, got, tt.want)
		}
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
		if got.Value != tt.want || definition.Settle(got, slot(11)).Value != tt.later {
			t.Errorf("%s: %v tokens and later %v, want %v and %v", tt.name, got.Value, definition.Settle(got, slot(11)).Value, tt.want, tt.later)
		}
	}
	if got := definition.RefundBeside(second, bucket.Out{Tokens: 3, Until: t6}, t5, 4, definition.Slot(first)); got.Value != 7 {
		t.Errorf("refunded to its slot: %v, want 7", got.Value)
	}
}

// A row that is reset is full less what is out, and not more when that has ended.
func TestFull(t *testing.T) {
	tokens, window, slots := definition(kinds[0]), definition(kinds[1]), definition(sliding)
	if got, want := tokens.Full("k", bucket.Out{Tokens: 4, Until: t3}, t0), row(3, t0); got != want {
		t.Errorf("a token bucket: %v, want %v", got, want)
	}
	if got, want := window.Full("k", bucket.Out{Tokens: 4, Until: t0.Add(time.Second)}, t3), row(6, t0); got != want {
		t.Errorf("a fixed window: %v, want %v", got, want)
	}
	// Since it was paused, its edges are not those of a fresh row, which would be refilled
	// before what is out has ended.
	moved := window.Full("k", bucket.Out{Tokens: 4, Until: t0.Add(13 * d)}, t5)
	if got := window.Settle(moved, t0.Add(13*d-1)).Value; got != 6 {
		t.Errorf("a fixed window that was paused: %v tokens before it ends, want 6", got)
	}
	if got := window.Settle(moved, t0.Add(13*d)).Value; got != 10 {
		t.Errorf("a fixed window that was paused: %v tokens when it has ended, want 10", got)
	}
	full := slots.Full("k", bucket.Out{Tokens: 4, Until: t6}, t5)
	if at := slots.Settle(full, slot(16).Add(-1)); full.Value != 6 || at.Value != 6 || slots.Settle(full, slot(16)).Value != 10 {
		t.Errorf("a sliding window: %v, and %v before the slot leaves the window, want 6 until then", full.Value, at.Value)
	}
	if got := time.UnixMicro(slots.Slot(full)).UTC(); got != t6.Add(-time.Microsecond) {
		t.Errorf("a sliding window: it is in the slot until %v, want %v", got, t6)
	}
}

// However rows are taken from, paused, credited and reset while some of their tokens are
// out, what is in them and what is out is never more than the capacity, and so no more is
// granted than without.
func TestNeverOverBesideWhatIsOut(t *testing.T) {
	const lasts = 3 * d
	for _, limit := range kinds {
		definition := definition(limit)
		most := 0.0
		for seed := range uint64(300) {
			random := rand.New(rand.NewPCG(seed, 24))
			s, now, out := definition.Fresh("k", t0), t0, bucket.Out{}
			var leases []bucket.Out
			for range 60 {
				now = now.Add(time.Duration(random.Int64N(int64(d/time.Microsecond))) * time.Microsecond)
				out = out.At(now)
				n := float64(random.IntN(12))
				switch random.IntN(6) {
				case 0, 1: // prefetch, by the rule of a row that others prefetch from as well
					settled := definition.Settle(s, now)
					room := min(settled.Value, definition.Capacity-definition.Inflow(lasts))
					if n = min(n, max(0, room)); n == 0 || settled.Paused.After(now) || definition.Slotted() && settled.Slots.Ahead > 0 {
						continue
					}
					settled.Value = min(settled.Value, definition.Capacity-definition.Inflow(lasts))
					s = definition.Spend(settled, now, n)
					lease := bucket.Out{Tokens: n, Until: definition.End(s.TS, now, lasts)}
					leases = append(leases, lease)
					out.Tokens += n
					if lease.Until.After(out.Until) {
						out.Until = lease.Until
					}
				case 2:
					s = definition.RefundBeside(s, out, now, n, definition.Slot(s))
				case 3:
					s = definition.CreditBeside(s, out, now, n)
				case 4:
					s = definition.Full("k", out, now)
				default:
					if after, ok := definition.Take(s, now, n, 0); ok {
						s = after
					}
				}
				for _, at := range []time.Time{now, now.Add(d), out.Until.Add(-time.Microsecond)} {
					if at.Before(now) {
						continue
					}
					held := definition.Settle(s, at).Value
					for _, lease := range leases {
						held += lease.At(at).Tokens
					}
					if most = max(most, held); held > definition.Capacity+1e-9 {
						t.Fatalf("%v, seed %d: %v tokens in the row and out", limit, seed, held)
					}
				}
			}
		}
		if most < definition.Capacity-1e-9 {
			t.Errorf("%v: never more than %v in the row and out, so this tests nothing", limit, most)
		}
	}
}
