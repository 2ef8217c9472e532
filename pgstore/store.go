package pgstore

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/keyqueue"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// Table is the table that holds the limits; package migrations makes it.
const Table = table.Name

var (
	// ErrNoPool is a verb that needs a pool, on a Store that has none.
	ErrNoPool = errors.New("pgstore: this needs a pool, and New was given nil")

	// ErrOutcomeUnknown is a connection that was lost during COMMIT, when the
	// server could not be asked afterwards either. The work and its tokens are
	// there both or neither.
	ErrOutcomeUnknown = errors.New("pgstore: the connection was lost during commit, and whether it was committed is not known")

	// ErrClosed is a decision on its own after Close.
	ErrClosed = errors.New("pgstore: the store is closed")

	// ErrLocked is a decision on its own that waited, until its context ended,
	// for a row that a transaction has locked. The message names limit and key,
	// and the context's error is within reach of errors.Is as well.
	ErrLocked = errors.New("pgstore: waited for a lock")

	// ErrNotMigrated is a database that lacks the table, or a column of it, where
	// the Store looks: the message says where that is.
	ErrNotMigrated = errors.New("pgstore: table " + Table + " is missing or not up to date; bring it there with `ratelimit migrate up` or migrate.Up")
)

const defaultTimeout = 5 * time.Second

// NoTimeout as Config.Timeout lets a decision on its own take as long as it does.
const NoTimeout time.Duration = -1

// Config says how a Store works. The zero value is a good one.
type Config struct {
	// Schema is the schema that holds the table. The default, "", leaves it to
	// the connection's search_path.
	Schema string

	// Clock tells the instant that decides, for tests. The default, nil, is
	// the database's clock, read by the deciding statement itself. Outside of
	// tests anything else gives away what keeps several processes together.
	Clock func() time.Time

	// Portable keeps every statement to what a PostgreSQL that distributes
	// tables (Citus) accepts, and prefers what is fast there. Decisions on their
	// own are then not combined, and wait for rows that are locked; Prune does
	// not skip locked rows; and what AllowTx took and was rolled back can be
	// cancelled, which gives away what was never taken.
	Portable bool

	// RefusalMemory is for how many keys the Store remembers that they were
	// refused, so that Allow and Reserve on their own refuse again without
	// asking the database, until time has brought what a call wants. It can miss
	// what happens elsewhere, in other processes and in callers' transactions:
	// after a reset or credit it refuses too long, at most until the RetryAt that
	// it tells, and after a take that RetryAt is too early. It knows this Store's
	// own, and changed definitions. It holds for one limit a call, without
	// shards. The default, 0, remembers none.
	RefusalMemory int

	// Timeout is how long a decision on its own (the verbs without Tx, but for
	// AllowFunc and ReserveFunc) may take when its context has no deadline, waits
	// for a connection and for a locked row included. The default is 5 seconds;
	// [NoTimeout] is none.
	Timeout time.Duration

	// RetryBudget is how long AllowFunc and ReserveFunc may take in all when
	// their context has no deadline: the waits for their turn and a connection,
	// all attempts with their functions, and the question what became of a lost
	// COMMIT. The default is 10 seconds.
	RetryBudget time.Duration
}

func (c *Config) validate() error {
	bad := func(field string, value any, reason string) error {
		return &ratelimit.FieldError{Field: field, Value: value, Reason: reason}
	}
	switch {
	case c.RetryBudget < 0:
		return bad("RetryBudget", c.RetryBudget, "must not be negative")
	case c.RefusalMemory < 0:
		return bad("RefusalMemory", c.RefusalMemory, "must not be negative")
	case c.Timeout < 0 && c.Timeout != NoTimeout:
		return bad("Timeout", c.Timeout, "must not be negative, unless it is NoTimeout")
	}
	return nil
}

// Store is limits in PostgreSQL. It is safe for concurrent use, and any number
// of processes may share the table. It owns no goroutine that outlives a call
// and no connection, so it need not be closed; see [Store.Close] for when to.
type Store struct {
	pool   *pgxpool.Pool
	table  *table.Table
	config Config

	seen  decide.Seen
	hints hints
	own   own
	turns keyqueue.Queue[turnKey] // of the runner's transactions
	spare chan struct{}           // connections that may wait for a locked row
	work  work
}

