package conn

import (
	"context"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Probe asks the server a statement on a connection of its own. The first answer after a probe that
// failed has the pool replace its connections.
//
// A server or a pooler that has no room for another connection is asked by one of the pool, which may
// itself be what fills it, such as up to its role's CONNECTION LIMIT. Those stay: another client could
// have their places first.
func (c *Conn) Probe(ctx context.Context) error {
	leave, err := c.Enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	err = probe(ctx, c.Pool)
	if code := Code(err); code == "53300" || code == "08P01" { // too_many_connections, of PostgreSQL and of PgBouncer
		if err = c.probeByPool(ctx, err); err == nil {
			return nil
		}
	}
	if err != nil {
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
	if _, err = own.PgConn().Exec(ctx, "SELECT 1").ReadAll(); err != nil && own.IsClosed() && Code(err) == "" {
		return fmt.Errorf("%w: %w", io.ErrUnexpectedEOF, err) // pgx may say no more than that it is closed
	}
	return err
}

// probeByPool asks by a connection of the pool, since the server has refused another one with an
// error. If all are in use by the application, and PostgreSQL itself refused, it has answered.
func (c *Conn) probeByPool(ctx context.Context, refused error) error {
	if c.InUse() {
		if Code(refused) == "53300" {
			return nil
		}
		return refused
	}
	_, err := c.Pool.Exec(ctx, "SELECT 1", pgx.QueryExecModeSimpleProtocol)
	if ctx.Err() != nil {
		c.Pool.Reset() // connections that are dead without knowing have those places
	}
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
