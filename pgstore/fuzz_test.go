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
func FuzzNamesAndKeys(f *testing.F) {
	for _, s := range hostile {
		f.Add(s, "k")
		f.Add("l", s)
	}
	db := pgtest.New(f)
	store := newStore(f, db)
	f.Fuzz(func(t *testing.T, name, key string) {
		request := slow(name, 10).For(key)
		result, err := store.Allow(t.Context(), request)
		if err != nil {
			if !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("name %q, key %q: %v", name, key, err)
			}
			return
		}
		var there bool
		if err := db.Pool.QueryRow(t.Context(), "SELECT value = $3 FROM "+db.Schema+".rate_limits WHERE name = $1 AND key = $2", name, key, result.Value).Scan(&there); err != nil || !there {
			t.Errorf("name %q, key %q: its row has not what it was told: %v", name, key, err)
		}
		should(t, store.Reset(t.Context(), request.Limit, key))
	})
}

// Any name of a schema leads to that schema, and never to another statement.
func FuzzSchema(f *testing.F) {
	for _, s := range hostile {
		f.Add(s)
	}
	db := pgtest.NewEmpty(f)
	f.Fuzz(func(t *testing.T, name string) {
		name = db.Schema + name
		quoted := pgx.Identifier{name}.Sanitize()
		store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: name})
		if err != nil {
			return // it says so at once
		}
		if _, err := db.Pool.Exec(t.Context(), "CREATE SCHEMA "+quoted+"; SET search_path = "+quoted+"; "+migrations.UpSQL()+"; RESET search_path"); err != nil {
			if _, err := store.Allow(t.Context(), slow("l", 10).For("k")); err == nil {
				t.Errorf("schema %q: cannot be, and grants", name)
			}
			return
		}
		defer func() {
			should(t, errOf(db.Pool.Exec(t.Context(), "DROP SCHEMA "+quoted+" CASCADE")))
		}()
		if err := store.Take(t.Context(), slow("l", 10).For("k")); err != nil {
			t.Errorf("schema %q: %v", name, err)
		}
	})
}
