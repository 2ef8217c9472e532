package tx

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Contend makes transactions take turns at rows for an hour, as if other processes were there, and
// returns the locks. It is for tests.
func (r *Runner) Contend(rows ...decide.Row) (locks []int64) {
	for _, row := range rows {
		lock := table.Lock(r.Schema, row)
		r.contention.Note(lock, time.Hour)
		locks = append(locks, lock)
	}
	return locks
}
