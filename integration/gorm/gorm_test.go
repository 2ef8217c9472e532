// Package gorm tests that a store takes in GORM's transactions.
package gorm

import (
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

type message struct {
	ID     int64
	Sender string
}

var sendMessage = ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: 24 * time.Hour}

// app is a program that sends messages.
type app struct {
	db    *gorm.DB
	store *pgstore.Store
}

func newApp(t *testing.T, prepare bool) *app {
	t.Helper()
	pool, done := pgtest.Example("CREATE TABLE messages (id bigserial PRIMARY KEY, sender text NOT NULL)")
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
	return &app{db, store}
}

// send sends a message, and takes for it in the same transaction.
func (a *app) send(t *testing.T, tx *gorm.DB) error {
	if err := tx.Create(&message{Sender: "alice"}).Error; err != nil {
		return err
	}
	return a.store.TakeTx(t.Context(), sqltx.Of(tx.Statement.ConnPool), sendMessage.For("alice"))
}

// want fails unless there are so many messages and as many tokens were spent.
func (a *app) want(t *testing.T, messages int64) {
	t.Helper()
	var got int64
	if err := a.db.Model(&message{}).Count(&got).Error; err != nil {
		t.Fatal(err)
	}
	result, err := a.store.Check(t.Context(), sendMessage.For("alice"))
	if err != nil {
		t.Fatal(err)
	}
	if spent := 10 - result.Remaining; got != messages || spent != messages {
		t.Errorf("%d messages and %d tokens spent, want %d of each", got, spent, messages)
	}
}

var errChanged = errors.New("changed my mind")

func TestGORM(t *testing.T) {
	for _, prepare := range []bool{false, true} {
		t.Run(fmt.Sprintf("PrepareStmt %v", prepare), func(t *testing.T) {
			a := newApp(t, prepare)
			db := a.db.WithContext(t.Context())

			for range 2 { // the second time, statements are prepared
				if err := db.Transaction(func(tx *gorm.DB) error { return a.send(t, tx) }); err != nil {
					t.Fatal(err)
				}
			}
			a.want(t, 2)

			err := db.Transaction(func(tx *gorm.DB) error { return errors.Join(a.send(t, tx), errChanged) })
			if !errors.Is(err, errChanged) {
				t.Error(err)
			}
			a.want(t, 2)

			err = db.Transaction(func(tx *gorm.DB) error {
				if err := a.send(t, tx); err != nil {
					return err
				}
				// Within a transaction, Transaction is a savepoint.
				if err := tx.Transaction(func(tx *gorm.DB) error { return errors.Join(a.send(t, tx), errChanged) }); !errors.Is(err, errChanged) {
					return err
				}
				return a.send(t, tx)
			}, &sql.TxOptions{Isolation: sql.LevelSerializable})
			if err != nil {
				t.Fatal(err)
			}
			a.want(t, 4)

			for range 6 {
				if err := db.Transaction(func(tx *gorm.DB) error { return a.send(t, tx) }); err != nil {
					t.Fatal(err)
				}
			}
			err = db.Transaction(func(tx *gorm.DB) error { return a.send(t, tx) })
			if !errors.Is(err, ratelimit.ErrRefused) {
				t.Errorf("got %v, want a refusal", err)
			}
			a.want(t, 10)

			// Several limits, in a transaction that goes on after a refusal.
			other := ratelimit.FixedWindow{Name: "other", Rate: 1, Period: 24 * time.Hour}
			err = db.Transaction(func(tx *gorm.DB) error {
				result, err := a.store.AllowTx(t.Context(), sqltx.Of(tx.Statement.ConnPool), other.For("alice"), sendMessage.For("alice"))
				if err != nil || result.OK {
					return fmt.Errorf("%v, %w, want a refusal", result, err)
				}
				return tx.Delete(&message{}, "true").Error
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// Outside of a transaction nothing is taken.
func TestNoTransaction(t *testing.T) {
	for _, prepare := range []bool{false, true} {
		a := newApp(t, prepare)
		if err := a.store.TakeTx(t.Context(), sqltx.Of(a.db.Statement.ConnPool), sendMessage.For("alice")); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("PrepareStmt %v: got %v, want %v", prepare, err, ratelimit.ErrInvalid)
		}
		a.want(t, 0)
	}
}
