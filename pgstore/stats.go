package pgstore

import (
	"context"
	"maps"
	"slices"
)

// Stats is the work that a Store has done since it was made, and that is under way.
type Stats struct {
	// UnderWay is the number of decisions on their own that are under way, with the work in
	// their wake, such as returning prefetched tokens.
	UnderWay int64

	// Statements is how often calls on their own were decided together, and Calls is how many they
	// were: Calls / Statements shared a statement. A call that waited for a locked row counts
	// several times.
	Statements, Calls int64

	// Retries is how often a statement or transaction of the Store was run again because PostgreSQL
	// asked for that, by 40001 or 40P01.
	Retries int64

	// LockedRows is how many rows have a queue of their own, because other transactions have or
	// lately had them locked.
	LockedRows int

	// Queued is how many transactions of AllowFunc and ReserveFunc wait for their turn.
	Queued int

	// Held is the tokens that are held by Config.Escrow, limit by limit, in the order of names.
	Held []Held
}

// Held is the tokens of a limit that a process holds in its memory.
type Held struct {
	Limit  string
	Keys   int // keys with held tokens
	Tokens float64
}

// Stats returns the Store's counts. Counting costs nothing for each call;
// with Config.Escrow, Stats itself looks at all keys that are remembered. It is safe for
// concurrent use.
func (s *Store) Stats() Stats {
	if s.usable() != nil {
		return Stats{}
	}
	stats := Stats{
		UnderWay:   max(0, s.conn.Work.UnderWay()),
		Statements: s.engine.Statements.Load(), Calls: s.engine.Calls.Load(), Retries: s.conn.Retries.Load(),
		LockedRows: s.engine.LockedRows(), Queued: s.runner.Waiting(),
	}
	held := s.memory.Held()
	for _, name := range slices.Sorted(maps.Keys(held)) {
		stats.Held = append(stats.Held, Held{name, held[name].Keys, held[name].Tokens})
	}
	return stats
}

// Versions has the old versions of rows that PostgreSQL keeps, and what keeps them. Each take
// leaves one, which is removed once no snapshot may see it. While one is held (by a transaction
// such as a dump or a report, a standby with hot_standby_feedback, the slot of one, or a prepared
// transaction), a key that is taken from often becomes slow within minutes.
type Versions struct {
	Dead   int64  // versions of the table's rows, as far as PostgreSQL has counted them
	Since  int64  // how many transactions have begun since the oldest snapshot
	Kind   string // of what holds that snapshot: "transaction", "standby", "replication slot", "prepared transaction"; "" for nothing
	Holder string // its process, the standby's application_name, the slot, or the prepared transaction
}

// Versions reads the [Versions] of the table. A role without pg_read_all_stats does not see the
// transactions of others. It writes and locks nothing, and is safe for concurrent use.
func (s *Store) Versions(ctx context.Context) (v Versions, err error) {
	err = s.alone(ctx, "versions", func(ctx context.Context) error {
		v.Dead, v.Kind, v.Holder, v.Since, err = s.table.Versions(ctx, s.conn.Pool)
		return err
	})
	return v, err
}

// Probe asks the server to commit an empty transaction on a new connection, which it then closes.
// So it does not matter whether the pool's connections are in use or dead. The commit waits for the
// disk and the synchronous standbys, as the calls do. If the server refuses that, any answer is
// enough. If it has no room for another connection, Probe uses one of the pool. After a failed
// probe, the first answered one makes the pool replace its connections, since these may be dead.
// Until the pool has one again, and for 30 seconds at most, Probe returns an error. Package
// fallback calls it once a second while the database is silent.
func (s *Store) Probe(ctx context.Context) error {
	if err := s.usable(); err != nil {
		return err
	}
	return s.conn.Probe(ctx)
}

// PoolInUse reports whether the application has all connections of the pool in use, so that a call
// has to wait for one. It is false unless in the last 30 seconds a Probe was answered and none
// failed, since the connections may be dead. A Store without a pool has none in use.
func (s *Store) PoolInUse() bool { return s.usable() == nil && s.conn.InUse() }
