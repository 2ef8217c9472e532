package pgstore_test

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// exampleDatabase is a pool on a database with the library's table, and a table of
// messages and one of customers.
func exampleDatabase() (pool *pgxpool.Pool, done func()) {
	return pgtest.Example(`CREATE TABLE messages (sender text, body text, send_at timestamptz DEFAULT now()); CREATE TABLE customers (name text, plan text)`)
}