// New makes a Store. A nil pool is enough for the verbs that take a
// transaction; a nil config means the defaults. The table must be there by the
// first call: see packages migrations and migrate, and [Store.Ready].
func New(pool *pgxpool.Pool, config *Config) (*Store, error) {
	if config == nil {
		config = &Config{}
	}
	if err := config.validate(); err != nil {
		return nil, err
	}
	s := &Store{pool: pool, config: *config, table: table.New(config.Schema, config.Portable)}
	if s.config.RetryBudget == 0 {
		s.config.RetryBudget = 10 * time.Second
	}
	if s.config.Timeout == 0 {
		s.config.Timeout = defaultTimeout
	}
	s.hints.init(config.RefusalMemory)
	if pool != nil {
		s.spare = make(chan struct{}, min(pool.Config().MaxConns/4, 4))
	}
	s.own.init(s)
	return s, nil
}

// Close waits until decisions on their own that are under way, those that wait
// included, have ended, and refuses new ones with [ErrClosed], but for those that
// are refused from memory. Close the pool after it. The verbs that take a
// transaction go on working.
func (s *Store) Close() {
	if s.usable() == nil {
		s.work.close()
	}
}

// work counts what Close waits for.
type work struct {
	mu     sync.Mutex
	closed bool
	wg     sync.WaitGroup
}

func (w *work) begin() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return ErrClosed
	}
	w.wg.Add(1)
	return nil
}

func (w *work) end() { w.wg.Done() }

// spawn starts a goroutine for what was begun.
func (w *work) spawn(f func()) { w.wg.Go(f) }

func (w *work) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.wg.Wait()
}

// clock is the instant that decides, nil for the database's.
func (s *Store) clock() *time.Time {
	if s.config.Clock == nil {
		return nil
	}
	now := s.config.Clock().UTC().Truncate(time.Microsecond)
	return &now
}

// usable is the error of a Store that did not come from New.
func (s *Store) usable() error {
	if s == nil || s.table == nil {
		return &ratelimit.FieldError{Field: "Store", Value: s, Reason: "must come from pgstore.New"}
	}
	return nil
}

// usableIn is the error of a verb in a transaction that is none.
func (s *Store) usableIn(tx pgx.Tx) error {
	if err := s.usable(); err != nil {
		return err
	}
	if v := reflect.ValueOf(tx); tx == nil || v.Kind() == reflect.Pointer && v.IsNil() {
		return &ratelimit.FieldError{Field: "Tx", Value: nil, Reason: "must not be nil"}
	}
	return nil
}

// call is a call whose limits the Store has seen.
func (s *Store) call(reserve bool, requests []ratelimit.Request) (decide.Call, error) {
	call, err := decide.New(reserve, requests...)
	for i := range call.Asks {
		s.seen.Note(call.Asks[i].Definition)
	}
	return call, err
}

// fault wraps an error of the database. The original stays within reach of
// errors.As, 40001 and 40P01 among them.
func (s *Store) fault(doing string, err error) error {
	switch code(err) {
	case "42P01", "42703": // undefined_table, undefined_column
		where := "the search_path of the connection (Config.Schema names another)"
		if s.config.Schema != "" {
			where = fmt.Sprintf("schema %q, which is Config.Schema", s.config.Schema)
		}
		return fmt.Errorf("%w; looked in %s: %w", ErrNotMigrated, where, err)
	}
	return fmt.Errorf("pgstore: %s: %w", doing, err)
}

// code is the SQLSTATE of the server's error in err, "" if there is none.
func code(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// retriable reports whether PostgreSQL asks for the transaction to be run again:
// serialization_failure or deadlock_detected.
func retriable(err error) bool {
	c := code(err)
	return c == "40001" || c == "40P01"
}

// answered reports whether err is the server's own word that what it was sent was
// not done, rather than that a connection was lost: also a pooler's, which says so
// by an error of class 08 or one that ends the connection.
func answered(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && pgErr.Code[:min(2, len(pgErr.Code))] != "08"
}

// locked is the error of a decision on its own that waited for a lock until its
// context ended.
func locked(key decide.Key, err error) error {
	return fmt.Errorf("%w: a transaction has locked the row of limit %q, key %q: %w", ErrLocked, key.Name, key.Key, err)
}

const lockNotAvailable = "55P03"

var errNilFunc = &ratelimit.FieldError{Field: "Func", Value: nil, Reason: "must not be nil"}

// end ends tx, if it has not ended, even when ctx is over. It is deferred, so that
// it also happens when a caller's function panics or ends its goroutine. Its error
// is of no use: a transaction that cannot be rolled back has lost its connection,
// and with it all that it did.
func end(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
	defer cancel()
	_ = tx.Rollback(ctx)
}

const rollbackTime = 5 * time.Second
