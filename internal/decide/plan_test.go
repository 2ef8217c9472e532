package decide_test

import (
	"math"
	"slices"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

const d = 100 * time.Millisecond // brings a token, at 10 a second

var t0 = time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)

// definition is a limit's, with the arithmetic.
func definition(l Limit) bucket.Definition { return bucket.Definition(l.Definition()) }

// row is a state without a pause.
func row(value float64, ts time.Time) bucket.State { return bucket.State{Value: value, TS: ts} }

// view is the states of limits that have one row each.
func view(now time.Time, states []bucket.State) decide.View {
	v := decide.View{At: now}
	for _, s := range states {
		v.States = append(v.States, []bucket.State{s})
	}
	return v
}

// decided is a store's whole decision on limits that have one row each: the
// answer, and what is stored.
func decided(call decide.Call, now time.Time, states []bucket.State) (Result, []bucket.State) {
	v := view(now, states)
	changes, ok := call.Plan(v)
	if !ok {
		return call.Refused(v), nil
	}
	var after []bucket.State
	for _, c := range changes {
		after = append(after, c.After)
	}
	return call.Granted(changes, v), after
}

func checked(call decide.Call, now time.Time, states []bucket.State) Result {
	return call.Checked(view(now, states))
}

// stateOf is the state of a request's limit among those of a call's asks.
func stateOf(call decide.Call, states []bucket.State, r Request) bucket.State {
	i := slices.IndexFunc(call.Demands, func(a decide.Demand) bool { return a.Definition.Name == NameOf(r.Limit) })
	return states[i]
}

// Of several limits all are taken from or none, and the answer's wait is the
// longest of those that refused.
func TestPlanSeveral(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	b := TokenBucket{Name: "b", Rate: 10, Period: time.Second}
	c := TokenBucket{Name: "c", Rate: 10, Period: time.Second, MaxReserved: 5}
	tests := []struct {
		name     string
		reserve  bool
		requests []Request
		states   []bucket.State // in the order of name
		decides  string         // name of the limit that does
		ok       bool
		retry    time.Duration
		each     []float64 // values, in the order of the call
		eachOK   []bool
		after    []bucket.State // in the order of name
	}{
		{
			"all", false,
			[]Request{c.ForN("", 3), a.ForN("", 1), b.ForN("", 2)},
			[]bucket.State{row(10, t0), row(10, t0), row(10, t0)},
			"c", true, 0,
			[]float64{7, 9, 8},
			[]bool{true, true, true},
			[]bucket.State{row(9, t0), row(8, t0), row(7, t0)},
		},
		{
			"one refuses", false,
			[]Request{c.For(""), a.For(""), b.For("")},
			[]bucket.State{row(10, t0), row(0, t0), row(5, t0)},
			"b", false, d,
			[]float64{5, 10, 0},
			[]bool{true, true, false},
			nil,
		},
		{
			"two refuse", false,
			[]Request{c.ForN("", 5), a.ForN("", 3), b.For("")},
			[]bucket.State{row(0, t0), row(0, t0), row(5, t0)},
			"a", false, 3 * d,
			[]float64{5, 0, 0},
			[]bool{true, false, false},
			nil,
		},
		{
			"a debt that waits longer does not decide", true,
			[]Request{a.ForN("", 9), c.ForN("", 1)},
			[]bucket.State{row(0, t0), row(-5, t0)},
			"c", false, d,
			[]float64{0, -5},
			[]bool{true, false},
			nil,
		},
		{
			"the longest debt decides", true,
			[]Request{a.ForN("", 2), c.ForN("", 4), b.For("")},
			[]bucket.State{row(0, t0), row(10, t0), row(0, t0)},
			"c", true, 4 * d,
			[]float64{-2, -4, 9},
			[]bool{true, true, true},
			[]bucket.State{row(-2, t0), row(9, t0), row(-4, t0)},
		},
		{
			"the fewest tokens left decide", false,
			[]Request{a.For(""), b.For("")},
			[]bucket.State{row(10, t0), row(4, t0)},
			"b", true, 0,
			[]float64{9, 3},
			[]bool{true, true},
			[]bucket.State{row(9, t0), row(3, t0)},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call, err := decide.New(tt.reserve, tt.requests...)
			if err != nil {
				t.Fatalf("New() = %v", err)
			}
			before := slices.Clone(tt.states)
			result, after := decided(call, t0, tt.states)
			if got := result.Request.Limit.Definition().Name; got != tt.decides || result.OK != tt.ok || result.RetryAfter != tt.retry {
				t.Errorf("Plan() = limit %s, OK %v, RetryAfter %v, want %s, %v, %v", got, result.OK, result.RetryAfter, tt.decides, tt.ok, tt.retry)
			}
			var each []float64
			var eachOK []bool
			for i, s := range result.Each() {
				each = append(each, s.Value)
				eachOK = append(eachOK, s.OK)
				if s.Request != tt.requests[i] {
					t.Errorf("Each[%d].Request = %v, want %v", i, s.Request, tt.requests[i])
				}
			}
			if !slices.Equal(each, tt.each) || !slices.Equal(eachOK, tt.eachOK) {
				t.Errorf("Each: Value, OK = %v, %v, want %v, %v", each, eachOK, tt.each, tt.eachOK)
			}
			if !slices.Equal(after, tt.after) {
				t.Errorf("Plan() stores %v, want %v", after, tt.after)
			}
			if !slices.Equal(tt.states, before) {
				t.Errorf("Plan() changed its states to %v", tt.states)
			}

			// Checked says the same, but what there is and not what there would be.
			checked := checked(call, t0, tt.states)
			if checked.OK != tt.ok || checked.RetryAfter != tt.retry {
				t.Errorf("Checked() = OK %v, RetryAfter %v, want %v, %v", checked.OK, checked.RetryAfter, tt.ok, tt.retry)
			}
			for i, s := range tt.requests {
				if got, want := checked.Each()[i].Value, stateOf(call, tt.states, s).Value; got != want {
					t.Errorf("Checked(): Value of %v = %v, want %v", s, got, want)
				}
			}
		})
	}
}

