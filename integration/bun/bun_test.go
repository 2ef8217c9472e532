// Package bun tests that a store takes in Bun's transactions.
package bun

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/pgratelimit/ratelimit/internal/ormtest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

type message struct {
	bun.BaseModel `bun:"table:messages"`

	ID     int64 `bun:",pk,autoincrement"`
	Sender string
}

func newApp(t *testing.T) (*bun.DB, ormtest.App[bun.Tx]) {
	t.Helper()
	pool, done := pgtest.Example(ormtest.Schema)
	t.Cleanup(done)
	db := bun.NewDB(stdlib.OpenDBFromPool(pool), pgdialect.New())
	t.Cleanup(func() { db.Close() })
	store, err := pgstore.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	alone := func(do func(bun.Tx) error) func(context.Context, bun.Tx) error {
		return func(_ context.Context, tx bun.Tx) error { return do(tx) }
	}
	return db, ormtest.App[bun.Tx]{
		Store: store,
		InTx: func(ctx context.Context, level sql.IsolationLevel, do func(bun.Tx) error) error {
			return db.RunInTx(ctx, &sql.TxOptions{Isolation: level}, alone(do))
		},
		// Within a transaction, RunInTx is a savepoint.
		Within: func(ctx context.Context, tx bun.Tx, do func(bun.Tx) error) error {
			return tx.RunInTx(ctx, nil, alone(do))
		},
		Of: func(tx bun.Tx) sqltx.Tx { return tx.Tx },
		Insert: func(ctx context.Context, tx bun.Tx, sender string) error {
			_, err := tx.NewInsert().Model(&message{Sender: sender}).Exec(ctx)
			return err
		},
		Count: func(ctx context.Context) (int64, error) {
			n, err := db.NewSelect().Model((*message)(nil)).Count(ctx)
			return int64(n), err
		},
	}
}

func TestBun(t *testing.T) {
	_, app := newApp(t)
	app.Test(t)
}

func TestNoTransaction(t *testing.T) {
	db, app := newApp(t)
	app.TestNoTransaction(t, db)
}
