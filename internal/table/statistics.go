package table

import (
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// statistics is the state of the planner's statistics, as far as known. Up to PostgreSQL 16 it
// may look keys up along the index, or go through all rows of a limit and compare each with all
// keys. Without statistics, which is for the first minute of a table, until autovacuum has run,
// it estimates those rows to be few.
type statistics struct {
	sql    string
	asked  atomic.Pointer[time.Time] // nil for never
	enough atomic.Bool
}

// askAgain is how long an answer holds, also that there are none.
const askAgain = 10 * time.Second

// known reports whether the planner is known to look keys up along the index. Now and then
// it has the statements of a batch, of which it is the first, tell for the next ones.
func (s *statistics) known(b *pgx.Batch) bool {
	now, last := time.Now(), s.asked.Load()
	if (last == nil || now.Sub(*last) >= askAgain) && s.asked.CompareAndSwap(last, &now) {
		b.Queue(s.sql).QueryRow(func(row pgx.Row) error {
			var enough bool
			err := row.Scan(&enough)
			s.enough.Store(enough)
			return err
		})
	}
	return s.enough.Load()
}
