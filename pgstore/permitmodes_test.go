package pgstore_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// permitRate is a rate that is asked beside permits in modes.
var permitRate = ratelimit.FixedWindow{Name: "beside", Rate: 2, Period: time.Hour}

// A limit that refuses gives no permit to anybody, at once, and leaves those that are held to
// their holders.
func TestPermitsRefusedByMode(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx, off := t.Context(), calls.In(ratelimit.ModeRefuse)
		held := takePermit(t, store, calls, "k")
		tx := begin()
		for verb, acquire := range map[string]func(ratelimit.InFlight) (ratelimit.Permit, error){
			"Acquire": func(l ratelimit.InFlight) (ratelimit.Permit, error) {
				return store.Acquire(ctx, l.For("k"), permitRate.For("k"))
			},
			"AcquireWait": func(l ratelimit.InFlight) (ratelimit.Permit, error) {
				return store.AcquireWait(ctx, l.For("k"), permitRate.For("k"))
			},
			"AcquireTx": func(l ratelimit.InFlight) (ratelimit.Permit, error) {
				return store.AcquireTx(ctx, tx, l.For("k"), permitRate.For("k"))
			},
		} {
			later := off
			later.RefusedUntil = clock.now().Add(time.Hour)
			for want, l := range map[time.Duration]ratelimit.InFlight{ratelimit.RefusedFor: off, time.Hour: later} {
				permit, err := acquire(l)
				if err != nil || permit.OK || permit.N != 1 || !permit.NotBefore.Equal(clock.now().Add(want)) {
					t.Errorf("%s: got %v not before %v, %v, want a refusal for %v", verb, permit, permit.NotBefore, err, want)
				}
				if err := permit.Err(); !errors.Is(err, ratelimit.ErrRefused) || !errors.As(err, new(*ratelimit.FullError)) || !strings.Contains(err.Error(), "by its mode") {
					t.Errorf("%s: got %v", verb, err)
				}
			}
		}
		err := store.Hold(ctx, off.For("k"), func(context.Context, ratelimit.Permit) error { t.Error("it ran"); return nil })
		if !errors.Is(err, ratelimit.ErrRefused) {
			t.Errorf("Hold: got %v, want ErrRefused", err)
		}
		wantCount(t, store, calls, "k", 1)
		if result, err := store.rates.Check(ctx, permitRate.ForN("k", 0)); err != nil || result.Remaining != 2 {
			t.Errorf("got %v, %v, want both tokens left", result, err)
		}
		held.InFlight = off
		if held, err = store.Renew(ctx, held); err != nil {
			t.Errorf("Renew: %v", err)
		}
		if err := store.Release(ctx, held); err != nil {
			t.Errorf("Release: %v", err)
		}
		var field *ratelimit.FieldError
		for _, mode := range []ratelimit.Mode{ratelimit.ModeShadow, 9} {
			if _, err := store.Acquire(ctx, calls.In(mode).For("k")); !errors.As(err, &field) || field.Field != "Mode" || field.Value != mode {
				t.Errorf("in mode %v: got %v", mode, err)
			}
		}
	})
}
