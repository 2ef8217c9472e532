package inspect_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// hosted is a schema with all sets, whose default privileges grant all to a role of the web, as
// those of hosted databases do.
func hosted(t *testing.T) (db *pgtest.DB, role string) {
	t.Helper()
	db = pgtest.NewEmpty(t)
	role = "web_" + db.Schema
	run(t, db, "CREATE ROLE "+role+"; GRANT USAGE ON SCHEMA "+db.Schema+" TO "+role)
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	})
	for _, what := range []string{"TABLES", "FUNCTIONS", "SEQUENCES"} {
		run(t, db, "ALTER DEFAULT PRIVILEGES IN SCHEMA "+db.Schema+" GRANT ALL ON "+what+" TO "+role)
	}
	for _, set := range migrations.Sets() {
		run(t, db, set.UpSQL())
	}
	run(t, db, `INSERT INTO rate_limit_definitions (name, kind, rate, period, max_reserved, shards) VALUES ('api', 'token bucket', 1, '1 h', 0, 1);
		INSERT INTO rate_limits (name, key, shard, value, ts) VALUES ('api', 'a stranger', 0, 0, now())`)
	return db, role
}

// run runs SQL in one transaction, with the schema in the search_path.
func run(t *testing.T, db *pgtest.DB, text string) {
	t.Helper()
	if _, err := db.Pool.Exec(t.Context(), "BEGIN; SET LOCAL search_path = "+db.Schema+"; "+text+"; COMMIT", pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
}

// attempt runs SQL as a role, and takes it back.
func attempt(t *testing.T, db *pgtest.DB, role, text string) error {
	t.Helper()
	undo := errors.New("undo")
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "CREATE SCHEMA "+role+" AUTHORIZATION "+role+"; SET LOCAL search_path = "+db.Schema+"; SET LOCAL ROLE "+role+"; "+text); err != nil {
			return err
		}
		return undo
	})
	if errors.Is(err, undo) {
		return nil
	}
	return err
}

func denied(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "42501"
}

// rightsOf returns the rights of a role, as an Inspector lists them.
func rightsOf(t *testing.T, db *pgtest.DB, role string) inspect.Rights {
	t.Helper()
	all, err := (&inspect.Inspector{Pool: db.Pool, Schema: db.Schema}).Rights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
		if r.Role == role {
			return r
		}
	}
	return inspect.Rights{}
}

// calls are attempts to call functions, and ours what they call.
var calls = map[string]string{
	"SELECT rate_limit_allow('api', 'me', 1e9, '1 s')":                                                                    "rate_limit_allow",
	"SELECT rate_limit_take('api', 'me', 1e9, '1 s')":                                                                     "rate_limit_take",
	"SELECT rate_limit_reserve('api', 'me', 1e9, '1 s')":                                                                  "rate_limit_reserve",
	"SELECT rate_limit_check('api', 'a stranger', 1e9, '1 s')":                                                            "rate_limit_check",
	"SELECT rate_limit_credit('api', 'me', 1e9, '1 s', 1e9)":                                                              "rate_limit_credit",
	"SELECT rate_limit_settle('api', 'me', 1e9, '1 s', 1e9, 0)":                                                           "rate_limit_settle",
	"SELECT rate_limit_allow_all(ARRAY[rate_limit_request('api', 'me', 1e9, '1 s')])":                                     "rate_limit_allow_all",
	"SELECT rate_limit_take_all(ARRAY[rate_limit_request('api', 'me', 1e9, '1 s')])":                                      "rate_limit_take_all",
	"SELECT rate_limit_reserve_all(ARRAY[rate_limit_request('api', 'me', 1e9, '1 s')])":                                   "rate_limit_reserve_all",
	"SELECT rate_limit_check_all(ARRAY[rate_limit_request('api', 'a stranger', 1e9, '1 s')])":                             "rate_limit_check_all",
	"SELECT rate_limit_acquire('exports', 'me', 10000)":                                                                   "rate_limit_acquire",
	"SELECT rate_limit_renew('exports', 'a stranger', 0, 1e15::int8, '1 day'::interval)":                                  "rate_limit_renew",
	"SELECT rate_limit_release('exports', 'a stranger', 0, 1e15::int8)":                                                   "",
	"SELECT rate_limit_credit('api', 'me', 1e9)":                                                                          "",
	"SELECT rate_limit_settle('api', 'me', 1e9, 0)":                                                                       "",
	"CREATE TABLE {role}.t (); CREATE TRIGGER t AFTER TRUNCATE ON {role}.t EXECUTE FUNCTION rate_limit_definitions_log()": "rate_limit_definitions_log",
}

