package pgstore_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var hostile = []string{
	"", "k", "'", "\"", "\\", "'; DROP TABLE rate_limits; --", "$1", "{table}", "%s", "a\nb", "\x00", "\xff", "é", "🦆",
	"NULL", "pg_catalog", strings.Repeat("x", 63), strings.Repeat("x", 64), strings.Repeat("é", 200), strings.Repeat("x", 3000),
}

// Any name and key is that of a row of its own, or is an error that changes nothing.
func TestHostileNamesAndKeys(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	for _, s := range hostile {
		for _, r := range []ratelimit.Request{slow(s, 10).For("k"), slow("l", 10).For(s)} {
			result, err := store.Allow(t.Context(), r)
			if errors.Is(err, ratelimit.ErrInvalid) {
				continue
			}
			must(t, err)
			wantLeft(t, store, r, 9)
			if rows := rowsOf(t, db, ratelimit.NameOf(r.Limit)); len(rows) != 1 {
				t.Errorf("name %q, key %q: got %v, and rows %q", ratelimit.NameOf(r.Limit), r.Key, result, rows)
			}
			mustReset(t, store, r.Limit, r.Key)
		}
	}
}

// Any name of a schema leads to that schema, and never to another statement.
func TestHostileSchemas(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	for _, name := range hostile {
		name = db.Schema + name
		quoted := pgx.Identifier{name}.Sanitize()
		store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: name})
		if err != nil {
			continue // it says so at once
		}
		_, err = db.Pool.Exec(t.Context(), "CREATE SCHEMA "+quoted+"; SET search_path = "+quoted+"; "+migrations.UpSQL()+"; RESET search_path")
		if took := store.Take(t.Context(), slow("l", 10).For("k")); (took == nil) != (err == nil) {
			t.Errorf("schema %q: %v when it was made, and %v", name, err, took)
		}
		if err == nil {
			should(t, errOf(db.Pool.Exec(t.Context(), "DROP SCHEMA "+quoted+" CASCADE")))
		}
	}
}
