package pgstore_test

import (
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
		execIn(t, db, `CREATE OR REPLACE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN RAISE '`+message+`' USING ERRCODE = '0A000'; END $$;
			CREATE OR REPLACE TRIGGER refuse BEFORE UPDATE ON {schema}.rate_limits FOR EACH ROW EXECUTE FUNCTION {schema}.refuse()`)
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

// A COMMIT that Citus fails with XX000 may be done on some nodes: its work is neither told to be rolled
// back nor done again.
func TestCommittedInPart(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	execIn(t, db, `CREATE TABLE {schema}.work (id int);
		CREATE FUNCTION {schema}.fail() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN RAISE 'could not commit transaction for shard 102009 on any active node' USING ERRCODE = 'XX000'; END $$;
		CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON {schema}.work DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {schema}.fail()`)
	for _, isPort := range []bool{true, false} {
		store := newStore(t, db, isPortable(isPort))
		for verb, run := range map[string]runner{"AllowFunc": store.AllowFunc, "AllowOnCommit": onCommit(store, "")} {
			for _, commits := range []bool{false, true} { // by itself
				runs := 0
				_, err := run(t.Context(), []ratelimit.Request{slow("l", 1000).For("k")}, func(tx pgx.Tx, _ ratelimit.Result) error {
					runs++
					_, err := tx.Exec(t.Context(), "INSERT INTO "+db.Schema+".work VALUES (1)")
					if commits {
						err = errors.Join(err, tx.Commit(t.Context()))
					}
					return err
				})
				if runs != 1 || !errors.Is(err, pgstore.ErrOutcomeUnknown) || codeOf(err) != "XX000" {
					t.Errorf("portable %v, %s, by itself %v: ran %d times, got %v, want %v", isPort, verb, commits, runs, err, pgstore.ErrOutcomeUnknown)
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
