package conn

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// held is for how long after a silence the pool may count connections that died in it: until the
// deadlines of their calls, and then until pgx has closed them, which takes up to 15 seconds.
const held = 30 * time.Second

// probes is what the probes of a Conn have found.
type probes struct {
	mu               sync.Mutex
	answered, failed time.Time // the last of each
	stale            bool      // the pool has connections from before failed
	lost             bool      // no connection of the pool was acquired since failed
}

// AwaitDisk is a transaction of its own that is committed once it is on disk, and on the synchronous
// standbys, as the session's synchronous_commit says. It needs no table.
const AwaitDisk = "SELECT pg_logical_emit_message(true, 'ratelimit', '')"

// Probe asks the server to commit an empty transaction, on a connection of its own: a server whose commits
// hang answers no call either. The first answer after a probe that failed has the pool replace its connections. Probe then returns an error until the pool has a
// connection, since a call would wait in vain for one, but for no longer than held.
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
	code := Code(err)
	full := code == "53300" || code == "08P01" // too_many_connections, of PostgreSQL and of PgBouncer
	if full {
		err = c.probeByPool(ctx, err)
	}
	if err = c.regain(ctx, full, err); err != nil {
		return fmt.Errorf("pgstore: probe: %w", err)
	}
	return nil
}

// regain returns err, the end of a probe. After a probe that failed, it returns that of acquiring a
// connection of the pool instead, until one is acquired. A server that is full keeps the pool's.
func (c *Conn) regain(ctx context.Context, full bool, err error) error {
	reset, lost := c.probes.ended(time.Now(), full, err)
	if reset {
		c.Pool.Reset()
	}
	if err != nil || !lost {
		return err
	}
	pooled, err := c.Pool.Acquire(ctx)
	if err != nil {
		return err
	}
	pooled.Release()
	c.probes.mu.Lock()
	defer c.probes.mu.Unlock()
	c.probes.lost = false
	return nil
}

// ended notes the end of a probe. It returns whether the pool has to replace its connections, and
// whether it may have none yet.
func (p *probes) ended(now time.Time, full bool, err error) (reset, lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.failed, p.stale, p.lost = now, true, true
		return false, true
	}
	reset = p.stale && !full
	p.answered, p.stale = now, p.stale && full
	return reset, p.lost && now.Sub(p.failed) < held
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
	err = ask(func(sql string) error {
		_, err := own.PgConn().Exec(ctx, sql).ReadAll()
		return err
	})
	if err != nil && own.IsClosed() && Code(err) == "" {
		return fmt.Errorf("%w: %w", io.ErrUnexpectedEOF, err) // pgx may say no more than that it is closed
	}
	return err
}

// ask asks whether the server commits, or where it refuses that, as a standby does or to a role that may
// not, whether it answers.
func ask(exec func(sql string) error) error {
	err := exec(AwaitDisk)
	lost := func(class string) bool { return strings.HasPrefix(Code(err), class) }
	if Code(err) == "" || slices.ContainsFunc([]string{"08", "53", "57P"}, lost) {
		return err
	}
	return exec("SELECT 1")
}

// probeByPool asks by a connection of the pool, since the server has refused another one with an
// error. If all are in use by the application, and PostgreSQL itself refused, it has answered.
func (c *Conn) probeByPool(ctx context.Context, refused error) error {
	if c.full() {
		if Code(refused) == "53300" {
			return nil
		}
		return refused
	}
	err := ask(func(sql string) error {
		_, err := c.Pool.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
		return err
	})
	if ctx.Err() != nil {
		c.Pool.Reset() // connections that are dead without knowing have those places
	}
	return err
}

// InUse reports whether the application has all connections of the pool in use. They may as well be
// dead, so a probe must have been answered lately, and none have failed.
func (c *Conn) InUse() bool {
	if c.Pool == nil || !c.full() {
		return false
	}
	c.probes.mu.Lock()
	defer c.probes.mu.Unlock()
	return time.Since(c.probes.answered) < held && time.Since(c.probes.failed) > held
}

// full reports whether all connections of the pool are in use.
func (c *Conn) full() bool {
	stat := c.Pool.Stat()
	return stat.AcquiredConns() >= stat.MaxConns()
}

const (
	firstMove = 100 * time.Millisecond // the first pause between moves
	lastMove  = time.Second
)

// LeaveReadOnly closes the pool's connections if err says that the server is read-only; connections in
// use are closed when they are given back. After a fail-over they lead to the old primary, and new
// ones lead to the new primary. If the server stays read-only, as by a setting of its role, the
// connections are closed at most once a second.
func (c *Conn) LeaveReadOnly(err error) {
	if c.Pool != nil && Code(err) == "25006" { // read_only_sql_transaction
		c.moves.once(time.Now(), c.Pool.Reset)
	}
}

// moves bounds how often a pool is moved.
type moves struct {
	mu    sync.Mutex
	next  time.Time     // the earliest next move
	pause time.Duration // before it
}

// once calls move, unless it did so a short while ago. A concurrent caller returns after the move, so
// it gets no connection from before.
func (m *moves) once(now time.Time, move func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case now.Before(m.next):
		return
	case now.Sub(m.next) > lastMove: // all was well in between
		m.pause = firstMove
	default:
		m.pause = min(2*m.pause, lastMove)
	}
	m.next = now.Add(m.pause)
	move()
}
