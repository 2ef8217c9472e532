package decide_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// paid is the receipt of taking n tokens of a full limit.
func paid(t *testing.T, l Limit, n float64) *Receipt {
	t.Helper()
	call := newCall(t, false, l.ForN("k", n))
	changes, ok := call.Plan(decide.View{States: [][]bucket.State{full(definition(l))}, At: t0})
	if !ok {
		t.Fatalf("%v refuses %v", l, n)
	}
	return call.Receipt(changes, "", nil, t0)
}

// refunded is what giving back all of a receipt changes: shard and tokens given back.
func refunded(t *testing.T, seen *decide.Definitions, r *Receipt) []string {
	t.Helper()
	settlement, err := seen.Settle(r, nil)
	must(t, err)
	var all []string
	for _, c := range settlement.Changes {
		all = append(all, fmt.Sprintf("%s/%s/%d %v", c.Name, c.Key.Key, c.Shard, -c.Count))
	}
	return all
}

// What several shards paid goes back to them, or to those that there are now:
// by the definition that was called last, not by one that was named to Prune.
func TestRefund(t *testing.T) {
	eight := TokenBucket{Name: "a", Rate: 80, Period: time.Second, Shards: 8}
	one := TokenBucket{Name: "a", Rate: 80, Period: time.Second}
	receipt := paid(t, eight, 30)
	asWas := []string{"a/k/0 10", "a/k/1 10", "a/k/2 10"}
	toOne := []string{"a/k/0 30"}

	var seen decide.Definitions
	steps := []struct {
		name string
		do   func()
		want []string
	}{
		{"nothing seen", func() {}, asWas},
		{"as it was", func() { seen.Note(definition(eight)) }, asWas},
		{"one shard now", func() { seen.Note(definition(one)) }, toOne},
		{"the old definition named", func() { seen.NoteAll(nil, []Limit{eight}) }, toOne},
		{"rolled back", func() { seen.Note(definition(eight)) }, asWas},
		{"and forth", func() { seen.Note(definition(one)) }, toOne},
	}
	for _, s := range steps {
		s.do()
		if got := refunded(t, &seen, receipt); !slices.Equal(got, s.want) {
			t.Errorf("%s: %q, want %q", s.name, got, s.want)
		}
	}
}

// Rows are settled in the order in which calls lock them: limits with shards last.
func TestRefundOrder(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 80, Period: time.Second, Shards: 8}
	b := TokenBucket{Name: "b", Rate: 80, Period: time.Second}
	call := newCall(t, false, a.ForN("k", 15), b.For("z"), b.For("k"))
	view := decide.View{States: [][]bucket.State{full(definition(b)), full(definition(b)), full(definition(a))}, At: t0}
	changes, ok := call.Plan(view)
	if !ok {
		t.Fatal("refused")
	}
	var seen decide.Definitions
	got := refunded(t, &seen, call.Receipt(changes, "", nil, t0))
	if want := []string{"b/k/0 1", "b/z/0 1", "a/k/0 10", "a/k/1 5"}; !slices.Equal(got, want) {
		t.Errorf("Settle() changes %q, want %q", got, want)
	}
}

// What was not used is given back by the last payments, what was used besides is taken
// from all shards, so that they are left with as much, and counts are in the order of
// the call.
func TestSettle(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 80, Period: time.Second, Shards: 8}
	b := FixedWindow{Name: "b", Rate: 80, Period: time.Second}
	call := newCall(t, false, b.ForN("k", 20), a.ForN("k", 25))
	changes, ok := call.Plan(decide.View{States: [][]bucket.State{full(definition(b)), full(definition(a))}, At: t0})
	if !ok {
		t.Fatal("refused")
	}
	receipt := call.Receipt(changes, "", nil, t0) // of a 10, 10 and 5
	for _, test := range []struct {
		used []float64 // of b and a
		want []string  // shard and tokens given back
	}{
		{[]float64{20, 25}, []string{"b/k/0 -0", "a/k/0 -0", "a/k/1 -0", "a/k/2 -0"}},
		{[]float64{7, 12}, []string{"b/k/0 13", "a/k/0 -0", "a/k/1 8", "a/k/2 5"}},
		{[]float64{21, 0}, []string{"b/k/0 -1", "a/k/0 10", "a/k/1 10", "a/k/2 5"}},
		{nil, []string{"b/k/0 20", "a/k/0 10", "a/k/1 10", "a/k/2 5"}},
		{[]float64{20, 27}, []string{
			"b/k/0 -0", "a/k/0 -0", "a/k/1 -0", "a/k/2 -0", "a/k/3 -0.4", "a/k/4 -0.4", "a/k/5 -0.4", "a/k/6 -0.4", "a/k/7 -0.4",
		}},
		{[]float64{20, 125}, []string{
			"b/k/0 -0", "a/k/0 -5.625", "a/k/1 -5.625", "a/k/2 -10.62", "a/k/3 -15.62", "a/k/4 -15.62", "a/k/5 -15.62", "a/k/6 -15.62", "a/k/7 -15.62",
		}},
	} {
		var seen decide.Definitions
		settlement, err := seen.Settle(receipt, test.used)
		var got []string
		states := make([]bucket.State, len(settlement.Changes))
		for i, c := range settlement.Changes {
			states[i] = bucket.State{Value: c.Definition.Capacity, TS: t0}
			for _, paid := range changes {
				if paid.Row == c.Row {
					states[i].Value -= paid.Count
				}
			}
		}
		for range 2 { // once more, when a transaction is run again
			settlement.Spread(states, t0)
		}
		for _, c := range settlement.Changes {
			got = append(got, fmt.Sprintf("%s/%s/%d %.4g", c.Name, c.Key.Key, c.Shard, -c.Count))
		}
		if err != nil || !slices.Equal(got, test.want) {
			t.Errorf("Settle(%v) = %q, %v, want %q", test.used, got, err, test.want)
		}
	}
	for _, used := range [][]float64{{}, {1}, {1, 2, 3}, {-1, 1}} {
		var seen decide.Definitions
		if got, err := seen.Settle(receipt, used); !errors.Is(err, ErrInvalid) || got.Changes != nil {
			t.Errorf("Settle(%v) = %v, %v, want ErrInvalid", used, got, err)
		}
	}
}

