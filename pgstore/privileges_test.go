package pgstore_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

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
	must(t, db.Pool.QueryRow(t.Context(), "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user").Scan(&may))
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
		should(t, errOf(db.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role)))
	})
	return another(t, db, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return errOf(conn.Exec(ctx, "SET ROLE "+role)) }
	})
}

// All verbs need SELECT, INSERT and UPDATE on the table, and those that delete rows
// DELETE besides: without it they fail, and change nothing.
func TestPrivileges(t *testing.T) {
	t.Parallel()
	type verb struct {
		name    string
		deletes bool
		do      func(ctx context.Context, store *pgstore.Store, tx pgx.Tx) error
	}
	limit := slow("l", 100)
	verbs := []verb{
		{"Change", false, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			return errors.Join(store.Take(ctx, limit.For("a")), errOf(store.Change(ctx, limit, shardedSlow("l", 100, 2), "a")))
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
		{"Change of a key without a row", true, func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			return errOf(store.Change(ctx, limit, shardedSlow("l", 100, 2), "none"))
		}},
		{"AllowTx that is refused, with rows that were not there", true, func(ctx context.Context, store *pgstore.Store, tx pgx.Tx) error {
			return errOf(store.AllowTx(ctx, tx, limit.For("new"), slow("empty", 1).ForN("drained", 1)))
		}},
	}
	deletes := func(name string) bool { return slices.Contains([]string{"Reset", "ResetTx", "Forget", "Prune"}, name) }
	for _, v := range verbsInTx {
		verbs = append(verbs, verb{v.name, deletes(v.name), func(ctx context.Context, store *pgstore.Store, tx pgx.Tx) error {
			return errOf(v.do(ctx, store, tx, limit.For(v.name)))
		}})
	}
	for _, v := range append(ownVerbs, tableVerbs...) {
		verbs = append(verbs, verb{v.name, deletes(v.name), func(ctx context.Context, store *pgstore.Store, _ pgx.Tx) error {
			return errOf(v.do(ctx, store, limit.For(v.name)))
		}})
	}
	for _, rights := range []string{"SELECT, INSERT, UPDATE", "SELECT, INSERT, UPDATE, DELETE"} {
		t.Run(rights, func(t *testing.T) {
			db := pgtest.New(t)
			must(t, errOf(db.Pool.Exec(t.Context(), "INSERT INTO "+db.Schema+".rate_limits (name, key, shard, value, ts) VALUES ('l', 'old', 0, 100, now() - interval '1 hour'), ('empty', 'drained', 0, 0, now())")))
			for _, name := range []string{"Cancel", "CancelTx", "Settle", "SettleTx"} { // which delete a row that they make
				mustAllow(t, newStore(t, db), limit.ForN(name, 9))
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
