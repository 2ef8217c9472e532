package pgstore_test

import (
	"context"
	"fmt"
	"log"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// exampleDatabase is a pool such as programs have: its connections find the
// library's table, and a table of messages, by their search_path. It is on the
// server of the tests, in a schema that done drops.
func exampleDatabase() (pool *pgxpool.Pool, done func()) {
	tb := &exampleTB{}
	db := pgtest.New(tb)
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		log.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["search_path"] = db.Schema
	pool, err = pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		log.Fatal(err)
	}
	const tables = `CREATE TABLE messages (sender text, body text, send_at timestamptz DEFAULT now())`
	if _, err := pool.Exec(context.Background(), tables); err != nil {
		log.Fatal(err)
	}
	return pool, func() {
		pool.Close()
		tb.end()
	}
}

// exampleTB is as much of a testing.TB as package pgtest needs: examples are
// given none.
type exampleTB struct {
	testing.TB
	cleanups []func()
}

func (tb *exampleTB) Helper()                           {}
func (tb *exampleTB) Cleanup(f func())                  { tb.cleanups = append(tb.cleanups, f) }
func (tb *exampleTB) Fatal(args ...any)                 { log.Fatal(args...) }
func (tb *exampleTB) Fatalf(format string, args ...any) { log.Fatalf(format, args...) }

// Errorf prints to where an example's output is compared, so that it fails.
func (tb *exampleTB) Errorf(format string, args ...any) { fmt.Printf(format+"\n", args...) }

func (tb *exampleTB) end() {
	for i := len(tb.cleanups) - 1; i >= 0; i-- {
		tb.cleanups[i]()
	}
}
