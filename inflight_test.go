package ratelimit_test

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
)

func TestInFlightValidate(t *testing.T) {
	good := InFlight{Name: "calls", Limit: 10}
	for _, l := range []InFlight{good, {Name: "calls", Limit: MaxInFlight, Lease: MinLease}, {Name: "calls", Limit: 1, Lease: MaxSpan}} {
		if err := l.Validate(); err != nil {
			t.Errorf("%v: %v", l, err)
		}
	}
	for _, c := range []struct {
		limit InFlight
		want  string
	}{
		{InFlight{Limit: 1}, `ratelimit: Name "": must not be empty`},
		{InFlight{Name: "c", Limit: 0}, `ratelimit: limit "c": Limit 0: must be from 1 to 10000`},
		{InFlight{Name: "c", Limit: MaxInFlight + 1}, `ratelimit: limit "c": Limit 10001: must be from 1 to 10000`},
		{InFlight{Name: "c", Limit: 1, Lease: -1}, `ratelimit: limit "c": Lease -1ns: must be positive`},
		{InFlight{Name: "c", Limit: 1, Lease: 30}, `ratelimit: limit "c": Lease 30ns: must be whole microseconds: for 30 seconds write 30 * time.Second`},
		{InFlight{Name: "c", Limit: 1, Lease: time.Microsecond}, `ratelimit: limit "c": Lease 1µs: must be at least 1ms (0 means 30s)`},
		{InFlight{Name: "c", Limit: 1, Lease: math.MaxInt64 / 1000 * 1000}, `must be at most`},
		{InFlight{Name: "c", Limit: 1, Mode: 9}, `ratelimit: limit "c": Mode Mode(9): must be enforce or refuse for a limit of how many at once`},
		{good.In(ModeShadow), `Mode shadow: must be enforce or refuse`},
	} {
		var fault *FieldError
		if err := c.limit.Validate(); !errors.As(err, &fault) || !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%#v: got %v, want %s", c.limit, err, c.want)
		}
	}
	if got, want := good.String(), `"calls": 10 at a time, lease 30s`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got, want := good.In(ModeRefuse).String(), `"calls": 10 at a time, lease 30s, mode refuse`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if err := good.ValidateKey(strings.Repeat("k", MaxKeyLength+1)); !errors.Is(err, ErrInvalid) {
		t.Errorf("a long key: got %v, want ErrInvalid", err)
	}
}

// A permit is renewed and released by who reads its JSON.
func TestPermitAsJSON(t *testing.T) {
	at := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	permit := Permit{
		InFlight: InFlight{Name: "calls", Limit: 10, Lease: time.Minute}, Key: "k", OK: true, Number: 3,
		Fence: at.UnixMicro() + 1, At: at, Until: at.Add(time.Minute),
	}
	text, err := json.Marshal(permit)
	must(t, err)
	var read Permit
	if err := json.Unmarshal(text, &read); err != nil || read.InFlight != permit.InFlight || read.Key != permit.Key || read.Fence != permit.Fence ||
		read.Number != permit.Number || !read.Until.Equal(permit.Until) || read.Validate() != nil {
		t.Errorf("%s was read as %v, %v", text, read, err)
	}
	if len(text) > 250 {
		t.Errorf("%s has %d bytes", text, len(text))
	}
	if !read.Ends().Before(at) {
		t.Errorf("a permit that was read ends at %v, which it cannot know", read.Ends())
	}
	inner, outer := permit, permit
	inner.With = []Permit{permit}
	outer.With = []Permit{inner}
	if err := inner.Validate(); err != nil {
		t.Errorf("one with another: %v", err)
	}
	if err := outer.Validate(); !errors.Is(err, ErrInvalid) {
		t.Errorf("one with one that has another, of which a release knows nothing: got %v, want ErrInvalid", err)
	}
}
