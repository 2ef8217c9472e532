package table

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// disk is a row in a schema with a message of its own, which is found before PostgreSQL's: it is
// awaited while somebody has an advisory lock, and notes the synchronous_commit of its transaction,
// as a change of the row does.
type disk struct {
	*pgtest.DB
	t     *testing.T
	table *Table
	pool  *pgxpool.Pool
	grant Grant
	lock  int64
}

func newDisk(t *testing.T, mode pgx.QueryExecMode) *disk {
	t.Helper()
	db := pgtest.New(t)
	d := &disk{DB: db, t: t, table: New(db.Schema, false, time.Second), grant: prefetchingGrant()}
	d.grant.Definition.Period = time.Hour // nothing that matters is refilled
	d.lock = Lock(db.Schema+" disk", d.grant.Row)
	putAll(t, db, d.table, []Grant{d.grant}, []bucket.State{d.grant.Definition.Fresh("k", time.Now())})
	d.exec(strings.ReplaceAll(`CREATE TABLE SCHEMA.noted (by text, setting text);
		CREATE FUNCTION SCHEMA.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			INSERT INTO SCHEMA.noted VALUES ('row', current_setting('synchronous_commit')); RETURN NEW; END $$;
		CREATE TRIGGER note AFTER UPDATE ON SCHEMA.rate_limits FOR EACH ROW EXECUTE FUNCTION SCHEMA.note();`, "SCHEMA", db.Schema))
	d.message(d.noted())
	config := db.Pool.Config()
	config.ConnConfig.RuntimeParams["search_path"] = db.Schema + ", pg_catalog"
	config.ConnConfig.DefaultQueryExecMode, config.MaxConns = mode, 1
	var err error
	d.pool, err = pgxpool.NewWithConfig(t.Context(), config)
	noError(t, err)
	t.Cleanup(d.pool.Close)
	return d
}

func (d *disk) exec(sql string) {
	d.t.Helper()
	noError(d.t, errOf(d.Pool.Exec(context.Background(), sql)))
}

// message has the message do what a statement does.
func (d *disk) message(sql string) {
	d.exec(fmt.Sprintf("CREATE OR REPLACE FUNCTION %s.pg_logical_emit_message(bool, text, text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN %s; END $$", d.Schema, sql))
}

// noted is what it does at first.
func (d *disk) noted() string {
	return fmt.Sprintf("INSERT INTO %s.noted VALUES ('message', current_setting('synchronous_commit')); PERFORM pg_advisory_xact_lock(%d)", d.Schema, d.lock)
}

// take takes from the row, in turn.
func (d *disk) take(pipelined bool) (Taken, error) {
	grants := []Grant{d.grant}
	grants[0].Pipelined = pipelined
	err := d.table.Decider().Grant(context.Background(), d.pool, grants, true, nil)
	return grants[0].Taken, err
}

func (d *disk) mustTake(pipelined bool) {
	d.t.Helper()
	if taken, err := d.take(pipelined); err != nil || !taken.OK {
		d.t.Fatal(taken, err)
	}
}

// TestTurnFreesItsRowEarly: those behind a transaction in line have the row before it is on disk,
// and its callers have their answer after that.
func TestTurnFreesItsRowEarly(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
		for _, pipelined := range []bool{false, true} {
			t.Run(fmt.Sprint(mode, pipelined), func(t *testing.T) {
				t.Parallel()
				d := newDisk(t, mode)
				d.mustTake(pipelined)
				d.exec("TRUNCATE " + d.Schema + ".noted")
				tx, err := d.Pool.Begin(t.Context())
				noError(t, err)
				defer func() { _ = tx.Rollback(context.Background()) }()
				noError(t, errOf(tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1)", d.lock)))
				done := make(chan error, 1)
				go func() {
					taken, err := d.take(pipelined)
					if err == nil && !taken.OK {
						err = errors.New("nothing was taken")
					}
					done <- err
				}()
				for !pgtest.Blocks(t, d.Pool, tx) {
					if len(done) > 0 {
						t.Fatalf("answered before it was on disk: %v", <-done)
					}
				}
				if _, err := tx.Exec(t.Context(), "SELECT FROM "+d.Schema+".rate_limits FOR UPDATE NOWAIT"); err != nil {
					t.Errorf("the row is not free while its transaction waits for the disk: %v", err)
				}
				noError(t, tx.Rollback(t.Context()))
				if err := <-done; err != nil {
					t.Error(err)
				}
				var noted string
				if err := d.Pool.QueryRow(t.Context(), "SELECT string_agg(by || ' ' || setting, ', ' ORDER BY by DESC) FROM "+d.Schema+".noted").Scan(&noted); err != nil || noted != "row off, message on" {
					t.Errorf("synchronous_commit: %q, %v", noted, err)
				}
			})
		}
	}
}

