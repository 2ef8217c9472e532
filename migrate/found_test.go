package migrate_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/migrations"
)

// asProgram is a pool of a role that may use the limits and nothing else.
func asProgram(t *testing.T, db *pgtest.DB) (pool *pgxpool.Pool, role string) {
	t.Helper()
	var may bool
	must(t, db.Pool.QueryRow(t.Context(), "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user").Scan(&may))
	if !may {
		t.Skip("the user of DATABASE_URL may not make roles")
	}
	role = strings.Replace(db.Schema, "ratelimit_test_", "ratelimit_role_", 1)
	execute(t, db.Pool, "CREATE ROLE "+role+"; GRANT "+role+" TO current_user; GRANT USAGE ON SCHEMA "+db.Schema+" TO "+role)
	t.Cleanup(func() {
		must(t, errOf(db.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role)))
	})
	return poolWith(t, db.Pool, "SET ROLE "+role), role
}

func execute(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	must(t, errOf(pool.Exec(t.Context(), sql)))
}

func wantUp(t *testing.T, pool *pgxpool.Pool, cfg *migrate.Config, want []migrate.Migration) {
	t.Helper()
	if got, err := migrate.Up(t.Context(), pool, cfg); err != nil || !slices.Equal(got, want) {
		t.Errorf("Up: got %v, %v, want %v", got, err, want)
	}
}

func wantStatus(t *testing.T, pool *pgxpool.Pool, cfg *migrate.Config, want []migrate.Migration) {
	t.Helper()
	if got, err := migrate.Status(t.Context(), pool, cfg); err != nil || !slices.Equal(got, want) {
		t.Errorf("Status: got %v, %v, want %v", got, err, want)
	}
}

// wantRefused wants an error of Up with the words, which changes nothing.
func wantRefused(t *testing.T, pool *pgxpool.Pool, cfg *migrate.Config, words ...string) {
	t.Helper()
	got, err := migrate.Up(t.Context(), pool, cfg)
	if err == nil || got != nil {
		t.Fatalf("Up: got %v, %v, want an error", got, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("Up: got error %v, want one with %q", err, w)
		}
	}
}

// wantMend wants a SchemaError with a word of Up and Status, and returns what mends it.
func wantMend(t *testing.T, pool *pgxpool.Pool, cfg *migrate.Config, word string) string {
	t.Helper()
	_, err := migrate.Status(t.Context(), pool, cfg)
	damage, ok := errors.AsType[*migrate.SchemaError](err)
	if !ok || !strings.Contains(damage.Fault, word) {
		t.Fatalf("Status: got %v, want a SchemaError with %q", err, word)
	}
	wantRefused(t, pool, cfg, damage.Error())
	return damage.Mend
}

// A program calls Up at each start, with the rights that it needs for its limits.
func TestUpWithTheRightsOfAProgram(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	cfg := &migrate.Config{Schema: db.Schema}
	pool, role := asProgram(t, db)
	wantUp(t, db.Pool, cfg, applied)
	for _, right := range []string{
		"SELECT, INSERT, UPDATE ON " + db.Schema + ".rate_limits",
		"SELECT ON " + db.Schema + "." + migrations.VersionTable,
	} {
		execute(t, db.Pool, "GRANT "+right+" TO "+role)
		wantUp(t, pool, cfg, nil)
		wantStatus(t, pool, cfg, applied)
	}

	execute(t, db.Pool, "REVOKE ALL ON "+db.Schema+"."+migrations.VersionTable+" FROM "+role)
	must(t, errOf(migrate.Down(t.Context(), db.Pool, cfg)))
	wantStatus(t, pool, cfg, all(3))
	wantRefused(t, pool, cfg, "lacks 00004_escrow.sql", "may not read "+migrations.VersionTable)
	wantUp(t, db.Pool, cfg, applied[3:])
	wantUp(t, pool, cfg, nil)
}

// Whatever was applied by another tool is seen, and left to it.
func TestTableOfAnotherTool(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for have := 1; have <= len(applied); have++ {
		db := pgtest.NewEmpty(t)
		pool := poolWith(t, db.Pool, "SET search_path TO "+quote(db.Schema))
		text := migrations.UpSQL()
		missing := ""
		if have < len(applied) {
			var err error
			if missing, err = migrations.UpSQLFrom(have + 1); err != nil {
				t.Fatal(err)
			}
		}
		execute(t, pool, strings.TrimSuffix(text, missing))
		want := all(have)
		for i := range want {
			want[i].Untracked = want[i].Applied
		}
		for _, cfg := range []*migrate.Config{nil, {Schema: db.Schema}} {
			wantStatus(t, pool, cfg, want)
			if missing != "" {
				wantRefused(t, pool, cfg, "another tool made", "lacks "+applied[have].Name, "print --from "+string(rune('1'+have)))
				wantStatus(t, pool, cfg, want)
			}
		}
		execute(t, pool, missing)
		wantUp(t, pool, nil, nil)
		if got, err := migrate.Down(t.Context(), pool, nil); err != nil || got != nil {
			t.Errorf("Down: got %v, %v, want nothing, as it is another tool's", got, err)
		}
		wantTables(t, db.Pool, db.Schema, "rate_limits") // and no version table
	}
}

