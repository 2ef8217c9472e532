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

func checked(call decide.Call, now time.Time, states []bucket.State) Result {
	return call.Checked(view(now, states))
}

// Another row of the call was waited for, until a debt was paid. That is told as of when
// it was made.
func TestGrantedAfterWaiting(t *testing.T) {
	now := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	call, err := decide.New(true, TokenBucket{Name: "l", Rate: 1, Period: time.Second}.For("k"))
	must(t, err)
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
		must(t, err)
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
			must(t, err)
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
	must(t, err)
	for _, debt := range []float64{1e3, 1e6, 1e12, 1e27} {
		result := checked(call, t0, []bucket.State{row(-debt, t0)})
		if result.OK || result.RetryAfter < MaxSpan || !result.RetryAt.After(t0.Add(MaxSpan-1)) {
			t.Errorf("debt of %g: OK %v, RetryAfter %v, RetryAt %v, want a refusal for longer than %v", debt, result.OK, result.RetryAfter, result.RetryAt, MaxSpan)
		}
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

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }
