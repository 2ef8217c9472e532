package migrate

import (
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// What is read from the SQL of all sets is what PostgreSQL has afterwards, but for version tables and the
// indexes of primary keys.
func TestCreationsAreAllThatIsMade(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	var want []string
	for _, set := range migrations.Sets() {
		if _, err := Up(t.Context(), db.Pool, &Config{Schema: db.Schema, Set: set}); err != nil {
			t.Fatal(err)
		}
		want = append(want, creations(set.UpSQL())...)
	}
	rows, err := db.Pool.Query(t.Context(), "SELECT unnest(ARRAY("+objects+")) FROM pg_namespace AS n WHERE nspname = $1", db.Schema)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(want)
	slices.Sort(got)
	got = slices.DeleteFunc(got, func(object string) bool {
		return strings.Contains(object, "_version") || strings.HasSuffix(object, "_pkey")
	})
	if !slices.Equal(got, want) {
		t.Errorf("PostgreSQL has %q\nand the SQL creates %q", got, want)
	}
}
