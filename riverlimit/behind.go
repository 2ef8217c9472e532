package riverlimit

import (
	"context"
	"math"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/gate"
)

// late is how long after its turn a job keeps it. River is up to 5 seconds late.
const late = 15 * time.Second

// waits sleeps in the worker until a refusal may be over, and reports whether it did. It does not
// sleep if the job could not start within MaxWait, or if as many jobs of the limit's key sleep here
// as tokens are due within that. It ends with ctx.
func (m *Middleware) waits(ctx context.Context, refused ratelimit.Result, since time.Time, d time.Duration) bool {
	if time.Since(since)+d+debt(refused.Request) > m.config.MaxWait {
		return false
	}
	key := queueKey([]ratelimit.Request{refused.Request})
	limit := refused.Request.Limit.Definition()
	due := limit.Rate * float64(m.config.MaxWait) / float64(limit.Period)
	ahead := m.passing.add(key, 1)
	defer m.passing.add(key, -1)
	return float64(ahead)*refused.Request.Count < max(due, 1) && sleep(ctx, d)
}

// putBehind gives a refused job a place behind those refused before it, and returns when its turn
// is. Places are reservations of another limit, with the same rate and no bound. A job that comes
// at its turn and is refused again keeps its turn. One that comes long after it gets another: after
// a pause all come late, and would come again at once.
func (m *Middleware) putBehind(ctx context.Context, n note, refused ratelimit.Result, at time.Time) (note, time.Time) {
	line, ok := m.line(refused.Request)
	if !ok || refused.At.Before(n.Turn.Add(late)) {
		return n, at
	}
	place, err := m.store.Reserve(ctx, line)
	if err != nil {
		return n, at
	}
	own := span(line.Count, line) // how long the first in line waits
	n.Turn = at.Add(max(0, debt(refused.Request)+place.RetryAfter-own-m.config.MaxWait/2))
	return n, n.Turn
}

// line returns the request for a place in the line of a limit. It reports false if there can be none.
func (m *Middleware) line(r ratelimit.Request) (ratelimit.Request, bool) {
	d := r.Limit.Definition()
	r.Limit = ratelimit.TokenBucket{Name: d.Name + gate.Line, Rate: d.Rate, Period: d.Period, Capacity: ratelimit.None}
	return r, r.Validate() == nil
}

// debt returns how long a limit takes to refill its largest debt. A reservation accepted at that
// debt is due so much later.
func debt(r ratelimit.Request) time.Duration {
	most := r.Limit.Definition().MaxReserved
	if math.IsInf(most, 0) {
		return 0
	}
	return span(most, r)
}

// span returns how long it takes until so many tokens of a limit are refilled.
func span(tokens float64, of ratelimit.Request) time.Duration {
	d := of.Limit.Definition()
	return time.Duration(min(tokens/d.Rate*float64(d.Period), float64(ratelimit.MaxSpan)))
}
