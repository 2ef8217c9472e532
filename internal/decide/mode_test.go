package decide_test

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// A refusal by its mode says when to ask again: when the mode ends, and if that is not known, or
// past in a request that is older, in a minute. Callers that ask the same again do not spin.
func TestRefusedUntil(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	for until, want := range map[time.Time]time.Duration{
		{}: ratelimit.RefusedFor, at.Add(-time.Hour): ratelimit.RefusedFor, at: ratelimit.RefusedFor,
		at.Add(time.Microsecond): time.Microsecond, at.Add(time.Hour): time.Hour,
	} {
		request := ratelimit.TokenBucket{Name: "l", Rate: 1, Period: time.Second}.For("k").In(ratelimit.ModeRefuse)
		request.RefusedUntil = until
		result, err := decide.ByMode(decide.All, at, []ratelimit.Request{request}, nil)
		if err != nil || result.OK || result.RetryAfter != want || !result.RetryAt.Equal(at.Add(want)) {
			t.Errorf("until %v: got %v, %v, want a refusal for %v", until, result, err, want)
		}
		limit := ratelimit.InFlight{Name: "c", Limit: 1, Mode: ratelimit.ModeRefuse, RefusedUntil: until}
		two := limit.ForN("k", 2)
		if permit, ok := decide.PermitRefused([]ratelimit.PermitRequest{two}, at); !ok || permit.OK || permit.N != 2 || !permit.NotBefore.Equal(at.Add(want)) {
			t.Errorf("until %v: got %v, want a refusal for %v", until, permit.NotBefore, want)
		}
	}
}
