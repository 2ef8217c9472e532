package catalog_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Edits of several keys are made together, keep what each has used, and are returned in their order. If one
// cannot be made, none is.
func TestSetEach(t *testing.T) {
	t.Parallel()
	for _, in := range []string{"memory", "PostgreSQL"} {
		for _, keeps := range []bool{true, false} {
			t.Run(in, func(t *testing.T) {
				t.Parallel()
				var db *pgtest.DB
				if in == "PostgreSQL" {
					db = newDB(t)
				}
				clock := newTestClock()
				k := newKeeper(t, db, clock.now)
				if !keeps {
					k.Catalog, _ = newCatalog(t, db)
					must(t, k.Publish(t.Context(), monthly, hourly, signUp, strict, api))
				}
				for _, key := range []string{"a", "b"} {
					k.take(t, monthly, key, 60)
				}
				many := &catalog.Override{Rate: 300}
				for _, bad := range [][]catalog.KeyEdit{
					{{Name: "monthly", Key: "a", Override: many}, {Name: "monthly", Key: "b", Override: &catalog.Override{Slots: 5}}},
					{{Name: "monthly", Key: "a", Override: many}, {Name: "unknown", Key: "b", Override: many}},
					{{Name: "monthly", Key: "a", Override: many}, {Name: "hourly", Key: "b", Override: many}, {Name: "monthly", Key: "a"}},
					{{Name: "monthly", Key: "a", Override: many}, {Name: "monthly", Key: catalog.AllKeys, Override: many}},
				} {
					if made, err := k.SetEach(t.Context(), bad...); err == nil || made != nil || !errors.Is(err, ratelimit.ErrInvalid) && !errors.Is(err, catalog.ErrUnknown) {
						t.Errorf("%d edits, one of which cannot be made: %v, %v", len(bad), made, err)
					}
				}
				if all := k.Overrides("monthly"); len(all) != 0 || k.left(t, monthly, "a") != 40 {
					t.Fatalf("edits that were refused made %v", all)
				}
				made, err := k.SetEach(t.Context(), catalog.KeyEdit{Name: "monthly", Key: "b", Override: &catalog.Override{Rate: 50}},
					catalog.KeyEdit{Name: "hourly", Key: "a", Override: &catalog.Override{Capacity: 200}}, catalog.KeyEdit{Name: "monthly", Key: "a", Override: many})
				must(t, err)
				if len(made) != 3 || made[0].Key != "b" || made[1].Name != "hourly" || made[2].Became.Rate != 300 || keeps != (made[0].Left != nil) {
					t.Errorf("made %+v", made)
				}
				clock.add(time.Minute)
				if keeps {
					must(t, errOf(k.Complete(t.Context())))
					if a, b := k.left(t, monthly, "a"), k.left(t, monthly, "b"); a != 240 || b != 0 {
						t.Errorf("%v and %v left, want 240 and 0", a, b)
					}
				}
				if none, err := k.SetEach(t.Context()); none != nil || err != nil {
					t.Errorf("no edits: %v, %v", none, err)
				}
			})
		}
	}
}

// Edits lock rows in the order in which calls do: those of limits with shards last.
func TestSetEachLocksShardsLast(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	k := newKeeper(t, db, nil)
	store := k.store.(*pgstore.Store)
	sharded := ratelimit.TokenBucket{Name: "a", Rate: 200, Period: time.Minute, Shards: 2}
	must(t, k.Publish(t.Context(), sharded))
	k.take(t, sharded, "k", 2)
	made := make(chan error, 1)
	must(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if _, err := store.AllowTx(t.Context(), tx, monthly.For("k")); err != nil {
			return err
		}
		go func() {
			made <- pgx.BeginFunc(context.Background(), db.Pool, func(tx pgx.Tx) error {
				o := &catalog.Override{Rate: 300}
				_, err := k.SetEachTx(t.Context(), tx, catalog.KeyEdit{Name: "a", Key: "k", Override: o}, catalog.KeyEdit{Name: "monthly", Key: "k", Override: o})
				return err
			})
		}()
		pgtest.AwaitBlocks(t, db.Pool, tx)
		return errOf(tx.Exec(t.Context(), inSchema(db, "SELECT FROM rate_limits WHERE name = 'a' FOR UPDATE NOWAIT")))
	}))
	must(t, <-made)
}

