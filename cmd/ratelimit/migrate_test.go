package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

var tableSteps = []string{"00001_rate_limits.sql", "00002_pauses.sql", "00003_sliding_windows.sql", "00004_escrow.sql"}

const heading = "VERSION  APPLIED  MIGRATION\n"

// status is what status prints if the first so many steps of the table are applied.
func status(applied int) string {
	text := heading
	for i, step := range tableSteps {
		is := "no "
		if i < applied {
			is = "yes"
		}
		text += fmt.Sprintf("%d        %s      %s\n", i+1, is, step)
	}
	return text
}

// steps is what is printed of steps of the table, each after a word.
func steps(word string, some ...string) string {
	return word + " " + strings.Join(some, "\n"+word+" ") + "\n"
}

const nothingUp = "nothing to apply\n"

func TestMigrate(t *testing.T) {
	t.Parallel()
	w := &world{T: t, db: pgtest.NewEmpty(t)}
	for _, step := range []struct{ verb, want string }{
		{"status", status(0)},
		{"down", "nothing to take back\n"},
		{"up", steps("applied", tableSteps...)},
		{"up", nothingUp},
		{"status", status(4)},
		{"down", "took back 00004_escrow.sql\n"},
		{"down", "took back 00003_sliding_windows.sql\n"},
		{"down", "took back 00002_pauses.sql\n"},
		{"status", status(1)},
		{"up", steps("applied", tableSteps[1:]...)},
	} {
		args := []string{"migrate", step.verb}
		if step.verb == "down" {
			args = append(args, "--yes")
		}
		o := w.program(args...)
		if step.verb == "status" && step.want != status(4) {
			o.wantStatus(t, exitFailed, " not applied: ratelimit migrate up")
		} else {
			o.wantStatus(t, exitOK)
		}
		if o.stdout != step.want {
			t.Errorf("%s printed:\n%s\nwant:\n%s", step.verb, o.stdout, step.want)
		}
	}
}

// A migration of a newer program is named, and not taken back.
func TestMigrationOfANewerProgram(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	run := (&world{T: t, db: db}).program
	run("migrate", "up").ok(t)
	must(t, errOf(db.Pool.Exec(t.Context(), "INSERT INTO "+db.Schema+"."+migrations.VersionTable+" (version_id, is_applied) VALUES (99, true)")))
	wantIn(t, run("migrate", "status").ok(t), "version 99 of a newer program")
	wantIn(t, run("doctor").ok(t), "there is version 99 of a newer program")
	run("migrate", "down", "--yes").wantStatus(t, exitFailed, "a newer program applied version 99")
}

func TestMigratePrint(t *testing.T) {
	t.Setenv("DATABASE_URL", "") // print needs none
	added, err := migrations.UpSQLFrom(3)
	must(t, err)
	takeBack, err := migrations.DownSQLFrom(3)
	must(t, err)
	if !strings.HasSuffix(takeBack, "ALTER TABLE rate_limits DROP COLUMN slots;\n") {
		t.Errorf("down from version 3 ends with\n%s", takeBack)
	}
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, migrations.UpSQL()},
		{[]string{"--down"}, migrations.DownSQL()},
		{[]string{"--from", "1"}, migrations.UpSQL()},
		{[]string{"--from", "3"}, added},
		{[]string{"--from", "3", "--down"}, takeBack},
	} {
		o := execute(t, "", append([]string{"migrate", "print"}, test.args...)...)
		o.wantStatus(t, exitOK)
		if o.stdout != test.want {
			t.Errorf("print %q printed:\n%s", test.args, o.stdout)
		}
	}
	for _, version := range []string{"0", "-1", "5", "x"} {
		execute(t, "", "migrate", "print", "--from", version).wantStatus(t, exitBad, version)
	}
	execute(t, "", "migrate", "up", "--from", "2").wantStatus(t, exitBad, "--from is for print only")
}