func TestTableOfAnotherLibrary(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	cfg := &migrate.Config{Schema: db.Schema}
	execute(t, db.Pool, "CREATE TABLE "+db.Schema+".rate_limits (id integer, slots integer)")
	const words = "has no column name: it is another library's"
	wantRefused(t, db.Pool, cfg, db.Schema, words)
	if got, err := migrate.Status(t.Context(), db.Pool, cfg); err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("Status: got %v, %v, want an error with %q", got, err, words)
	}
}

// The version table was here first, and then somebody printed the SQL.
func TestBothTools(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	pool := poolWith(t, db.Pool, "SET search_path TO "+quote(db.Schema))
	wantUp(t, pool, nil, applied)
	for range applied {
		must(t, errOf(migrate.Down(t.Context(), pool, nil)))
	}
	execute(t, pool, migrations.UpSQL())
	execute(t, pool, wantMend(t, pool, nil, "lacks a version that the schema has"))
	wantUp(t, pool, nil, nil)
}

// A version table that is older or newer than the schema, such as one that was restored, is told with the SQL
// that mends it.
func TestVersionTableOfAnotherTime(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	for _, set := range migrations.Sets() {
		cfg := &migrate.Config{Schema: db.Schema, Set: set}
		must(t, errOf(migrate.Up(t.Context(), db.Pool, cfg)))
		all, err := migrate.Status(t.Context(), db.Pool, cfg)
		must(t, err)
		var lacks []string
		for from := range all {
			lacks = append(lacks, fmt.Sprintf("version_id > %d", from))
		}
		if len(all) > 1 {
			lacks = append(lacks, "version_id = 1")
		}
		for _, which := range lacks {
			execute(t, db.Pool, fmt.Sprintf("DELETE FROM %s.%s WHERE %s", db.Schema, set.VersionTable(), which))
			execute(t, db.Pool, wantMend(t, db.Pool, cfg, set.VersionTable()))
			wantStatus(t, db.Pool, cfg, all)
			wantUp(t, db.Pool, cfg, nil)
		}
	}
	// Without a version that the schema lacks too, the version is applied. Down takes the newest back, and not
	// the one that was applied last.
	cfg := &migrate.Config{Schema: db.Schema}
	down(t, db.Pool, db.Schema, migrations.Functions, migrations.Catalog)
	execute(t, db.Pool, "SET LOCAL search_path = "+db.Schema+"; ALTER TABLE rate_limits DROP COLUMN paused; DELETE FROM rate_limits_version WHERE version_id = 2")
	wantUp(t, db.Pool, cfg, applied[1:2])
	if newest, err := migrate.Newest(t.Context(), db.Pool, cfg); err != nil || newest == nil || *newest != applied[3] {
		t.Errorf("Newest: got %v, %v, want %v", newest, err, applied[3])
	}
	if got, err := migrate.Down(t.Context(), db.Pool, cfg); err != nil || got == nil || *got != pending[3] {
		t.Errorf("Down: got %v, %v, want %v", got, err, pending[3])
	}
	wantUp(t, db.Pool, cfg, applied[3:])

	cfg.Set = migrations.Catalog
	down(t, db.Pool, db.Schema, "")
	wantRefused(t, db.Pool, cfg, "lacks migrations of the limits' own, which the set catalog needs")
	wantUp(t, db.Pool, &migrate.Config{Schema: db.Schema}, applied)
	execute(t, db.Pool, "CREATE FUNCTION "+db.Schema+".rate_limits_at(timestamptz) RETURNS int LANGUAGE sql AS 'SELECT 1'")
	if _, err := migrate.Up(t.Context(), db.Pool, cfg); err == nil || !strings.Contains(err.Error(), "drop or rename it (function rate_limits_at)") {
		t.Errorf("Up beside a function of that name: got %v", err)
	}
	execute(t, db.Pool, "DROP FUNCTION "+db.Schema+".rate_limits_at(timestamptz)")
	if got, err := migrate.Up(t.Context(), db.Pool, cfg); len(got) != 1 || err != nil {
		t.Errorf("Up: got %v, %v, want the views", got, err)
	}
}

