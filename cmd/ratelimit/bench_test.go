package main

import (
	"io"
	"testing"

	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// million is that, or with -short enough to see that a benchmark runs.
func million() int {
	if testing.Short() {
		return 20_000
	}
	return 1_000_000
}

// A page of the keys with a prefix, of a million that are not full: the whole program.
func BenchmarkLsOfAMillion(b *testing.B) {
	db := pgtest.New(b, pgtest.With(migrations.Catalog))
	c, err := catalog.New(db.Pool, &catalog.Config{Schema: db.Schema, Logger: silent})
	if err == nil {
		err = c.Publish(b.Context(), api)
	}
	if err == nil {
		_, err = db.Pool.Exec(b.Context(), `INSERT INTO `+db.Schema+`.rate_limits
SELECT 'api', 'tenant ' || i % 1000 || '/' || i, 0, i % 20, clock_timestamp() FROM generate_series(1, $1) AS i`, million())
	}
	if err != nil {
		b.Fatal(err)
	}
	for name, args := range map[string][]string{
		"limits":   {"ls"},
		"a prefix": {"ls", "api", "--prefix", "tenant 777/"},
		"short":    {"ls", "api", "--prefix", "tenant 777/", "--short"},
		"a key":    {"show", "api", "tenant 777/777"},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if status := run(b.Context(), append(args, "--database-url", db.URL, "--schema", db.Schema), nil, io.Discard, io.Discard); status != exitOK {
					b.Fatalf("exit status %d", status)
				}
			}
		})
	}
}