// A team that owns its migrations prints them, and the command says what it finds.
func TestMigrateFindsAnotherToolsTable(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	conn, err := db.Pool.Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	run := (&world{T: t, db: db}).program
	apply := func(sql string) {
		t.Helper()
		must(t, errOf(conn.Exec(t.Context(), "SET search_path TO "+db.Schema+"; "+sql)))
	}
	added := execute(t, "", "migrate", "print", "--from", "3").stdout
	apply(strings.TrimSuffix(migrations.UpSQL(), added))
	const another = "another tool made the table: there is no rate_limits_version\n"
	if o := run("migrate", "status"); o.stdout != status(2)+another {
		t.Errorf("status printed:\n%s%s", o.stdout, o.stderr)
	}
	run("migrate", "up").wantStatus(t, exitFailed, "lacks 00003_sliding_windows.sql, 00004_escrow.sql", "ratelimit migrate print --from 3")
	apply(added)
	if o := run("migrate", "up"); o.stdout != nothingUp+another {
		t.Errorf("up printed:\n%s%s", o.stdout, o.stderr)
	}
	if o := run("migrate", "down"); o.stdout != "nothing to take back\n"+another {
		t.Errorf("down printed:\n%s%s", o.stdout, o.stderr)
	}
}

// nobody is an address at which no server listens.
const nobody = "postgres://app:hunter2@127.0.0.1:1/app?connect_timeout=5"

func TestNoErrorShowsAPassword(t *testing.T) {
	tests := []struct {
		name   string
		url    string
		args   []string
		status int
		want   string
	}{
		{"nobody there", nobody, []string{"migrate", "up"}, exitFailed, "reach the database: "},
		{"no port", "postgres://app:hunter2@localhost:port/app", []string{"migrate", "up"}, exitBad, "not valid"},
		{"bad escape", "postgres://app:hunter2%zz@localhost/app", []string{"migrate", "status"}, exitBad, "not valid"},
		{"no URL", "password=hunter2 nonsense", []string{"migrate", "down"}, exitBad, "not valid"},
		{"replay, nobody there", nobody, []string{"replay", "--store", "postgres", "-"}, exitFailed, "DATABASE_URL"},
		{"replay, bad escape", "postgres://app:hunter2%zz@localhost/app", []string{"replay", "--store", "postgres", "-"}, exitFailed, "DATABASE_URL"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("DATABASE_URL", test.url)
			o := execute(t, "", test.args...)
			o.wantStatus(t, test.status, test.want)
			if strings.Contains(o.stderr+o.stdout, "hunter2") {
				t.Errorf("the password is shown: %s", o.stderr)
			}
		})
	}
}

// A set has a life of its own.
func TestMigrateSet(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	run := (&world{T: t, db: db}).program
	run("migrate", "up").wantStatus(t, exitOK)
	wantIn(t, run("migrate", "up", "--set", "catalog").ok(t), "applied 00001_definitions.sql\n")
	wantIn(t, run("migrate", "status", "--set", "catalog").ok(t), heading+"1        yes      00001_definitions.sql\n")
	if sql := execute(t, "", "migrate", "print", "--set", "catalog", "--down").ok(t); sql != migrations.Catalog.DownSQL() {
		t.Errorf("printed %q", sql)
	}
	run("migrate", "up", "--set", "none").wantStatus(t, exitBad, `--set "none"`, "catalog, functions, refusals, river")
	run("migrate", "status", "--set", "functions").wantStatus(t, exitFailed, "1 migration not applied: ratelimit migrate up --set functions --schema "+db.Schema)

	// Nothing is lost with views, and so nothing is asked; with what they show it is.
	if o := run("migrate", "down", "--set", "catalog"); o.status != exitOK || o.stdout != "took back 00002_views.sql\n" {
		t.Errorf("printed %q%q", o.stdout, o.stderr)
	}
	for _, how := range []string{"--yes", "--dry-run"} {
		run("migrate", "down", how).wantStatus(t, exitFailed, "the set catalog depends on table rate_limits", "migrate down --set catalog")
	}
	run("migrate", "down", "--set", "catalog", "--dry-run").wantStatus(t, exitOK, "would take back 00001_definitions.sql: all definitions")
	run("migrate", "down", "--set", "catalog").wantStatus(t, exitBad, "overrides and their history are deleted")
	run("migrate", "down", "--set", "catalog", "--yes").wantStatus(t, exitOK)
	run("migrate", "down").wantStatus(t, exitBad, "take back 00004_escrow.sql: what processes hold in memory is forgotten", "--yes")
}

