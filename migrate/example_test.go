package migrate_test

import (
	"context"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrate"
)

// Teams that own their migrations print the SQL (ratelimit migrate print). Up leaves their
// table alone, and Status says what it has.
func ExampleStatus() {
	ctx := context.Background()
	pool, done := pgtest.Example("") // made from migrations.UpSQL
	defer done()

	all, err := migrate.Status(ctx, pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range all {
		fmt.Println(m.Version, m.Applied, m.Untracked)
	}
	applied, err := migrate.Up(ctx, pool, nil)
	fmt.Println(applied, err)
	// Output:
	// 1 true true
	// 2 true true
	// 3 true true
	// 4 true true
	// [] <nil>
}

func Example() {
	ctx := context.Background()

	// A server for this example. A program has its own.
	server, err := throwaway.Start(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	pool, err := pgxpool.New(ctx, server.URL)
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	defer pool.Exec(ctx, "DROP SCHEMA IF EXISTS example_migrate CASCADE")

	// Most programs pass nil in place of the configuration.
	cfg := &migrate.Config{Schema: "example_migrate"}
	for start := range 2 {
		applied, err := migrate.Up(ctx, pool, cfg)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("start %d: %d applied\n", start+1, len(applied))
	}

	all, err := migrate.Status(ctx, pool, cfg)
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range all {
		fmt.Println(m.Version, m.Name, m.Applied)
	}
	// Output:
	// start 1: 4 applied
	// start 2: 0 applied
	// 1 00001_rate_limits.sql true
	// 2 00002_pauses.sql true
	// 3 00003_sliding_windows.sql true
	// 4 00004_escrow.sql true
}
