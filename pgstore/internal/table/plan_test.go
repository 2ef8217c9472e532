package table

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// The plans that PostgreSQL keeps are made while the table is small, and must
// do when it has grown: none may go through the whole table.
func TestKeptPlans(t *testing.T) {
	db := pgtest.New(t)
	sql := New(db.Schema, false, time.Second)
	conn, err := db.Pool.Acquire(t.Context())
	noError(t, err)
	defer conn.Release()
	explain(t, conn, "SET plan_cache_mode = force_generic_plan")
	for _, test := range []struct{ name, sql, args, want string }{
		{"read", sql.common["read"], "('{a}', '{k}', '{0}')", "Index Scan"},
		{"lock", sql.common["lock"], "('{a}', '{k}', '{0}')", "Index Scan"},
		{"await", sql.common["await"], "('a', 'k', 0)", "Index Scan"},
		{"write", sql.common["write"], "('{a}', '{k}', '{0}', '{1}', '{now}', '{now}', ARRAY['{1}'])", "Index Scan"},
		{"bucket_grant", sql.kinds[bucket.TokenBucket].grant.sql, "('a', 'k', 0, 1, 1, 1, 1, 1, NULL)", "Index Scan"},
		{"window_grant", sql.kinds[bucket.FixedWindow].grant.sql, "('a', 'k', 0, 1, 1, 1, 1, 1, NULL)", "Index Scan"},
		{"slots_grant", sql.kinds[bucket.SlidingWindow].grant.sql, "('a', 'k', 0, 1, 1, 1, 1, 18, NULL)", "Index Scan"},
		{"bucket_in_turn", sql.kinds[bucket.TokenBucket].grantInTurn.sql, "('a', 'k', 0, 1, 1, 1, 1, 1, NULL)", "Index Scan"},
		{"window_in_turn", sql.kinds[bucket.FixedWindow].grantInTurn.sql, "('a', 'k', 0, 1, 1, 1, 1, 1, NULL)", "Index Scan"},
		{"slots_in_turn", sql.kinds[bucket.SlidingWindow].grantInTurn.sql, "('a', 'k', 0, 1, 1, 1, 1, 18, NULL)", "Index Scan"},
		{"bucket_many", sql.kinds[bucket.TokenBucket].grantMany.sql, "('{k}', '{1}', '{0}', '{1}', '{1}', '{a}', '{1}', '{1}', '{1}', NULL)", "Index Scan"},
		{"window_many", sql.kinds[bucket.FixedWindow].grantMany.sql, "('{k}', '{1}', '{0}', '{1}', '{1}', '{a}', '{1}', '{1}', '{1}', NULL)", "Index Scan"},
		{"slots_many", sql.kinds[bucket.SlidingWindow].prefetch.sql, "('{k}', '{1}', '{0}', '{1}', '{1}', '{a}', '{1}', '{1}', '{18}', NULL, '{1}', '{1}', '{1}', '{1}', '{now}')", "Index Scan"},
		{"slots_many_in_turn", sql.kinds[bucket.SlidingWindow].prefetchInTurn.sql, "('{k}', '{1}', '{0}', '{1}', '{1}', '{a}', '{1}', '{1}', '{18}', NULL, '{1}', '{1}', '{1}', '{1}', '{now}')", "Index Scan"},
		{"prefetch_many", sql.kinds[bucket.TokenBucket].prefetch.sql, "('{k}', '{1}', '{0}', '{1}', '{1}', '{a}', '{1}', '{1}', '{1}', NULL, '{1}', '{1}', '{1}', '{1}', '{1}', '{now}', '{1}')", "Index Scan"},
		{"prefetch_in_turn", sql.kinds[bucket.TokenBucket].prefetchInTurn.sql, "('{k}', '{1}', '{0}', '{1}', '{1}', '{a}', '{1}', '{1}', '{1}', NULL, '{1}', '{1}', '{1}', '{1}', '{1}', '{now}', '{1}')", "Index Scan"},
		{"find", sql.common["find"], "('a', 'k')", "Scan"},
		{"reset", sql.common["reset"], "('a', 'k')", "Scan"},
		{"reset_left", sql.common["reset_left"], "('a', 'k')", "Scan"},
		{"permit_look", sql.inflight["permit_look"], "('a', 'k')", "Scan"},
		{"permit_look_part", sql.inflight["permit_look_part"], "('a', 'k', 2000, 1000, 60000)", "Index Scan"},
		{"names", sql.maintenance["names"], "", "Index Only Scan"},
		{"page", sql.maintenance["page"], "('a', 'k', 0, 1000, NULL)", "Index Scan"},
	} {
		t.Run(test.name, func(t *testing.T) {
			explain(t, conn, "PREPARE "+test.name+" AS "+test.sql)
			plan := explain(t, conn, "EXPLAIN EXECUTE "+test.name+test.args)
			if !strings.Contains(plan, test.want) || strings.Contains(plan, "Seq Scan") {
				t.Errorf("want a %s and no Seq Scan:\n%s", test.want, plan)
			}
		})
	}
}

