package conn

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	// PassOver is how long a statement waits for a lock that is not to wait for one, since
	// PostgreSQL cannot tell an INSERT or an UPDATE not to wait at all.
	PassOver = time.Millisecond

	// Awaited is how long a statement waits at a time that is to wait for a lock.
	Awaited = time.Second

	// Poll is how often a locked row is looked at without a [Seat], at first.
	Poll = 5 * time.Millisecond

	// SlowPoll is how often it is looked at later.
	SlowPoll = 50 * time.Millisecond
)

// LockWait is a wait for a row that another transaction has locked. A few connections may wait in
// PostgreSQL, where it is first come, first served: so few that however many rows are locked, the
// pool has some for the rest. Without a [Seat], the row is looked at now and then.
type LockWait struct {
	conn  *Conn
	pause time.Duration
	quick bool // the last attempt did not wait in PostgreSQL, though it might
}

// LockWait returns a wait whose first pause without a [Seat] is given.
func (c *Conn) LockWait(pause time.Duration) *LockWait { return &LockWait{conn: c, pause: pause} }

// Attempt runs do once more: with a [Seat], if a connection may wait in PostgreSQL, and else after a
// pause. If ctx is over by then it returns the error of that.
func (w *LockWait) Attempt(ctx context.Context, do func(*Seat) error) error {
	if !w.quick {
		if s := w.conn.seat(); s != nil {
			defer s.Leave()
			begun := time.Now()
			defer func() { w.quick = time.Since(begun) < Poll }()
			return do(s)
		}
	}
	w.quick = false
	if err := Sleep(ctx, w.pause); err != nil {
		return err
	}
	w.pause = min(max(2*w.pause, Poll), SlowPoll)
	return do(nil)
}

// Seat is the right of one connection to wait in PostgreSQL. It is given back when all have left
// that share it: a statement that is awaited to its end waits on when its callers have gone.
type Seat struct {
	seats chan struct{}
	users atomic.Int32
}

// seat returns a Seat, or nil if as many connections wait as may.
func (c *Conn) seat() *Seat {
	select {
	case c.seats <- struct{}{}:
		s := &Seat{seats: c.seats}
		s.Share()
		return s
	default:
		return nil
	}
}

// Share has one more user leave the Seat. A nil Seat has none.
func (s *Seat) Share() {
	if s != nil {
		s.users.Add(1)
	}
}

// Leave gives the Seat back if all who share it have left.
func (s *Seat) Leave() {
	if s != nil && s.users.Add(-1) == 0 {
		<-s.seats
	}
}

// Seated returns how many connections wait in PostgreSQL.
func (c *Conn) Seated() int { return len(c.seats) }
