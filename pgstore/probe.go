package pgstore

import "context"

// Probe asks the server to commit an empty transaction, on a connection that it makes for this and
// closes, so that neither connections in use nor dead ones of the pool matter. The commit waits for the
// disk and the synchronous standbys, as the calls do. Where it is refused, Probe asks to be answered. If the server
// has no room for that one, it is asked by a connection of the pool. The first answer after a probe
// that failed has the pool replace its connections, since those may be dead without knowing. Until the
// pool has one again, and for 30 seconds at most, Probe returns an error. Package fallback calls it
// once a second while the database is silent.
func (s *Store) Probe(ctx context.Context) error {
	if err := s.usable(); err != nil {
		return err
	}
	return s.conn.Probe(ctx)
}

// PoolInUse reports whether the application has all connections of the pool in use, so that a call has
// to wait for one. It is false unless the last 30 seconds have a Probe that was answered and none that
// failed, since the connections may be dead. A Store without a pool has none in use.
func (s *Store) PoolInUse() bool { return s.usable() == nil && s.conn.InUse() }
