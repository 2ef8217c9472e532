package erase_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/erase"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// A person is forgotten: keys go from all tables of the library, in one transaction.
func ExampleKeys() {
	ctx := context.Background()
	pool, done := pgtest.Example("")
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	limit := ratelimit.TokenBucket{Name: "messages", Rate: 2, Period: time.Minute}
	if err := store.Take(ctx, limit.For("ann@example.com")); err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		erased, err := erase.Keys(ctx, tx, "", "ann@example.com")
		fmt.Println(erased.Rows)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// 1
}
