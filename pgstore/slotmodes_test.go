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

// slotRate is a rate that is asked beside slots in modes.
var slotRate = ratelimit.FixedWindow{Name: "beside", Rate: 2, Period: time.Hour}

// wantTokens checks how many tokens of slotRate are left.
func wantTokens(t *testing.T, store flightStore, want int64) {
	t.Helper()
	if result, err := store.Check(t.Context(), slotRate.ForN("k", 0)); err != nil || result.Remaining != want {
		t.Errorf("got %v, %v, want %d tokens left", result, err, want)
	}
}

// wantHeld checks how many slots of calls are held, and takes a shadowed one for none.
func wantHeld(t *testing.T, store flightStore, want int) {
	t.Helper()
	if slots, err := store.Slots(t.Context(), calls, "k"); err != nil || len(slots) != want {
		t.Errorf("got %v, %v, want %d slots held", slots, err, want)
	}
}

// A limit that refuses gives no slot to anybody, at once, and leaves those that are held to
// their holders.
func TestSlotsRefusedByMode(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx, off := t.Context(), calls.In(ratelimit.ModeRefuse)
		held := takeSlot(t, store, calls, "k")
		tx := begin()
		for verb, acquire := range map[string]func(ratelimit.InFlight) (ratelimit.Slot, error){
			"Acquire": func(l ratelimit.InFlight) (ratelimit.Slot, error) {
				return store.Acquire(ctx, l, "k", slotRate.For("k"))
			},
			"AcquireWait": func(l ratelimit.InFlight) (ratelimit.Slot, error) {
				return store.AcquireWait(ctx, l, "k", slotRate.For("k"))
			},
			"AcquireTx": func(l ratelimit.InFlight) (ratelimit.Slot, error) {
				return store.AcquireTx(ctx, tx, l, "k", slotRate.For("k"))
			},
		} {
			later := off
			later.RefusedUntil = clock.now().Add(time.Hour)
			for want, l := range map[time.Duration]ratelimit.InFlight{ratelimit.RefusedFor: off, time.Hour: later} {
				slot, err := acquire(l)
				if err != nil || slot.OK || !slot.NotBefore.Equal(clock.now().Add(want)) {
					t.Errorf("%s: got %v not before %v, %v, want a refusal for %v", verb, slot, slot.NotBefore, err, want)
				}
				if err := slot.Err(); !errors.Is(err, ratelimit.ErrRefused) || !errors.As(err, new(*ratelimit.FullError)) || !strings.Contains(err.Error(), "by its mode") {
					t.Errorf("%s: got %v", verb, err)
				}
			}
		}
		err := store.Hold(ctx, off, "k", func(context.Context, ratelimit.Slot) error { t.Error("it ran"); return nil })
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
		if _, err := store.Acquire(ctx, calls.In(9), "k"); !errors.As(err, &field) || field.Field != "Mode" {
			t.Errorf("in mode 9: got %v", err)
		}
	})
}

// A limit that is tried out takes its slots, and when they are held lets everybody through at
// once, with a slot that holds nothing.
func TestSlotsInShadow(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // or a fault would wait
		defer cancel()
		tried, tx := calls.In(ratelimit.ModeShadow), begin()
		first := takeSlot(t, store, calls, "k")
		for n := range 2 {
			if slot := takeSlot(t, store, tried, "k"); slot.Shadowed || slot.Fence == 0 {
				t.Errorf("slot %d: got %v, want one that is held", n, slot)
			}
		}
		for verb, acquire := range map[string]func() (ratelimit.Slot, error){
			"Acquire":     func() (ratelimit.Slot, error) { return store.Acquire(ctx, tried, "k") },
			"AcquireWait": func() (ratelimit.Slot, error) { return store.AcquireWait(ctx, tried, "k") },
			"AcquireTx":   func() (ratelimit.Slot, error) { return store.AcquireTx(ctx, tx, tried, "k") },
		} {
			slot, err := acquire()
			if err != nil || !slot.OK || !slot.Shadowed || slot.Fence != 0 || !slot.NotBefore.Equal(first.Until) || slot.Err() != nil {
				t.Errorf("%s: got %+v, %v, want a shadowed slot", verb, slot, err)
			}
			again, err := store.Renew(ctx, slot)
			if err != nil || !again.OK || !again.Shadowed || again.Fence != 0 {
				t.Errorf("%s: Renew: got %+v, %v, want the same", verb, again, err)
			}
			if err := errors.Join(store.Release(ctx, slot), store.Release(ctx, slot), store.ReleaseTx(ctx, tx, slot)); err != nil {
				t.Errorf("%s: Release: %v", verb, err)
			}
			ran := false
			err = store.Keep(ctx, slot, func(ctx context.Context, _ ratelimit.Slot) error { ran = true; return ctx.Err() })
			if !ran || err != nil {
				t.Errorf("%s: Keep: ran %v, %v", verb, ran, err)
			}
		}
		refusedFor(t, store, calls, "k") // by whom it is enforced
		wantHeld(t, store, 3)
	})
}

// The rates that are asked with slots that are tried out refuse, and are spent once if they do not.
func TestSlotsInShadowWithRates(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx, tried := t.Context(), calls.In(ratelimit.ModeShadow)
		ask := map[string]func() (ratelimit.Slot, error){
			"Acquire": func() (ratelimit.Slot, error) { return store.Acquire(ctx, tried, "k", slotRate.For("k")) },
			"AcquireTx": func() (ratelimit.Slot, error) {
				tx := begin()
				slot, err := store.AcquireTx(ctx, tx, tried, "k", slotRate.For("k"))
				return slot, errors.Join(err, tx.Commit(ctx))
			},
		}
		for verb, ask := range ask {
			held, err := ask()
			if err != nil || !held.OK || held.Shadowed || !held.Rates.OK {
				t.Errorf("%s: got %+v, %v, want a slot and a token", verb, held, err)
			}
			wantTokens(t, store, 1)
			var others []ratelimit.Slot
			for range calls.Limit - 1 {
				others = append(others, takeSlot(t, store, calls, "k"))
			}
			if slot, err := ask(); err != nil || !slot.OK || !slot.Shadowed || !slot.Rates.OK {
				t.Errorf("%s: got %+v, %v, want a shadowed slot and a token", verb, slot, err)
			}
			wantTokens(t, store, 0)
			if slot, err := ask(); err != nil || slot.OK || slot.Rates.OK || !errors.As(slot.Err(), new(*ratelimit.RefusedError)) {
				t.Errorf("%s: got %+v, %v, want the refusal of the rate", verb, slot, err)
			}
			for _, slot := range append(others, held) {
				if err := store.Release(ctx, slot); err != nil {
					t.Error(err)
				}
			}
			if slot, err := ask(); err != nil || slot.OK {
				t.Errorf("%s: got %+v, %v, want the refusal of the rate", verb, slot, err)
			}
			wantHeld(t, store, 0)
			clock.add(2 * time.Hour)
		}
	})
}

// A holder whose lease is lost while the limit is tried out is not kept from his work, nor
// are those who have his slot by now.
func TestSlotsLostInShadow(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx, tried := t.Context(), calls.In(ratelimit.ModeShadow)
		lost := takeSlot(t, store, tried, "k")
		clock.add(calls.Lease)
		for range calls.Limit {
			takeSlot(t, store, calls, "k")
		}
		if slot, err := store.Renew(ctx, lost); err != nil || !slot.OK || !slot.Shadowed {
			t.Errorf("Renew: got %+v, %v, want it shadowed", slot, err)
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