// Requests for the same limit and key have one status, with the counts added.
func TestPlanSameTwice(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	b := TokenBucket{Name: "b", Rate: 10, Period: time.Second}
	call, err := decide.New(false, b.ForN("", 6), a.For(""), b.ForN("", 3))
	if err != nil {
		t.Fatalf("New() = %v", err)
	}
	result, after := decided(call, t0, []bucket.State{row(10, t0), row(10, t0)})
	if want := []bucket.State{row(9, t0), row(1, t0)}; !slices.Equal(after, want) {
		t.Errorf("Plan() stores %v, want %v", after, want)
	}
	var got []Request
	for _, s := range result.Each() {
		got = append(got, s.Request)
	}
	if want := []Request{b.ForN("", 9), a.For("")}; !slices.Equal(got, want) {
		t.Errorf("Each: %v, want %v", got, want)
	}
}

// A count of 0 asks whether the key is in debt.
func TestInDebt(t *testing.T) {
	tests := []struct {
		name  string
		value float64
		ok    bool
		retry time.Duration
	}{
		{"full", 10, true, 0},
		{"empty", 0, true, 0},
		{"a little debt", -0.5, false, d / 2},
		{"debt", -3, false, 3 * d},
	}
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call, err := decide.New(false, a.ForN("", 0))
			if err != nil {
				t.Fatalf("New() = %v", err)
			}
			result := checked(call, t0, []bucket.State{row(tt.value, t0)})
			if result.OK != tt.ok || result.RetryAfter != tt.retry {
				t.Errorf("OK, RetryAfter = %v, %v, want %v, %v", result.OK, result.RetryAfter, tt.ok, tt.retry)
			}
		})
	}
}

// Another row of the call was waited for, until a debt was paid. That is told as of when
// it was made.
func TestGrantedAfterWaiting(t *testing.T) {
	now := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	call, err := decide.New(true, TokenBucket{Name: "l", Rate: 1, Period: time.Second}.For("k"))
	if err != nil {
		t.Fatal(err)
	}
	changes := []decide.Change{call.Demands[0].Change(0, 0, 1)}
	changes[0].After = row(-1, now.Add(-3*time.Second))
	got := call.Granted(changes, decide.View{At: now})
	if want := now.Add(-3 * time.Second); !got.OK || !got.At.Equal(want) || got.RetryAfter != time.Second || !got.RetryAt.Equal(want.Add(time.Second)) {
		t.Errorf("got OK %v at %v, RetryAfter %v, RetryAt %v, want it at %v, and a wait of 1s from then on", got.OK, got.At, got.RetryAfter, got.RetryAt, want)
	}
}

// After the clock went back, what is granted at once counts at the instant of its row, and
// what is due later is waited for from what the clock says, which is the same for all rows.
func TestGrantedAfterTheClockWentBack(t *testing.T) {
	now := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	later := func(d time.Duration) time.Time { return now.Add(d) }
	paused := row(0, later(3*time.Second))
	paused.Paused = paused.TS
	for _, test := range []struct {
		name        string
		after       bucket.State
		at, retryAt time.Time
	}{
		{"at once", row(0, later(time.Second)), later(time.Second), later(time.Second)},
		{"in debt", row(-1, later(time.Second)), now, later(2 * time.Second)},
		{"paused", paused, now, later(3 * time.Second)},
	} {
		call, err := decide.New(true, TokenBucket{Name: "l", Rate: 1, Period: time.Second}.For("k"))
		if err != nil {
			t.Fatal(err)
		}
		changes := []decide.Change{call.Demands[0].Change(0, 0, 1)}
		changes[0].After = test.after
		got := call.Granted(changes, decide.View{At: now})
		if !got.At.Equal(test.at) || !got.RetryAt.Equal(test.retryAt) || got.RetryAfter != test.retryAt.Sub(test.at) {
			t.Errorf("%s: at %v, RetryAfter %v, RetryAt %v, want it at %v, and due at %v", test.name, got.At, got.RetryAfter, got.RetryAt, test.at, test.retryAt)
		}
	}
}

