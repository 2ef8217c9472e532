package pgstore_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// needRoles skips a test that makes a role, where that is not allowed.
func needRoles(t *testing.T, db *pgtest.DB) {
	t.Helper()
	var may bool
	if err := db.Pool.QueryRow(t.Context(), "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user").Scan(&may); err != nil {
		t.Fatal(err)
	}
	if !may {
		t.Skip("the user of DATABASE_URL may not make roles")
	}
}

// restricted is a pool whose role has nothing but some rights on the table.
func restricted(t *testing.T, db *pgtest.DB, rights string) *pgtest.DB {
	t.Helper()
	needRoles(t, db)
	role := strings.Replace(db.Schema, "ratelimit_test_", "ratelimit_role_", 1)
	if _, err := db.Pool.Exec(t.Context(), "CREATE ROLE "+role+"; GRANT "+role+" TO current_user; GRANT USAGE ON SCHEMA "+db.Schema+" TO "+role+
		"; GRANT "+rights+" ON "+db.Schema+".rate_limits TO "+role); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	})
	return another(t, db, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "SET ROLE "+role)
			return err
		}
	})
}

// All verbs need SELECT, INSERT and UPDATE on the table, and those that delete rows
// DELETE besides: without it they fail, and change nothing.
func TestPrivileges(t *testing.T) {
	t.Parallel()
	limit, other := slow("l", 100), slow("other", 1)
	verbs := []struct {
		name    string
		deletes bool
		do      func(ctx context.Context, store *pgstore.Store, tx pgx.Tx) error
	}{
		{"Ready", false, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error { return store.Ready(ctx) }},
		{"Take", false, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			return store.Take(ctx, limit.For("a"), other.For("a"))
		}},
		{"TakeTx", false, func(ctx context.Context, store *pgstore.Store, tx pgx.Tx) error {
			return store.TakeTx(ctx, tx, limit.For("b"), other.For("b"))
		}},
		{"ReserveTx", false, func(ctx context.Context, store *pgstore.Store, tx pgx.Tx) error {
			_, err := store.ReserveTx(ctx, tx, limit.For("b"))
			return err
		}},
		{"AllowAtMostTx", false, func(ctx context.Context, store *pgstore.Store, tx pgx.Tx) error {
			_, err := store.AllowAtMostTx(ctx, tx, limit.ForN("b", 3))
			return err
		}},
		{"AllowFunc", false, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			_, err := store.AllowFunc(ctx, []ratelimit.Request{limit.For("c")}, nothingToDo)
			return err
		}},
		{"Settle and Cancel", false, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			first, err := store.Allow(ctx, limit.ForN("a", 3))
			second, err2 := store.Reserve(ctx, limit.ForN("a", 3))
			if err := errors.Join(err, err2); err != nil {
				return err
			}
			_, err = store.Settle(ctx, first.Receipt, 5)
			_, err2 = store.Cancel(ctx, second.Receipt)
			return errors.Join(err, err2)
		}},
		{"Credit, Pause and Resume", false, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			_, err := store.Credit(ctx, limit.For("a"))
			_, err2 := store.Pause(ctx, limit, "a", time.Minute)
			return errors.Join(err, err2, store.Resume(ctx, limit, "a"))
		}},
		{"Change", false, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			_, err := store.Change(ctx, limit, shardedSlow("l", 100, 2), "a")
			return err
		}},
		{"Permits, held and lost", false, func(ctx context.Context, store *pgstore.Store, tx pgx.Tx) error {
			limit := ratelimit.InFlight{Name: "permits", Limit: 2}
			permit, err := store.Permits().Acquire(ctx, limit.For("a"))
			lost := permit
			lost.Key = "none"
			_, err2 := store.Permits().Renew(ctx, lost)
			if err3 := store.Permits().Release(ctx, lost); !errors.Is(err2, ratelimit.ErrLeaseLost) || !errors.Is(err3, ratelimit.ErrLeaseLost) {
				return errors.Join(err2, err3)
			}
			_, err3 := store.Permits().AcquireTx(ctx, tx, limit.For("b"))
			return errors.Join(err, err3, store.Permits().Release(ctx, permit), store.Permits().Reset(ctx, limit, "a"))
		}},
		{"Check, CheckEach, Names and Rows", false, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			_, err := store.Check(ctx, limit.For("a"))
			_, err2 := store.CheckEach(ctx, limit.For("a"))
			_, err3 := store.Names(ctx)
			for _, err := range store.Rows(ctx, limit, ratelimit.Page{}) {
				err3 = errors.Join(err3, err)
			}
			return errors.Join(err, err2, err3)
		}},
		{"Reset", true, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error { return store.Reset(ctx, limit, "a") }},
		{"Forget", true, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			_, err := store.Forget(ctx, "l")
			return err
		}},
		{"Prune", true, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			_, err := store.Prune(ctx, limit)
			return err
		}},
		{"Change of a key without a row", true, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			_, err := store.Change(ctx, limit, shardedSlow("l", 100, 2), "none")
			return err
		}},
		{"AllowTx that is refused, with rows that were not there", true, func(ctx context.Context, store *pgstore.Store, tx pgx.Tx) error {
			_, err := store.AllowTx(ctx, tx, limit.For("new"), slow("empty", 1).ForN("drained", 1))
			return err
		}},
	}
	for _, rights := range []string{"SELECT, INSERT, UPDATE", "SELECT, INSERT, UPDATE, DELETE"} {
		t.Run(rights, func(t *testing.T) {
			db := pgtest.New(t)
			if _, err := db.Pool.Exec(t.Context(), "INSERT INTO "+db.Schema+".rate_limits (name, key, shard, value, ts) VALUES ('l', 'old', 0, 100, now() - interval '1 hour'), ('empty', 'drained', 0, 0, now())"); err != nil {
				t.Fatal(err)
			}
			may := strings.Contains(rights, "DELETE")
			role := restricted(t, db, rights)
			store := newStore(t, role)
			for _, verb := range verbs {
				before := tableOf(t, db)
				err := pgx.BeginFunc(t.Context(), role.Pool, func(tx pgx.Tx) error { return verb.do(t.Context(), store, tx) })
				var denied *pgconn.PgError
				switch {
				case may || !verb.deletes:
					if err != nil {
						t.Errorf("%s: %v", verb.name, err)
					}
				case !errors.As(err, &denied) || denied.Code != "42501":
					t.Errorf("%s: got %v, want that it is not permitted", verb.name, err)
				case !slices.Equal(tableOf(t, db), before):
					t.Errorf("%s: was not permitted, and changed the table", verb.name)
				}
			}
		})
	}
}
