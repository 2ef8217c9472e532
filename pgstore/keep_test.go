package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// wantNames wants these names to have rows.
func wantNames(t *testing.T, store *pgstore.Store, want ...string) {
	t.Helper()
	if got, err := store.Names(t.Context()); err != nil || !slices.Equal(got, want) {
		t.Errorf("got names %q, error %v, want %q", got, err, want)
	}
}

// Names has each name that has rows once, in order, whoever defined it.
func TestNames(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store) {
		wantNames(t, store)
		others := newStore(t, db)
		want := []string{"", "a", "b", `o'neil \ "$1" %s é`, "shards"}
		for _, name := range want[1:] {
			for key := range 3 {
				mustAllow(t, others, shardedSlow(name, 100, 2).ForN(fmt.Sprint(key), 60)) // has rows of both shards
			}
		}
		wantNames(t, store, want[1:]...)
		insert(t, db, "", 2, 1, noon) // which no definition can have, and a table can
		wantNames(t, store, want...)
		tx := begin(t, db, pgx.ReadCommitted)
		takeIn(t, store, tx, slow("not committed", 1).For("k"))
		wantNames(t, store, want...)
	})
}

// Forget deletes the rows of one name, whatever is in them, and no others.
func TestForget(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store) {
		gone, stays := shardedSlow("gone", 100, 2), slow("gone too", 10)
		for key := range 3 {
			result, err := store.Reserve(t.Context(), gone.ForN(fmt.Sprint(key), 150), stays.For(fmt.Sprint(key)))
			mustTake(t, result, err)
		}
		must(t, errOf(store.Pause(t.Context(), gone, "0", time.Hour)))
		for _, want := range []int64{6, 0} {
			if got, err := store.Forget(t.Context(), "gone"); err != nil || got != want {
				t.Errorf("deleted %d, error %v, want %d", got, err, want)
			}
		}
		wantNames(t, store, "gone too")
		if got := len(rowsOf(t, db, "gone too")); got != 3 {
			t.Errorf("%d rows of another name stayed, want 3", got)
		}
		for key := range 3 {
			wantLeft(t, store, gone.ForN(fmt.Sprint(key), 0), 100)
			mustAllow(t, store, gone.ForN(fmt.Sprint(key), 100))
		}
	})
}

// Ready is nil where the table is as the statements want it.
func TestReady(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store) {
		if err := store.Ready(t.Context()); err != nil {
			t.Errorf("got %v, want nil", err)
		}
		for _, column := range []string{"paused", "ts"} {
			execIn(t, db, `ALTER TABLE {schema}.rate_limits DROP COLUMN `+column)
			wantNotMigrated(t, store.Ready(t.Context()), db.Schema)
		}
	})
}

func wantNotMigrated(t *testing.T, err error, where string) {
	t.Helper()
	if !errors.Is(err, pgstore.ErrNotMigrated) || !strings.Contains(fmt.Sprint(err), where) || codeOf(err) == "" {
		t.Errorf("got %v, want %v, with PostgreSQL's own, and that it looked in %q", err, pgstore.ErrNotMigrated, where)
	}
}

// ErrNotMigrated says where the store looked: in the schema of its Config, or
// along the search_path, which is another's business.
func TestNotMigratedSaysWhere(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	for _, test := range []struct{ name, schema, where, not string }{
		{"Config.Schema set", db.Schema, fmt.Sprintf("schema %q", db.Schema), "search_path"},
		{"no such schema", "there is none", `schema "there is none"`, "search_path"},
		{"Config.Schema not set", "", "search_path", db.Schema},
	} {
		t.Run(test.name, func(t *testing.T) {
			store := newStore(t, &pgtest.DB{Schema: test.schema, Pool: db.Pool})
			r := slow("l", 10).For("k")
			for _, verb := range append(tableVerbs, ownVerbs...) {
				_, err := verb.do(t.Context(), store, r)
				wantNotMigrated(t, err, test.where)
				if strings.Contains(fmt.Sprint(err), test.not) {
					t.Errorf("%s: got %v, want no word of %q", verb.name, err, test.not)
				}
			}
			for _, verb := range verbsInTx {
				tx := begin(t, db, pgx.ReadCommitted)
				_, err := verb.do(t.Context(), store, tx, r)
				wantNotMigrated(t, err, test.where)
				end(t, tx.Rollback)
			}
		})
	}
}