// TestTurnWithoutMessages: where the message is refused a row is freed when it is on disk; and if
// that is noticed after COMMIT, the error does not say that nothing was taken.
func TestTurnWithoutMessages(t *testing.T) {
	t.Parallel()
	for _, before := range []bool{true, false} {
		for _, pipelined := range []bool{false, true} {
			t.Run(fmt.Sprint(before, pipelined), func(t *testing.T) {
				t.Parallel()
				d := newDisk(t, pgx.QueryExecModeCacheStatement)
				const refuse = "PERFORM 1/0"
				if before {
					d.message(refuse)
				}
				d.mustTake(pipelined)
				left := 93
				if !before {
					d.message(refuse)
					var refused *pgconn.PgError
					if _, err := d.take(pipelined); err == nil || errors.As(err, &refused) || Unsent(err) {
						t.Errorf("got %v, want an error that tells nothing of what was done", err)
					}
					left = 87
				}
				if taken, err := d.take(pipelined); err != nil || !taken.OK || int(taken.After.Value) != left-6 {
					t.Errorf("then: %+v, %v", taken, err)
				}
			})
		}
	}
}

// TestTurnRemembersADenial: what the server may answer otherwise later is asked again, and a right
// that is missing is not.
func TestTurnRemembersADenial(t *testing.T) {
	t.Parallel()
	for code, early := range map[string]bool{"53100": true, "57014": true, "XX000": true, "42501": false, "0A000": false} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			d := newDisk(t, pgx.QueryExecModeCacheStatement)
			d.message("RAISE SQLSTATE '" + code + "'")
			d.mustTake(true)
			d.message(d.noted())
			d.exec("TRUNCATE " + d.Schema + ".noted")
			d.mustTake(true)
			var noted bool
			if err := d.Pool.QueryRow(t.Context(), "SELECT count(*) > 0 FROM "+d.Schema+".noted WHERE by = 'message'").Scan(&noted); err != nil || noted != early {
				t.Errorf("then a row is freed early: %v, %v, want %v", noted, err, early)
			}
		})
	}
}

// TestTurnOutlivesForgottenMessage: a connection on which the prepared message is gone, and nothing
// else, has committed when it says so.
func TestTurnOutlivesForgottenMessage(t *testing.T) {
	t.Parallel()
	for _, pipelined := range []bool{false, true} {
		t.Run(fmt.Sprint(pipelined), func(t *testing.T) {
			t.Parallel()
			d := newDisk(t, pgx.QueryExecModeCacheStatement)
			take := func(left int) {
				t.Helper()
				if taken, err := d.take(pipelined); err != nil || !taken.OK || int(taken.After.Value) != left {
					t.Errorf("%+v, %v, want %d left", taken, err, left)
				}
			}
			take(93)
			var name string
			noError(t, d.pool.QueryRow(t.Context(), "SELECT name FROM pg_prepared_statements WHERE statement = $1", awaitDiskSQL).Scan(&name))
			noError(t, errOf(d.pool.Exec(t.Context(), "DEALLOCATE "+name)))
			take(87)
			take(81)
		})
	}
}

// TestTurnOutlivesTheServer: after a server that went away before it could say that a transaction
// is on disk, rows are freed early again.
func TestTurnOutlivesTheServer(t *testing.T) {
	t.Parallel()
	d := newDisk(t, pgx.QueryExecModeCacheStatement)
	noError(t, errOf(d.take(true)))
	d.message("PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(10)")
	var refused *pgconn.PgError
	if _, err := d.take(true); err == nil || errors.As(err, &refused) {
		t.Errorf("got %v, want an error that tells nothing of what was done", err)
	}
	d.message(d.noted())
	d.exec("TRUNCATE " + d.Schema + ".noted")
	d.mustTake(true)
	var noted int
	if err := d.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+d.Schema+".noted WHERE by = 'message'").Scan(&noted); err != nil || noted != 1 {
		t.Errorf("%d messages, %v, want 1", noted, err)
	}
}
