package riverlimit

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/riverqueue/river"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/gate"
)

// Rows returns the requests with which the middleware takes the tokens of r: from the limit, and
// with HardStart from its gate too: a token bucket with the limit's name and ":start" after it. A
// sliding window has no gate. They are for programs that credit, pause, reset or prune the rows
// that the middleware takes from:
//
//	for _, row := range middleware.Rows(Tokens.ForN(org, unused)) {
//		_, err := store.CreditTx(ctx, tx, row)
//		…
//	}
//
// For the bound on starts, credited tokens count as refilled.
func (m *Middleware) Rows(r ratelimit.Request) []ratelimit.Request {
	return m.rows(decide.Resolved(m.config.Catalog, []ratelimit.Request{r})[0])
}

// rows returns the requests that take r's tokens: from its limit, and with HardStart also from its
// gate. The catalog has resolved r.
func (m *Middleware) rows(r ratelimit.Request) []ratelimit.Request {
	if !m.config.HardStart || ratelimit.NameOf(r.Limit) == "" || slides(r) {
		return []ratelimit.Request{r}
	}
	return []ratelimit.Request{m.scheduled(r), m.gate(r)}
}

// Pruner is the part of a store that prunes: a *pgstore.Store or a *memstore.Store.
type Pruner interface {
	PruneOverridden(ctx context.Context, overrides []ratelimit.Request, limits ...ratelimit.Limit) (deleted int64, err error)
}

// Pruner returns a Pruner that prunes the rows of a limit, of its gate, and of the line of its
// refused jobs. A catalog does not know the last two:
//
//	deleted, err := limits.Prune(ctx, middleware.Pruner(store, 10), store.Permits())
//
// A gate's capacity is at least the count of the job that asks, so most is the most tokens that
// one job takes, over all programs that insert jobs.
func (m *Middleware) Pruner(store Pruner, most float64) Pruner { return gatePruner{store, m, most} }

type gatePruner struct {
	Pruner
	of   *Middleware
	most float64
}

// PruneOverridden prunes as the store does, with gates and lines.
func (p gatePruner) PruneOverridden(ctx context.Context, overrides []ratelimit.Request, limits ...ratelimit.Limit) (int64, error) {
	all, own := slices.Clone(limits), slices.Clone(overrides)
	for _, l := range limits {
		rows, err := p.rows(ratelimit.Request{Limit: l})
		if err != nil {
			return 0, err
		}
		for _, r := range rows {
			all = append(all, r.Limit)
		}
	}
	for _, r := range overrides {
		rows, err := p.rows(r)
		if err != nil {
			return 0, err
		}
		own = append(own, rows...)
	}
	return p.Pruner.PruneOverridden(ctx, own, all...)
}

// rows returns the requests of the largest job, without those of invalid limits.
func (p gatePruner) rows(r ratelimit.Request) ([]ratelimit.Request, error) {
	r.Count = p.most
	if err := r.Validate(); err != nil {
		return nil, err
	}
	rows := p.of.rows(r)
	if line, ok := p.of.line(r); ok {
		rows = append(rows, line)
	}
	return slices.DeleteFunc(rows, func(r ratelimit.Request) bool { return r.Validate() != nil }), nil
}

// scheduled returns r as it is reserved. With HardStart its rate is the gate's, or ever more jobs
// would become due and wait there.
func (m *Middleware) scheduled(r ratelimit.Request) ratelimit.Request {
	limit, ok := r.Limit.(ratelimit.TokenBucket)
	if !m.config.HardStart || !ok {
		return r
	}
	limit.Capacity = cmp.Or(limit.Capacity, limit.Rate)
	limit.Period = m.stretched(limit.Period)
	r.Limit = limit
	return r
}

// aheadSlacks is how far ahead a gate grants, in slacks.
const aheadSlacks = 4