// A search_path that leads to the table is as good as its schema.
func TestReadyAlongTheSearchPath(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	along := another(t, db, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = "pg_catalog, " + db.Schema })
	along.Schema = ""
	store := newStore(t, along)
	if err := store.Ready(t.Context()); err != nil {
		t.Errorf("got %v, want nil", err)
	}
	mustAllow(t, store, slow("l", 10).For("k"))
	wantNames(t, store, "l")
}

// A server before 14 is refused, although it has the table. Of any other, a function that
// stands before PostgreSQL's own says that it is one.
func TestReadyRefusesAnOldServer(t *testing.T) {
	db := pgtest.New(t)
	execIn(t, db, `CREATE FUNCTION {schema}.current_setting(text) RETURNS text LANGUAGE sql AS
		$$SELECT least(pg_catalog.current_setting($1)::int4, 130023)::text$$`)
	old := another(t, db, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = db.Schema + ", pg_catalog" })
	err := newStore(t, old).Ready(t.Context())
	if err == nil || errors.Is(err, pgstore.ErrNotMigrated) || !strings.Contains(err.Error(), "and the oldest that the statements run on is 14") {
		t.Errorf("got %v, want that it is too old", err)
	}
}

// What Config says no store can do is an error that names the field.
func TestConfigInvalid(t *testing.T) {
	for _, test := range []struct {
		field  string
		config pgstore.Config
	}{
		{"Timeout", pgstore.Config{Timeout: -time.Second}},
		{"Timeout", pgstore.Config{Timeout: pgstore.NoTimeout - 1}},
		{"RetryBudget", pgstore.Config{RetryBudget: -1}},
		{"Escrow", pgstore.Config{Escrow: -1}},
		{"Escrow", pgstore.Config{Escrow: pgstore.MaxEscrow + 1}},
		{"Escrow", pgstore.Config{Escrow: time.Nanosecond}},
	} {
		store, err := pgstore.New(nil, &test.config)
		var field *ratelimit.FieldError
		if store != nil || !errors.As(err, &field) || field.Field != test.field || !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%+v: got %v, error %v, want one of %s", test.config, store, err, test.field)
		}
	}
	for _, timeout := range []time.Duration{pgstore.NoTimeout, 0, 1} {
		if _, err := pgstore.New(nil, &pgstore.Config{Timeout: timeout}); err != nil {
			t.Errorf("Timeout %d: got %v, want nil", timeout, err)
		}
	}
}

// Without a time-out a decision on its own waits for as long as it takes, beyond
// what would be the default, and disturbs nobody meanwhile; with one it does not.
func TestNoTimeout(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const byDefault = 5 * time.Second
	s := newScene(t, 8, withTimeout(pgstore.NoTimeout))
	h := s.hold(t, 1, true)
	ctx, cancel := context.WithCancel(t.Context()) // has no deadline
	defer cancel()
	ends := make(chan error)
	verbs := []func() error{
		func() error { return waiting[0].do(ctx, s.store, h.limit, h.keys[0]) },
		func() error { _, err := s.store.Credit(ctx, h.limit.For(h.keys[0])); return err },
		func() error { return waiting[3].do(ctx, s.store, h.limit, h.keys[0]) },
	}
	for _, verb := range verbs {
		go func() { ends <- verb() }()
	}
	waited := time.After(byDefault + 500*time.Millisecond)
	waitFor(t, s.side, h.tx, 1)
	s.wantUndisturbed(t)
	select {
	case err := <-ends:
		t.Fatalf("got %v while the row was locked, want it to wait", err)
	case <-waited:
	}
	end(t, h.tx.Rollback)
	for range verbs {
		should(t, <-ends)
	}
}
