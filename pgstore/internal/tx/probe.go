package tx

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Contend has transactions take turns at the rows of keys without shards for an hour, as if other
// processes had been met there, and returns the locks: for tests.
func (r *Runner) Contend(keys ...decide.Key) (locks []int64) {
	m := &r.contention
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = make(map[int64]time.Time)
	for _, key := range keys {
		lock := table.Lock(r.Schema, decide.Row{Key: key})
		m.last[lock] = time.Now().Add(time.Hour)
		locks = append(locks, lock)
	}
	return locks
}

// Contended returns at how many rows other processes were met lately: for tests.
func (r *Runner) Contended() (n int) {
	m := &r.contention
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, last := range m.last {
		if time.Since(last) <= engine.Contended {
			n++
		}
	}
	return n
}