func TestStatus(t *testing.T) {
	tests := []struct {
		name      string
		value     float64
		remaining int64
		reset     time.Duration
	}{
		{"full", 10, 10, 0},
		{"fraction", 7.5, 7, d * 5 / 2},
		{"less than one", 0.75, 0, d * 37 / 4},
		{"a hair below a whole", math.Nextafter(3, 0), 3, 7 * d},
		{"empty", 0, 0, 10 * d},
		{"less than one of debt", -0.5, 0, d * 21 / 2},
		{"debt", -5, 0, 15 * d},
		{"deep debt", -1e6, 0, 1_000_010 * d},
	}
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call, err := decide.New(false, a.ForN("k", 1))
			if err != nil {
				t.Fatalf("New() = %v", err)
			}
			got := checked(call, t0, []bucket.State{row(tt.value, t0)}).Status
			if got.Remaining != tt.remaining || got.ResetAfter != tt.reset {
				t.Errorf("Remaining, ResetAfter = %v, %v, want %v, %v", got.Remaining, got.ResetAfter, tt.remaining, tt.reset)
			}
			if got.Capacity != 10 || got.Value != tt.value || got.Request != a.ForN("k", 1) {
				t.Errorf("Capacity, Value, Request = %v, %v, %v, want 10, %v, %v", got.Capacity, got.Value, got.Request, tt.value, a.ForN("k", 1))
			}
		})
	}
}

// A row's debt can be larger than its definition now allows: it was made
// under another. The wait is longer than can be told, and so is not told
// shorter.
func TestWaitBeyondMaxSpan(t *testing.T) {
	slow := TokenBucket{Name: "a", Rate: 1, Period: 100 * year}
	call, err := decide.New(false, slow.For(""))
	if err != nil {
		t.Fatalf("New() = %v", err)
	}
	for _, debt := range []float64{1e3, 1e6, 1e12, 1e27} {
		result := checked(call, t0, []bucket.State{row(-debt, t0)})
		if result.OK || result.RetryAfter < MaxSpan || !result.RetryAt.After(t0.Add(MaxSpan-1)) {
			t.Errorf("debt of %g: OK %v, RetryAfter %v, RetryAt %v, want a refusal for longer than %v", debt, result.OK, result.RetryAfter, result.RetryAt, MaxSpan)
		}
	}
}

func BenchmarkPlan(b *testing.B) {
	full := []bucket.State{row(10, t0), row(10, t0), row(10, t0), row(10, t0)}
	empty := []bucket.State{row(0, t0), row(0, t0), row(0, t0), row(0, t0)}
	for _, bm := range []struct {
		name     string
		requests []Request
		states   []bucket.State
	}{
		{"1/taken", fourLimits()[:1], full[:1]},
		{"1/refused", fourLimits()[:1], empty[:1]},
		{"4/taken", fourLimits(), full},
		{"4/refused", fourLimits(), empty},
	} {
		b.Run(bm.name, func(b *testing.B) {
			call, err := decide.New(false, bm.requests...)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				decided(call, t0, bm.states)
			}
		})
	}
}

