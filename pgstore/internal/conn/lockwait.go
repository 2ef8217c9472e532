package conn

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// PassOver is the lock_timeout of a statement that should not wait for a lock. PostgreSQL has no
	// INSERT or UPDATE that does not wait at all.
	PassOver = time.Millisecond

	// Awaited is the lock_timeout of a statement that should wait for a lock.
	Awaited = time.Second

	// Poll is the first pause between attempts on a locked row without a [Seat].
	Poll = 5 * time.Millisecond

	// SlowPoll is the longest of these pauses.
	SlowPoll = 50 * time.Millisecond
)

// LockWait is a wait for a row that another transaction has locked. A few connections may wait in
// PostgreSQL, where waiting is first come, first served. They are so few that the pool has others left,
// however many rows are locked. Without a [Seat] the row is tried now and then.
type LockWait struct {
	conn  *Conn
	pause time.Duration
	quick bool // the last attempt did not wait in PostgreSQL, though it might
}

// LockWait returns a wait. pause is its first pause without a [Seat].
func (c *Conn) LockWait(pause time.Duration) *LockWait { return &LockWait{conn: c, pause: pause} }

// Attempt runs do with a [Seat] if a connection may wait in PostgreSQL, and else without one after a
// pause. It returns ctx's error if ctx ends during the pause.
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

// Seat is the right of one connection to wait in PostgreSQL. It is given back when all of its users
// have left, since a statement may wait on after its callers gave up.
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

// Share adds a user, who must leave. It does nothing on a nil Seat.
func (s *Seat) Share() {
	if s != nil {
		s.users.Add(1)
	}
}

// Leave removes a user, and gives the Seat back after the last one.
func (s *Seat) Leave() {
	if s != nil && s.users.Add(-1) == 0 {
		<-s.seats
	}
}

// lockOfTable says which session has or awaits a lock of the table that decisions wait for. It neither
// reads nor locks the table. Of several locks one that is granted explains more.
const lockOfTable = `SELECT format('table %s is %s by %s (%s)', l.relation::regclass,
	CASE WHEN l.granted THEN 'locked' ELSE 'waited for' END,
	coalesce('pid ' || l.pid, 'a prepared transaction'), concat_ws(', ', l.mode, nullif(a.application_name, '')))
FROM pg_locks AS l LEFT JOIN LATERAL pg_stat_get_activity(l.pid) AS a ON true
WHERE l.locktype = 'relation' AND l.relation = to_regclass($1::text)
	AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
	AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
ORDER BY l.granted DESC LIMIT 1`

const (
	lockLook  = 200 * time.Millisecond // for a look at the table's lock, with its connection
	lockKnown = time.Second            // for which its answer is used
)

// tableLock is what was seen last of the table's lock.
type tableLock struct {
	mu sync.Mutex
	at time.Time
	by string
}

// tableLock says which session has locked the table or waits to, such as a migration behind a dump; ""
// if none does, or the database does not say so at once. While the pool has no connection left it does
// not look.
func (c *Conn) tableLock() string {
	if c.Pool == nil {
		return ""
	}
	l := &c.lock
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.at) < lockKnown {
		return l.by
	}
	if stat := c.Pool.Stat(); stat.IdleConns() == 0 && stat.TotalConns() >= stat.MaxConns() {
		return ""
	}
	table := pgx.Identifier{Table}
	if c.Schema != "" {
		table = pgx.Identifier{c.Schema, Table}
	}
	ctx, cancel := context.WithTimeout(context.Background(), lockLook)
	defer cancel()
	l.by = ""
	_ = c.Pool.QueryRow(ctx, lockOfTable, pgx.QueryExecModeExec, table.Sanitize()).Scan(&l.by) // an error is no answer
	l.at = time.Now()
	return l.by
}