// Definitions that differ in rate and capacity only are kept as one, and others
// by themselves, however many are noted.
func TestSeen(t *testing.T) {
	var seen decide.Definitions
	if got := seen.Of("a"); got != nil {
		t.Errorf("Of() = %v before anything was noted", got)
	}
	base := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	for i := range 1000 {
		plan := base
		plan.Rate, plan.Capacity = 10+float64(i%50), 1+float64(i%70)
		seen.Note(definition(plan))
	}
	sharded, window := base, FixedWindow{Name: "a", Rate: 10, Period: time.Second}
	sharded.Shards = 2
	must(t, errOf(seen.NoteAll(nil, []Limit{sharded, window, window, TokenBucket{Name: "b", Rate: 1, Period: time.Second}})))
	merged := base
	merged.Capacity = 70
	want := []bucket.Definition{definition(merged), definition(sharded), definition(window)}
	if got := seen.Of("a"); !slices.Equal(got, want) {
		t.Errorf("Of(a) = %v, want %v", got, want)
	}
	if got := len(seen.Of("b")); got != 1 {
		t.Errorf("Of(b) has %d definitions, want 1", got)
	}
}

// A row is idle when it is by every definition.
func TestIdle(t *testing.T) {
	slow := TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: 20}
	fast := TokenBucket{Name: "a", Rate: 100, Period: time.Second, Capacity: 20}
	large := TokenBucket{Name: "a", Rate: 100, Period: time.Second, Capacity: 200}
	old := TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: 20, Shards: 4}
	const minute = time.Minute
	tests := []struct {
		name   string
		limits []Limit
		state  bucket.State
		now    time.Time
		want   bool
	}{
		{"full", []Limit{slow}, row(20, t0), t0.Add(minute), true},
		{"full by the faster only", []Limit{slow, fast}, row(10, t0), t0.Add(minute + 9*time.Second), false},
		{"full by both", []Limit{slow, fast}, row(10, t0), t0.Add(minute + 10*time.Second), true},
		{"full by the smaller only", []Limit{fast, large}, row(20, t0), t0.Add(minute), false},
		{"full by the old one's shard only", []Limit{old, slow}, row(5, t0), t0.Add(minute), false},
		{"full by one and the old one's shard", []Limit{old, slow}, row(5, t0), t0.Add(minute + 15*time.Second), true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var seen decide.Definitions
			must(t, errOf(seen.NoteAll(nil, tt.limits)))
			if got := seen.Idle(decide.Key{Name: "a", Key: "k"}, nil, tt.state, tt.now); got != tt.want {
				t.Errorf("Idle() = %v, want %v", got, tt.want)
			}
		})
	}
}

// A definition of a key's own override is none of the name: it neither says by what other keys'
// receipts are settled, nor which rows of theirs are idle.
func TestOwnOverrideBindsItsKey(t *testing.T) {
	base := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	raised := TokenBucket{Name: "a", Rate: 10, Period: time.Minute, Capacity: 1000}
	var seen decide.Definitions
	for _, r := range []Request{base.For("k"), {Limit: raised, Key: "raised", Count: 1, Overridden: true}} {
		call := newCall(t, false, r)
		must(t, seen.NoteCall(&call))
	}
	receipt := paid(t, base, 3)
	settlement, err := seen.Settle(receipt, nil)
	must(t, err)
	if got := settlement.Changes[0].Definition; got != definition(base) {
		t.Errorf("settled by %v, want %v", got, definition(base))
	}
	full := bucket.State{Value: 10, TS: t0}
	for key, want := range map[string]bool{"k": true, "raised": false, "named": false} {
		named := decide.Overrides{"named": {definition(raised)}}
		if got := seen.Idle(decide.Key{Name: "a", Key: key}, named, full, t0.Add(2*time.Minute)); got != want {
			t.Errorf("the row of %q: idle is %t, want %t", key, got, want)
		}
	}
	call := newCall(t, false, Request{Limit: FixedWindow{Name: "b", Rate: 1, Period: time.Second}, Key: "k", Overridden: true})
	other := newCall(t, false, TokenBucket{Name: "b", Rate: 1, Period: time.Second}.For("k"))
	must(t, seen.NoteCall(&call))
	if err := seen.NoteCall(&other); !errors.Is(err, ErrInvalid) {
		t.Errorf("another kind than the override's: got %v, want ErrInvalid", err)
	}
}

// A plan that is called for a key with an override binds every key as any plan, and two requests
// of one key are an override only if both are.
func TestPlanBeside(t *testing.T) {
	base := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	plan := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 1000}
	own := Request{Limit: plan, Key: "k", Count: 1, Overridden: true}
	for name, requests := range map[string][]Request{"after": {plan.For("k")}, "in one call": {own, plan.For("k")}} {
		var seen decide.Definitions
		for _, requests := range [][]Request{{base.For("k")}, {own}, requests} {
			call := newCall(t, false, requests...)
			must(t, seen.NoteCall(&call))
		}
		if seen.Idle(decide.Key{Name: "a", Key: "other"}, nil, bucket.State{Value: 10, TS: t0}, t0.Add(90*time.Second)) {
			t.Errorf("%s: the row of another key is idle, and is not full by the plan", name)
		}
	}
}
