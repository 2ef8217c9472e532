package pgstore

import (
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Store is limits in PostgreSQL. It is safe for concurrent use, and any number
// of processes may share the table. It owns no goroutine that outlives a call
// and no connection, so it need not be closed; see [Store.Close] for when to.
type Store struct {
	*base
	engine  *engine
	memory  *memory // nil without Config.Escrow
	runner  *runner
	flights *flights
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
	c := *config
	if c.RetryBudget == 0 {
		c.RetryBudget = 10 * time.Second
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	b := newBase(pool, c)
	s := &Store{base: b, engine: newEngine(b), flights: newFlights(b)}
	if c.Escrow > 0 && pool != nil {
		s.memory = newMemory(s.engine)
	}
	s.runner = &runner{base: b, memory: s.memory}
	return s, nil
}

// Close waits until decisions on their own that are under way, those that wait included, have
// ended, gives back the tokens prefetched by Config.Escrow, and refuses new ones with
// [ErrClosed], but for those that are refused from memory. Without Config.Escrow it need not be
// called. Close the pool after it. The verbs that take a transaction go on working.
func (s *Store) Close() {
	if s.usable() == nil {
		s.work.close()
		s.memory.close()
	}
}

// parts returns the parts of s; none, if it was not made by New.
func (s *Store) parts() Store {
	if s == nil {
		return Store{}
	}
	return *s
}

// usable is the error of a Store that did not come from New.
func (s *Store) usable() error { return s.parts().base.usable() }

// usableIn is the error of such a Store, or of a transaction that is none.
func (s *Store) usableIn(tx pgx.Tx) error { return s.parts().base.usableIn(tx) }
