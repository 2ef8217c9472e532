package pgstore

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Probe asks the server a statement that needs nothing of it, on a connection that it makes for
// this and closes, so that neither connections in use nor dead ones of the pool matter. The first
// answer after a probe that failed has the pool replace its connections, since those may be dead
// without knowing. Package fallback calls it once a second while the database is silent.
func (s *Store) Probe(ctx context.Context) error {
	base := s.parts().base
	if err := base.usable(); err != nil {
		return err
	}
	leave, err := base.Enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if err := probe(ctx, base.Pool); err != nil {
		base.unanswered.Store(true)
		return fmt.Errorf("pgstore: probe: %w", err)
	}
	if base.unanswered.CompareAndSwap(true, false) {
		base.Pool.Reset()
	}
	return nil
}

func probe(ctx context.Context, pool *pgxpool.Pool) error {
	config := pool.Config()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return err
		}
	}
	own, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.RollbackTime)
		defer cancel()
		_ = own.Close(ctx)
	}()
	_, err = own.PgConn().Exec(ctx, "SELECT 1").ReadAll()
	return err
}

// PoolInUse reports whether all connections of the pool are in use, so that a call has to wait for
// one. A Store without a pool has none in use.
func (s *Store) PoolInUse() bool {
	base := s.parts().base
	if base == nil || base.Pool == nil {
		return false
	}
	stat := base.Pool.Stat()
	return stat.AcquiredConns() >= stat.MaxConns()
}
