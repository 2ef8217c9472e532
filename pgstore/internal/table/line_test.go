package table

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// TestGrantAwaitsItsTurn: a grant that waits for its row stands in the line of those who do, and
// tells how long; the lease of one that prefetches begins after that.
func TestGrantAwaitsItsTurn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	table := New(db.Schema, false, time.Second)
	g := prefetchingGrant()
	putAll(t, db, table, []Grant{g}, []bucket.State{g.Definition.Fresh("k", time.Now())})
	conn, err := db.Pool.Acquire(t.Context())
	noError(t, err)
	defer conn.Release()
	leave := standInFront(t, conn, Lock(db.Schema, g.Row))
	grants := []Grant{g}
	done := make(chan error, 1)
	begun := time.Now()
	go func() { done <- table.Decider().Grant(t.Context(), db.Pool, grants, true, nil) }()
	untilInLine(t, conn, Lock(db.Schema, g.Row))
	var gone time.Time
	noError(t, conn.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&gone))
	leave()
	noError(t, <-done)
	if g := grants[0]; !g.Taken.OK || g.Taken.Extra <= 0 || g.Waited <= 0 || g.Waited > time.Since(begun) || g.Taken.After.TS.Before(gone) {
		t.Errorf("took %+v at %v after %v, want it after %v", g.Taken, g.Taken.After.TS, g.Waited, gone)
	}
}

// TestGrantWithoutTurns: a role that may not use advisory locks waits for the row all the same.
func TestGrantWithoutTurns(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	role := strings.Replace(db.Schema, "ratelimit_test_", "ratelimit_role_", 1)
	exec := func(sql string) {
		t.Helper()
		noError(t, errOf(db.Pool.Exec(context.Background(), sql)))
	}
	table := New(db.Schema, false, time.Second)
	g := prefetchingGrant()
	putAll(t, db, table, []Grant{g}, []bucket.State{g.Definition.Fresh("k", time.Now())})
	// An overload that is found first is denied, and not PostgreSQL's, which others use meanwhile.
	exec("CREATE ROLE " + role + "; GRANT USAGE ON SCHEMA " + db.Schema + " TO " + role + "; GRANT SELECT, INSERT, UPDATE ON " + db.Schema + ".rate_limits TO " + role)
	t.Cleanup(func() { exec("DROP OWNED BY " + role + "; DROP ROLE " + role) })
	exec("CREATE FUNCTION " + db.Schema + ".pg_advisory_xact_lock(int8) RETURNS void LANGUAGE sql AS ''; REVOKE ALL ON FUNCTION " + db.Schema + ".pg_advisory_xact_lock(int8) FROM PUBLIC")
	config := db.Pool.Config()
	config.ConnConfig.RuntimeParams["search_path"] = db.Schema + ", pg_catalog"
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SET ROLE "+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	noError(t, err)
	defer pool.Close()
	for range 2 {
		grants := []Grant{g}
		if err := table.Decider().Grant(t.Context(), pool, grants, true, nil); err != nil || !grants[0].Taken.OK || !table.noTurns.Load() {
			t.Errorf("got %+v, %v, want it granted without a turn", grants[0].Taken, err)
		}
	}
}

// prefetchingGrant takes one token of a bucket, and a few ahead.
func prefetchingGrant() Grant {
	g := grantOf(ratelimit.TokenBucket{Name: "line", Rate: 100, Period: time.Minute}.For("k"))
	g.Lasts, g.Lowered, g.Prefetch = 100*time.Millisecond, 99, 5
	return g
}

// standInFront has a session stand at the head of a line, until it is to leave.
func standInFront(t *testing.T, conn *pgxpool.Conn, lock int64) (leave func()) {
	t.Helper()
	var batch pgx.Batch
	QueueLock(&batch, lock, time.Minute, func(bool) {})
	noError(t, conn.SendBatch(t.Context(), &batch).Close())
	return func() {
		t.Helper()
		noError(t, errOf(conn.Exec(t.Context(), "SELECT pg_advisory_unlock($1)", lock)))
	}
}

// untilInLine waits until a session stands in line, and returns its process.
func untilInLine(t *testing.T, conn *pgxpool.Conn, lock int64) (pid int32) {
	t.Helper()
	for {
		err := conn.QueryRow(t.Context(), `SELECT pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
			WHERE locktype = 'advisory' AND NOT granted AND (classid::int8 << 32) | objid::int8 = $1`, lock).Scan(&pid)
		if err == nil {
			return pid
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}
