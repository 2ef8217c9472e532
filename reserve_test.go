package ratelimit_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/memstore"
)

func reserved(t *testing.T, s *memstore.Store, requests ...Request) Result {
	t.Helper()
	r, err := s.Reserve(t.Context(), requests...)
	if err == nil {
		err = r.Err()
	}
	must(t, err)
	return r
}

// 500 pieces of work that were reserved for together are due when 500 reservations would
// have been, and their receipts are those.
func TestSplitIsOneByOne(t *testing.T) {
	const pieces = 500
	noon := time.Date(2026, 3, 14, 12, 0, 0, 1000, time.UTC)
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 3))
		rate, period := []float64{1, 7.77, 1.0 / 3, 10, 1e4}[r.IntN(5)], []time.Duration{time.Millisecond, time.Second, 7 * time.Minute}[r.IntN(3)]
		var l Limit = TokenBucket{Name: "l", Rate: rate, Period: period, Capacity: max(1, rate*r.Float64()*3)}
		if r.IntN(3) == 0 {
			l = FixedWindow{Name: "l", Rate: rate, Period: period, Capacity: max(1, rate*r.Float64()*3), Start: noon.Add(-period / 3)}
		}
		count := []float64{1, 0.3, rate / 3, 2.5}[r.IntN(4)]
		t.Run(fmt.Sprintf("%d: %v by %g", seed, l, count), func(t *testing.T) {
			now := noon
			one, many := memstore.New(func() time.Time { return now }), memstore.New(func() time.Time { return now })
			before := l.Definition().Capacity * r.Float64()
			for _, s := range []*memstore.Store{one, many} {
				now = noon
				reserved(t, s, l.ForN("", before))
				if seed%4 == 0 {
					must(t, errOf(s.Pause(t.Context(), l, "", period*2)))
				}
				now = noon.Add(period / 7).Truncate(time.Microsecond)
			}
			whole := reserved(t, one, l.ForN("", count*pieces))
			instants := whole.Instants(pieces)
			parts, err := whole.Split(slices.Repeat([][]float64{{count}}, pieces)...)
			must(t, err)
			for i := range pieces {
				want := reserved(t, many, l.ForN("", count))
				if off := instants[i].Sub(want.RetryAt); off.Abs() > time.Microsecond {
					t.Fatalf("piece %d is due at %v, want %v: %v off", i, instants[i], want.RetryAt, off)
				}
				if off := parts[i].RetryAt.Sub(want.RetryAt); off.Abs() > time.Microsecond || parts[i].RetryAfter != parts[i].RetryAt.Sub(now) {
					t.Fatalf("part %d is due at %v, want %v: %v off", i, parts[i].RetryAt, want.RetryAt, off)
				}
				if got := parts[i].Value; got-want.Value > 1e-6*pieces || want.Value-got > 1e-6*pieces || parts[i].Taken != count {
					t.Fatalf("part %d: %v taken and %v left, want %v and %v", i, parts[i].Taken, got, count, want.Value)
				}
			}
			if last := instants[pieces-1]; !last.Equal(whole.RetryAt) {
				t.Errorf("the last is due at %v, want %v", last, whole.RetryAt)
			}
			for _, part := range parts {
				if ok, err := one.Cancel(t.Context(), part.Receipt); !ok || err != nil {
					t.Fatal(ok, err)
				}
			}
			after, err := one.Check(t.Context(), l.ForN("", 0))
			if before := min(whole.Value+whole.Taken, whole.Capacity); err != nil || after.Value-before > 1e-6 || before-after.Value > 1e-6 {
				t.Errorf("%v tokens after all were given back, %v, want %v", after.Value, err, before)
			}
		})
	}
}

// Of a limit with shards the gaps are those of the whole limit.
func TestSplitOverShards(t *testing.T) {
	const pieces = 500
	noon := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	for _, shards := range []int{3, 8, 10} { // of 2, one alone would not take more than twice as long
		l := TokenBucket{Name: "l", Rate: 10, Period: time.Second, Capacity: 10, Shards: shards}
		s := memstore.New(func() time.Time { return noon })
		reserved(t, s, l.ForN("", 10)) // empty
		whole := reserved(t, s, l.ForN("", pieces))
		for i, at := range whole.Instants(pieces) {
			want := noon.Add(time.Duration(i+1) * 100 * time.Millisecond)
			if off := at.Sub(want); off.Abs() > time.Microsecond {
				t.Fatalf("%d shards, piece %d: %v off", shards, i, off)
			}
		}
	}
}