// All sets go in one command.
func TestMigrateAll(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	run := (&world{T: t, db: db}).program
	run("migrate", "status", "--all").wantStatus(t, exitFailed, "9 migrations not applied: ratelimit migrate up --schema "+db.Schema+" --all")
	all := slices.Concat(tableSteps, []string{"00001_definitions.sql", "00002_views.sql", "00001_functions.sql", "00001_refusals.sql", "00001_parked.sql"})
	for _, want := range []string{steps("applied", all...), nothingUp} {
		if got := run("migrate", "up", "--all").ok(t); got != want {
			t.Errorf("printed %q, want %q", got, want)
		}
	}
	o := run("migrate", "status", "--all")
	o.wantStatus(t, exitOK)
	if want := status(4) + "\nset catalog\n" + heading; !strings.HasPrefix(o.stdout, want) || !strings.HasSuffix(o.stdout, "1        yes      00001_parked.sql\n") {
		t.Errorf("printed %q, want it to begin with %q", o.stdout, want)
	}
	o = execute(t, "", "migrate", "print", "--all")
	o.wantStatus(t, exitOK)
	var texts []string
	for _, set := range migrations.Sets() {
		texts = append(texts, set.UpSQL())
	}
	if o.stdout != strings.Join(texts, "\n") {
		t.Errorf("printed\n%s", o.stdout)
	}
	for _, args := range [][]string{{"down", "--all"}, {"up", "--all", "--set", "catalog"}, {"print", "--all", "--from", "2"}, {"print", "--all", "--down"}} {
		execute(t, "", append([]string{"migrate"}, args...)...).wantStatus(t, exitBad, "--all is for up, status and print")
	}
	run("migrate", "up", "--yes").wantStatus(t, exitBad, "for down only")
}

// Whoever stops a migration that waits is told for what.
func TestMigrateThatIsStoppedSaysWhy(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	db := pgtest.NewEmpty(t)
	run := (&world{T: t, db: db}).program
	run("migrate", "up").wantStatus(t, exitOK)
	run("migrate", "down", "--yes").wantStatus(t, exitOK)
	tx, err := db.Pool.Begin(ctx)
	if err == nil {
		_, err = tx.Exec(ctx, "LOCK TABLE "+db.Schema+".rate_limits IN ACCESS SHARE MODE")
		defer tx.Rollback(context.Background())
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, os.Args[0], "migrate", "up", "--schema", db.Schema)
	cmd.Env = append(os.Environ(), asProgram+"=1", "DATABASE_URL="+db.URL)
	cmd.Stderr = &stderr
	if err == nil {
		err = cmd.Start()
	}
	waits := map[string]bool{"": true} // two tries, of which the first has failed
	for len(waits) < 3 && err == nil {
		var since string
		err = db.Pool.QueryRow(ctx, "SELECT coalesce(max(waitstart)::text, '') FROM pg_locks WHERE NOT granted AND relation = $1::text::regclass", db.Schema+".rate_limits").Scan(&since)
		waits[since] = true
	}
	must(t, err)
	must(t, cmd.Process.Signal(os.Interrupt))
	if exit, stopped := errors.AsType[*exec.ExitError](cmd.Wait()); !stopped || exit.ExitCode() != exitFailed {
		t.Errorf("got exit %v, want status %d", exit, exitFailed)
	}
	wantIn(t, stderr.String(), "ratelimit: migrate up: ", "another transaction, such as a dump, has locked")
}
