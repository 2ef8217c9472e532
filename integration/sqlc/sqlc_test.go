// Package sqlc tests that a store takes in the transactions of code that sqlc has generated for
// database/sql, here with lib/pq.
package sqlc

import (
	"context"
	"database/sql"
	"testing"

	_ "github.com/lib/pq"

	"github.com/pgratelimit/ratelimit/integration/sqlc/messages"
	"github.com/pgratelimit/ratelimit/internal/ormtest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func newApp(t *testing.T) (*sql.DB, ormtest.App[messages.DBTX]) {
	t.Helper()
	pool, done := pgtest.Example(ormtest.Schema)
	t.Cleanup(done)
	db, err := sql.Open("postgres", pgtest.URL(t)+"&sslmode=disable&search_path="+pool.Config().ConnConfig.RuntimeParams["search_path"])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	store, err := pgstore.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	return db, ormtest.App[messages.DBTX]{
		Store: store,
		InTx: func(ctx context.Context, level sql.IsolationLevel, do func(messages.DBTX) error) error {
			tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
			if err != nil {
				return err
			}
			defer func() { _ = tx.Rollback() }()
			if err := do(tx); err != nil {
				return err
			}
			return tx.Commit()
		},
		Within: ormtest.Savepoint(func(ctx context.Context, tx messages.DBTX, query string) error {
			_, err := tx.ExecContext(ctx, query)
			return err
		}),
		Of: func(tx messages.DBTX) sqltx.Tx { return tx },
		Insert: func(ctx context.Context, tx messages.DBTX, sender string) error {
			return messages.New(tx).SendMessage(ctx, sender)
		},
		Count: func(ctx context.Context) (int64, error) { return messages.New(db).CountMessages(ctx) },
	}
}

func TestSQLC(t *testing.T) {
	_, app := newApp(t)
	app.Test(t)
}

func TestNoTransaction(t *testing.T) {
	db, app := newApp(t)
	app.TestNoTransaction(t, db)
}
