package pgstore

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
)

// Table is the table that holds the limits; package migrations makes it.
const Table = "rate_limits"

var (
	// ErrNoPool is a verb that needs a pool, on a Store that has none.
	ErrNoPool = errors.New("pgstore: this needs a pool, and New was given nil")

	// ErrOutcomeUnknown is a connection that was lost during COMMIT, when the
	// server could not be asked afterwards either. The work and its tokens are
	// there both or neither.
	ErrOutcomeUnknown = errors.New("pgstore: the connection was lost during commit, and whether it was committed is not known")

	// ErrClosed is a decision on its own after Close.
	ErrClosed = errors.New("pgstore: the store is closed")

	// ErrNotMigrated is a database that lacks the table.
	ErrNotMigrated = errors.New("pgstore: table " + Table + " is missing; make it with `ratelimit migrate up` or migrate.Up")
)

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
	// own are then not combined, Prune does not skip locked rows, and the At of a
	// token bucket's AllowTx is the row's ts.
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

	// RetryBudget is for how long AllowFunc and ReserveFunc run a transaction
	// again when their context has no deadline. The default is 10 seconds.
	RetryBudget time.Duration
}

// Store is limits in PostgreSQL. It is safe for concurrent use, and any number
// of processes may share the table. It owns no goroutine that outlives a call
// and no connection, so it need not be closed; see [Store.Close] for when to.
type Store struct {
	pool   *pgxpool.Pool
	sql    statements
	config Config
	shards shardMemory

	combiner combiner
	refusals refusals
	gates    gates
	work     work

	sendsAhead bool         // of the runner
	connecting atomic.Int64 // that wait for a connection, of the runner
}

// New makes a Store. A nil pool is enough for the verbs that take a
// transaction; a nil config means the defaults. The table must be there by the
// first call: see packages migrations and migrate.
func New(pool *pgxpool.Pool, config *Config) (*Store, error) {
	if config == nil {
		config = &Config{}
	}
	if config.RetryBudget < 0 {
		return nil, &ratelimit.FieldError{Field: "RetryBudget", Value: config.RetryBudget, Reason: "must not be negative"}
	}
	if config.RefusalMemory < 0 {
		return nil, &ratelimit.FieldError{Field: "RefusalMemory", Value: config.RefusalMemory, Reason: "must not be negative"}
	}
	s := &Store{pool: pool, config: *config, sql: newStatements(config.Schema, config.Portable)}
	s.combiner.seed = maphash.MakeSeed()
	s.refusals.remember(config.RefusalMemory)
	if s.sendsAhead = maySendAhead(pool); pool != nil {
		s.gates.most = int(pool.Config().MaxConns)
	}
	if s.config.RetryBudget == 0 {
		s.config.RetryBudget = 10 * time.Second
	}
	return s, nil
}

// Close waits until allowing, reserving and checking on their own that are under
// way, those that wait included, are there, and refuses new ones with
// [ErrClosed], but for those that are refused from memory. Close the pool after
// it. The other verbs go on working.
func (s *Store) Close() { s.work.close() }

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

// more counts one more, begun by one that is counted.
func (w *work) more() { w.wg.Add(1) }

func (w *work) end() { w.wg.Done() }

func (w *work) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.wg.Wait()
}

// querier is what pools, connections and transactions have in common.
type querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// clock is the instant that decides, nil for the database's.
func (s *Store) clock() *time.Time {
	if s.config.Clock == nil {
		return nil
	}
	now := s.config.Clock().UTC().Truncate(time.Microsecond)
	return &now
}

// fault wraps an error of the database. The original stays within reach of
// errors.As, 40001 and 40P01 among them.
func fault(doing string, err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "42P01" { // undefined_table
		return fmt.Errorf("%w: %w", ErrNotMigrated, err)
	}
	return fmt.Errorf("pgstore: %s: %w", doing, err)
}

// serialization reports whether PostgreSQL asks for the transaction to be run
// again: serialization_failure or deadlock_detected.
func serialization(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}
