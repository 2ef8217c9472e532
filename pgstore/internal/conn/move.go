package conn

import (
	"sync"
	"time"
)

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