// A pause refuses whatever there is, but for reservations, which it delays.
func TestPaused(t *testing.T) {
	paused := bucket.State{Value: 5, TS: t0.Add(6 * d), Paused: t0.Add(6 * d)}
	one := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	two := TokenBucket{Name: "a", Rate: 20, Period: time.Second, Shards: 2}
	tests := []struct {
		name    string
		limit   TokenBucket
		reserve bool
		count   float64
		now     time.Time
		ok      bool
		retry   time.Duration
		value   float64
	}{
		{"allow", one, false, 1, t0, false, 6 * d, 4},
		{"allow more", one, false, 7, t0, false, 8 * d, -2},
		{"allow none", one, false, 0, t0, false, 6 * d, 5},
		{"reserve", one, true, 1, t0, true, 6 * d, 4},
		{"reserve more", one, true, 7, t0, true, 8 * d, -2},
		{"reserve none", one, true, 0, t0, true, 6 * d, 5},
		{"when it is over", one, false, 1, t0.Add(6 * d), true, 0, 4},
		{"a microsecond before", one, false, 1, t0.Add(6*d - time.Microsecond), false, time.Microsecond, 4},

		{"allow of shards", two, false, 1, t0, false, 6 * d, 9},
		{"allow all of shards", two, false, 12, t0, false, 7 * d, -2},
		{"reserve of shards", two, true, 1, t0, true, 6 * d, 9},
		{"reserve more of shards", two, true, 12, t0, true, 7 * d, -2},
		{"shards when it is over", two, false, 1, t0.Add(6 * d), true, 0, 9},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call := newCall(t, tt.reserve, tt.limit.ForN("k", tt.count))
			v := decide.View{States: [][]bucket.State{slices.Repeat([]bucket.State{paused}, max(tt.limit.Shards, 1))}, At: tt.now}
			result, foreseen := call.Refused(v), call.Checked(v)
			changes, ok := call.Plan(v)
			if ok {
				result = call.Granted(changes, after(v, changes))
				if result.Value != tt.value {
					t.Errorf("Value = %v, want %v", result.Value, tt.value)
				}
			}
			if ok != tt.ok || result.OK != tt.ok || result.RetryAfter != tt.retry {
				t.Errorf("OK, RetryAfter = %v, %v, want %v, %v", result.OK, result.RetryAfter, tt.ok, tt.retry)
			}
			if foreseen.OK != tt.ok || foreseen.RetryAfter != tt.retry {
				t.Errorf("Checked(): OK, RetryAfter = %v, %v, want %v, %v", foreseen.OK, foreseen.RetryAfter, tt.ok, tt.retry)
			}
			until := time.Time{}
			if tt.now.Before(paused.Paused) {
				until = paused.Paused
			}
			if !result.PausedUntil.Equal(until) || !foreseen.PausedUntil.Equal(until) {
				t.Errorf("PausedUntil = %v, and checked %v, want %v", result.PausedUntil, foreseen.PausedUntil, until)
			}
		})
	}
}

// after is a view of one limit once changes were made to its shards.
func after(v decide.View, changes []decide.Change) decide.View {
	states := slices.Clone(v.States[0])
	for _, c := range changes {
		states[c.Shard] = c.After
	}
	return decide.View{States: [][]bucket.State{states}, At: v.At}
}

// A call that found less than others left for it each time is worth repeating at
// once.
func TestRefusedThoughThereIsEnough(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	call := newCall(t, false, a.For("k"))
	got := call.Refused(view(t0, []bucket.State{row(10, t0)}))
	if got.OK || got.RetryAfter != time.Microsecond || !got.RetryAt.Equal(t0.Add(time.Microsecond)) {
		t.Errorf("Refused() = %v, want a wait of a microsecond", got)
	}
}

// Several shards are told of as one limit.
func TestStatusOfShards(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 20, Period: time.Second, Shards: 2}
	call := newCall(t, true, a.ForN("k", 12))
	v := decide.View{States: [][]bucket.State{rows(6, 4)}, At: t0}
	if got := call.Checked(v); got.Value != 10 || got.Remaining != 10 || got.Capacity != 20 || got.ResetAfter != 6*d || got.RetryAfter != d {
		t.Errorf("Checked() = %+v, want 10 of 20, full in %v, due in %v", plain(got.Status), 6*d, d)
	}
	changes, ok := call.Plan(v)
	if !ok {
		t.Fatal("refused")
	}
	if got := call.Granted(changes, after(v, changes)); got.Value != -2 || got.Remaining != 0 || got.ResetAfter != 11*d || got.RetryAfter != d {
		t.Errorf("Granted() = %+v, want a debt of 2, full in %v, due in %v", plain(got.Status), 11*d, d)
	}
}

// plain is a status without its String, so that a message shows all of it.
func plain(s Status) any {
	type fields Status
	return fields(s)
}

func TestCredited(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	tests := []struct {
		name  string
		state bucket.State
		ok    bool
		retry time.Duration
	}{
		{"there is some", row(3, t0), true, 0},
		{"in debt still", row(-3, t0), false, 3 * d},
		{"paused still", bucket.State{Value: 3, TS: t0.Add(2 * d), Paused: t0.Add(2 * d)}, false, 2 * d},
	}
	for _, tt := range tests {
		got := decide.Credited(a.ForN("k", 2), []bucket.State{tt.state}, t0)
		if got.OK != tt.ok || got.RetryAfter != tt.retry || got.Request != a.ForN("k", 2) || got.Value != tt.state.Value {
			t.Errorf("%s: Credited() = %+v, want OK %v, RetryAfter %v", tt.name, plain(got), tt.ok, tt.retry)
		}
	}
}
