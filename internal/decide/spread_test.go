package decide_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

func newCall(t *testing.T, reserve bool, requests ...Request) decide.Call {
	t.Helper()
	call, err := decide.New(reserve, requests...)
	must(t, err)
	return call
}

// rows is a limit's shards at t0 with the given values.
func rows(values ...float64) []bucket.State {
	states := make([]bucket.State, len(values))
	for i, v := range values {
		states[i] = row(v, t0)
	}
	return states
}

// What can be had at once is taken from as few shards as can be, the fullest
// first; a reservation that must wait goes to the one that is ready first, or to
// several when that is less than half as long.
func TestSpread(t *testing.T) {
	four := TokenBucket{Name: "a", Rate: 40, Period: time.Second, Shards: 4, MaxReserved: 40} // 10 each
	debtless := four
	debtless.MaxReserved = None
	tests := []struct {
		name    string
		limit   TokenBucket
		reserve bool
		count   float64
		values  []float64
		want    []float64 // nil when they are short
	}{
		{"the fullest", four, false, 3, []float64{4, 7, 5, 6}, []float64{0, 3, 0, 0}},
		{"the first of equals", four, false, 3, []float64{5, 5, 5, 5}, []float64{3, 0, 0, 0}},
		{"more than one has", four, false, 12, []float64{4, 7, 5, 6}, []float64{0, 7, 0, 5}},
		{"all there is", four, false, 22, []float64{4, 7, 5, 6}, []float64{4, 7, 5, 6}},
		{"more than there is", four, false, 22.5, []float64{4, 7, 5, 6}, nil},
		{"debts do not count", four, false, 7.5, []float64{-4, 7, -5, 0}, nil},
		{"none of an empty limit", four, false, 0, []float64{0, 0, 0, 0}, []float64{0, 0, 0, 0}},
		{"none of a limit in debt", four, false, 0, []float64{-1, -1, -1, -1}, nil},
		{"none of a limit that is in debt in part", four, false, 0, []float64{-1, -1, 0.5, -1}, []float64{0, 0, 0, 0}},

		{"a reservation of what is there", four, true, 12, []float64{4, 7, 5, 6}, []float64{0, 7, 0, 5}},
		{"a debt of one", four, true, 1, []float64{-4, 0, -5, -1}, []float64{0, 1, 0, 0}},
		{"a debt of several", four, true, 8, []float64{0, 0, 0, 0}, []float64{2, 2, 2, 2}},
		{"as deep as may be", four, true, 40, []float64{0, 0, 0, 0}, []float64{10, 10, 10, 10}},
		{"deeper", four, true, 40.5, []float64{0, 0, 0, 0}, nil},
		{"no debt", debtless, true, 1, []float64{0.25, 0.25, 0.25, 0}, nil},
		{"no debt, in parts", debtless, true, 0.75, []float64{0.25, 0.25, 0.25, 0}, []float64{0.25, 0.25, 0.25, 0}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call := newCall(t, tt.reserve, tt.limit.ForN("k", tt.count))
			counts, ok := call.Demands[0].Spread(t0, rows(tt.values...))
			if ok != (tt.want != nil) || ok && !near(counts, tt.want) {
				t.Errorf("Spread() = %v, %v, want %v", counts, ok, tt.want)
			}
		})
	}
}

const hair = 1e-9 // what rounding may do to tens of tokens

func near(a, b []float64) bool {
	for i := range a {
		if math.Abs(a[i]-b[i]) > hair {
			return false
		}
	}
	return len(a) == len(b)
}

// Whatever the shards hold, what is spread over them, taken or given back, adds
// up, and keeps to each shard's floor and capacity.
func TestSpreadAndFill(t *testing.T) {
	spread, refused := 0, 0
	for seed := range uint64(20_000) {
		random := rand.New(rand.NewPCG(seed, 6))
		l := TokenBucket{
			Name: "l", Rate: 10 * random.Float64() * 10, Period: time.Minute, Shards: 2 + random.IntN(8),
			Capacity: pick(random, 0, 5, 100*random.Float64(), None), MaxReserved: pick(random, None, 7, 100*random.Float64()),
		}
		if l.Validate() != nil {
			continue
		}
		d := definition(l)
		values := make([]float64, d.Shards)
		for i := range values {
			values[i] = d.Shard().Capacity - (d.Shard().Capacity+d.Shard().MaxReserved)*random.Float64()
		}
		call, err := decide.New(random.IntN(2) == 0, l.ForN("k", (d.Capacity+d.MaxReserved)*random.Float64()))
		if errors.Is(err, ErrExceedsCapacity) {
			continue
		}
		must(t, err)
		ask := call.Demands[0]
		switch counts, ok := ask.Spread(t0, rows(values...)); {
		case ok:
			spread++
			wantSpread(t, seed, ask, values, counts)
		default:
			refused++
			wantShort(t, seed, ask, values)
		}
		wantFilled(t, seed, ask, values, pick(random, 0, ask.Count, 3*d.Capacity*random.Float64()))
	}
	if spread < 1000 || refused < 1000 {
		t.Errorf("%d spread and %d refused, want more of both", spread, refused)
	}
}

