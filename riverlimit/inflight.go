package riverlimit

import (
	"context"
	"errors"
	"math/rand/v2"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
)

// inFlight does a job's work while it holds a slot, if it is to have one.
func (m *Middleware) inFlight(ctx context.Context, job *rivertype.JobRow, work func(context.Context) error) error {
	limit, key := m.config.InFlight(job)
	if limit.Name == "" {
		return work(ctx)
	}
	if m.config.Catalog != nil {
		limit = m.config.Catalog.InFlight(limit, key)
	}
	waiting, cancel := context.WithTimeout(ctx, m.config.MaxWait)
	defer cancel()
	slot, err := m.store.AcquireWait(waiting, limit, key)
	switch {
	case err == nil && !slot.OK: // by its mode
		m.observe(ctx, job, ratelimit.Event{Outcome: ratelimit.OutcomeRefused, Slot: &slot})
		return river.JobSnooze(slot.NotBefore.Sub(slot.At) + rand.N(m.config.MaxWait))
	case err == nil:
	case ctx.Err() == nil && waiting.Err() != nil && errors.Is(err, context.DeadlineExceeded): // all slots are held
		m.observe(ctx, job, ratelimit.Event{Outcome: ratelimit.OutcomeRefused, Slot: &ratelimit.Slot{InFlight: limit, Key: key}})
		return river.JobSnooze(m.config.MaxWait/2 + rand.N(m.config.MaxWait))
	default:
		return m.putOff(ctx, job, ratelimit.Event{Slot: &ratelimit.Slot{InFlight: limit, Key: key}}, err)
	}
	return m.store.Keep(ctx, slot, func(ctx context.Context, slot ratelimit.Slot) error {
		return work(context.WithValue(ctx, slotKey{}, slot))
	})
}

// slotKey is for a job's slot in its context.
type slotKey struct{}

// SlotOf returns the slot held by the job whose context is ctx: for ReleaseTx of the Store in
// the transaction that completes the job, and for its Fence. It returns false if there is none.
func SlotOf(ctx context.Context) (slot ratelimit.Slot, ok bool) {
	slot, ok = ctx.Value(slotKey{}).(ratelimit.Slot)
	return slot, ok
}