// changes are attempts on tables, views and sequences.
var changes = map[string]string{
	"INSERT INTO rate_limits VALUES ('api', 'me', 0, 1e9, now())": "rate_limits",
	"UPDATE rate_limits SET value = 1e9":                          "rate_limits",
	"DELETE FROM rate_limits":                                     "rate_limits",
	"TRUNCATE rate_limits":                                        "rate_limits",
	"CREATE FUNCTION {role}.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; CREATE TRIGGER t BEFORE UPDATE ON rate_limits FOR EACH ROW EXECUTE FUNCTION {role}.f()": "rate_limits",
	"SELECT key FROM rate_limits":                                          "rate_limits",
	"UPDATE rate_limit_definitions SET rate = 1e9":                         "rate_limit_definitions",
	"TRUNCATE rate_limit_history":                                          "rate_limit_history",
	"SELECT setval('rate_limit_history_version_seq', 9223372036854775807)": "rate_limit_history_version_seq",
	"SELECT key FROM rate_limit_refusals":                                  "rate_limit_refusals",
	"SELECT key FROM rate_limits_in_flight":                                "rate_limits_in_flight",
}

// A role to which default privileges grant all can call no function of ours, and what else it
// can do is listed; in a database that was migrated before, the functions are listed as well.
func TestRightsUnderDefaultPrivileges(t *testing.T) {
	t.Parallel()
	db, role := hosted(t)
	in := func(text string) string { return strings.ReplaceAll(text, "{role}", role) }
	for call := range calls {
		if err := attempt(t, db, role, in(call)); !denied(err) {
			t.Errorf("%s: got %v, want insufficient_privilege", call, err)
		}
	}
	rights := rightsOf(t, db, role)
	if len(rights.Calls) > 0 || !rights.Beyond {
		t.Errorf("got %+v, want rights to tables beyond those of a program", rights)
	}
	listed := strings.Join(slices.Concat(rights.Writes, rights.Reads), " ") + " "
	for change, object := range changes {
		if err := attempt(t, db, role, in(change)); !denied(err) && !strings.Contains(listed, object+" ") {
			t.Errorf("%s: got %v, and %q does not list %s", change, err, listed, object)
		}
	}

	run(t, db, "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA "+db.Schema+" TO PUBLIC") // as before
	everybody := rightsOf(t, db, inspect.Everybody)
	for call, function := range calls {
		if err := attempt(t, db, role, in(call)); denied(err) || function != "" && !slices.Contains(everybody.Calls, function) {
			t.Errorf("%s: got %v, and %q does not list it", call, err, everybody.Calls)
		}
	}
	if again := rightsOf(t, db, role); len(again.Calls) > 0 || len(again.Writes) != len(rights.Writes) {
		t.Errorf("got %+v, want what everybody can do not to be the role's", again)
	}
}

// revoking is the SQL of the page to which doctor sends its readers.
func revoking(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/setup.md")
	if err != nil {
		t.Fatal(err)
	}
	for block := range strings.SplitSeq(string(page), "```sql\n") {
		if sql, _, _ := strings.Cut(block, "```"); strings.Contains(sql, "REVOKE ALL ON %s FROM PUBLIC, web") {
			return sql
		}
	}
	t.Fatal("the page has no such block")
	return ""
}

