package erase_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/erase"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/refusals"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var (
	api     = ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Hour}
	strict  = ratelimit.SlidingWindow{Name: "strict", Rate: 10, Period: time.Hour}
	exports = ratelimit.InFlight{Name: "exports", Limit: 2, Lease: time.Hour}
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }

// inTx runs do in a transaction that is committed.
func inTx(t *testing.T, db *pgtest.DB, do func(tx pgx.Tx) (erase.Counts, error)) (counts erase.Counts, err error) {
	t.Helper()
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) (err error) {
		counts, err = do(tx)
		return err
	})
	return counts, err
}

// newCatalog returns a catalog that has read what there is.
func newCatalog(t *testing.T, db *pgtest.DB) *catalog.Catalog {
	t.Helper()
	c, err := catalog.New(db.Pool, &catalog.Config{Schema: db.Schema})
	must(t, err)
	must(t, c.Refresh(t.Context()))
	return c
}

// found returns the columns of tables of the library that have a text somewhere, and how many columns
// were looked through.
func found(t *testing.T, db *pgtest.DB, text string) (in []string, columns int) {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), `SELECT c.relname::text, a.attname::text FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
WHERE c.relnamespace = $1::text::regnamespace AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped`, db.Schema)
	must(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ Table, Column string }])
	must(t, err)
	for _, c := range all {
		var has bool
		must(t, db.Pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM "+pgx.Identifier{db.Schema, c.Table}.Sanitize()+" AS t WHERE position($1::text IN t."+pgx.Identifier{c.Column}.Sanitize()+"::text) > 0)", text).Scan(&has))
		if has {
			in = append(in, c.Table+"."+c.Column)
		}
	}
	return in, len(all)
}

// Of a key that is in every table nothing is left in any column of any, and of others all is there.
func TestErase(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.New(t, pgtest.With(migrations.Catalog), pgtest.With(migrations.Functions), pgtest.With(migrations.Refusals), pgtest.With(migrations.River))
	refused, err := refusals.New(db.Pool, &refusals.Config{Schema: db.Schema})
	must(t, err)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Observe: refused.Observe})
	must(t, err)
	c, err := catalog.New(db.Pool, &catalog.Config{Schema: db.Schema, Store: store})
	must(t, err)
	must(t, c.Publish(ctx, api, strict))
	must(t, c.PublishInFlight(ctx, exports))
	const person = "ann@example.com"
	for _, key := range []string{person, "bob@example.com"} {
		must(t, store.Take(ctx, api.ForN(key, 8), strict.ForN(key, 3)))
		must(t, errOf(store.Allow(ctx, api.ForN(key, 9))))
		if permit, err := store.Permits().Acquire(ctx, exports.For(key)); err != nil || !permit.OK {
			t.Fatal(permit, err)
		}
		for _, o := range []catalog.Override{{Rate: 5, Note: "for " + key}, {Rate: 6, Capacity: 40}} {
			must(t, errOf(c.Set(ctx, "api", key, o)))
		}
	}
	must(t, errOf(db.Pool.Exec(ctx, "INSERT INTO "+db.Schema+".rate_limit_parked (river, name, key, priority, job, weight) VALUES ('', 'exports', $1, 1, 1, 1), ('', 'exports', 'bob@example.com', 1, 2, 1)", person)))
	must(t, errOf(db.Pool.Exec(ctx, "INSERT INTO "+db.Schema+".rate_limit_pending (name, mark, measured, due, done) VALUES ('api', now(), '[]', 'infinity', $1)", person)))
	must(t, refused.Write(ctx))
	if in, columns := found(t, db, person); len(in) < 7 || columns < 30 {
		t.Fatalf("the key is in %q of %d columns, want it in all tables", in, columns)
	}
	want := erase.Counts{Rows: 3, Overrides: 1, Changes: 2, Pending: 1, Refusals: 1, Parked: 1}
	if got, err := inTx(t, db, func(tx pgx.Tx) (erase.Counts, error) { return erase.Count(ctx, tx, db.Schema, person) }); err != nil || got != want {
		t.Errorf("counted %+v, %v, want %+v", got, err, want)
	}
	want.Changes++ // that the override is gone
	want.Pending++ // an edit for all keys that had come as far
	if got, err := inTx(t, db, func(tx pgx.Tx) (erase.Counts, error) { return erase.Keys(ctx, tx, db.Schema, person) }); err != nil || got != want {
		t.Errorf("erased %+v, %v, want %+v", got, err, want)
	}
	if in, _ := found(t, db, person); in != nil {
		t.Errorf("the key is left in %q", in)
	}
	if in, _ := found(t, db, "bob@example.com"); len(in) < 7 {
		t.Errorf("of another key there is only %q", in)
	}
	if result, err := store.Check(ctx, api.ForN(person, 0)); err != nil || result.Remaining != 10 {
		t.Errorf("got %v, %v, want a key that is full", result, err)
	}
	changes, err := c.History(ctx, "", 1)
	if err != nil || len(changes) != 1 || changes[0].Name != "" || !strings.Contains(string(changes[0].Became), "erased") || changes[0].Role == "" {
		t.Errorf("the history says %+v, %v", changes, err)
	}
}

