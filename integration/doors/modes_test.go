package doors

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

// door is a store, with a transaction of its own for the verbs that want one.
type door struct {
	txStore
	permits ratelimit.TxPermits[pgx.Tx]
	begin   func(ctx context.Context) (tx pgx.Tx, end func() error, err error)
}

// modedVerb is a verb that heeds a request's mode. In shadow it is granted, but for those that
// enforce such a limit.
type modedVerb struct {
	name     string
	enforces bool
	call     modedCall
}

type modedCall func(ctx context.Context, d door, tx pgx.Tx, r ratelimit.Request) (ratelimit.Result, error)

type txStore = ratelimit.TxStore[pgx.Tx]

// own is a verb outside of a transaction, and inTx one that is given it.
func own(verb func(txStore, context.Context, ...ratelimit.Request) (ratelimit.Result, error)) modedCall {
	return func(ctx context.Context, d door, _ pgx.Tx, r ratelimit.Request) (ratelimit.Result, error) {
		return verb(d, ctx, r)
	}
}

func inTx(verb func(txStore, context.Context, pgx.Tx, ...ratelimit.Request) (ratelimit.Result, error)) modedCall {
	return func(ctx context.Context, d door, tx pgx.Tx, r ratelimit.Request) (ratelimit.Result, error) {
		return verb(d, ctx, tx, r)
	}
}

var modedVerbs = []modedVerb{
	{"Allow", false, own(txStore.Allow)},
	{"AllowTx", false, inTx(txStore.AllowTx)},
	{"Reserve", false, own(txStore.Reserve)},
	{"ReserveTx", false, inTx(txStore.ReserveTx)},
	{"Wait", false, own(txStore.Wait)},
	{"Check", false, own(txStore.Check)},
	{"CheckTx", false, inTx(txStore.CheckTx)},
	{"CheckReserveTx", false, inTx(txStore.CheckReserveTx)},
	{"AllowFirst", true, own(txStore.AllowFirst)},
	{"AllowFirstTx", true, inTx(txStore.AllowFirstTx)},
	{"Take", false, func(ctx context.Context, d door, _ pgx.Tx, r ratelimit.Request) (ratelimit.Result, error) {
		return taken(d.Take(ctx, r))
	}},
	{"TakeTx", false, func(ctx context.Context, d door, tx pgx.Tx, r ratelimit.Request) (ratelimit.Result, error) {
		return taken(d.TakeTx(ctx, tx, r))
	}},
	{"AllowFunc", false, func(ctx context.Context, d door, _ pgx.Tx, r ratelimit.Request) (ratelimit.Result, error) {
		return d.AllowFunc(ctx, []ratelimit.Request{r}, nothing)
	}},
	{"ReserveFunc", false, func(ctx context.Context, d door, _ pgx.Tx, r ratelimit.Request) (ratelimit.Result, error) {
		return d.ReserveFunc(ctx, []ratelimit.Request{r}, nothing)
	}},
	{"AllowAtMost", true, func(ctx context.Context, d door, _ pgx.Tx, r ratelimit.Request) (ratelimit.Result, error) {
		return d.AllowAtMost(ctx, r)
	}},
	{"AllowAtMostTx", true, func(ctx context.Context, d door, tx pgx.Tx, r ratelimit.Request) (ratelimit.Result, error) {
		return d.AllowAtMostTx(ctx, tx, r)
	}},
}

func nothing(pgx.Tx, ratelimit.Result) error { return nil }

// taken returns a result by the error of a verb that has no other.
func taken(err error) (ratelimit.Result, error) {
	var refused *ratelimit.RefusedError
	if errors.As(err, &refused) {
		return refused.Result, err
	}
	return ratelimit.Result{Status: ratelimit.Status{OK: err == nil}}, err
}

// oneAnHour returns a limit of each kind with a single token.
func oneAnHour() []ratelimit.Limit {
	return []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "bucket", Rate: 1, Period: time.Hour},
		ratelimit.FixedWindow{Name: "fixed", Rate: 1, Period: time.Hour, Start: time.Now()},
		ratelimit.SlidingWindow{Name: "sliding", Rate: 1, Period: time.Hour, Start: time.Now()},
	}
}

