// Package sqlc tests that a store takes in the transactions of code that sqlc has generated for
// database/sql, here with lib/pq.
package sqlc

import (
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"testing"
	"time"

	_ "github.com/lib/pq"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/integration/sqlc/messages"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

//go:embed schema.sql
var schema string

var sendMessage = ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: 24 * time.Hour}

// app is a program that sends messages.
type app struct {
	db    *sql.DB
	store *pgstore.Store
}

func newApp(t *testing.T) *app {
	t.Helper()
	pool, done := pgtest.Example(schema)
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
	return &app{db, store}
}

// inTx runs do in a transaction, which is committed if there is no error.
func (a *app) inTx(ctx context.Context, level sql.IsolationLevel, do func(tx *sql.Tx) error) error {
	tx, err := a.db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := do(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// send sends a message, and takes for it in the same transaction.
func (a *app) send(ctx context.Context, tx messages.DBTX) error {
	if err := messages.New(tx).SendMessage(ctx, "alice"); err != nil {
		return err
	}
	return a.store.TakeTx(ctx, sqltx.Of(tx), sendMessage.For("alice"))
}

// want fails unless there are so many messages and as many tokens were spent.
func (a *app) want(t *testing.T, sent int64) {
	t.Helper()
	got, err := messages.New(a.db).CountMessages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	result, err := a.store.Check(t.Context(), sendMessage.For("alice"))
	if err != nil {
		t.Fatal(err)
	}
	if spent := 10 - result.Remaining; got != sent || spent != sent {
		t.Errorf("%d messages and %d tokens spent, want %d of each", got, spent, sent)
	}
}

var errChanged = errors.New("changed my mind")

func TestSQLC(t *testing.T) {
	a, ctx := newApp(t), t.Context()
	sendAnd := func(err error) func(tx *sql.Tx) error {
		return func(tx *sql.Tx) error { return errors.Join(a.send(ctx, tx), err) }
	}
	for range 2 {
		if err := a.inTx(ctx, sql.LevelDefault, sendAnd(nil)); err != nil {
			t.Fatal(err)
		}
	}
	a.want(t, 2)

	if err := a.inTx(ctx, sql.LevelDefault, sendAnd(errChanged)); !errors.Is(err, errChanged) {
		t.Error(err)
	}
	a.want(t, 2)

	err := a.inTx(ctx, sql.LevelSerializable, func(tx *sql.Tx) error {
		exec := func(query string) error { _, err := tx.ExecContext(ctx, query); return err }
		return errors.Join(a.send(ctx, tx), exec("SAVEPOINT s"), a.send(ctx, tx), exec("ROLLBACK TO SAVEPOINT s"), a.send(ctx, tx))
	})
	if err != nil {
		t.Fatal(err)
	}
	a.want(t, 4)

	for range 6 {
		if err := a.inTx(ctx, sql.LevelDefault, sendAnd(nil)); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.inTx(ctx, sql.LevelDefault, sendAnd(nil)); !errors.Is(err, ratelimit.ErrRefused) {
		t.Errorf("got %v, want a refusal", err)
	}
	a.want(t, 10)

	// Several limits, in a transaction that goes on after a refusal.
	other := ratelimit.FixedWindow{Name: "other", Rate: 1, Period: 24 * time.Hour}
	err = a.inTx(ctx, sql.LevelDefault, func(tx *sql.Tx) error {
		result, err := a.store.AllowTx(ctx, sqltx.Of(tx), other.For("alice"), sendMessage.For("alice"))
		if err != nil || result.OK {
			return fmt.Errorf("%v, %w, want a refusal", result, err)
		}
		return messages.New(tx).SendMessage(ctx, "bob")
	})
	if err != nil {
		t.Error(err)
	}
}

// Outside of a transaction nothing is taken.
func TestNoTransaction(t *testing.T) {
	a := newApp(t)
	var db messages.DBTX = a.db
	if err := a.store.TakeTx(t.Context(), sqltx.Of(db), sendMessage.For("alice")); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("got %v, want %v", err, ratelimit.ErrInvalid)
	}
	a.want(t, 0)
}