// A process that has an override in memory lets go of it, whatever it has seen of the history.
func TestProcessesHearOfIt(t *testing.T) {
	t.Parallel()
	for name, last := range map[string]func(ctx context.Context, c *catalog.Catalog) error{
		"an override that is there": func(context.Context, *catalog.Catalog) error { return nil },
		"one that was removed since it looked": func(ctx context.Context, c *catalog.Catalog) error {
			return errOf(c.Unset(ctx, "api", "ann"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			db := pgtest.New(t, pgtest.With(migrations.Catalog))
			editor := newCatalog(t, db)
			must(t, editor.Publish(ctx, api))
			_, err := editor.Set(ctx, "api", "ann", catalog.Override{Rate: 5})
			must(t, err)
			knew := newCatalog(t, db)
			_, err = editor.Set(ctx, "api", "bob", catalog.Override{Rate: 7})
			must(t, err)
			later := newCatalog(t, db)
			must(t, last(ctx, editor))
			must(t, errOf(inTx(t, db, func(tx pgx.Tx) (erase.Counts, error) { return erase.Keys(ctx, tx, db.Schema, "ann", "carol") })))
			for who, c := range map[string]*catalog.Catalog{"before": knew, "after another change": later, "the editor": editor, "anew": newCatalog(t, db)} {
				must(t, c.Refresh(ctx))
				if rate := c.For(api, "ann").Limit.Definition().Rate; rate != 10 {
					t.Errorf("who has looked %s goes by a rate of %v, want 10", who, rate)
				}
				if rate := c.For(api, "bob").Limit.Definition().Rate; rate != 7 {
					t.Errorf("who has looked %s has lost another override: %v", who, rate)
				}
			}
		})
	}
}

// What cannot be a key, or is the key of all, changes nothing; and without optional tables there is
// nothing of a key in them, but without any it is an error.
func TestEraseOfNothing(t *testing.T) {
	t.Parallel()
	ctx, db := t.Context(), pgtest.New(t)
	for _, key := range []string{"", "\xff", "a\x00b"} {
		_, err := inTx(t, db, func(tx pgx.Tx) (erase.Counts, error) { return erase.Keys(ctx, tx, db.Schema, "fine", key) })
		var fault *ratelimit.FieldError
		if !errors.As(err, &fault) || fault.Field != "Key" {
			t.Errorf("%q: got %v, want ErrInvalid of Key", key, err)
		}
	}
	if got, err := inTx(t, db, func(tx pgx.Tx) (erase.Counts, error) { return erase.Keys(ctx, tx, db.Schema, "ann") }); err != nil || got != (erase.Counts{}) {
		t.Errorf("got %+v, %v, want nothing", got, err)
	}
	empty := pgtest.NewEmpty(t)
	if _, err := inTx(t, empty, func(tx pgx.Tx) (erase.Counts, error) { return erase.Count(ctx, tx, empty.Schema, "ann") }); err == nil {
		t.Error("without a table: got no error")
	}
}
