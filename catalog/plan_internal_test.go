package catalog

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// What is read for one change, or for one key in a transaction, does not grow with a limit's
// overrides, even before the tables have statistics.
func TestReadsByIndexOnly(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.With(migrations.Catalog))
	in := newTable(db.Pool, db.Schema)
	for _, sql := range []string{
		"INSERT INTO rate_limit_definitions AS d (name, kind, rate, period, max_reserved, shards) VALUES ('l', 'token bucket', 5, '1 hour', 0, 1)",
		"INSERT INTO rate_limit_definitions AS d (name, key, rate) SELECT 'l', 'k' || n, 7 FROM generate_series(1, 5000) AS n",
	} {
		if _, err := db.Pool.Exec(t.Context(), in.sql(sql)); err != nil {
			t.Fatal(err)
		}
	}
	for sql, args := range map[string][]any{readChanged: {int64(5000)}, rowsOf: {[]string{"l"}, "k7"}} {
		rows, err := db.Pool.Query(t.Context(), "EXPLAIN "+in.sql(sql), args...)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if all := strings.Join(plan, "\n"); err != nil || strings.Contains(all, "Seq Scan") {
			t.Errorf("%v: reads all rows:\n%s", err, all)
		}
	}
}
