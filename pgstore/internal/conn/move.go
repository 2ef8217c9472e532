package conn

import (
	"sync"
	"time"
)

const (
	firstMove = 100 * time.Millisecond // until a pool is moved again
	lastMove  = time.Second
)

// LeaveReadOnly has the pool's connections closed, those in use when they are given back, if err says that
// the server is read-only: after a fail-over they lead to the old primary, and connections that are
// made from now on to the new one. A pool that comes to a read-only server again is moved once a
// second in the end, and not for each call: its role may be read-only by a setting.
func (c *Conn) LeaveReadOnly(err error) {
	if c.Pool != nil && Code(err) == "25006" { // read_only_sql_transaction
		c.moves.once(time.Now(), c.Pool.Reset)
	}
}

// moves bounds how often a pool is moved.
type moves struct {
	mu    sync.Mutex
	next  time.Time     // not before
	pause time.Duration // that ends then
}

// once moves, unless that was done a short while ago: it returns when no connection from before is
// to be had.
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
