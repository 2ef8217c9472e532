package riverlimit

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/riverqueue/river"

	"github.com/pgratelimit/ratelimit"
)

// startSuffix ends the names of the gates.
const startSuffix = ":start"

// Rows are the requests with which the middleware takes what r asks for: from
// the limit, and with HardStart from the gate too, a token bucket of the same
// name with ":start" after it. They are for whoever gives back, pauses, resets
// or prunes what the middleware takes:
//
//	for _, row := range middleware.Rows(Tokens.ForN(org, unused)) {
//		_, err := store.CreditTx(ctx, tx, row)
//		…
//	}
//
// For the bound on starts, what is credited counts as having come in.
func (m *Middleware) Rows(r ratelimit.Request) []ratelimit.Request {
	if !m.config.HardStart || r.Limit == nil {
		return []ratelimit.Request{r}
	}
	return []ratelimit.Request{m.scheduled(r), m.gate(r)}
}

// scheduled is r as it is reserved. With HardStart it is at the gate's rate, or
// ever more jobs would become due and wait there.
func (m *Middleware) scheduled(r ratelimit.Request) ratelimit.Request {
	limit, ok := r.Limit.(ratelimit.TokenBucket)
	if !m.config.HardStart || !ok {
		return r
	}
	limit.Capacity = orSelf(limit.Capacity, limit.Rate)
	limit.Period = m.stretched(limit.Period)
	return limit.ForN(r.Key, r.Count)
}

// aheadSlacks is how many times the slack a gate grants ahead.
const aheadSlacks = 4

// orSelf spells out the default of a capacity.
func orSelf(capacity, rate float64) float64 {
	if capacity == 0 {
		return rate
	}
	return capacity
}

// stretched is a limit's period with the slack in it, and a microsecond: then
// what comes in during a period and the slack is less than Rate, and whole
// tokens are at most Rate − 1.
func (m *Middleware) stretched(period time.Duration) time.Duration {
	return (period + m.config.StartSlack + 2*time.Microsecond - 1).Truncate(time.Microsecond)
}

// gate is the limit on starts. Taking from a token bucket at the very instants
// t1 … tn takes at most Capacity + Rate · (tn − t1) / Period. A start is up to
// the slack after its taking, so those in a window of the limit's period were
// taken within the period and the slack.
//
// It grants a little ahead, so that the way to the database and back does not
// come on top of the spacing. A pause does not stop who was granted before.
func (m *Middleware) gate(r ratelimit.Request) ratelimit.Request {
	d := r.Limit.Definition()
	capacity := max(d.Capacity, r.Count)
	if d.Kind == ratelimit.KindFixedWindow {
		capacity = max(1, r.Count) // its own would let two windows' worth start at an edge
	}
	period := m.stretched(d.Period)
	return ratelimit.TokenBucket{
		Name: d.Name + startSuffix, Rate: d.Rate, Period: period, Capacity: max(1, capacity),
		MaxReserved: d.Rate * float64(aheadSlacks*m.config.StartSlack) / float64(period),
	}.ForN(r.Key, r.Count)
}

// pass has the job pay at the gates and returns nil if it may start, which it
// must do at once. Of the jobs in this process only one at a time asks at a
// gate, the others stand in line: those that are late would otherwise all ask
// each time one of them may start.
//
// A grant that is not used is lost. It must not be given back: those who were
// granted theirs after it have their instants, and another one, at once, would
// be a start that the spacing between those does not allow for.
func (m *Middleware) pass(ctx context.Context, requests []ratelimit.Request) error {
	gates := m.gates(requests)
	deadline := time.Now().Add(m.config.MaxWait)
	name := lineName(gates)
	l, ahead := m.lines.join(name)
	defer m.lines.leave(name, l)
	for {
		if !l.wait(ctx, deadline) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			// It is due already, so there is no better instant than its turn.
			return river.JobSnooze(max(time.Duration(ahead)*spacing(gates)-m.config.MaxWait, m.config.MaxWait/2))
		}
		asked, result, err := m.ask(ctx, gates)
		l.done()
		if err != nil {
			return err
		}
		late, err := m.atItsInstant(ctx, asked, result)
		if err != nil || late <= m.config.StartSlack {
			return err
		}
		m.config.Logger.WarnContext(ctx, "riverlimit: too late to start; asking again",
			slog.Duration("late", late), slog.Duration("start_slack", m.config.StartSlack))
	}
}

