package table

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// scanning is a table as if PostgreSQL had statistics of it.
func scanning(table *Table) *Table {
	later := time.Now().Add(time.Hour)
	table.statistics.enough.Store(true)
	table.statistics.asked.Store(&later)
	return table
}

// A statement that the planner may take for a scan of all rows of a limit waits until it
// has statistics, which show that to be the longer way.
func TestScanWaitsForStatistics(t *testing.T) {
	db := pgtest.New(t)
	table := New(db.Schema, false, time.Second)
	if _, err := db.Pool.Exec(t.Context(), `INSERT INTO `+db.Schema+`.rate_limits (name, key, shard, value, ts)
SELECT 'a', lpad(i::text, 5, '0'), 0, 1e9, clock_timestamp() FROM generate_series(1, 5000) AS i`); err != nil {
		t.Fatal(err)
	}
	conn, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for range 3 {
		table.statistics.asked.Store(nil)
		grantAlike(t, conn, table)
	}
	if prepared(t, conn, table.kinds["bucket"]["grant_alike"].sql) {
		t.Error("the table was scanned before there were statistics")
	}
	if _, err := db.Pool.Exec(t.Context(), `ANALYZE `+db.Schema+`.rate_limits`); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); !prepared(t, conn, table.kinds["bucket"]["grant_alike"].sql); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) { // the server tells of it a little later
			t.Fatal("never used the statistics")
		}
		table.statistics.asked.Store(nil)
		grantAlike(t, conn, table)
	}
}

// grantAlike takes one token of each of some keys.
func grantAlike(t *testing.T, conn *pgxpool.Conn, table *Table) {
	t.Helper()
	limit := ratelimit.TokenBucket{Name: "a", Rate: 1e9, Period: time.Second}
	grants := make([]Grant, 40)
	for i := range grants {
		call, err := decide.New(false, limit.For(fmt.Sprintf("%05d", 100*(i+1))))
		if err != nil {
			t.Fatal(err)
		}
		grants[i] = Grant{Change: call.Demands[0].Change(0, 0, 1), Need: 1}
	}
	if err := (plainTable{table}).grant(t.Context(), conn, grants, nil); err != nil {
		t.Fatal(err)
	}
	for i := range grants {
		if !grants[i].Taken.OK {
			t.Fatalf("%v: refused", grants[i].Row)
		}
	}
}

func prepared(t *testing.T, conn *pgxpool.Conn, sql string) (yes bool) {
	t.Helper()
	if err := conn.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_prepared_statements WHERE statement = $1)`, sql).Scan(&yes); err != nil {
		t.Fatal(err)
	}
	return yes
}
