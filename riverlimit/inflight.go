package riverlimit

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
)

// inFlight does a job's work while it holds a permit, if it is to have one.
func (m *Middleware) inFlight(ctx context.Context, job *rivertype.JobRow, work func(context.Context) error) error {
	asked := m.config.InFlight(job)
	if asked.Limit.Name == "" {
		return work(ctx)
	}
	if m.config.Catalog != nil {
		asked.More = slices.Clone(asked.More)
		asked.Limit = m.config.Catalog.InFlight(asked.Limit, asked.Key)
		for i, r := range asked.More {
			asked.More[i].Limit = m.config.Catalog.InFlight(r.Limit, r.Key)
		}
	}
	want := ratelimit.Permit{InFlight: asked.Limit, Key: asked.Key, N: asked.N}
	waiting, cancel := context.WithTimeout(ctx, m.config.MaxWait)
	defer cancel()
	permit, err := m.store.Permits().AcquireWait(waiting, asked)
	switch {
	case err == nil && !permit.OK: // by its mode
		m.observe(ctx, job, ratelimit.Event{Outcome: ratelimit.OutcomeRefused, Permit: &permit})
		return river.JobSnooze(permit.NotBefore.Sub(permit.At) + rand.N(m.config.MaxWait))
	case err == nil:
	case ctx.Err() == nil && waiting.Err() != nil && errors.Is(err, context.DeadlineExceeded): // all permits are held
		m.observe(ctx, job, ratelimit.Event{Outcome: ratelimit.OutcomeRefused, Permit: &want})
		return river.JobSnooze(m.config.MaxWait/2 + rand.N(m.config.MaxWait))
	default:
		return m.putOff(ctx, job, ratelimit.Event{Permit: &want}, err)
	}
	return m.store.Permits().Keep(ctx, permit, func(ctx context.Context, permit ratelimit.Permit) error {
		return work(context.WithValue(ctx, permitKey{}, permit))
	})
}

// permitKey is for a job's permit in its context.
type permitKey struct{}

// PermitOf returns the permit held by the job whose context is ctx: for ReleaseTx of the Store in
// the transaction that completes the job, and for its Fence. It returns false if there is none.
func PermitOf(ctx context.Context) (permit ratelimit.Permit, ok bool) {
	permit, ok = ctx.Value(permitKey{}).(ratelimit.Permit)
	return permit, ok
}