// While another edit, of any limit, is under way, no edit holds a row for which calls wait.
func TestEditsWaitWithoutRows(t *testing.T) {
	t.Parallel()
	o := &catalog.Override{Rate: 300}
	inTx := func(do func(context.Context, keeper, pgx.Tx) error) func(context.Context, keeper, *pgtest.DB) error {
		return func(ctx context.Context, k keeper, db *pgtest.DB) error {
			return pgx.BeginFunc(context.Background(), db.Pool, func(tx pgx.Tx) error { return do(ctx, k, tx) })
		}
	}
	one, other := catalog.KeyEdit{Name: "monthly", Key: "a", Override: o}, catalog.KeyEdit{Name: "hourly", Key: "a", Override: o}
	for name, edit := range map[string]func(context.Context, keeper, *pgtest.DB) error{
		"Set": func(ctx context.Context, k keeper, _ *pgtest.DB) error { return errOf(k.Set(ctx, "monthly", "a", *o)) },
		"SetEach": func(ctx context.Context, k keeper, _ *pgtest.DB) error {
			return errOf(k.SetEach(ctx, one, other))
		},
		"SetTx": inTx(func(ctx context.Context, k keeper, tx pgx.Tx) error {
			return errOf(k.SetTx(ctx, tx, "monthly", "a", *o))
		}),
		"SetEachTx": inTx(func(ctx context.Context, k keeper, tx pgx.Tx) error {
			return errOf(k.SetEachTx(ctx, tx, one, other))
		}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			k := newKeeper(t, db, nil)
			k.take(t, monthly, "a", 60)
			k.take(t, hourly, "a", 60)
			made := make(chan error, 1)
			must(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
				if _, err := k.SetTx(t.Context(), tx, "api", "b", *o); err != nil {
					return err
				}
				go func() { made <- edit(t.Context(), k, db) }()
				for range 3 {
					pgtest.AwaitBlocks(t, db.Pool, tx)
					if _, err := db.Pool.Exec(t.Context(), inSchema(db, "SELECT FROM rate_limits WHERE key = 'a' FOR UPDATE NOWAIT")); err != nil {
						t.Errorf("a row is locked: %v", err)
					}
				}
				return nil
			}))
			must(t, <-made)
		})
	}
}

// An editor that waits for one that began later, with rows locked that the other needs, lets go of them,
// and leaves the lock_timeout of its transaction as it was.
func TestEditorsGiveWay(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	k := newKeeper(t, db, nil)
	made := make(chan error, 1)
	set := func(tx pgx.Tx, key string) error {
		return errOf(k.SetTx(context.Background(), tx, "monthly", key, catalog.Override{Rate: 300}))
	}
	for _, key := range []string{"a", "b"} {
		k.take(t, monthly, key, 60)
	}
	begin := func() pgx.Tx {
		tx, err := db.Pool.Begin(t.Context())
		must(t, err)
		t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
		return tx
	}
	holder, later := begin(), begin()
	must(t, errOf(holder.Exec(t.Context(), inSchema(db, "SELECT FROM rate_limits WHERE key = 'b' FOR UPDATE"))))
	go func() {
		made <- pgx.BeginFunc(context.Background(), db.Pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(context.Background(), "SET LOCAL lock_timeout = '17s'"); err != nil {
				return err
			}
			if err := set(tx, "b"); err != nil {
				return err
			}
			var bound string
			if err := tx.QueryRow(context.Background(), "SHOW lock_timeout").Scan(&bound); err != nil || bound != "17s" {
				t.Errorf("lock_timeout %q, %v, want 17s", bound, err)
			}
			return nil
		})
	}()
	pgtest.AwaitBlocks(t, db.Pool, holder)
	must(t, set(later, "a"))
	must(t, holder.Rollback(t.Context()))
	pgtest.AwaitBlocks(t, db.Pool, later)
	must(t, set(later, "b"))
	must(t, later.Commit(t.Context()))
	must(t, <-made)
}