// What the page says to revoke leaves nothing to list, and what it says to grant to a program
// is no more than it needs.
func TestRightsOfAProgram(t *testing.T) {
	t.Parallel()
	db, role := hosted(t)
	run(t, db, "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA "+db.Schema+" TO PUBLIC, "+role) // as in a database migrated before
	run(t, db, strings.NewReplacer("'public'", "'"+db.Schema+"'", "web", role).Replace(revoking(t)))
	for _, who := range []string{role, inspect.Everybody} {
		if got := rightsOf(t, db, who); got.Role != "" {
			t.Errorf("after the REVOKE: %s", got)
		}
	}
	if err := attempt(t, db, role, "SELECT * FROM rate_limits_now"); !denied(err) {
		t.Errorf("got %v, want insufficient_privilege", err)
	}
	run(t, db, "GRANT SELECT, INSERT, UPDATE, DELETE ON rate_limits TO "+role+"; GRANT SELECT ON rate_limit_definitions TO "+role+"; GRANT UPDATE (rate) ON rate_limit_definitions TO "+role)
	got := rightsOf(t, db, role)
	want := role + " can write rate_limit_definitions (UPDATE), rate_limits (DELETE, INSERT, UPDATE); read keys in rate_limit_definitions, rate_limits"
	if got.String() != want || got.Beyond {
		t.Errorf("got %q, %t, want %q", got, got.Beyond, want)
	}
}

// A role that can create functions beside ours can have calls without a schema meet its own, and is listed.
func TestRightToCreateBesideOurs(t *testing.T) {
	t.Parallel()
	db, role := hosted(t)
	run(t, db, strings.NewReplacer("'public'", "'"+db.Schema+"'", "web", role).Replace(revoking(t)))
	run(t, db, "GRANT CREATE ON SCHEMA "+db.Schema+" TO "+role)
	const lure = "CREATE FUNCTION rate_limit_allow(text, text, int4) RETURNS int4 LANGUAGE sql AS 'SELECT 1'"
	if err := attempt(t, db, role, lure); err != nil {
		t.Fatal(err)
	}
	if got := rightsOf(t, db, role); !got.Creates || !got.Beyond || !strings.Contains(got.String(), "create objects in the schema") {
		t.Errorf("got %+v, want the right to create", got)
	}
	run(t, db, "REVOKE CREATE ON SCHEMA "+db.Schema+" FROM "+role)
	if got := rightsOf(t, db, role); got.Role != "" || !denied(attempt(t, db, role, lure)) {
		t.Errorf("after the REVOKE: %s", got)
	}
}

// A view shows nobody what the tables would not: where the server can, it reads as its caller.
func TestViewsReadAsTheirCaller(t *testing.T) {
	t.Parallel()
	db, role := hosted(t)
	var version int
	if err := db.Pool.QueryRow(t.Context(), "SELECT current_setting('server_version_num')::int4").Scan(&version); err != nil {
		t.Fatal(err)
	}
	run(t, db, "REVOKE ALL ON rate_limits FROM "+role)
	for _, view := range []string{"rate_limits_now", "rate_limits_short", "rate_limits_in_flight"} {
		if err := attempt(t, db, role, "SELECT * FROM "+view); !denied(err) && version >= 150000 {
			t.Errorf("%s: got %v, want insufficient_privilege", view, err)
		}
	}
	run(t, db, "GRANT SELECT ON rate_limits TO "+role+"; ALTER TABLE rate_limits ENABLE ROW LEVEL SECURITY; CREATE POLICY mine ON rate_limits USING (key = 'mine')")
	run(t, db, "INSERT INTO rate_limits (name, key, shard, value, ts) VALUES ('api', 'mine', 0, 0, now())")
	if err := attempt(t, db, role, "DO $$BEGIN ASSERT (SELECT count(*) = 1 FROM rate_limits_now); END$$"); err != nil && version >= 150000 {
		t.Errorf("row-level security does not hold for the view: %v", err)
	}
}
