package pgtest

import (
	"context"
	"fmt"
	"log"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Example returns a pool such as programs have: its connections find the library's table by
// their search_path. It is on the server of the tests, in a schema that done drops. SQL
// that is given runs in that schema.
func Example(sql string) (pool *pgxpool.Pool, done func()) {
	tb := &exampleTB{}
	db := New(tb)
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		log.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["search_path"] = db.Schema
	pool, err = pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := pool.Exec(context.Background(), sql); err != nil {
		log.Fatal(err)
	}
	return pool, func() {
		pool.Close()
		tb.end()
	}
}

// exampleTB is as much of a testing.TB as this package needs: examples are given none.
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