// explain sends SQL as it is written, and returns its rows.
func explain(t *testing.T, conn *pgxpool.Conn, sql string) string {
	t.Helper()
	results, err := conn.Conn().PgConn().Exec(t.Context(), sql).ReadAll() // $1 stays $1
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	var lines []string
	for _, row := range results[0].Rows {
		lines = append(lines, string(row[0]))
	}
	return strings.Join(lines, "\n")
}

// A page of a large table is read along the index, and nothing but what is on it.
func TestPageReadsNothingElse(t *testing.T) {
	db := pgtest.New(t)
	sql := New(db.Schema, false, time.Second)
	conn, err := db.Pool.Acquire(t.Context())
	noError(t, err)
	defer conn.Release()
	var plan string
	for _, text := range []string{
		`INSERT INTO ` + db.Schema + `.rate_limits (name, key, shard, value, ts)
			SELECT n, 'org ' || i, 0, 5, clock_timestamp() FROM generate_series(1, 20000) AS i, unnest('{a,b,c}'::text[]) AS n`,
		`ANALYZE ` + db.Schema + `.rate_limits`,
		`SET plan_cache_mode = force_generic_plan`,
		`PREPARE page AS ` + sql.maintenance["page"],
		`EXPLAIN (ANALYZE, TIMING OFF, SUMMARY OFF, COSTS OFF) EXECUTE page('b', 'org 15', 0, 100, NULL)`,
	} {
		plan = explain(t, conn, text)
	}
	if strings.Count(plan, "rows=100") != 2 || !strings.Contains(plan, "Index Scan") || strings.Contains(plan, "Removed") || strings.Contains(plan, "Sort") {
		t.Errorf("want 100 rows read along the index, and no others:\n%s", plan)
	}
}

// The planner keeps its plan of grants for several rows: for few rows and for many, while the
// table is young and when it is not.
func TestGrantManyKeepsItsPlan(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	sql := New(db.Schema, false, time.Second)
	conn, err := db.Pool.Acquire(t.Context())
	noError(t, err)
	defer conn.Release()
	grant := func(n int) {
		t.Helper()
		grants := make([]Grant, n)
		for i := range grants {
			count := float64(i)
			grants[i] = grantOf(ratelimit.TokenBucket{Name: "a", Rate: 1e9, Period: time.Second}.ForN(fmt.Sprint("k", i), count))
		}
		slices.SortFunc(grants, func(g, h Grant) int { return g.Row.Compare(h.Row) })
		for range 50 { // of which the first five are planned anyway
			noError(t, (plainTable{sql}).grant(t.Context(), conn, grants, nil))
		}
	}
	for _, rows := range []int{0, 20_000} {
		if _, err := conn.Exec(t.Context(), `INSERT INTO `+db.Schema+`.rate_limits (name, key, shard, value, ts)
SELECT 'a', 'k' || i, 0, 1e9, clock_timestamp() FROM generate_series(1, $1::int4) AS i`, rows); err != nil {
			t.Fatal(err)
		}
		if rows > 0 {
			noError(t, errOf(conn.Exec(t.Context(), `ANALYZE `+db.Schema+`.rate_limits`)))
		}
		for _, n := range []int{2, 20, 500} {
			grant(n)
		}
		var kept, planned int
		noError(t, conn.QueryRow(t.Context(), `SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE statement = $1`, sql.kinds[bucket.TokenBucket].grantMany.sql).Scan(&kept, &planned))
		if planned > 5 || kept < 80 {
			t.Errorf("%d rows: planned %d times and kept the plan %d times", rows, planned, kept)
		}
	}
}