// gates are the gates that a job passes.
func (m *Middleware) gates(requests []ratelimit.Request) []ratelimit.Request {
	gates := make([]ratelimit.Request, len(requests))
	for i, r := range requests {
		gates[i] = m.gate(r)
		if len(requests) == 1 {
			continue
		}
		// Each would have an instant of its own. Without debt it is the same.
		alone := gates[i].Limit.(ratelimit.TokenBucket)
		alone.MaxReserved = ratelimit.None
		gates[i].Limit = alone
	}
	return gates
}

// ask asks until the gates grant the job an instant, and returns when it asked.
func (m *Middleware) ask(ctx context.Context, gates []ratelimit.Request) (asked time.Time, result ratelimit.Result, err error) {
	for {
		asked = time.Now()
		result, err = m.store.Reserve(ctx, gates...)
		if err != nil || result.OK {
			return asked, result, err
		}
		now := decided(result)
		if now.until(result.RetryAt) > m.config.MaxWait {
			return asked, result, now.snooze(result.RetryAt.Add(-m.config.MaxWait / 2))
		}
		if !sleep(ctx, now.until(result.RetryAt)) {
			return asked, result, ctx.Err()
		}
	}
}

// atItsInstant waits for the instant that was granted, and says by how much it
// is over at most: the database decided after it was asked.
func (m *Middleware) atItsInstant(ctx context.Context, asked time.Time, result ratelimit.Result) (late time.Duration, err error) {
	now := decided(result)
	if now.until(result.RetryAt) > m.config.MaxWait { // in a pause
		return 0, now.snooze(result.RetryAt.Add(-m.config.MaxWait / 2))
	}
	if !sleep(ctx, now.until(result.RetryAt)) {
		return 0, ctx.Err()
	}
	return time.Since(asked) - result.RetryAfter, nil
}

// spacing is how long the slowest of the gates needs for what is asked.
func spacing(gates []ratelimit.Request) time.Duration {
	longest := time.Duration(0)
	for _, g := range gates {
		d := g.Limit.Definition()
		need := min(g.Count/d.Rate*float64(d.Period), float64(ratelimit.MaxSpan))
		longest = max(longest, time.Duration(need))
	}
	return longest
}

// lines are the jobs of this process that stand before gates.
type lines struct {
	mu     sync.Mutex
	byName map[string]*line
}

// line is the jobs that stand before the same gates.
type line struct {
	turn    chan struct{} // holds one while somebody has the turn; first come, first served
	members int
}

func lineName(gates []ratelimit.Request) string {
	var b strings.Builder
	for _, g := range gates {
		fmt.Fprintf(&b, "%q %q ", g.Limit.Definition().Name, g.Key)
	}
	return b.String()
}

// join returns the line and how many are in it already.
func (ls *lines) join(name string) (l *line, ahead int) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l = ls.byName[name]
	if l == nil {
		if ls.byName == nil {
			ls.byName = map[string]*line{}
		}
		l = &line{turn: make(chan struct{}, 1)}
		ls.byName[name] = l
	}
	l.members++
	return l, l.members - 1
}

func (ls *lines) leave(name string, l *line) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l.members--
	if l.members == 0 {
		delete(ls.byName, name)
	}
}

// wait reports whether it is the caller's turn before the deadline.
func (l *line) wait(ctx context.Context, deadline time.Time) bool {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	select {
	case l.turn <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (l *line) done() { <-l.turn }