// An edit that waited until its context ended says for what: a limit's row, whichever of several limits
// that is, or the catalog's tables. Calls go on meanwhile.
func TestEditThatWaitsForALockNamesIt(t *testing.T) {
	t.Parallel()
	o := &catalog.Override{Rate: 300}
	for lock, want := range map[string]string{
		"SELECT FROM rate_limits WHERE name = 'hourly' FOR UPDATE":   `locked a row of limit "hourly"`,
		"SELECT FROM rate_limits WHERE name = 'monthly' FOR UPDATE":  `locked a row of limit "monthly"`,
		"LOCK TABLE rate_limit_definitions IN ACCESS EXCLUSIVE MODE": "locked a row or table of the catalog",
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			k := newKeeper(t, db, nil)
			for _, limit := range []ratelimit.Limit{monthly, hourly} {
				k.take(t, limit, "a", 60)
			}
			tx, err := db.Pool.Begin(t.Context())
			must(t, err)
			defer func() { _ = tx.Rollback(context.Background()) }()
			must(t, errOf(tx.Exec(t.Context(), inSchema(db, lock))))
			ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
			defer cancel()
			_, err = k.SetEach(ctx, catalog.KeyEdit{Name: "monthly", Key: "a", Override: o}, catalog.KeyEdit{Name: "hourly", Key: "a", Override: o})
			if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), want) || errors.Is(err, pgstore.ErrLocked) != strings.Contains(want, "limit") {
				t.Errorf("got %v, want %s", err, want)
			}
		})
	}
}

// An edit that has waited in vain for one of another limit says so.
func TestEditorThatWaitsSaysForWhom(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	k := newKeeper(t, db, nil)
	must(t, k.Publish(t.Context(), api))
	k.take(t, monthly, "a", 60)
	must(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if _, err := k.SetTx(t.Context(), tx, "api", "a", catalog.Override{Rate: 300}); err != nil {
			return err
		}
		return pgx.BeginFunc(t.Context(), db.Pool, func(other pgx.Tx) error {
			if _, err := k.SetTx(t.Context(), other, "monthly", "a", catalog.Override{Rate: 300}); err == nil || !strings.Contains(err.Error(), "waited for a transaction that edits the catalog") {
				t.Errorf("got %v", err)
			}
			return nil
		})
	}))
}

// An edit for all keys without a deadline waits for another edit no longer than the Timeout, at its
// beginning (a raise) and at its end (a change of the mode).
func TestEditOfAllKeysIsBounded(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	store := newKeeper(t, db, nil).store
	c, _ := newCatalog(t, db, func(c *catalog.Config) { c.Store, c.Timeout = store, 100*time.Millisecond })
	holder, err := db.Pool.Begin(t.Context())
	must(t, err)
	defer func() { _ = holder.Rollback(context.Background()) }()
	must(t, errOf(c.SetTx(t.Context(), holder, "api", "a", catalog.Override{Rate: 300})))
	for _, o := range []catalog.Override{{Rate: 300}, {Mode: ratelimit.ModeShadow}} {
		made := make(chan error, 1)
		go func() { made <- errOf(c.Set(t.Context(), "monthly", catalog.AllKeys, o)) }()
		select {
		case err := <-made:
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v: got %v", o, err)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%v: still waits", o)
		}
	}
}

// Edits in one transaction lock all rows before others who edit must wait: one that waits for a row keeps
// nobody from editing another limit, and two in turn do not wait for each other.
func TestSetEachWaitsForRowsFirst(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	k := newKeeper(t, db, nil)
	store := k.store.(*pgstore.Store)
	for _, key := range []string{"a", "b"} {
		k.take(t, monthly, key, 60)
	}
	edits := func(rate float64) []catalog.KeyEdit {
		o := &catalog.Override{Rate: rate}
		return []catalog.KeyEdit{{Name: "monthly", Key: "b", Override: o}, {Name: "monthly", Key: "a", Override: o}}
	}
	made := make(chan error, 2)
	must(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if _, err := store.AllowTx(t.Context(), tx, monthly.For("b")); err != nil {
			return err
		}
		for i := range 2 {
			go func() {
				made <- pgx.BeginFunc(context.Background(), db.Pool, func(tx pgx.Tx) error { return errOf(k.SetEachTx(t.Context(), tx, edits(float64(200+i))...)) })
			}()
		}
		pgtest.AwaitBlocks(t, db.Pool, tx)
		_, err := k.Set(t.Context(), "hourly", "c", catalog.Override{Capacity: 50})
		return err
	}))
	for range 2 {
		must(t, <-made)
	}
	must(t, k.Refresh(t.Context()))
	a, _ := k.Override("monthly", "a")
	if b, _ := k.Override("monthly", "b"); a.Rate != b.Rate || a.Rate < 200 {
		t.Errorf("a has %v, and b %v", a.Rate, b.Rate)
	}
}
