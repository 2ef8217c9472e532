// Package gorm tests that a store takes in GORM's transactions.
package gorm

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/stdlib"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/pgratelimit/ratelimit/internal/ormtest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

type message struct {
	ID     int64
	Sender string
}

func newApp(t *testing.T, prepare bool) (*gorm.DB, ormtest.App[*gorm.DB]) {
	t.Helper()
	pool, done := pgtest.Example(ormtest.Schema)
	t.Cleanup(done)
	conns := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { conns.Close() })
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: conns}), &gorm.Config{PrepareStmt: prepare, Logger: logger.Discard})
	if err != nil {
		t.Fatal(err)
	}
	store, err := pgstore.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	return db, ormtest.App[*gorm.DB]{
		Store: store,
		InTx: func(ctx context.Context, level sql.IsolationLevel, do func(*gorm.DB) error) error {
			return db.WithContext(ctx).Transaction(do, &sql.TxOptions{Isolation: level})
		},
		// Within a transaction, Transaction is a savepoint.
		Within: func(_ context.Context, tx *gorm.DB, do func(*gorm.DB) error) error { return tx.Transaction(do) },
		Of:     func(tx *gorm.DB) sqltx.Tx { return tx.Statement.ConnPool },
		Insert: func(_ context.Context, tx *gorm.DB, sender string) error {
			return tx.Create(&message{Sender: sender}).Error
		},
		Count: func(ctx context.Context) (n int64, err error) {
			err = db.WithContext(ctx).Model(&message{}).Count(&n).Error
			return n, err
		},
	}
}

func TestGORM(t *testing.T) {
	for _, prepare := range []bool{false, true} {
		t.Run(fmt.Sprintf("PrepareStmt %v", prepare), func(t *testing.T) {
			_, app := newApp(t, prepare)
			app.Test(t)
		})
	}
}

func TestNoTransaction(t *testing.T) {
	for _, prepare := range []bool{false, true} {
		db, app := newApp(t, prepare)
		app.TestNoTransaction(t, db.Statement.ConnPool)
	}
}
