package memstore_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// Each call is told once, as pgstore tells it.
func TestObserve(t *testing.T) {
	ctx := t.Context()
	var heard []string
	store := memstore.NewWithConfig(memstore.Config{Observe: func(_ context.Context, e ratelimit.Event) {
		heard = append(heard, fmt.Sprintf("%s %s %s %s", e.Verb, e.Form, e.Outcome, e.Policy()))
	}})
	limit := ratelimit.TokenBucket{Name: "l", Rate: 2, Period: time.Hour}
	requests := []ratelimit.Request{limit.For("a")}
	jobs := ratelimit.InFlight{Name: "s", Limit: 1}
	store.Allow(ctx, requests...)
	store.AllowFunc(ctx, requests, func(pgx.Tx, ratelimit.Result) error { return errors.New("no") })
	store.AllowFunc(ctx, requests, func(pgx.Tx, ratelimit.Result) error { return nil })
	store.Take(ctx, requests...)
	store.AllowFunc(ctx, requests, func(pgx.Tx, ratelimit.Result) error { return nil })
	result, _ := store.Reserve(ctx, limit.For("b"))
	store.Settle(ctx, result.Receipt, 0.5)
	store.Cancel(ctx, result.Receipt)
	store.Pause(ctx, limit, "b", time.Minute)
	store.AllowAtMost(ctx, limit.For("b"))
	store.Resume(ctx, limit, "b")
	store.Reset(ctx, limit, "b")
	store.Credit(ctx, limit.For("b"))
	store.Check(ctx, limit.For("b"))
	store.AllowFirst(ctx, limit.ForN("b", 3))
	tx, err := store.Begin(ctx)
	must(t, err)
	store.AllowTx(ctx, tx, limit.For("c"))
	tx.Rollback(ctx)
	store.AllowTx(ctx, tx, limit.For("c"))
	permit, _ := store.Permits().AcquireWait(ctx, jobs.For("k"))
	store.Permits().Acquire(ctx, jobs.For("k"))
	permit, _ = store.Permits().Renew(ctx, permit)
	store.Permits().Release(ctx, permit)
	store.Permits().Release(ctx, permit)
	want := []string{
		"allow memory granted l", "allow runner rolled_back l", "allow runner granted l", "allow memory refused l",
		"allow runner refused l", "reserve memory granted l", "settle memory granted l", "cancel memory refused l",
		"pause memory granted l", "allow_at_most memory paused l", "resume memory granted l", "reset memory granted l",
		"credit memory granted l", "check memory granted l", "allow_first memory too_large l",
		"allow tx granted l", "allow tx failed l",
		"acquire memory granted s", "acquire memory refused s", "renew memory granted s", "release memory granted s", "release memory lost s",
	}
	if !slices.Equal(heard, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(heard, "\n"), strings.Join(want, "\n"))
	}
}
