// Package bun tests that a store takes in Bun's transactions.
package bun

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/pgratelimit/ratelimit"
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

var sendMessage = ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: 24 * time.Hour}

// app is a program that sends messages.
type app struct {
	db    *bun.DB
	store *pgstore.Store
}

func newApp(t *testing.T) *app {
	t.Helper()
	pool, done := pgtest.Example("CREATE TABLE messages (id bigserial PRIMARY KEY, sender text NOT NULL)")
	t.Cleanup(done)
	db := bun.NewDB(stdlib.OpenDBFromPool(pool), pgdialect.New())
	t.Cleanup(func() { db.Close() })
	store, err := pgstore.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	return &app{db, store}
}

// send sends a message, and takes for it in the same transaction.
func (a *app) send(ctx context.Context, tx bun.Tx) error {
	if _, err := tx.NewInsert().Model(&message{Sender: "alice"}).Exec(ctx); err != nil {
		return err
	}
	return a.store.TakeTx(ctx, sqltx.Of(tx.Tx), sendMessage.For("alice"))
}

// want fails unless there are so many messages and as many tokens were spent.
func (a *app) want(t *testing.T, messages int64) {
	t.Helper()
	got, err := a.db.NewSelect().Model((*message)(nil)).Count(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	result, err := a.store.Check(t.Context(), sendMessage.For("alice"))
	if err != nil {
		t.Fatal(err)
	}
	if spent := 10 - result.Remaining; int64(got) != messages || spent != messages {
		t.Errorf("%d messages and %d tokens spent, want %d of each", got, spent, messages)
	}
}

var errChanged = errors.New("changed my mind")

func TestBun(t *testing.T) {
	a, ctx := newApp(t), t.Context()
	sendAnd := func(err error) func(context.Context, bun.Tx) error {
		return func(ctx context.Context, tx bun.Tx) error { return errors.Join(a.send(ctx, tx), err) }
	}
	for range 2 {
		if err := a.db.RunInTx(ctx, nil, sendAnd(nil)); err != nil {
			t.Fatal(err)
		}
	}
	a.want(t, 2)

	if err := a.db.RunInTx(ctx, nil, sendAnd(errChanged)); !errors.Is(err, errChanged) {
		t.Error(err)
	}
	a.want(t, 2)

	err := a.db.RunInTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable}, func(ctx context.Context, tx bun.Tx) error {
		if err := a.send(ctx, tx); err != nil {
			return err
		}
		// Within a transaction, RunInTx is a savepoint.
		if err := tx.RunInTx(ctx, nil, sendAnd(errChanged)); !errors.Is(err, errChanged) {
			return err
		}
		return a.send(ctx, tx)
	})
	if err != nil {
		t.Fatal(err)
	}
	a.want(t, 4)

	for range 6 {
		if err := a.db.RunInTx(ctx, nil, sendAnd(nil)); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.db.RunInTx(ctx, nil, sendAnd(nil)); !errors.Is(err, ratelimit.ErrRefused) {
		t.Errorf("got %v, want a refusal", err)
	}
	a.want(t, 10)

	// Several limits, in a transaction that goes on after a refusal.
	other := ratelimit.FixedWindow{Name: "other", Rate: 1, Period: 24 * time.Hour}
	err = a.db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		result, err := a.store.AllowTx(ctx, sqltx.Of(tx.Tx), other.For("alice"), sendMessage.For("alice"))
		if err != nil || result.OK {
			return fmt.Errorf("%v, %w, want a refusal", result, err)
		}
		_, err = tx.NewDelete().Model((*message)(nil)).Where("true").Exec(ctx)
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// Outside of a transaction nothing is taken.
func TestNoTransaction(t *testing.T) {
	a := newApp(t)
	if err := a.store.TakeTx(t.Context(), sqltx.Of(a.db), sendMessage.For("alice")); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("got %v, want %v", err, ratelimit.ErrInvalid)
	}
	a.want(t, 0)
}
