package pgstore_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Histories of calls in modes are in TestDifferential. Here is what those do not have: the
// runner, shards and memory.

var (
	tried  = ratelimit.TokenBucket{Name: "tried", Rate: 3, Period: time.Hour}
	bound  = ratelimit.TokenBucket{Name: "bound", Rate: 5, Period: time.Hour}
	spread = ratelimit.TokenBucket{Name: "spread", Rate: 8, Period: time.Hour, Shards: 4}
)

// modeStores are the ways of a store.
func modeStores(t *testing.T, test func(t *testing.T, db *pgtest.DB, store *pgstore.Store)) {
	for name, config := range map[string]pgstore.Config{
		"plain": {}, "portable": {Portable: true}, "escrow": {Escrow: 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			store := newStore(t, db, func(c *pgstore.Config) { c.Portable, c.Escrow = config.Portable, config.Escrow })
			t.Cleanup(store.Close)
			test(t, db, store)
		})
	}
}

// The runner runs the function whatever limits say that are only tried out, once for each
// call, takes from those that have enough, and refuses by the others.
func TestShadowInRunner(t *testing.T) {
	t.Parallel()
	modeStores(t, func(t *testing.T, _ *pgtest.DB, store *pgstore.Store) {
		ctx := t.Context()
		run := func(requests ...ratelimit.Request) (result ratelimit.Result, ran int, err error) {
			result, err = store.AllowFunc(ctx, requests, func(tx pgx.Tx, told ratelimit.Result) error {
				if ran++; !told.OK || told.RetryAfter != 0 {
					t.Errorf("the function is told %v", told)
				}
				return tx.QueryRow(ctx, "SELECT 1").Scan(new(int))
			})
			return result, ran, err
		}
		shadowed := 0
		for i := range 5 {
			result, ran, err := run(tried.For("a").In(ratelimit.ModeShadow), bound.For("a"), spread.ForN("a", 2).In(ratelimit.ModeShadow))
			if err != nil || ran != 1 || !result.OK || len(result.Each()) != 3 {
				t.Fatalf("call %d: got %v, run %d times, %v", i, result, ran, err)
			}
			if want := i >= 3; result.Each()[0].Shadowed != want || result.Each()[0].OK == want {
				t.Errorf("call %d: got %v, want shadowed %t", i, result.Each()[0], want)
			}
			if want := i >= 4; result.Each()[2].Shadowed != want {
				t.Errorf("call %d: got %v, want shadowed %t", i, result.Each()[2], want)
			}
			if result.Shadowed {
				shadowed++
			}
		}
		if shadowed != 2 {
			t.Errorf("%d were told that they would have been refused, want 2", shadowed)
		}
		result, ran, err := run(tried.For("a").In(ratelimit.ModeShadow), bound.For("a"))
		if !errors.Is(err, ratelimit.ErrRefused) || ran != 0 || result.OK || ratelimit.NameOf(result.Request.Limit) != "bound" {
			t.Errorf("got %v, run %d times, %v, want that bound has refused", result, ran, err)
		}
		result, ran, err = run(tried.For("a").In(ratelimit.ModeShadow))
		if err != nil || ran != 1 || !result.OK || !result.Shadowed || result.Taken != 0 || result.Receipt == nil {
			t.Errorf("alone: got %v, run %d times, %v", result, ran, err)
		}
		if settled, err := store.Settle(ctx, result.Receipt, 2); err != nil || settled.Value < 0 {
			t.Errorf("settled: got %v, %v, want that nothing was taken", settled, err)
		}
		if result, ran, err = run(bound.For("b"), tried.For("b").In(ratelimit.ModeRefuse)); !errors.Is(err, ratelimit.ErrRefused) || ran != 0 || result.RetryAfter != ratelimit.RefusedFor {
			t.Errorf("refused: got %v, run %d times, %v", result, ran, err)
		}
		if result, err := store.Allow(ctx, bound.For("b"), tried.For("b").In(ratelimit.ModeRefuse)); err != nil || result.OK {
			t.Errorf("refused on its own: got %v, %v", result, err)
		}
		if left, err := store.Check(ctx, bound.ForN("b", 0)); err != nil || left.Remaining != 5 {
			t.Errorf("%d of the other limit are left, error %v, want all 5", left.Remaining, err)
		}
		mine := errors.New("mine")
		_, err = store.AllowFunc(ctx, []ratelimit.Request{tried.For("a").In(ratelimit.ModeShadow)}, func(pgx.Tx, ratelimit.Result) error { return mine })
		if !errors.Is(err, mine) {
			t.Errorf("got %v, want the function's error", err)
		}
		_, err = store.AllowFunc(ctx, []ratelimit.Request{tried.For("a").In(ratelimit.ModeShadow)}, func(pgx.Tx, ratelimit.Result) error {
			return (ratelimit.Result{}).Err()
		})
		if !errors.Is(err, ratelimit.ErrRefused) {
			t.Errorf("got %v, want the function's refusal", err)
		}
	})
}

// A limit in shadow puts no work off.
func TestShadowPutsNothingOff(t *testing.T) {
	t.Parallel()
	modeStores(t, func(t *testing.T, _ *pgtest.DB, store *pgstore.Store) {
		ctx := within(t, 30*time.Second)
		ahead := ratelimit.TokenBucket{Name: "ahead", Rate: 1, Period: time.Hour, MaxReserved: 2}
		for i := range 5 {
			begun := time.Now()
			result, err := store.Wait(ctx, ahead.For("a").In(ratelimit.ModeShadow))
			if took := time.Since(begun); err != nil || !result.OK || took > time.Minute {
				t.Fatalf("call %d: got %v after %v, %v", i, result, took, err)
			}
			if result.Shadowed != (i >= 1) || result.Each()[0].OK != (i < 3) {
				t.Errorf("call %d: got %v, %v", i, result, result.Each())
			}
		}
		result, err := store.Allow(ctx, ahead.ForN("a", 50).In(ratelimit.ModeShadow), bound.For("z"))
		if err != nil || !result.OK || !result.Each()[0].Shadowed || result.Each()[0].RetryAfter != ratelimit.MaxSpan || !result.Each()[1].OK {
			t.Errorf("what can never be granted: got %v, %v, %v", result, result.Each(), err)
		}
		statuses, err := store.CheckEach(ctx, ahead.For("a").In(ratelimit.ModeShadow), ahead.For("a"), ahead.For("a").In(ratelimit.ModeRefuse), ahead.ForN("a", 50).In(ratelimit.ModeShadow))
		if err != nil || !statuses[0].OK || !statuses[0].Shadowed || statuses[1].OK || statuses[2].OK || !statuses[3].OK || !statuses[3].Shadowed {
			t.Errorf("got %v, %v", statuses, err)
		}
	})
}
