package decide

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// TestMetLimit asks for a limit that was called before: the answer is that of the first call, for
// good requests and bad ones.
func TestMetLimit(t *testing.T) {
	limit := ratelimit.TokenBucket{Name: "met", Rate: 10, Period: time.Second, Capacity: 1000}
	good := limit.For("key")
	with := func(change func(*ratelimit.Request)) ratelimit.Request {
		r := good
		change(&r)
		return r
	}
	for _, r := range []ratelimit.Request{
		good,
		with(func(r *ratelimit.Request) { r.Key = "" }),
		with(func(r *ratelimit.Request) { r.Key = strings.Repeat("k", ratelimit.MaxKeyLength+1) }),
		with(func(r *ratelimit.Request) { r.Key = "a\x00b" }),
		with(func(r *ratelimit.Request) { r.Key = "\xff" }),
		with(func(r *ratelimit.Request) { r.Count = 0 }),
		with(func(r *ratelimit.Request) { r.Count = -1 }),
		with(func(r *ratelimit.Request) { r.Count = math.NaN() }),
		with(func(r *ratelimit.Request) { r.Count = math.Inf(1) }),
		with(func(r *ratelimit.Request) { r.Count = 1e-13 }), // too small beside the capacity
		with(func(r *ratelimit.Request) { r.Count = 1001 }),
		with(func(r *ratelimit.Request) { r.Count = 2 * ratelimit.MaxTokens }),
		with(func(r *ratelimit.Request) { r.AboveShare = 0.5 }),
		with(func(r *ratelimit.Request) { r.AboveShare = -0.5 }),
		with(func(r *ratelimit.Request) { r.AboveShare = math.NaN() }),
		with(func(r *ratelimit.Request) { r.Mode = ratelimit.ModeRefuse + 1 }),
	} {
		met := note(t, good)
		var err error
		got, plain := met.Plain(All, false, nil, []ratelimit.Request{r})
		if !plain {
			got, err = NewIn(met, nil, false, r)
		}
		want, first := New(false, r)
		for i := range got.Demands {
			got.Demands[i].noted = false
		}
		if plain != (first == nil && r.Count >= 1 && r.AboveShare == 0) || got.Plain != plain {
			t.Errorf("%v: Plain is %v", r, plain)
		}
		got.Plain = false
		if !reflect.DeepEqual(got, want) || fmt.Sprint(err) != fmt.Sprint(first) {
			t.Errorf("%v: got %v %v, want %v %v", r, got, err, want, first)
		}
	}
}

// TestMetLimitMayChange asks for limits that must be validated again: one behind a pointer, whose
// fields have changed, and another one of the name.
func TestMetLimitMayChange(t *testing.T) {
	limit := ratelimit.TokenBucket{Name: "met", Rate: 10, Period: time.Second}
	met := note(t, ratelimit.Request{Limit: &limit, Key: "key", Count: 1})
	limit.Rate = -1
	for _, r := range []ratelimit.Request{{Limit: &limit, Key: "key", Count: 1}, {Limit: limit, Key: "key", Count: 1}} {
		if _, err := NewIn(met, nil, false, r); err == nil {
			t.Errorf("a rate of -1 is valid in %T", r.Limit)
		}
	}
}

// note returns definitions that have met the limits of requests.
func note(t *testing.T, requests ...ratelimit.Request) *Definitions {
	t.Helper()
	var met Definitions
	for _, r := range requests {
		call, err := New(false, r)
		if err == nil {
			err = met.NoteCall(&call)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return &met
}
