package pgstore_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

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
		if _, err := db.Pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
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
	if err != nil {
		t.Error(err)
	}
	if _, err := store.AllowOnCommit(t.Context(), requests, "", isReadCommitted); err != nil {
		t.Error(err)
	}
	_, err = store.AllowOnCommit(t.Context(), requests, pgx.Serializable, isReadCommitted)
	var field *ratelimit.FieldError
	if !errors.As(err, &field) || field.Field != "IsoLevel" {
		t.Errorf("SERIALIZABLE: got %v, want an error of IsoLevel", err)
	}
}