// What is there, but not as it was made, is told with the SQL that makes it so, such as after a restore that
// ended before its keys, or with triggers off.
func TestKeysAndTriggersAsTheyWereMade(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	const state = `SELECT string_agg(s, ' ' ORDER BY s) FROM (
		SELECT pg_get_constraintdef(oid) || ' of ' || conrelid::regclass AS s FROM pg_constraint WHERE connamespace = $1::text::regnamespace AND contype = 'p'
		UNION ALL SELECT tgname || ' ' || tgenabled::text FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid WHERE relnamespace = $1::text::regnamespace) AS s`
	read := func() (s string) {
		must(t, db.Pool.QueryRow(t.Context(), state, db.Schema).Scan(&s))
		return s
	}
	tables := map[migrations.Set][]string{
		"":                  {"rate_limits"},
		migrations.Catalog:  {"rate_limit_definitions", "rate_limit_history", "rate_limit_pending"},
		migrations.Refusals: {"rate_limit_refusals"},
		migrations.River:    {"rate_limit_parked"},
	}
	for _, set := range migrations.Sets() {
		cfg := &migrate.Config{Schema: db.Schema, Set: set}
		must(t, errOf(migrate.Up(t.Context(), db.Pool, cfg)))
		before := read()
		for _, table := range tables[set] {
			execute(t, db.Pool, fmt.Sprintf("ALTER TABLE %[1]s.%[2]s DROP CONSTRAINT %[2]s_pkey; ALTER TABLE %[1]s.%[2]s DISABLE TRIGGER USER", db.Schema, table))
		}
		if tables[set] != nil {
			execute(t, db.Pool, wantMend(t, db.Pool, cfg, tables[set][0]+" has no primary key"))
		}
		if after := read(); after != before {
			t.Errorf("set %q: got %s\nwant %s", set, after, before)
		}
		wantUp(t, db.Pool, cfg, nil)
	}
}

// A table in place of a view, as a copy of the schema can have, is renamed; then the view can be created.
func TestTableInPlaceOfAView(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	for _, set := range []migrations.Set{"", migrations.Catalog} {
		must(t, errOf(migrate.Up(t.Context(), db.Pool, &migrate.Config{Schema: db.Schema, Set: set})))
	}
	cfg := &migrate.Config{Schema: db.Schema, Set: migrations.Catalog}
	execute(t, db.Pool, "SET LOCAL search_path = "+db.Schema+"; DROP VIEW rate_limits_short; CREATE TABLE rate_limits_short ()")
	execute(t, db.Pool, wantMend(t, db.Pool, cfg, "rate_limits_short is a table, and not a view"))
	wantMend(t, db.Pool, cfg, "(view rate_limits_short)")
}

// down takes all of some sets back.
func down(t *testing.T, pool *pgxpool.Pool, schema string, sets ...migrations.Set) {
	t.Helper()
	for _, set := range sets {
		for {
			undone, err := migrate.Down(t.Context(), pool, &migrate.Config{Schema: schema, Set: set})
			must(t, err)
			if undone == nil {
				break
			}
		}
	}
}

// Of a newer server, a function that stands before PostgreSQL's own says that it is old.
func TestUpRefusesAnOldServer(t *testing.T) {
	db := pgtest.NewEmpty(t)
	execute(t, db.Pool, "CREATE FUNCTION "+db.Schema+".current_setting(text) RETURNS text LANGUAGE sql AS $$SELECT least(pg_catalog.current_setting($1)::int4, 130023)::text$$")
	pool := poolWith(t, db.Pool, "SET search_path TO "+quote(db.Schema)+", pg_catalog")
	wantRefused(t, pool, nil, "and the oldest that the library runs on is 14")
	wantTables(t, db.Pool, db.Schema)
}

// A newer program's migration is named, and stays; the table works on.
func TestVersionOfANewerProgram(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	cfg := &migrate.Config{Schema: db.Schema}
	wantUp(t, db.Pool, cfg, applied)
	execute(t, db.Pool, "INSERT INTO "+db.Schema+"."+migrations.VersionTable+" (version_id, is_applied) VALUES (99, true)")
	wantUp(t, db.Pool, cfg, nil)
	wantStatus(t, db.Pool, cfg, append(slices.Clone(applied), migrate.Migration{Version: 99, Name: "version 99 of a newer program", Applied: true, Newer: true}))
	if got, err := migrate.Down(t.Context(), db.Pool, cfg); err == nil || !strings.Contains(err.Error(), "a newer program applied version 99") {
		t.Errorf("Down: got %v, %v, want an error that names the version", got, err)
	}
}

// The error of a version table that was emptied says what to write into it.
func TestEmptiedVersionTable(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	cfg := &migrate.Config{Schema: db.Schema}
	wantUp(t, db.Pool, cfg, applied)
	must(t, errOf(migrate.Down(t.Context(), db.Pool, cfg)))
	execute(t, db.Pool, "DELETE FROM "+db.Schema+"."+migrations.VersionTable)
	mend := wantMend(t, db.Pool, cfg, "is empty")
	if got, err := migrate.Down(t.Context(), db.Pool, cfg); err == nil || !strings.Contains(err.Error(), mend) {
		t.Errorf("Down: got %v, %v, want the same error", got, err)
	}
	execute(t, db.Pool, mend)
	wantStatus(t, db.Pool, cfg, all(3))
	wantUp(t, db.Pool, cfg, applied[3:])
}
