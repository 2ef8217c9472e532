package flight

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// fake renews as it is told.
type fake struct {
	renew    func(ctx context.Context) error
	released int
}

func (f *fake) Renew(ctx context.Context, permit ratelimit.Permit) (ratelimit.Permit, error) {
	asked := time.Now()
	if err := f.renew(ctx); err != nil {
		return ratelimit.Permit{}, err
	}
	return lasting(permit.Fence, asked), nil
}

func (f *fake) Release(context.Context, ratelimit.Permit) error {
	f.released++
	return nil
}

const lease = 10 * time.Second

func lasting(fence int64, from time.Time) ratelimit.Permit {
	return ratelimit.Permit{
		InFlight: ratelimit.InFlight{Name: "l", Limit: 1, Lease: lease}, OK: true, Fence: fence,
		At: from, Until: from.Add(lease), Asked: from,
	}
}

// keep keeps a permit for a while, and returns after how long its context ended, or 0, and why.
func keep(t *testing.T, store *fake, permit ratelimit.Permit, work time.Duration) (told time.Duration, cause, err error) {
	t.Helper()
	var k Renewers
	begun := time.Now()
	err = k.Keep(t.Context(), store, permit, func(ctx context.Context, _ ratelimit.Permit) error {
		select {
		case <-ctx.Done():
			told, cause = time.Since(begun), context.Cause(ctx)
		case <-time.After(work):
		}
		return nil
	})
	if store.released != 1 {
		t.Errorf("released %d times, want once", store.released)
	}
	return told, cause, err
}

// When the database does not answer, by an error or at all, the holder is told at the end of
// the lease, and not later; when it says that the permit is lost, at once.
func TestKeepTellsInTime(t *testing.T) {
	down := errors.New("down")
	for name, c := range map[string]struct {
		renew func(context.Context) error
		told  time.Duration
	}{
		"errors":  {func(context.Context) error { return down }, lease},
		"silence": {func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, lease},
		"lost":    {func(context.Context) error { return ratelimit.ErrLeaseLost }, lease / 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				told, cause, err := keep(t, &fake{renew: c.renew}, lasting(1, time.Now()), time.Hour)
				if told != c.told || !errors.Is(cause, ratelimit.ErrLeaseLost) || !errors.Is(err, ratelimit.ErrLeaseLost) {
					t.Errorf("told after %v because of %v, error %v; want ErrLeaseLost after %v", told, cause, err, c.told)
				}
			})
		})
	}
}

// A holder that has released a part of its permit is told when the rest is lost.
func TestKeepTellsOfTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var k Renewers
		permit := lasting(1, time.Now())
		permit.With = []ratelimit.Permit{permit}
		permit.With[0].InFlight.Name = "other"
		store := &fake{renew: func(context.Context) error { return ratelimit.ErrLeaseLost }}
		err := k.Keep(t.Context(), store, permit, func(ctx context.Context, permit ratelimit.Permit) error {
			k.Released(permit.Parts()[0])
			select {
			case <-ctx.Done():
			case <-time.After(2 * lease):
				t.Error("not told within two leases")
			}
			return nil
		})
		if !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("got %v, want ErrLeaseLost", err)
		}
	})
}

// A fault that passes within the lease is not noticed.
func TestKeepSurvivesFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		last := time.Now()
		store := &fake{renew: func(context.Context) error {
			if time.Since(last) > lease*9/10 {
				last = time.Now()
				return nil
			}
			return errors.New("down")
		}}
		if told, cause, err := keep(t, store, lasting(1, last), 3*lease); told != 0 || err != nil {
			t.Errorf("told after %v because of %v, error %v", told, cause, err)
		}
	})
}

// Work that goes on when its context is over still has its permit: nobody else is to be given it.
func TestKeepRenewsForWorkThatOutlivesItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		renewed := 0
		store := &fake{renew: func(ctx context.Context) error { renewed++; return ctx.Err() }}
		var k Renewers
		err := k.Keep(ctx, store, lasting(1, time.Now()), func(inner context.Context, _ ratelimit.Permit) error {
			cancel()
			if inner.Err() == nil {
				t.Error("the work's context is not over")
			}
			time.Sleep(4*lease + time.Second)
			return nil
		})
		if err != nil || renewed != 8 || store.released != 1 {
			t.Errorf("got %v, renewed %d times in four leases and released %d times, want 8 and 1", err, renewed, store.released)
		}
	})
}

// In a process that was stopped past the lease, no timer has rung: the context says so all the
// same.
func TestContextOfALeaseThatIsOver(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	permit := lasting(1, time.Now().Add(-lease-time.Millisecond))
	c := &leased{ctx, &renewer{cancel: cancel, permit: permit}}
	if err := c.Err(); !errors.Is(err, context.Canceled) || !errors.Is(context.Cause(c), ratelimit.ErrLeaseLost) {
		t.Errorf("got %v because of %v, want canceled because of ErrLeaseLost", err, context.Cause(c))
	}
	select {
	case <-c.Done():
	default:
		t.Error("it is not done")
	}
}

// A permit that was read, or waited for past its lease, is renewed before it is worked with.
func TestKeepRenewsFirstWhatIsOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old := lasting(1, time.Now().Add(-time.Hour))
		var k Renewers
		store := &fake{renew: func(context.Context) error { return ratelimit.ErrLeaseLost }}
		err := k.Keep(t.Context(), store, old, func(context.Context, ratelimit.Permit) error {
			t.Error("worked with a permit that is lost")
			return nil
		})
		if !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("got %v, want ErrLeaseLost", err)
		}
		store.renew = func(context.Context) error { return nil }
		if told, _, err := keep(t, store, old, lease*2); told != 0 || err != nil {
			t.Errorf("told after %v, error %v", told, err)
		}
	})
}

// A release of the holder's own is not a loss, unless it was rolled back.
func TestKeepOfWhatIsReleased(t *testing.T) {
	for _, committed := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			var k Renewers
			renewals := 0
			store := &fake{renew: func(context.Context) error {
				if renewals++; committed || renewals > 1 {
					return ratelimit.ErrLeaseLost // at first it was rolled back
				}
				return nil
			}}
			permit := lasting(1, time.Now())
			err := k.Keep(t.Context(), store, permit, func(ctx context.Context, permit ratelimit.Permit) error {
				k.Released(permit)
				select {
				case <-ctx.Done():
				case <-time.After(3 * lease):
				}
				return nil
			})
			if lost := errors.Is(err, ratelimit.ErrLeaseLost); lost == committed {
				t.Errorf("committed %v: got %v", committed, err)
			}
		})
	}
}
