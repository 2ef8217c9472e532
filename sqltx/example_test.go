package sqltx_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

// Message and limit are spent together, in a transaction of database/sql.
func ExampleOf() {
	pool, done := pgtest.Example("CREATE TABLE messages (sender text)")
	defer done()
	db := stdlib.OpenDBFromPool(pool) // as sql.Open("pgx", url) would; lib/pq does as well
	defer db.Close()
	ctx := context.Background()

	sendMessage := ratelimit.TokenBucket{Name: "send_message", Rate: 2, Period: time.Hour}
	store, err := pgstore.New(nil, nil) // no pool: for the verbs that end in Tx
	if err != nil {
		log.Fatal(err)
	}

	send := func() error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		result, err := store.AllowTx(ctx, sqltx.Of(tx), sendMessage.For("alice"))
		if err != nil {
			return err // not a yes
		}
		if !result.OK {
			return result.Err()
		}
		if _, err := tx.ExecContext(ctx, "INSERT INTO messages VALUES ('alice')"); err != nil {
			return err
		}
		return tx.Commit()
	}
	for range 3 {
		if err := send(); err != nil {
			fmt.Println("refused")
			continue
		}
		fmt.Println("sent")
	}
	// Output:
	// sent
	// sent
	// refused
}
