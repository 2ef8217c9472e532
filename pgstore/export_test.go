package pgstore

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Queued is how many transactions wait for their turn before they begin.
func (s *Store) Queued() int { return s.runner.turns.Waiting() }

// WaitingForPermits is how many wait for a permit of a key.
func (s *Store) WaitingForPermits(name, key string) int {
	return s.permits.Waiting(decide.Key{Name: name, Key: key})
}

// Meet has the transactions of a store stand in line for the rows of limits without shards,
// as if others had been met there, and returns the locks.
func (s *Store) Meet(requests ...ratelimit.Request) (locks []int64) {
	m := &s.runner.meetings
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = make(map[int64]time.Time)
	for _, r := range requests {
		lock := table.Lock(s.Schema, decide.Row{Key: decide.Key{Name: ratelimit.NameOf(r.Limit), Key: r.Key}})
		m.last[lock] = time.Now().Add(time.Hour)
		locks = append(locks, lock)
	}
	return locks
}

// Crowd has the calls of a store wait for the row of a limit without shards, as if it had been
// found locked.
func (s *Store) Crowd(r ratelimit.Request) {
	s.engine.markLocked(decide.Row{Key: decide.Key{Name: ratelimit.NameOf(r.Limit), Key: r.Key}})
}

// Meetings is at how many rows others were met lately.
func (s *Store) Meetings() (n int) {
	m := &s.runner.meetings
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, last := range m.last {
		if time.Since(last) <= contended {
			n++
		}
	}
	return n
}