// stretched returns a limit's period with the slack and a microsecond. So fewer than Rate tokens
// are refilled during a period and the slack: at most Rate − 1 whole ones.
func (m *Middleware) stretched(period time.Duration) time.Duration {
	return (period + m.config.StartSlack + 2*time.Microsecond - 1).Truncate(time.Microsecond)
}

// gate returns r as a request to the limit on starts. What is taken from a token bucket between t1
// and tn is at most Capacity + Rate · (tn − t1) / Period. A start is up to the slack after its
// taking, so those in a window of the limit's period were taken within the period and the slack.
//
// It grants a little ahead, so that the way to the database and back is not added to the spacing.
func (m *Middleware) gate(r ratelimit.Request) ratelimit.Request {
	d := r.Limit.Definition()
	capacity := max(d.Capacity, r.Count)
	if d.Kind == ratelimit.KindFixedWindow {
		capacity = max(1, r.Count) // its own would let two windows' worth start at an edge
	}
	period := m.stretched(d.Period)
	r.Limit = ratelimit.TokenBucket{
		Name: d.Name + gate.Suffix, Rate: d.Rate, Period: period, Capacity: max(1, capacity),
		MaxReserved: d.Rate * float64(aheadSlacks*m.config.StartSlack) / float64(period),
	}
	return r
}

// pass takes from the gates, and returns the receipt when the job may start. The job must then
// start at once. Only one job of this process at a time asks at a gate, so that not all ask each
// time one may start.
//
// A grant that is not used is lost, except those of sliding windows. If it were given back, another job
// would start between jobs whose spacing does not allow for it.
func (m *Middleware) pass(ctx context.Context, gates []ratelimit.Request) (*ratelimit.Receipt, error) {
	if len(gates) == 0 {
		return nil, nil
	}
	key := queueKey(gates)
	ahead := m.passing.add(key, 1)
	defer m.passing.add(key, -1)
	waiting, cancel := context.WithTimeout(ctx, m.config.MaxWait)
	defer cancel()
	for {
		place, err := m.turns.Enter(waiting, key, 1, nil)
		if err != nil {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			// It is due already, so there is no better instant than its turn.
			return nil, river.JobSnooze(max(passed(gates, ahead)-m.config.MaxWait, m.config.MaxWait/2))
		}
		asked, result, err := m.ask(ctx, gates)
		m.turns.Leave(key, place)
		if err != nil {
			return nil, err
		}
		if err := m.sleepUntil(ctx, decided(result, asked), result.RetryAt); err != nil {
			return result.Receipt, err
		}
		late := time.Since(asked) - result.RetryAfter // at most: the database decided after it was asked
		if late <= m.config.StartSlack && !m.over(gates, asked, result) {
			return result.Receipt, nil
		}
		m.config.Logger.WarnContext(ctx, "riverlimit: too late to start; asking again",
			slog.Duration("late", late), slog.Duration("start_slack", m.config.StartSlack))
		if err := m.leave(ctx, gates, asked, result); err != nil {
			return nil, err
		}
	}
}

// leave gives up gates that were granted too late to start. A sliding window counts by its
// slots, so those that are given back can be granted again. It returns when the slots that are
// over too soon are over: until then they would be granted again and again.
func (m *Middleware) leave(ctx context.Context, gates []ratelimit.Request, asked time.Time, granted ratelimit.Result) error {
	if !slices.ContainsFunc(gates, func(r ratelimit.Request) bool { return !slides(r) }) {
		if _, err := m.store.Cancel(ctx, granted.Receipt); err != nil {
			return err
		}
	}
	if !m.over(gates, asked, granted) {
		return nil
	}
	now := decided(granted, asked)
	for _, p := range (note{}).with(gates, granted, 0).Paid {
		if !sleep(ctx, now.until(p.Until)) {
			return ctx.Err()
		}
	}
	return nil
}

