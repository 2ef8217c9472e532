package fallback

import (
	"context"

	"github.com/pgratelimit/ratelimit"
)

// Permits returns the store's verbs of permits, such as limits.Permits(), for doors with policies in
// flight. During a silence they end with a [SilentError] at once: without the database there is no
// lease. Held and Reset ask it nevertheless, and so does Keep, which renews what is held until its
// lease ends.
func (s *Store) Permits(of ratelimit.Permits) ratelimit.Permits {
	if of == nil {
		return nil
	}
	return permits{of, s}
}

// permits is the verbs of a store's permits, and what its Store knows of the database.
type permits struct {
	ratelimit.Permits
	s *Store
}

func (p permits) Acquire(ctx context.Context, request ratelimit.PermitRequest, rates ...ratelimit.Request) (ratelimit.Permit, error) {
	return p.acquire(ctx, request, func() (ratelimit.Permit, error) { return p.Permits.Acquire(ctx, request, rates...) })
}

func (p permits) AcquireWait(ctx context.Context, request ratelimit.PermitRequest, rates ...ratelimit.Request) (ratelimit.Permit, error) {
	return p.acquire(ctx, request, func() (ratelimit.Permit, error) { return p.Permits.AcquireWait(ctx, request, rates...) })
}

// acquire takes a permit, and memory heeds what the database has said of the rates beside it.
func (p permits) acquire(ctx context.Context, r ratelimit.PermitRequest, take func() (ratelimit.Permit, error)) (ratelimit.Permit, error) {
	wanted := ratelimit.Permit{InFlight: r.Limit, Key: r.Key, N: r.N}
	permit, err := askFor(ctx, p.s, ratelimit.VerbAcquire, wanted, take)
	if err == nil {
		p.s.memory.note(&permit.Rates, 0)
	}
	return permit, err
}

func (p permits) Renew(ctx context.Context, permit ratelimit.Permit) (ratelimit.Permit, error) {
	return askFor(ctx, p.s, ratelimit.VerbRenew, permit, func() (ratelimit.Permit, error) { return p.Permits.Renew(ctx, permit) })
}

func (p permits) Release(ctx context.Context, permit ratelimit.Permit) error {
	_, err := askFor(ctx, p.s, ratelimit.VerbRelease, permit, func() (none struct{}, _ error) { return none, p.Permits.Release(ctx, permit) })
	return err
}

func (p permits) Hold(ctx context.Context, request ratelimit.PermitRequest, do func(ctx context.Context, permit ratelimit.Permit) error) error {
	if do == nil {
		return p.Permits.Hold(ctx, request, do)
	}
	permit, err := p.AcquireWait(ctx, request)
	if err != nil {
		return err
	}
	return p.Keep(ctx, permit, do)
}

// askFor is ask of a verb of permits.
func askFor[T any](ctx context.Context, s *Store, verb ratelimit.Verb, permit ratelimit.Permit, do func() (T, error)) (answer T, err error) {
	if err := s.usable(); err != nil {
		return answer, err
	}
	if quiet := s.quiet.Load(); quiet != nil {
		w := s.watches.Begin(ctx, verb, ratelimit.FormMemory, nil)
		err := s.fail(quiet, "")
		w.ReportPermit(permit, err)
		return answer, err
	}
	answer, err = do()
	return answer, s.hear(ctx, err)
}
