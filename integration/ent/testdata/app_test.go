// Package app tests that a store takes in the transactions of the client in package ent, which
// ent has generated.
package app

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgratelimit/ratelimit/integration/ent/app/ent"
	"github.com/pgratelimit/ratelimit/internal/ormtest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func newApp(t *testing.T) (*ent.Client, ormtest.App[*ent.Tx]) {
	t.Helper()
	pool, done := pgtest.Example(ormtest.Schema)
	t.Cleanup(done)
	client := ent.NewClient(ent.Driver(entsql.OpenDB(dialect.Postgres, stdlib.OpenDBFromPool(pool))))
	t.Cleanup(func() { client.Close() })
	store, err := pgstore.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	return client, ormtest.App[*ent.Tx]{
		Store: store,
		InTx: func(ctx context.Context, level sql.IsolationLevel, do func(*ent.Tx) error) error {
			tx, err := client.BeginTx(ctx, &sql.TxOptions{Isolation: level})
			if err != nil {
				return err
			}
			if err := do(tx); err != nil {
				return errors.Join(err, tx.Rollback())
			}
			return tx.Commit()
		},
		Within: ormtest.Savepoint(func(ctx context.Context, tx *ent.Tx, query string) error {
			_, err := tx.ExecContext(ctx, query)
			return err
		}),
		Of: func(tx *ent.Tx) sqltx.Tx { return tx },
		Insert: func(ctx context.Context, tx *ent.Tx, sender string) error {
			return tx.Message.Create().SetSender(sender).Exec(ctx)
		},
		Count: func(ctx context.Context) (int64, error) {
			n, err := client.Message.Query().Count(ctx)
			return int64(n), err
		},
	}
}

func TestEnt(t *testing.T) {
	_, app := newApp(t)
	app.Test(t)
}

func TestNoTransaction(t *testing.T) {
	client, app := newApp(t)
	app.TestNoTransaction(t, client)
}