func pick(random *rand.Rand, values ...float64) float64 { return values[random.IntN(len(values))] }

func wantSpread(t *testing.T, seed uint64, a decide.Demand, values, counts []float64) {
	t.Helper()
	floor, sum := a.Floor/float64(len(values)), 0.0
	for i, n := range counts {
		sum += n
		if n < 0 || n > 0 && values[i]-n < floor-hair {
			t.Errorf("seed %d: took %v of %v down to a floor of %v", seed, n, values[i], floor)
		}
	}
	if math.Abs(sum-a.Count) > hair {
		t.Errorf("seed %d: took %v, want %v", seed, sum, a.Count)
	}
}

func wantShort(t *testing.T, seed uint64, a decide.Demand, values []float64) {
	t.Helper()
	floor, have := a.Floor/float64(len(values)), 0.0
	for _, v := range values {
		have += max(0, v-floor)
	}
	if have > a.Count+hair {
		t.Errorf("seed %d: refused %v though the shards have %v", seed, a.Count, have)
	}
}

func wantFilled(t *testing.T, seed uint64, a decide.Demand, values []float64, n float64) {
	t.Helper()
	d := a.Definition
	room, sum := 0.0, 0.0
	counts := a.Fill(rows(values...), n, t0)
	for i, c := range counts {
		room += d.Shard().Capacity - values[i]
		sum += c
		if c < 0 || values[i]+c > d.Shard().Capacity+hair {
			t.Errorf("seed %d: gave %v to a shard with %v of %v", seed, c, values[i], d.Shard().Capacity)
		}
	}
	if want := min(n, room); math.Abs(sum-want) > hair {
		t.Errorf("seed %d: gave %v back, want %v", seed, sum, want)
	}
}

// full is the states of a limit's shards that have no rows.
func full(d bucket.Definition) []bucket.State {
	states, each := make([]bucket.State, d.Shards), d.Shard()
	for i := range states {
		states[i] = each.Fresh("k", t0)
	}
	return states
}

// All of a limit's capacity can be taken at once, however many shards it is
// spread over and however badly that divides.
func TestWholeCapacity(t *testing.T) {
	for shards := 2; shards <= MaxShards; shards += 1 + shards/64 {
		for _, capacity := range []float64{float64(shards), 1024.1, 1e4 / 3, 1e12} {
			l := TokenBucket{Name: "l", Rate: 10, Period: time.Microsecond, Capacity: capacity, Shards: shards}
			if l.Validate() != nil { // fewer tokens than shards
				continue
			}
			wantGranted(t, l)
		}
	}
	wantGranted(t, TokenBucket{Name: "l", Rate: 1000, Period: time.Minute, Shards: 538})
}

// wantGranted fails the test unless a limit grants its capacity when it is full,
// and by changes each of which its row grants by itself.
func wantGranted(t *testing.T, l TokenBucket) {
	t.Helper()
	call := newCall(t, false, l.ForN("k", l.Definition().Capacity))
	changes, ok := call.Plan(decide.View{States: [][]bucket.State{full(definition(l))}, At: t0})
	if !ok {
		t.Errorf("%v refuses its capacity", l)
	}
	sum := 0.0
	for _, c := range changes {
		sum += c.Count
		if _, ok := c.Definition.Take(c.Before, t0, c.Count, c.Floor); !ok {
			t.Errorf("%v: shard %d refuses %v of %v", l, c.Shard, c.Count, c.Before.Value)
		}
	}
	if call.Demands[0].Count-sum > 0x1p-46*sum {
		t.Errorf("%v: took %v of %v", l, sum, call.Demands[0].Count)
	}
}

// What rounding takes from nothing is stored as debt, so that asking again and
// again, for as little as may be, gains nothing.
func TestRoundingDoesNotAddUp(t *testing.T) {
	l := TokenBucket{Name: "l", Rate: 1000, Period: time.Minute, Shards: 538}
	for _, units := range []float64{1, 2, 60, 538} {
		n := 1000 * 0x1p-46 * units
		call := newCall(t, false, l.ForN("k", n))
		states, taken := rows(make([]float64, 538)...), 0.0
		states[7].Value = n / 2
		for range 2000 {
			changes, ok := call.Plan(decide.View{States: [][]bucket.State{states}, At: t0})
			if !ok {
				continue
			}
			taken += n
			for _, c := range changes {
				states[c.Shard] = c.After
			}
		}
		left := 0.0
		for _, s := range states {
			left += s.Value
		}
		if off := math.Abs(n/2 - left - taken); off > n*1e-9 {
			t.Errorf("%v of %v: took %v and %v is left", n, n/2, taken, left)
		}
		if taken > n/2+1000*0x1p-46 {
			t.Errorf("took %v by %v, though there was %v", taken, n, n/2)
		}
	}
}
