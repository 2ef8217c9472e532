package memstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// ErrLocked is the error of a verb that waited, until its context ended or for too long,
// for a transaction that has taken from its limit and key. It is the context's error as
// well.
var ErrLocked = errors.New("memstore: waited for a transaction")

// ErrNoDatabase is what the transactions of [Store.Begin] answer to SQL.
var ErrNoDatabase = errors.New("memstore: a transaction in memory knows no SQL")

// lockTimeout is how long a verb waits whose context has no deadline.
const lockTimeout = 5 * time.Second

// session is an open transaction with its savepoints.
type session struct {
	store  *Store
	layers []*layer // of the transaction, and of each savepoint that is open
}

// layer is what was done since a transaction or a savepoint was begun.
type layer struct {
	rows map[decide.Row]*bucket.State // as they are since then; nil for one that is gone
	keys []decide.Key                 // that are held since then
	undo []func()                     // what else a rollback does
}

// transaction is a transaction, or a savepoint in one.
type transaction struct {
	pgx.Tx // for SQL
	of     *session
	layer  *layer

	committed bool
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

// Join returns tx with the store in it: SQL goes to tx, and the end of the returned
// transaction is that of tx, and decides what the store's verbs took in it. It is for fakes
// of a database. Do not end tx itself.
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

func (of *session) push() *layer {
	l := &layer{rows: map[decide.Row]*bucket.State{}}
	of.layers = append(of.layers, l)
	return l
}

// Begin begins a savepoint.
func (t *transaction) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := t.of.store.own().usable(ctx); err != nil {
		return nil, err
	}
	tx, err := t.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	if err := t.of.store.lockOpen(t); err != nil {
		return nil, err
	}
	defer t.of.store.mu.Unlock()
	return &transaction{Tx: tx, of: t.of, layer: t.of.push()}, nil
}

// Commit keeps what was done since the transaction or savepoint was begun. If ctx has
// ended, or the transaction that was joined does not commit, it is rolled back.
func (t *transaction) Commit(ctx context.Context) error { return t.end(ctx, true) }

// Rollback undoes what was done since the transaction or savepoint was begun.
func (t *transaction) Rollback(ctx context.Context) error { return t.end(ctx, false) }

func (t *transaction) end(ctx context.Context, commit bool) error {
	s := t.of.store
	if s.lockOpen(t) != nil {
		return pgx.ErrTxClosed
	}
	s.mu.Unlock() // what tx does may ask the store
	err := ctx.Err()
	if commit && err == nil {
		err = t.Tx.Commit(ctx)
		t.committed = err == nil
	} else if failed := t.Tx.Rollback(ctx); !commit {
		err = failed
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.committed {
		t.of.keep(t.depth())
	} else {
		t.of.undo(t.depth())
	}
	return err
}

// lockOpen takes the store's lock, unless t has ended.
func (s *Store) lockOpen(t *transaction) error {
	s.mu.Lock()
	if t.depth() < 0 {
		s.mu.Unlock()
		return pgx.ErrTxClosed
	}
	return nil
}

// depth is the place of t's layer, below 0 if it has ended.
func (t *transaction) depth() int { return slices.Index(t.of.layers, t.layer) }

// keep makes what the layers from depth on have part of the one below, or of the store. It
// needs the store's lock, as undo does.
func (of *session) keep(depth int) {
	for _, l := range of.layers[depth:] {
		if depth > 0 {
			below := of.layers[depth-1]
			for row, state := range l.rows {
				below.rows[row] = state
			}
			below.keys, below.undo = append(below.keys, l.keys...), append(below.undo, l.undo...)
			continue
		}
		for row, state := range l.rows {
			if state == nil {
				delete(of.store.rows, row)
			} else {
				of.store.rows[row] = *state
			}
		}
		of.store.free(l.keys)
	}
	of.layers = of.layers[:depth]
}

// undo forgets the layers from depth on.
func (of *session) undo(depth int) {
	for _, l := range slices.Backward(of.layers[depth:]) {
		for _, undo := range slices.Backward(l.undo) {
			undo()
		}
		of.store.free(l.keys)
	}
	of.layers = of.layers[:depth]
}

// free lets others have keys.
func (s *Store) free(keys []decide.Key) {
	if len(keys) == 0 {
		return
	}
	for _, key := range keys {
		delete(s.held, key)
	}
	close(s.freed)
	s.freed = make(chan struct{})
}

// open is the error of a transaction that has ended. It needs the store's lock, as top, get
// and what they write with do.
func (s scope) open() error {
	if s.tx != nil && s.tx.depth() < 0 {
		return pgx.ErrTxClosed
	}
	return nil
}

// top is where a verb writes: the newest savepoint that is open, as in PostgreSQL. It is
// nil for a verb on its own.
func (s scope) top() *layer {
	if s.tx == nil {
		return nil
	}
	return s.tx.of.layers[len(s.tx.of.layers)-1]
}

// lock waits until no other transaction has the keys of a call, and takes the store's lock
// then. A transaction has them from then on.
func (s scope) lock(ctx context.Context, call *decide.Call) error {
	s.mu.Lock()
	if _, ok := ctx.Deadline(); !ok && s.locked(call) != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, lockTimeout)
		defer cancel()
	}
	for key := s.locked(call); key != nil; key = s.locked(call) {
		freed := s.freed
		s.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return fmt.Errorf("%w that has limit %q and one of its keys: %w", ErrLocked, key.Name, ctx.Err())
		}
		s.mu.Lock()
	}
	if err := s.open(); err != nil {
		s.mu.Unlock()
		return err
	}
	if top := s.top(); top != nil {
		for i := range call.Asks {
			if key := call.Asks[i].Of(); s.held[key] == nil {
				s.held[key] = s.tx.of
				top.keys = append(top.keys, key)
			}
		}
	}
	return nil
}

// locked returns a key of a call that another transaction has, nil if there is none.
func (s scope) locked(call *decide.Call) *decide.Key {
	for i := range call.Asks {
		key := call.Asks[i].Of()
		if holder := s.held[key]; holder != nil && (s.tx == nil || holder != s.tx.of) {
			return &key
		}
	}
	return nil
}

// get returns the state of a row, if it is there.
func (s scope) get(row decide.Row) (bucket.State, bool) {
	if s.tx != nil {
		for _, l := range slices.Backward(s.tx.of.layers) {
			if state, ok := l.rows[row]; ok {
				if state == nil {
					return bucket.State{}, false
				}
				return *state, true
			}
		}
	}
	state, ok := s.rows[row]
	return state, ok
}

func (s scope) put(row decide.Row, state bucket.State) {
	if top := s.top(); top != nil {
		top.rows[row] = &state
		return
	}
	s.rows[row] = state
}

func (s scope) remove(row decide.Row) {
	if top := s.top(); top == nil {
		delete(s.rows, row)
	} else if _, ok := s.get(row); ok {
		top.rows[row] = nil
	}
}

// onRollback has do done if what the verb has done is rolled back.
func (s scope) onRollback(do func()) {
	if top := s.top(); top != nil {
		top.undo = append(top.undo, do)
	}
}

// noDatabase is the SQL of a transaction that has none.
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

// noResults are those of a batch without a database.
type noResults struct{}

func (noResults) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, ErrNoDatabase }
func (noResults) Query() (pgx.Rows, error)         { return nil, ErrNoDatabase }
func (noResults) QueryRow() pgx.Row                { return noRow{} }
func (noResults) Close() error                     { return ErrNoDatabase }
func (noResults) Tx() pgx.Tx                       { return nil }
