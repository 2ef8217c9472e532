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

// wantTokens checks how many tokens of permitRate are left.
func wantTokens(t *testing.T, store flightStore, want int64) {
	t.Helper()
	if result, err := store.rates.Check(t.Context(), permitRate.ForN("k", 0)); err != nil || result.Remaining != want {
		t.Errorf("got %v, %v, want %d tokens left", result, err, want)
	}
}

// wantHeld checks how many permits of calls are held, and takes a shadowed one for none.
func wantHeld(t *testing.T, store flightStore, want int) {
	t.Helper()
	if permits, err := store.Held(t.Context(), calls, "k"); err != nil || len(permits) != want {
		t.Errorf("got %v, %v, want %d permits held", permits, err, want)
	}
}

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
				if err != nil || permit.OK || !permit.NotBefore.Equal(clock.now().Add(want)) {
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
		wantHeld(t, store, 1)
		wantTokens(t, store, 2)
		held.InFlight = off
		if held, err = store.Renew(ctx, held); err != nil {
			t.Errorf("Renew: %v", err)
		}
		if err := store.Release(ctx, held); err != nil {
			t.Errorf("Release: %v", err)
		}
		var field *ratelimit.FieldError
		if _, err := store.Acquire(ctx, calls.In(9).For("k")); !errors.As(err, &field) || field.Field != "Mode" {
			t.Errorf("in mode 9: got %v", err)
		}
	})
}

// A limit that is tried out takes its permits, and when they are held lets everybody through at
// once, with a permit that holds nothing.
func TestPermitsInShadow(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // or a fault would wait
		defer cancel()
		tried, tx := calls.In(ratelimit.ModeShadow), begin()
		first := takePermit(t, store, calls, "k")
		for n := range 2 {
			if permit := takePermit(t, store, tried, "k"); permit.Shadowed || permit.Fence == 0 {
				t.Errorf("permit %d: got %v, want one that is held", n, permit)
			}
		}
		for verb, acquire := range map[string]func() (ratelimit.Permit, error){
			"Acquire":     func() (ratelimit.Permit, error) { return store.Acquire(ctx, tried.For("k")) },
			"AcquireWait": func() (ratelimit.Permit, error) { return store.AcquireWait(ctx, tried.For("k")) },
			"AcquireTx":   func() (ratelimit.Permit, error) { return store.AcquireTx(ctx, tx, tried.For("k")) },
		} {
			permit, err := acquire()
			if err != nil || !permit.OK || !permit.Shadowed || permit.Fence != 0 || !permit.NotBefore.Equal(first.Until) || permit.Err() != nil {
				t.Errorf("%s: got %+v, %v, want a shadowed permit", verb, permit, err)
			}
			again, err := store.Renew(ctx, permit)
			if err != nil || !again.OK || !again.Shadowed || again.Fence != 0 {
				t.Errorf("%s: Renew: got %+v, %v, want the same", verb, again, err)
			}
			if err := errors.Join(store.Release(ctx, permit), store.Release(ctx, permit), store.ReleaseTx(ctx, tx, permit)); err != nil {
				t.Errorf("%s: Release: %v", verb, err)
			}
			ran := false
			err = store.Keep(ctx, permit, func(ctx context.Context, _ ratelimit.Permit) error { ran = true; return ctx.Err() })
			if !ran || err != nil {
				t.Errorf("%s: Keep: ran %v, %v", verb, ran, err)
			}
		}
		refusedFor(t, store, calls, "k") // by whom it is enforced
		wantHeld(t, store, 3)
	})
}

// The rates that are asked with permits that are tried out refuse, and are spent once if they do not.
func TestPermitsInShadowWithRates(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx, tried := t.Context(), calls.In(ratelimit.ModeShadow)
		ask := map[string]func() (ratelimit.Permit, error){
			"Acquire": func() (ratelimit.Permit, error) { return store.Acquire(ctx, tried.For("k"), permitRate.For("k")) },
			"AcquireTx": func() (ratelimit.Permit, error) {
				tx := begin()
				permit, err := store.AcquireTx(ctx, tx, tried.For("k"), permitRate.For("k"))
				return permit, errors.Join(err, tx.Commit(ctx))
			},
		}
		for verb, ask := range ask {
			held, err := ask()
			if err != nil || !held.OK || held.Shadowed || !held.Rates.OK {
				t.Errorf("%s: got %+v, %v, want a permit and a token", verb, held, err)
			}
			wantTokens(t, store, 1)
			var others []ratelimit.Permit
			for range calls.Limit - 1 {
				others = append(others, takePermit(t, store, calls, "k"))
			}
			if permit, err := ask(); err != nil || !permit.OK || !permit.Shadowed || !permit.Rates.OK {
				t.Errorf("%s: got %+v, %v, want a shadowed permit and a token", verb, permit, err)
			}
			wantTokens(t, store, 0)
			if permit, err := ask(); err != nil || permit.OK || permit.Rates.OK || !errors.As(permit.Err(), new(*ratelimit.RefusedError)) {
				t.Errorf("%s: got %+v, %v, want the refusal of the rate", verb, permit, err)
			}
			for _, permit := range append(others, held) {
				if err := store.Release(ctx, permit); err != nil {
					t.Error(err)
				}
			}
			if permit, err := ask(); err != nil || permit.OK {
				t.Errorf("%s: got %+v, %v, want the refusal of the rate", verb, permit, err)
			}
			wantHeld(t, store, 0)
			clock.add(2 * time.Hour)
		}
	})
}

// A holder whose lease is lost while the limit is tried out is not kept from his work, nor
// are those who have his permit by now.
func TestPermitsLostInShadow(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx, tried := t.Context(), calls.In(ratelimit.ModeShadow)
		lost := takePermit(t, store, tried, "k")
		clock.add(calls.Lease)
		for range calls.Limit {
			takePermit(t, store, calls, "k")
		}
		if permit, err := store.Renew(ctx, lost); err != nil || !permit.OK || !permit.Shadowed {
			t.Errorf("Renew: got %+v, %v, want it shadowed", permit, err)
		}
		tx := begin()
		if err := errors.Join(store.Release(ctx, lost), store.ReleaseTx(ctx, tx, lost), tx.Commit(ctx)); err != nil {
			t.Errorf("Release: %v", err)
		}
		if err := store.Keep(ctx, lost, noWork); err != nil {
			t.Errorf("Keep: %v", err)
		}
		wantHeld(t, store, calls.Limit)
		lost.InFlight = calls
		if err := store.Release(ctx, lost); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("Release when it is enforced: got %v, want ErrLeaseLost", err)
		}
	})
}
