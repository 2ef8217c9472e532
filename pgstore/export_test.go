package pgstore

import (
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
)

// Queued is how many transactions wait for their turn before they begin.
func (s *Store) Queued() int { return s.runner.Waiting() }

// WaitingForPermits is how many wait for a permit of a key.
func (s *Store) WaitingForPermits(name, key string) int {
	return s.permits.Waiting(decide.Key{Name: name, Key: key})
}

// Meet has the transactions of a store stand in line for the rows of limits without shards,
// as if others had been met there, and returns the locks.
func (s *Store) Meet(requests ...ratelimit.Request) (locks []int64) {
	var rows []decide.Row
	for _, r := range requests {
		for shard := range r.Limit.Definition().Shards {
			rows = append(rows, decide.Row{Key: decide.Key{Name: ratelimit.NameOf(r.Limit), Key: r.Key}, Shard: shard})
		}
	}
	return s.runner.Contend(rows...)
}

// UnderWay is how many calls on their own are under way.
func (s *Store) UnderWay() int64 { return engine.Probe{Engine: s.engine}.UnderWay() }