// gates returns the gates that a job passes with its reservations, at an instant. A sliding window
// is its own gate if the job has missed its slot.
func (m *Middleware) gates(requests []ratelimit.Request, n note, now *instant) (gates []ratelimit.Request) {
	for _, r := range requests {
		if !slides(r) {
			gates = append(gates, m.gate(r))
		} else if m.missed(n, r, now) {
			gates = append(gates, atOnce(r))
		}
	}
	if len(gates) == 1 {
		return gates
	}
	for i := range gates { // with debt each would have an instant of its own; without it is the same
		gates[i] = atOnce(gates[i])
	}
	return gates
}

// over reports whether a slot of a sliding window among gates is over. It was granted to a call
// made at asked.
func (m *Middleware) over(gates []ratelimit.Request, asked time.Time, granted ratelimit.Result) bool {
	n, now := note{}.with(gates, granted, 0), decided(granted, asked)
	return slices.ContainsFunc(gates, func(r ratelimit.Request) bool { return slides(r) && m.missed(n, r, now) })
}

// missed reports whether the slot that was reserved for r may be over when the job starts.
func (m *Middleware) missed(n note, r ratelimit.Request, now *instant) bool {
	return n.missed(r, now.latest().Add(m.config.StartSlack))
}

// tooNarrow returns the error of a sliding window with slots that are over before a job starts.
func (m *Middleware) tooNarrow(requests []ratelimit.Request) error {
	for _, r := range requests {
		if !slides(r) {
			continue
		}
		if d := r.Limit.Definition(); d.SlotWidth() <= m.config.StartSlack {
			return &ratelimit.FieldError{
				Limit: d.Name, Field: "Slots", Value: d.Slots,
				Reason: fmt.Sprintf("makes slots of %v, which must be longer than StartSlack, %v", d.SlotWidth(), m.config.StartSlack),
			}
		}
	}
	return nil
}

// atOnce returns r as a request to the same limit that must be granted at once.
func atOnce(r ratelimit.Request) ratelimit.Request {
	d := r.Limit.Definition()
	d.MaxReserved = 0
	r.Limit = d.Limit()
	return r
}

// ask asks until the gates grant the job an instant, and returns when it asked.
func (m *Middleware) ask(ctx context.Context, gates []ratelimit.Request) (asked time.Time, result ratelimit.Result, err error) {
	for {
		asked = time.Now()
		result, err = m.store.Reserve(ctx, gates...)
		if err != nil || result.OK {
			return asked, result, err
		}
		if err := m.sleepUntil(ctx, decided(result, asked), result.RetryAt); err != nil {
			return asked, result, err
		}
	}
}

// sleepUntil waits for an instant. If it is later than MaxWait, as in a pause, it returns a snooze.
func (m *Middleware) sleepUntil(ctx context.Context, now *instant, at time.Time) error {
	if now.until(at) > m.config.MaxWait {
		return now.snooze(at.Add(-m.config.MaxWait / 2))
	}
	if !sleep(ctx, now.until(at)) {
		return ctx.Err()
	}
	return nil
}

// passed returns the least time in which n jobs like this one pass the gates, which may be full at
// first.
func passed(gates []ratelimit.Request, n int) time.Duration {
	longest := time.Duration(0)
	for _, g := range gates {
		missing := max(0, float64(n)*g.Count-g.Limit.Definition().Capacity)
		longest = max(longest, span(missing, g))
	}
	return longest
}

// queueKey names the queue before gates.
func queueKey(gates []ratelimit.Request) string {
	var b strings.Builder
	for _, g := range gates {
		fmt.Fprintf(&b, "%q %q ", ratelimit.NameOf(g.Limit), g.Key)
	}
	return b.String()
}

// counts holds a number of jobs for each key. The zero value is ready to use.
type counts struct {
	mu sync.Mutex
	of map[string]int
}

// add adds n to a key's number, and returns its value before.
func (c *counts) add(key string, n int) (before int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before = c.of[key]
	if c.of == nil {
		c.of = make(map[string]int)
	}
	if c.of[key] += n; c.of[key] == 0 {
		delete(c.of, key)
	}
	return before
}
