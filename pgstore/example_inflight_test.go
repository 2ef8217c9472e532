package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Calls are under way two at a time.
var Calls = ratelimit.InFlight{Name: "calls", Limit: 2, Lease: 30 * time.Second}

// Work that takes long is held, and its permit is released by the transaction that finishes it.
func ExamplePermits_Hold() {
	ctx := context.Background()
	pool, done := exampleDatabase() // a *pgxpool.Pool
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	err = store.Permits().Hold(ctx, Calls.For("acme"), func(ctx context.Context, permit ratelimit.Permit) error {
		held, err := store.Permits().Held(ctx, Calls, "acme")
		fmt.Println("held meanwhile:", len(held), err)
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `INSERT INTO messages (sender, body) VALUES ('acme', 'done')`); err != nil {
				return err
			}
			return store.Permits().ReleaseTx(ctx, tx, permit)
		})
	})
	held, _ := store.Permits().Held(ctx, Calls, "acme")
	fmt.Println("held afterwards:", len(held), err)
	// Output:
	// held meanwhile: 1 <nil>
	// held afterwards: 0 <nil>
}

// Two at once, and three an hour: all or nothing.
func ExamplePermits_Acquire() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	for range 5 {
		permit, err := store.Permits().Acquire(ctx, Calls.For("acme"), SignUp.For("acme"))
		var full *ratelimit.FullError
		switch {
		case err != nil:
			log.Fatal(err)
		case errors.As(permit.Err(), &full):
			fmt.Println("all permits are held")
			held, _ := store.Permits().Held(ctx, Calls, "acme")
			_ = store.Permits().Release(ctx, held[0])
		case !permit.OK:
			fmt.Println("too often, retry after", permit.Rates.RetryAfter.Round(time.Minute))
		default:
			fmt.Println("at work,", permit.Rates.Remaining, "of the rate left")
		}
	}
	// Output:
	// at work, 2 of the rate left
	// at work, 1 of the rate left
	// all permits are held
	// at work, 0 of the rate left
	// all permits are held
}

// Work holds as many permits as it weighs, and those of other limits with them: all or nothing.
func ExamplePermits_Acquire_weights() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	gpus := ratelimit.InFlight{Name: "gpus", Limit: 8}
	tenant := ratelimit.InFlight{Name: "tenant_jobs", Limit: 2}
	for range 3 {
		permit, err := store.Permits().Acquire(ctx, tenant.For("acme").And(gpus.ForN("", 3)))
		if err != nil {
			log.Fatal(err)
		}
		if !permit.OK {
			fmt.Println(permit.Err())
			continue
		}
		for _, part := range permit.Parts() {
			fmt.Println(part.N, "of", part.InFlight.Name)
		}
	}
	_, err = store.Permits().Acquire(ctx, gpus.ForN("", 9))
	fmt.Println(errors.Is(err, ratelimit.ErrExceedsCapacity), err)
	// Output:
	// 1 of tenant_jobs
	// 3 of gpus
	// 1 of tenant_jobs
	// 3 of gpus
	// ratelimit: limit "tenant_jobs": all 2 permits are held
	// true ratelimit: limit "gpus": 9 permits can never be acquired at once, at most 8 can
}