func TestSplitSeveral(t *testing.T) {
	noon := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	requests := TokenBucket{Name: "requests", Rate: 2, Period: time.Second, Capacity: 1}
	tokens := TokenBucket{Name: "tokens", Rate: 100, Period: time.Second, Capacity: 100, Shards: 2}
	s := memstore.New(func() time.Time { return noon })
	whole := reserved(t, s, tokens.ForN("org", 400), requests.ForN("org", 3))
	parts, err := whole.Split([]float64{300, 1}, []float64{0, 1}, []float64{100, 1})
	must(t, err)
	for i, want := range []struct {
		after  time.Duration
		limit  string
		counts [2]float64
	}{
		{2 * time.Second, "tokens", [2]float64{300, 1}},
		{2 * time.Second, "tokens", [2]float64{0, 1}}, // behind the one before it
		{3 * time.Second, "tokens", [2]float64{100, 1}},
	} {
		got := parts[i]
		if got.RetryAfter != want.after || NameOf(got.Request.Limit) != want.limit || !got.OK {
			t.Errorf("part %d: %v, want after %v by %s", i, got, want.after, want.limit)
		}
		for k, n := range want.counts {
			if got.Each()[k].Request.Count != n || got.Each()[k].Taken != n {
				t.Errorf("part %d, limit %d: %v, want %v", i, k, got.Each()[k], n)
			}
		}
	}
	// The work of each settles by itself, in the order of the call.
	settled, err := s.Settle(t.Context(), parts[1].Receipt, 50, 1)
	if err != nil || settled.Each()[0].Value != whole.Each()[0].Value-50 || settled.Each()[1].Value != whole.Each()[1].Value {
		t.Errorf("settled %v, %v", settled.Each(), err)
	}
}

func TestSplitErrors(t *testing.T) {
	noon := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	l := TokenBucket{Name: "l", Rate: 10, Period: time.Second, MaxReserved: 5}
	s := memstore.New(func() time.Time { return noon })
	whole := reserved(t, s, l.ForN("", 10))
	refused, err := s.Reserve(t.Context(), l.ForN("", 6))
	must(t, err)
	for name, test := range map[string]struct {
		result Result
		parts  [][]float64
	}{
		"refused":                {refused, [][]float64{{6}}},
		"too few":                {whole, [][]float64{{6}, {3}}},
		"too many":               {whole, [][]float64{{6}, {5}}},
		"none":                   {whole, nil},
		"negative":               {whole, [][]float64{{11}, {-1}}},
		"without limit":          {whole, [][]float64{{10}, {}}},
		"a count too many":       {whole, [][]float64{{6, 1}, {4}}},
		"NaN too many":           {whole, [][]float64{{6}, {4, math.NaN()}}},
		"negative too many":      {whole, [][]float64{{6}, {4, -1}}},
		"NaN":                    {whole, [][]float64{{6}, {math.NaN()}}},
		"infinite":               {whole, [][]float64{{math.Inf(1)}, {4}}},
		"all that are too large": {whole, [][]float64{{math.MaxFloat64}, {math.MaxFloat64}}},
	} {
		if parts, err := test.result.Split(test.parts...); !errors.Is(err, ErrInvalid) || parts != nil {
			t.Errorf("%s: %v, %v, want ErrInvalid", name, parts, err)
		}
	}
	if got := whole.Instants(0); got != nil {
		t.Errorf("Instants(0) = %v", got)
	}
	allowed, err := s.Check(t.Context(), l.For(""))
	must(t, err)
	if got := allowed.Instants(2); len(got) != 2 || !got[0].Equal(allowed.RetryAt) || !got[1].Equal(allowed.RetryAt) {
		t.Errorf("Instants(2) of a check: %v", got)
	}
}

// What a receipt can have by its text is what calls can have.
func TestReceiptBounds(t *testing.T) {
	got := []float64{receipt.MaxLimits, receipt.MaxShards, receipt.MaxNameLength, receipt.MaxKeyLength, receipt.MaxTokens, receipt.MaxSlots}
	want := []float64{MaxRequests, MaxShards, MaxNameLength, MaxKeyLength, MaxTokens, MaxSlots}
	if !slices.Equal(got, want) {
		t.Errorf("bounds %v, want %v", got, want)
	}
}

// The pieces of a reservation from a sliding window are counted in one slot, and so all due
// when that begins: never before one by one, and each can be given back to it.
func TestSplitSlidingWindow(t *testing.T) {
	now := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	for _, shards := range []int{1, 4} {
		l := SlidingWindow{Name: "l", Rate: 40, Period: time.Minute, Slots: 6, Start: now, Shards: shards}
		for name, test := range map[string]struct {
			before float64
			due    time.Duration
			value  float64 // after the first of four pieces of two
		}{
			"at once": {10, 0, 28},
			"ahead":   {36, 70 * time.Second, -40.0 * 70 / 60},
		} {
			t.Run(fmt.Sprint(name, " from ", shards), func(t *testing.T) {
				s := memstore.New(func() time.Time { return now })
				reserved(t, s, l.ForN("", test.before))
				whole := reserved(t, s, l.ForN("", 8))
				for i, at := range whole.Instants(4) {
					if !at.Equal(now.Add(test.due)) {
						t.Errorf("piece %d is due after %v, want %v", i, at.Sub(now), test.due)
					}
				}
				parts, err := whole.Split([]float64{2}, []float64{2}, []float64{2}, []float64{2})
				must(t, err)
				for i, part := range parts {
					if part.RetryAfter != test.due || part.Taken != 2 {
						t.Errorf("part %d: %v", i, part)
					}
					if i == 0 && shards == 1 && part.Value != test.value {
						t.Errorf("after the first part there are %v, want %v", part.Value, test.value)
					}
					if ok, err := s.Cancel(t.Context(), part.Receipt); !ok || err != nil {
						t.Errorf("cancelling part %d: %v, %v", i, ok, err)
					}
				}
				again := reserved(t, s, l.ForN("", 8))
				if again.RetryAfter != test.due {
					t.Errorf("once they were given back, as much is due after %v, want %v", again.RetryAfter, test.due)
				}
			})
		}
	}
}
