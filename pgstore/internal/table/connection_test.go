package table

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
)

// onBatch is a tracer that does something when a batch is about to be sent.
type onBatch struct {
	traced.Statements
	do func(*pgx.Conn)
}

func (o *onBatch) TraceBatchStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	o.do(conn)
	return ctx
}

// keeping is a table that keeps a connection of a pool for grants that prefetch.
type keeping struct {
	*Table
	t      *testing.T
	pool   *pgxpool.Pool
	latest *pgx.Conn // that was sent a batch
}

// newKeeping is one of a pool with as many connections, all of which are there.
func newKeeping(t *testing.T, conns int32) *keeping {
	k := &keeping{t: t}
	note := &onBatch{do: func(conn *pgx.Conn) { k.latest = conn }}
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.MaxConns, c.ConnConfig.Tracer = conns, note }))
	k.Table, k.pool = New(db.Schema, false, time.Second), db.Pool
	g := prefetchingGrant()
	putAll(t, db, k.Table, []Grant{g}, []bucket.State{g.Definition.Fresh("k", time.Now())})
	k.all(conns)()
	return k
}

// all acquires so many connections, and returns a function that gives them back.
func (k *keeping) all(n int32) (release func()) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(k.t.Context(), 20*time.Second)
	defer cancel()
	conns := make([]*pgxpool.Conn, n)
	for i := range conns {
		var err error
		if conns[i], err = k.pool.Acquire(ctx); err != nil {
			k.t.Fatal(err)
		}
	}
	return func() {
		for _, conn := range conns {
			conn.Release()
		}
	}
}

// prefetch prefetches, and returns the connection. However long the machine stands still then, it
// does not become too old to be kept.
func (k *keeping) prefetch() *pgx.Conn {
	k.t.Helper()
	grants := []Grant{prefetchingGrant()}
	if err := k.Decider().Grant(k.t.Context(), k.pool, grants, true, nil); err != nil || !grants[0].Taken.OK {
		k.t.Fatal(grants[0].Taken, err)
	}
	k.age(-time.Hour, -time.Hour)
	return k.latest
}

// age has a connection that is kept acquired, and used last, so long ago.
func (k *keeping) age(acquired, used time.Duration) {
	k.kept.mu.Lock()
	defer k.kept.mu.Unlock()
	if s := k.kept.kept; s != nil {
		s.acquired, s.used = time.Now().Add(-acquired), time.Now().Add(-used)
	}
}

// keeps reports whether a connection is kept.
func (k *keeping) keeps() bool {
	k.kept.mu.Lock()
	defer k.kept.mu.Unlock()
	return k.kept.kept != nil
}

// Grants that prefetch have one session, which has planned them, whatever others the pool has.
func TestPrefetchingKeepsItsSession(t *testing.T) {
	t.Parallel()
	k := newKeeping(t, 4)
	first := k.prefetch()
	for range 5 {
		if !k.keeps() || k.pool.Stat().AcquiredConns() != 1 {
			t.Fatalf("%d connections are acquired, want one, which is kept", k.pool.Stat().AcquiredConns())
		}
		k.all(2)() // of which one was used last
		if conn := k.prefetch(); conn != first {
			t.Fatal("another session prefetches")
		}
	}
	k.Close()
	if n := k.pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections are acquired after Close", n)
	}
	if k.prefetch(); k.keeps() {
		t.Error("one is kept after Close")
	}
}

// A pool that has no other idle connection has the kept one back: at once, or soon.
func TestPoolHasItsSessionBack(t *testing.T) {
	t.Parallel()
	alone := newKeeping(t, 1)
	if alone.prefetch(); alone.keeps() {
		t.Error("the only connection of a pool is kept")
	}
	k := newKeeping(t, 2)
	k.prefetch()
	if !k.keeps() {
		t.Fatal("none is kept beside an idle one")
	}
	release := k.all(2)
	if k.keeps() {
		t.Error("it is kept and given back")
	}
	release()
	if k.prefetch(); !k.keeps() {
		t.Fatal("none is kept again")
	}
	k.all(2)()
}

// A connection that is not used any more is given back, and so is one that is used for long, so
// that the pool can close it.
func TestSessionIsNotKeptForLong(t *testing.T) {
	t.Parallel()
	k := newKeeping(t, 2)
	k.prefetch()
	k.age(-time.Hour, 0)
	for end := time.Now().Add(20 * time.Second); k.keeps(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a connection that is not used is kept")
		}
	}
	k.prefetch()
	k.age(keptInAll, -time.Hour)
	if k.prefetch(); k.keeps() || k.pool.Stat().AcquiredConns() != 0 {
		t.Error("a connection is kept for longer than it may be")
	}
	s, err := k.kept.acquire(t.Context(), k.pool)
	noError(t, err)
	noError(t, s.Conn.Conn().Close(t.Context()))
	if k.kept.release(t.Context(), s); k.keeps() {
		t.Error("a connection that is closed is kept")
	}
}
