package memstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
)

// ErrNoDatabase is returned by SQL in a transaction of [Store.Begin].
var ErrNoDatabase = errors.New("memstore: a transaction in memory knows no SQL")

// transaction is a transaction or a savepoint.
type transaction struct {
	pgx.Tx // for SQL
	of     *session
	layer  *layer

	committed bool
}

// in returns the scope of a verb in tx.
func (s *Store) in(tx pgx.Tx) scope {
	t, ok := tx.(*transaction)
	switch {
	case tx == nil || ok && t == nil:
		return scope{Store: s, fault: &ratelimit.FieldError{Field: "Tx", Value: nil, Reason: "must not be nil"}}
	case !ok || t.of.store != s:
		return scope{Store: s, fault: &ratelimit.FieldError{Field: "Tx", Value: fmt.Sprintf("%T", tx), Reason: "must come from this store's Begin or Join"}}
	}
	return scope{Store: s, session: t.of, layer: t.layer}
}

// Begin begins a transaction for the verbs that end in Tx, as the Begin of a pool does, so
// pgx.BeginFunc takes a Store as well. Its SQL is [ErrNoDatabase]. Like any other it is not
// for several goroutines at once.
func (s *Store) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := s.own().usable(ctx); err != nil {
		return nil, err
	}
	return s.join(noDatabase{}), nil
}

// Join returns tx with the store in it: SQL goes to tx, and the end of the returned transaction
// is that of tx, and decides about the tokens that the store's verbs took in it. It is for
// fakes of a database. Do not end tx itself.
func (s *Store) Join(tx pgx.Tx) (pgx.Tx, error) {
	if err := s.own().usable(context.Background()); err != nil {
		return nil, err
	}
	if tx == nil {
		return nil, &ratelimit.FieldError{Field: "Tx", Value: nil, Reason: "must not be nil"}
	}
	return s.join(tx), nil
}

func (s *Store) join(tx pgx.Tx) *transaction {
	of := &session{store: s}
	return &transaction{Tx: tx, of: of, layer: of.push()}
}

// Begin begins a savepoint.
func (t *transaction) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	tx, err := t.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	if err := t.of.store.in(t).lockOpen(); err != nil {
		return nil, err
	}
	defer t.of.store.mu.Unlock()
	return &transaction{Tx: tx, of: t.of, layer: t.of.push()}, nil
}

// Commit keeps the changes since the transaction or savepoint was begun. If ctx has ended, or
// the transaction that was joined does not commit, it is rolled back.
func (t *transaction) Commit(ctx context.Context) error { return t.end(ctx, true) }

// Rollback undoes the changes since the transaction or savepoint was begun.
func (t *transaction) Rollback(ctx context.Context) error { return t.end(ctx, false) }

func (t *transaction) end(ctx context.Context, commit bool) error {
	s := t.of.store
	if err := s.in(t).lockOpen(); err != nil {
		return err
	}
	s.mu.Unlock() // tx may call the store
	err := ctx.Err()
	if commit && err == nil {
		err = t.Tx.Commit(ctx)
		t.committed = err == nil
	} else if failed := t.Tx.Rollback(ctx); !commit {
		err = failed
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch depth := t.of.depth(t.layer); {
	case depth < 0: // somebody has ended it meanwhile
	case t.committed:
		t.of.keep(depth)
	default:
		t.of.undo(depth)
	}
	return err
}

// noDatabase answers SQL in a transaction without a database.
type noDatabase struct{}

func (noDatabase) Begin(context.Context) (pgx.Tx, error) { return noDatabase{}, nil }
func (noDatabase) Commit(context.Context) error          { return nil }
func (noDatabase) Rollback(context.Context) error        { return nil }
func (noDatabase) LargeObjects() pgx.LargeObjects        { return pgx.LargeObjects{} }
func (noDatabase) Conn() *pgx.Conn                       { return nil }

func (noDatabase) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, ErrNoDatabase
}

func (noDatabase) SendBatch(context.Context, *pgx.Batch) pgx.BatchResults { return noResults{} }

func (noDatabase) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	return nil, ErrNoDatabase
}

func (noDatabase) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, ErrNoDatabase
}

func (noDatabase) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, ErrNoDatabase
}

func (noDatabase) QueryRow(context.Context, string, ...any) pgx.Row { return noRow{} }

type noRow struct{}

func (noRow) Scan(...any) error { return ErrNoDatabase }

// noResults answers a batch without a database.
type noResults struct{}

func (noResults) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, ErrNoDatabase }
func (noResults) Query() (pgx.Rows, error)         { return nil, ErrNoDatabase }
func (noResults) QueryRow() pgx.Row                { return noRow{} }
func (noResults) Close() error                     { return ErrNoDatabase }
func (noResults) Tx() pgx.Tx                       { return nil }