// Each verb heeds a mode, of each kind, at each door. In refuse there is nothing to be had, and
// nothing is taken. In shadow what allows, reserves, takes and checks is granted; AllowAtMost and
// AllowFirst enforce it, and of permits it is an error.
func TestModesAtEachDoor(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	calls := ratelimit.InFlight{Name: "calls", Limit: 1, Lease: time.Hour}
	for name, d := range modedDoors(t, db) {
		t.Run(name, func(t *testing.T) {
			for _, limit := range oneAnHour() {
				for _, verb := range modedVerbs {
					r := limit.For(name + " " + verb.name)
					result, err := d.do(t, verb, r.In(ratelimit.ModeRefuse))
					if err != nil && !errors.Is(err, ratelimit.ErrRefused) || result.OK || result.RetryAfter != ratelimit.RefusedFor {
						t.Errorf("%s of %v in refuse: got %v, %v", verb.name, limit, result, err)
					}
					if result, err := d.Allow(t.Context(), r); err != nil || !result.OK {
						t.Errorf("%s of %v has taken in refuse: then %v, %v", verb.name, limit, result, err)
					}
					result, err = d.do(t, verb, r.In(ratelimit.ModeShadow))
					if err != nil || result.OK == verb.enforces {
						t.Errorf("%s of %v in shadow: got %v, %v, want it enforced: %t", verb.name, limit, result, err, verb.enforces)
					}
				}
			}
			for verb, acquire := range map[string]func(tx pgx.Tx, r ratelimit.PermitRequest) (ratelimit.Permit, error){
				"Acquire": func(_ pgx.Tx, r ratelimit.PermitRequest) (ratelimit.Permit, error) {
					return d.permits.Acquire(t.Context(), r)
				},
				"AcquireWait": func(_ pgx.Tx, r ratelimit.PermitRequest) (ratelimit.Permit, error) {
					return d.permits.AcquireWait(t.Context(), r)
				},
				"AcquireTx": func(tx pgx.Tx, r ratelimit.PermitRequest) (ratelimit.Permit, error) {
					return d.permits.AcquireTx(t.Context(), tx, r)
				},
			} {
				d.inTx(t, func(tx pgx.Tx) {
					permit, err := acquire(tx, calls.In(ratelimit.ModeRefuse).For(name))
					if err != nil || permit.OK || permit.NotBefore.Sub(permit.At) != ratelimit.RefusedFor {
						t.Errorf("%s in refuse: got %v, %v", verb, permit, err)
					}
					var fault *ratelimit.FieldError
					if _, err := acquire(tx, calls.In(ratelimit.ModeShadow).For(name)); !errors.As(err, &fault) || fault.Field != "Mode" {
						t.Errorf("%s in shadow: got %v, want ErrInvalid of Mode", verb, err)
					}
				})
			}
		})
	}
}

// Cancel of a call in shadow that took nothing reports false, and of one that took something true.
func TestCancelOfShadow(t *testing.T) {
	t.Parallel()
	for name, d := range modedDoors(t, pgtest.New(t)) {
		t.Run(name, func(t *testing.T) {
			for _, limit := range oneAnHour() {
				d.inTx(t, func(tx pgx.Tx) {
					ctx, r := t.Context(), limit.For(name).In(ratelimit.ModeShadow)
					took, err := d.Allow(ctx, r)
					nothing, err2 := d.Allow(ctx, r)
					if err != nil || err2 != nil || took.Taken != 1 || nothing.Taken != 0 || !nothing.OK {
						t.Fatalf("got %v, %v and %v, %v", took, err, nothing, err2)
					}
					for range 2 { // nor once more
						if given, err := d.Cancel(ctx, nothing.Receipt); given || err != nil {
							t.Errorf("Cancel of %v: got %t, %v, want false", limit, given, err)
						}
						if given, err := d.CancelTx(ctx, tx, nothing.Receipt); given || err != nil {
							t.Errorf("CancelTx of %v: got %t, %v, want false", limit, given, err)
						}
					}
					if given, err := d.Cancel(ctx, took.Receipt); !given || err != nil {
						t.Errorf("Cancel of %v that took: got %t, %v, want true", limit, given, err)
					}
				})
			}
		})
	}
}

// modedDoors returns the stores, with transactions of pgx, of database/sql and of memory.
func modedDoors(t *testing.T, db *pgtest.DB) map[string]door {
	t.Helper()
	doors := map[string]door{}
	ofPgx := func(tx pgx.Tx, err error) (pgx.Tx, func() error, error) {
		return tx, func() error { return tx.Rollback(context.Background()) }, err
	}
	for name, escrow := range map[string]time.Duration{"pgstore": 0, "pgstore, with escrow": time.Second} {
		store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Escrow: escrow})
		must(t, err)
		t.Cleanup(store.Close)
		doors[name] = door{store, store.Permits(), func(ctx context.Context) (pgx.Tx, func() error, error) {
			return ofPgx(db.Pool.Begin(ctx))
		}}
		for _, d := range drivers {
			pool := d.open(t, db)
			doors[fmt.Sprintf("%s, by database/sql and %s", name, d.name)] = door{store, store.Permits(), func(ctx context.Context) (pgx.Tx, func() error, error) {
				tx, err := pool.BeginTx(ctx, &sql.TxOptions{})
				return sqltx.Of(tx), tx.Rollback, err
			}}
		}
	}
	memory := memstore.New(nil)
	doors["memstore"] = door{memory, memory.Permits(), func(ctx context.Context) (pgx.Tx, func() error, error) {
		return ofPgx(memory.Begin(ctx))
	}}
	return doors
}

// inTx runs a function in a transaction of d, which is rolled back.
func (d door) inTx(t *testing.T, do func(tx pgx.Tx)) {
	t.Helper()
	tx, end, err := d.begin(t.Context())
	must(t, err)
	do(tx)
	must(t, end())
}

// do calls a verb, which the context ends if it waits.
func (d door) do(t *testing.T, verb modedVerb, r ratelimit.Request) (result ratelimit.Result, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	d.inTx(t, func(tx pgx.Tx) { result, err = verb.call(ctx, d, tx, r) })
	return result, err
}
