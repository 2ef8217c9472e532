package pgstore_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// A program without Portable is told of it where the server refuses its statements as Citus does, and not
// where a table was altered.
func TestPortableHint(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, key := newStore(t, db), slow("l", 1000).For("k")
	mustAllow(t, store, key)
	refuse := func(message string) error {
		for _, sql := range []string{
			"CREATE OR REPLACE FUNCTION " + db.Schema + ".refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE '" + message + "' USING ERRCODE = '0A000'; END $$",
			"CREATE OR REPLACE TRIGGER refuse BEFORE UPDATE ON " + db.Schema + ".rate_limits FOR EACH ROW EXECUTE FUNCTION " + db.Schema + ".refuse()",
		} {
			must(t, errOf(db.Pool.Exec(t.Context(), sql)))
		}
		_, err := store.Allow(t.Context(), key)
		if codeOf(err) != "0A000" {
			t.Fatalf("got %v, want %s", err, message)
		}
		return err
	}
	for message, want := range map[string]bool{"non-IMMUTABLE functions are not allowed in the RETURNING clause": true, "cached plan must not change result type": false} {
		if err := refuse(message); strings.Contains(err.Error(), "set Config.Portable") != want {
			t.Errorf("%s: got %v", message, err)
		}
	}
}

// failAtCommit makes the table work, whose rows fail at COMMIT with an error of Citus.
func failAtCommit(t *testing.T, db *pgtest.DB) (insert string) {
	t.Helper()
	for _, sql := range []string{
		"CREATE TABLE " + db.Schema + ".work (id int)",
		"CREATE FUNCTION " + db.Schema + ".fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN " +
			"RAISE 'could not commit transaction for shard 102009 on any active node' USING ERRCODE = 'XX000'; END $$",
		"CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON " + db.Schema + ".work DEFERRABLE INITIALLY DEFERRED " +
			"FOR EACH ROW EXECUTE FUNCTION " + db.Schema + ".fail()",
	} {
		must(t, errOf(db.Pool.Exec(t.Context(), sql)))
	}
	return "INSERT INTO " + db.Schema + ".work VALUES (1)"
}

// A COMMIT that Citus fails with XX000 may be done on some nodes: its work is neither told to be rolled
// back nor done again.
func TestCommittedInPart(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	insert := failAtCommit(t, db)
	requests := []ratelimit.Request{slow("l", 1000).For("k")}
	for name, change := range map[string]func(*pgstore.Config){"portable": portable, "limits on one server": unchanged} {
		store := newStore(t, db, change)
		for verb, run := range map[string]func(do func(pgx.Tx) error) (ratelimit.Result, error){
			"AllowFunc": func(do func(pgx.Tx) error) (ratelimit.Result, error) {
				return store.AllowFunc(t.Context(), requests, func(tx pgx.Tx, _ ratelimit.Result) error { return do(tx) })
			},
			"AllowOnCommit": func(do func(pgx.Tx) error) (ratelimit.Result, error) {
				return store.AllowOnCommit(t.Context(), requests, "", do)
			},
		} {
			for commits, then := range map[string]func(pgx.Tx) error{
				"": func(pgx.Tx) error { return nil }, " by itself": func(tx pgx.Tx) error { return tx.Commit(context.Background()) },
			} {
				runs := 0
				_, err := run(func(tx pgx.Tx) error {
					runs++
					_, err := tx.Exec(t.Context(), insert)
					return errors.Join(err, then(tx))
				})
				if runs != 1 || !errors.Is(err, pgstore.ErrOutcomeUnknown) || codeOf(err) != "XX000" {
					t.Errorf("%s, %s%s: ran %d times, got %v, want %v", name, verb, commits, runs, err, pgstore.ErrOutcomeUnknown)
				}
			}
		}
	}
}

// Nodes do not serialize with each other, so the runner's transactions there are READ COMMITTED.
func TestPortableIsolation(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store := newStore(t, db, portable)
	requests := []ratelimit.Request{slow("l", 1000).For("k")}
	isReadCommitted := func(tx pgx.Tx) error {
		var level string
		err := tx.QueryRow(t.Context(), "SHOW transaction_isolation").Scan(&level)
		if err == nil && level != "read committed" {
			t.Errorf("the transaction is %s, want read committed", level)
		}
		return err
	}
	_, err := store.AllowFunc(t.Context(), requests, func(tx pgx.Tx, _ ratelimit.Result) error { return isReadCommitted(tx) })
	should(t, err)
	should(t, errOf(store.AllowOnCommit(t.Context(), requests, "", isReadCommitted)))
	_, err = store.AllowOnCommit(t.Context(), requests, pgx.Serializable, isReadCommitted)
	var field *ratelimit.FieldError
	if !errors.As(err, &field) || field.Field != "IsoLevel" {
		t.Errorf("SERIALIZABLE: got %v, want an error of IsoLevel", err)
	}
}

// A permit that an open transaction has taken is passed over there too, and a caller's transaction keeps
// its own lock_timeout.
func TestPortablePassesOverLockedPermits(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	jobs := ratelimit.InFlight{Name: "jobs", Limit: 3}
	holder, caller := begin(t, db, pgx.ReadCommitted), begin(t, db, pgx.ReadCommitted)
	one, two := jobs.For("k"), jobs.For("k")
	two.N = 2
	if permit, err := newStore(t, db, portable).Permits().AcquireTx(t.Context(), holder, two); err != nil || !permit.OK {
		t.Fatalf("got OK %v, error %v, want two permits", permit.OK, err)
	}
	mustExec(t, caller, "SET LOCAL lock_timeout = '7s'")
	for _, request := range []ratelimit.PermitRequest{two, one} { // of which one is free
		for _, inTx := range []bool{false, true} {
			store := newStore(t, db, portable) // which knows of no permit
			var permit ratelimit.Permit
			var err error
			if inTx {
				permit, err = store.Permits().AcquireTx(t.Context(), caller, request)
			} else if permit, err = store.Permits().Acquire(t.Context(), request); permit.OK {
				err = errors.Join(err, store.Permits().Release(t.Context(), permit))
			}
			if err != nil || permit.OK != (request.N == 1) {
				t.Errorf("%d permits, in a transaction %v: got OK %v, error %v", request.N, inTx, permit.OK, err)
			}
			var timeout string
			if err := caller.QueryRow(t.Context(), "SHOW lock_timeout").Scan(&timeout); err != nil || timeout != "7s" {
				t.Fatalf("%d permits, in a transaction %v: lock_timeout is %q, %v", request.N, inTx, timeout, err)
			}
		}
	}
}
