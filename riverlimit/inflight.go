package riverlimit

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
)

// inFlight does a job's work while it holds its permits, if it needs any. A job that gets none is
// parked.
func (m *Middleware) inFlight(ctx context.Context, job *rivertype.JobRow, work func(context.Context) error) error {
	asked := permitsOf(m.config.Catalog, m.config.InFlight, job)
	if asked.Limit.Name == "" {
		return work(ctx)
	}
	c := clientOf(ctx)
	permit, err := m.acquire(ctx, c, job, &asked)
	switch {
	case err != nil:
		want := ratelimit.Permit{InFlight: asked.Limit, Key: asked.Key, N: asked.N}
		return m.putOff(ctx, job, ratelimit.Event{Permit: &want}, err)
	case !permit.OK && permit.InFlight.Mode == ratelimit.ModeRefuse:
		m.observe(ctx, job, ratelimit.Event{Outcome: ratelimit.OutcomeRefused, Permit: &permit})
		return clockOf(&permit).snooze(permit.NotBefore.Add(rand.N(m.config.MaxWait)))
	case !permit.OK:
		return m.park(ctx, c, job, &asked, &permit)
	case noteOf(ctx, job).Parked && job.ScheduledAt.After(job.CreatedAt): // the job came by itself: a woken one is due at its creation
		m.lines.looks(c, &permit, job.ID)
	}
	return m.store.Permits().Keep(ctx, permit, func(ctx context.Context, permit ratelimit.Permit) error {
		defer m.lines.end(ctx, c, job.ID, &permit, time.Now())
		return work(context.WithValue(ctx, permitKey{}, permit))
	})
}

// permitsOf returns what a job asks for, by what the catalog says now.
func permitsOf(catalog ratelimit.Catalog, of func(*rivertype.JobRow) ratelimit.PermitRequest, job *rivertype.JobRow) ratelimit.PermitRequest {
	asked := of(job)
	if catalog == nil || asked.Limit.Name == "" {
		return asked
	}
	asked.More = slices.Clone(asked.More)
	asked.Limit = catalog.InFlight(asked.Limit, asked.Key)
	for i, r := range asked.More {
		asked.More[i].Limit = catalog.InFlight(r.Limit, r.Key)
	}
	return asked
}

// acquire returns the job's permit, or the refusal of the part for which it has to wait. If jobs
// wait in line, a new job asks only if it may wait in a worker.
func (m *Middleware) acquire(ctx context.Context, c client, job *rivertype.JobRow, asked *ratelimit.PermitRequest) (permit ratelimit.Permit, err error) {
	if err := asked.Validate(); err != nil {
		return ratelimit.Permit{}, err
	}
	wait, full := m.lines.enter(c, asked, noteOf(ctx, job).Parked, m.config.MaxWait)
	switch {
	case full != nil:
		return refusalOf(full), nil
	case wait == 0:
		return m.store.Permits().Acquire(ctx, *asked)
	}
	defer func() { m.lines.leave(c, asked, !permit.OK) }()
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	permit, err = m.store.Permits().AcquireWait(waiting, *asked)
	switch {
	case ctx.Err() != nil || waiting.Err() == nil || !errors.Is(err, context.DeadlineExceeded):
		return permit, err
	case len(asked.More) > 0: // which part is it?
		return m.store.Permits().Acquire(ctx, *asked)
	}
	return refusalOf(asked), nil
}

// refusalOf returns a refusal without asking the database. Its NotBefore is a lease from now.
func refusalOf(asked *ratelimit.PermitRequest) ratelimit.Permit {
	now := time.Now()
	return ratelimit.Permit{InFlight: asked.Limit, Key: asked.Key, N: asked.N, At: now, NotBefore: now.Add(asked.Limit.LeaseOrDefault())}
}

// park parks a refused job until it is woken. The first in its line also comes when a lease ends.
func (m *Middleware) park(ctx context.Context, c client, job *rivertype.JobRow, asked *ratelimit.PermitRequest, refused *ratelimit.Permit) error {
	e := ratelimit.Event{Outcome: ratelimit.OutcomeRefused, Permit: refused}
	first, err := m.lines.park(ctx, c, job, asked, refused)
	n := noteOf(ctx, job)
	if n.Parked {
		m.lines.passOn(c, asked, refused)
	}
	n.Parked = true
	if err := errors.Join(err, n.save(ctx)); err != nil {
		return m.putOff(ctx, job, e, err)
	}
	m.observe(ctx, job, e)
	comes := refused.NotBefore
	switch {
	case !first:
		comes = refused.At.Add(parkedFor)
	case !comes.After(refused.At): // a permit has just been taken, or released
		comes = refused.At.Add(refused.InFlight.LeaseOrDefault())
	}
	return clockOf(refused).snooze(comes)
}

// clockOf returns the instant of a refusal.
func clockOf(refused *ratelimit.Permit) instant {
	return instant{database: refused.At, worker: time.Now()}
}

// permitKey is for a job's permit in its context.
type permitKey struct{}

// PermitOf returns the permit held by the job whose context is ctx: for ReleaseTx of the Store in
// the transaction that completes the job, and for its Fence. It returns false if there is none.
func PermitOf(ctx context.Context) (permit ratelimit.Permit, ok bool) {
	permit, ok = ctx.Value(permitKey{}).(ratelimit.Permit)
	return permit, ok
}
