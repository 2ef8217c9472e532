package conn

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Probe sends a statement on a connection of its own. After a probe that failed, the first one that
// succeeds makes the pool replace its connections.
func (c *Conn) Probe(ctx context.Context) error {
	leave, err := c.Enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if err := probe(ctx, c.Pool); err != nil {
		c.unanswered.Store(true)
		return fmt.Errorf("pgstore: probe: %w", err)
	}
	if c.unanswered.CompareAndSwap(true, false) {
		c.Pool.Reset()
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
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), RollbackTime)
		defer cancel()
		_ = own.Close(ctx)
	}()
	_, err = own.PgConn().Exec(ctx, "SELECT 1").ReadAll()
	return err
}

// InUse reports whether all connections of the pool are in use.
func (c *Conn) InUse() bool {
	if c.Pool == nil {
		return false
	}
	stat := c.Pool.Stat()
	return stat.AcquiredConns() >= stat.MaxConns()
}
