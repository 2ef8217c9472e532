package catalog_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var SendMessage = ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: time.Minute, Capacity: 20}

// A customer's rate is raised in psql, and holds without a deployment.
func Example() {
	ctx := context.Background()
	pool, done := pgtest.Example(migrations.Catalog.UpSQL())
	defer done()

	store, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	limits, err := catalog.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := limits.Publish(ctx, SendMessage); err != nil {
		log.Fatal(err)
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	go limits.Run(running) // reads what has changed, every 5 seconds

	_, err = pool.Exec(ctx, `INSERT INTO rate_limit_definitions (name, key, rate, capacity, note)
		VALUES ('send_message', 'alice', 100, 200, 'moving house')`)
	if err != nil {
		log.Fatal(err)
	}
	if err := limits.Refresh(ctx); err != nil { // or within 5 seconds
		log.Fatal(err)
	}
	for _, user := range []string{"alice", "bob"} {
		result, err := store.Allow(ctx, limits.For(SendMessage, user))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(user, result)
	}
	// Output:
	// alice 1 of "send_message": ok, 199 of 200 left
	// bob 1 of "send_message": ok, 19 of 20 left
}

// Set and Unset are for a page of administrators.
func ExampleCatalog_Set() {
	ctx := context.Background()
	limits, err := catalog.NewInMemory(nil) // in a test; catalog.New in a program
	if err != nil {
		log.Fatal(err)
	}
	if err := limits.Publish(ctx, SendMessage); err != nil {
		log.Fatal(err)
	}
	weekend := catalog.Override{Rate: 100, Until: time.Now().Add(48 * time.Hour), Note: "moving house"}
	if _, err := limits.Set(ctx, "send_message", "alice", weekend); err != nil {
		log.Fatal(err)
	}
	if _, err := limits.Set(ctx, "send_message", catalog.AllKeys, catalog.Override{MaxReserved: 30}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(limits.For(SendMessage, "alice").Limit)
	fmt.Println(limits.For(SendMessage, "bob").Limit)
	_, err = limits.Set(ctx, "send_message", "bob", catalog.Override{Rate: -1})
	fmt.Println(err)
	// Output:
	// token bucket "send_message": 100 per 1m, capacity 20, max reserved 30
	// token bucket "send_message": 10 per 1m, capacity 20, max reserved 30
	// ratelimit: limit "send_message": Rate -1: must not be negative
}

// Prune needs no list of limits: a cron goes by all that the catalog knows.
func ExampleCatalog_Prune() {
	ctx := context.Background()
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	store := memstore.New(func() time.Time { return now })
	limits, err := catalog.NewInMemory(nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := limits.Publish(ctx, SendMessage); err != nil {
		log.Fatal(err)
	}
	if _, err := limits.Set(ctx, "send_message", "alice", catalog.Override{Rate: 100, Capacity: 1000}); err != nil {
		log.Fatal(err)
	}
	if err := store.Take(ctx, limits.ForN(SendMessage, "alice", 500)); err != nil {
		log.Fatal(err)
	}
	for range 2 {
		deleted, err := limits.Prune(ctx, store, store.Permits())
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(deleted, "deleted")
		now = now.Add(24 * time.Hour)
	}
	// Output:
	// 0 deleted
	// 1 deleted
}

// Who changed what, and when.
func ExampleCatalog_History() {
	ctx := context.Background()
	limits, err := catalog.NewInMemory(nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := limits.Publish(ctx, SendMessage); err != nil {
		log.Fatal(err)
	}
	if _, err := limits.Set(ctx, "send_message", "alice", catalog.Override{Rate: 100, Note: "moving house"}); err != nil {
		log.Fatal(err)
	}
	changes, err := limits.History(ctx, "send_message", 1)
	if err != nil {
		log.Fatal(err)
	}
	for _, c := range changes {
		fmt.Fprintln(os.Stdout, c.Key, string(c.Became))
	}
	// Output: alice {"enabled":true,"note":"moving house","rate":100}
}
