package doors

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// functions are the SQL functions of a schema as a store, with which a store in Go shares the
// rows: that is asked for what they do not know, which is several limits in one call, shards,
// sliding windows, what is kept, and the other verbs.
type functions struct {
	ratelimit.Store
	pool   *pgxpool.Pool
	schema string
	clock  func() time.Time // nil for the database's
	taken  map[*ratelimit.Receipt]ratelimit.Request
}

// withFunctions makes the functions in a test's schema. With a clock that decides, they are
// made with that in place of the database's.
func withFunctions(t *testing.T, db *pgtest.DB, clock func() time.Time) *functions {
	t.Helper()
	text := migrations.Functions.UpSQL()
	if clock != nil {
		inSchema(t, db, "CREATE TABLE test_clock (t timestamptz); INSERT INTO test_clock VALUES (NULL);"+
			"CREATE FUNCTION test_clock() RETURNS timestamptz LANGUAGE sql AS 'SELECT t FROM "+db.Schema+".test_clock'")
		text = strings.ReplaceAll(text, "clock_timestamp()", "@schema@.test_clock()")
	}
	inSchema(t, db, text)
	f := &functions{pool: db.Pool, schema: db.Schema, clock: clock}
	f.empty(t)
	return f
}

// empty has the functions begin anew, with a store in Go that has seen no limits.
func (f *functions) empty(t *testing.T) {
	t.Helper()
	if _, err := f.pool.Exec(t.Context(), "TRUNCATE "+f.schema+".rate_limits"); err != nil {
		t.Fatal(err)
	}
	store, err := pgstore.New(f.pool, &pgstore.Config{Schema: f.schema, Clock: f.clock})
	if err != nil {
		t.Fatal(err)
	}
	f.Store, f.taken = store, map[*ratelimit.Receipt]ratelimit.Request{}
}

// inSchema runs SQL with a test's schema in the search_path.
func inSchema(t *testing.T, db *pgtest.DB, text string) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "SET LOCAL search_path = "+db.Schema+"; "+text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// knows reports whether the functions have a verb for requests.
func knows(requests ...ratelimit.Request) bool {
	if len(requests) != 1 || requests[0].Limit == nil || requests[0].Floor != 0 {
		return false
	}
	d := requests[0].Limit.Definition()
	return d.Shards == 1 && d.Kind != ratelimit.KindSlidingWindow && d.Every == 0
}

// call calls a function, with arguments besides those that all have.
func (f *functions) call(ctx context.Context, name string, r ratelimit.Request, args pgx.NamedArgs) (result ratelimit.Result, err error) {
	d := r.Limit.Definition()
	named := pgx.NamedArgs{"name": d.Name, "key": r.Key, "rate": d.Rate, "period": d.Period, "capacity": d.Capacity, "kind": d.Kind.String()}
	if !d.Start.IsZero() {
		named["start"] = d.Start
	}
	for key, value := range args {
		named[key] = value
	}
	if f.clock != nil {
		if _, err := f.pool.Exec(ctx, "UPDATE "+f.schema+".test_clock SET t = $1", f.clock()); err != nil {
			return result, err
		}
	}
	var list []string
	for key := range named {
		list = append(list, fmt.Sprintf("%s => @%[1]s", key))
	}
	slices.Sort(list) // one statement text, whatever the order of the map
	s := &result.Status
	var retryAfter, resetAfter int64
	var paused *time.Time
	err = f.pool.QueryRow(ctx, `SELECT ok, (extract(epoch FROM retry_after) * 1000000)::int8, retry_at, value, remaining, capacity,
		(extract(epoch FROM reset_after) * 1000000)::int8, paused_until, at FROM `+f.schema+"."+name+"("+strings.Join(list, ", ")+")", named).
		Scan(&s.OK, &retryAfter, &s.RetryAt, &s.Value, &s.Remaining, &s.Capacity, &resetAfter, &paused, &s.At)
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		switch pgErr.Code {
		case "22003": // numeric_value_out_of_range
			return result, &ratelimit.ExceedsCapacityError{Request: r}
		case "22023", "22021": // invalid_parameter_value, character_not_in_repertoire
			return result, &ratelimit.FieldError{Field: "Count", Value: r.Count, Reason: pgErr.Message}
		}
	}
	if paused != nil {
		s.PausedUntil = *paused
	}
	s.Request, s.RetryAfter, s.ResetAfter = r, time.Duration(retryAfter)*time.Microsecond, time.Duration(resetAfter)*time.Microsecond
	return result, err
}

// take is call for a verb that takes.
func (f *functions) take(ctx context.Context, name string, r ratelimit.Request, args pgx.NamedArgs) (ratelimit.Result, error) {
	args["count"] = r.Count
	result, err := f.call(ctx, name, r, args)
	if err == nil && result.OK && name != "rate_limit_check" {
		result.Taken, result.Receipt = r.Count, new(ratelimit.Receipt)
		f.taken[result.Receipt] = r
	}
	return result, err
}

func (f *functions) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if !knows(requests...) {
		return f.Store.Allow(ctx, requests...)
	}
	return f.take(ctx, "rate_limit_allow", requests[0], pgx.NamedArgs{})
}

func (f *functions) Reserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if !knows(requests...) {
		return f.Store.Reserve(ctx, requests...)
	}
	return f.take(ctx, "rate_limit_reserve", requests[0], pgx.NamedArgs{"max_reserved": requests[0].Limit.Definition().MaxReserved})
}

func (f *functions) Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if !knows(requests...) {
		return f.Store.Check(ctx, requests...)
	}
	return f.take(ctx, "rate_limit_check", requests[0], pgx.NamedArgs{})
}

func (f *functions) CheckReserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if !knows(requests...) {
		return f.Store.CheckReserve(ctx, requests...)
	}
	return f.take(ctx, "rate_limit_check", requests[0], pgx.NamedArgs{"reserve": true, "max_reserved": requests[0].Limit.Definition().MaxReserved})
}

func (f *functions) Credit(ctx context.Context, r ratelimit.Request) (ratelimit.Status, error) {
	if !knows(r) {
		return f.Store.Credit(ctx, r)
	}
	result, err := f.call(ctx, "rate_limit_credit", r, pgx.NamedArgs{"count": r.Count})
	return result.Status, err
}

func (f *functions) Settle(ctx context.Context, r *ratelimit.Receipt, used ...float64) (ratelimit.Result, error) {
	taken, ok := f.taken[r]
	if !ok || len(used) != 1 {
		return f.Store.Settle(ctx, r, used...)
	}
	if taken.Limit == nil {
		return ratelimit.Result{}, ratelimit.ErrSettled
	}
	result, err := f.call(ctx, "rate_limit_settle", taken, pgx.NamedArgs{"taken": taken.Count, "used": used[0]})
	if err == nil {
		f.taken[r] = ratelimit.Request{}
		result.Taken = used[0]
	}
	return result, err
}

func (f *functions) Cancel(ctx context.Context, r *ratelimit.Receipt) (bool, error) {
	if _, ok := f.taken[r]; !ok {
		return f.Store.Cancel(ctx, r)
	}
	_, err := f.Settle(ctx, r, 0)
	if errors.Is(err, ratelimit.ErrSettled) {
		return false, nil
	}
	return err == nil, err
}

func TestFunctionScenarios(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var clock func() time.Time
	f := withFunctions(t, db, func() time.Time { return clock() })
	calls := scenarios(t, func(c func() time.Time) ratelimit.Store {
		clock = c
		f.empty(t)
		return f
	}, func(line) bool { return false })
	if calls < 150 {
		t.Errorf("%d calls, want at least 150", calls)
	}
}

func TestFunctionHistories(t *testing.T) {
	t.Parallel()
	const calls = 60
	seeds := uint64(40)
	if testing.Short() {
		seeds = 10
	}
	db := pgtest.New(t)
	var h *history
	clock := func() time.Time { return h.now }
	f := withFunctions(t, db, clock)
	took := 0
	for seed := range seeds {
		h = newHistory(seed)
		f.empty(t)
		h.most, h.noText = 1, true
		h.stores = [2]ratelimit.Store{f, memstore.New(clock)}
		for n := range calls {
			if err := h.step(t.Context()); err != nil {
				t.Fatalf("seed %d, call %d: %v", seed, n, err)
			}
		}
		took += len(f.taken)
	}
	if least := 5 * int(seeds); took < least {
		t.Errorf("the functions took %d times, want at least %d", took, least)
	}
}

// The phase of a window is the same in SQL: also of keys that are not ASCII.
func TestFunctionPhase(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	withFunctions(t, db, nil)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	if err != nil {
		t.Fatal(err)
	}
	for i, key := range []string{"", "a", "Ünïcode 語", strings.Repeat("x", 300)} {
		limit := ratelimit.FixedWindow{Name: fmt.Sprintf("window %d", i), Rate: 1, Period: 7919 * time.Second}
		if err := store.Take(t.Context(), limit.For(key)); err != nil {
			t.Fatal(err)
		}
		var apart float64
		err := db.Pool.QueryRow(t.Context(), `SELECT mod((extract(epoch FROM ts - `+db.Schema+`.rate_limit_origin(name, key, 7919e6, NULL)) * 1000000), 7919000000)
			FROM `+db.Schema+`.rate_limits WHERE name = $1`, limit.Name).Scan(&apart)
		if err != nil || apart != 0 {
			t.Errorf("key %q: the edges are %v microseconds apart, %v", key, apart, err)
		}
	}
}

// What a call must not have is an error, and changes nothing.
func TestFunctionsRefuseBadInput(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	withFunctions(t, db, nil)
	for call, want := range map[string]string{
		"rate_limit_allow('', 'k', 1, '1 s')":                                   "22023",
		"rate_limit_allow(NULL, 'k', 1, '1 s')":                                 "22023",
		"rate_limit_allow('l', NULL, 1, '1 s')":                                 "22023",
		"rate_limit_allow('l', repeat('k', 2049), 1, '1 s')":                    "22023",
		"rate_limit_allow('l', 'k', 0, '1 s')":                                  "22023",
		"rate_limit_allow('l', 'k', 'NaN', '1 s')":                              "22023",
		"rate_limit_allow('l', 'k', 'Infinity', '1 s')":                         "22023",
		"rate_limit_allow('l', 'k', 0.5, '1 s')":                                "22023",
		"rate_limit_allow('l', 'k', 1, '0 s')":                                  "22023",
		"rate_limit_allow('l', 'k', 1, '1 month')":                              "22023",
		"rate_limit_allow('l', 'k', 1, NULL)":                                   "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', count => -1)":                     "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', count => 'NaN')":                  "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', count => NULL)":                   "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', capacity => -1)":                  "22023",
		"rate_limit_allow('l', 'k', 1, '36500 days', capacity => 2)":            "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', kind => 'sliding window')":        "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', start => now())":                  "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', count => 2)":                      "22003",
		"rate_limit_reserve('l', 'k', 1, '1 s', count => 3, max_reserved => 1)": "22003",
		"rate_limit_reserve('l', 'k', 1, '1 s', max_reserved => -1)":            "22023",
		"rate_limit_settle('l', 'k', 1, '1 s', taken => 1, used => -1)":         "22023",
		"rate_limit_settle('l', 'k', 1, '1 s', taken => 1, used => 'Infinity')": "22023",
		"rate_limit_take('l', 'k', 1, '1 s', count => 2)":                       "22003",
	} {
		if _, err := db.Pool.Exec(t.Context(), "SELECT "+db.Schema+"."+call); !hasCode(err, want) {
			t.Errorf("%s: got %v, want %s", call, err, want)
		}
	}
	var rows int
	if err := db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".rate_limits").Scan(&rows); err != nil || rows != 0 {
		t.Errorf("%d rows, %v, want none", rows, err)
	}
}

// A role that may call one function, and nothing else, is limited by what that says: it cannot
// reach the table, the other functions, or have its own tables and functions taken for ours.
func TestFunctionsAreSafe(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	withFunctions(t, db, nil)
	role := "caller_of_" + db.Schema
	owner := func(text string) {
		t.Helper()
		inSchema(t, db, strings.NewReplacer("{role}", role, "{schema}", db.Schema).Replace(text))
	}
	owner(`CREATE ROLE {role}; GRANT USAGE ON SCHEMA {schema} TO {role};
		CREATE FUNCTION send_message(who text) RETURNS boolean LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
			SELECT ok FROM {schema}.rate_limit_allow('send_message', who, rate => 2, period => '1 day')
		$$;
		REVOKE EXECUTE ON FUNCTION send_message FROM PUBLIC;
		GRANT EXECUTE ON FUNCTION send_message TO {role};`)
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	})
	conn, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Hijack().Close(context.Background()) }() // with what is set in it
	as := func(text string, args ...any) error {
		_, err := conn.Exec(t.Context(), strings.NewReplacer("{schema}", db.Schema, "{role}", role).Replace(text), args...)
		return err
	}
	// Shadows of all that the functions use, before it in the search_path.
	for _, text := range []string{
		"GRANT CREATE ON SCHEMA {schema} TO {role}", "CREATE SCHEMA AUTHORIZATION {role}", "SET ROLE {role}",
		"CREATE TEMP TABLE rate_limits (name text, key text, shard int, value float8, ts timestamptz, paused timestamptz, slots float8[], ahead float8[], PRIMARY KEY (name, key, shard))",
		"SET search_path = pg_temp, {role}, {schema}, pg_catalog",
		"CREATE FUNCTION {role}.least(float8, float8) RETURNS float8 LANGUAGE sql AS 'SELECT 1e9::float8'",
		"CREATE FUNCTION {role}.date_part(text, interval) RETURNS float8 LANGUAGE sql AS 'SELECT 1e9::float8'",
		"CREATE FUNCTION {role}.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT '2100-01-01'::timestamptz$$",
		"CREATE FUNCTION {role}.more(float8, float8) RETURNS boolean LANGUAGE sql AS 'SELECT true'",
		"CREATE OPERATOR {role}.>= (LEFTARG = float8, RIGHTARG = float8, FUNCTION = {role}.more)",
	} {
		if err := as(text); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	for i, want := range []bool{true, true, false, false} {
		var ok bool
		if err := conn.QueryRow(t.Context(), "SELECT "+db.Schema+".send_message('alice')").Scan(&ok); err != nil || ok != want {
			t.Errorf("call %d: got %v, %v, want %v", i, ok, err, want)
		}
	}
	for _, text := range []string{
		"SELECT * FROM {schema}.rate_limits", "DELETE FROM {schema}.rate_limits", "UPDATE {schema}.rate_limits SET value = 9",
		"SELECT {schema}.rate_limit_allow('send_message', 'alice', 1000, '1 s')",
		"SELECT {schema}.rate_limit_credit('send_message', 'alice', 2, '1 day')",
		"SELECT {schema}.rate_limit_take('send_message', 'alice', 1000, '1 s')",
		"SELECT {schema}.rate_limit_put('send_message', 'alice', 0, 9, now(), NULL, NULL)",
		"SELECT {schema}.rate_limit_call('credit', 'send_message', 'alice', 1, 1, '1 s', NULL, NULL, 'token bucket', NULL, NULL)",
	} {
		if err := as(text); !hasCode(err, "42501") { // insufficient_privilege
			t.Errorf("%s: got %v, want insufficient_privilege", text, err)
		}
	}
	var left int
	if err := conn.QueryRow(t.Context(), "SELECT pg_catalog.count(*) FROM pg_temp.rate_limits").Scan(&left); err != nil || left != 0 {
		t.Errorf("%d rows in the role's own table, %v, want none", left, err)
	}
}

// A trigger limits inserts, whoever makes them, and raises the SQLSTATE that was chosen; what
// is refused is not there, and what is rolled back costs nothing.
func TestTrigger(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	f := withFunctions(t, db, nil)
	inSchema(t, db, strings.ReplaceAll(`CREATE TABLE messages (sender text NOT NULL);
		CREATE FUNCTION limit_messages() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
		BEGIN
			PERFORM {schema}.rate_limit_take('send_message', NEW.sender, rate => 3, period => '1 day');
			RETURN NEW;
		END $$;
		CREATE TRIGGER limit_messages BEFORE INSERT ON messages FOR EACH ROW EXECUTE FUNCTION limit_messages();`, "{schema}", db.Schema))
	insert := func(values string) error {
		_, err := db.Pool.Exec(t.Context(), "INSERT INTO "+db.Schema+".messages VALUES "+values)
		return err
	}
	if err := insert("('alice'), ('alice')"); err != nil {
		t.Fatal(err)
	}
	if err := insert("('alice'), ('alice')"); !hasCode(err, "PT429") { // the first of them is undone
		t.Errorf("got %v, want PT429", err)
	}
	if err := insert("('alice'), ('bob')"); err != nil {
		t.Error(err)
	}
	var pgErr *pgconn.PgError
	if err := insert("('alice')"); !errors.As(err, &pgErr) || pgErr.Code != "PT429" || !strings.HasPrefix(pgErr.Detail, "Try again in ") || strings.Contains(pgErr.Message, "alice") {
		t.Errorf("got %+v, want PT429 without the key, and when to try again", pgErr)
	}
	var messages int
	if err := db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".messages").Scan(&messages); err != nil || messages != 4 {
		t.Errorf("%d messages, %v, want 4", messages, err)
	}
	limit := ratelimit.TokenBucket{Name: "send_message", Rate: 3, Period: 24 * time.Hour}
	result, err := f.Store.Check(t.Context(), limit.For("alice")) // in Go, the same row
	if err != nil || result.OK || result.Remaining != 0 {
		t.Errorf("got %v, %v, want a refusal", result, err)
	}
	_, err = db.Pool.Exec(t.Context(), "SELECT "+db.Schema+".rate_limit_take('other', 'k', 1, '1 day', state => 'AB123') FROM generate_series(1, 2)")
	if !hasCode(err, "AB123") {
		t.Errorf("got %v, want the SQLSTATE that was chosen", err)
	}
}

// psql calls a function, as anybody would.
func TestPsql(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	withFunctions(t, db, nil)
	psql, err := exec.LookPath("psql")
	if err != nil {
		found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/psql")
		if len(found) == 0 {
			t.Skip("no psql on this machine")
		}
		psql = found[len(found)-1]
	}
	command := exec.CommandContext(t.Context(), psql, "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", db.URL,
		"-c", "SELECT (a).ok, (a).remaining FROM (SELECT "+db.Schema+".rate_limit_allow('from psql', '', rate => 2, period => '1 h') AS a FROM generate_series(1, 3) OFFSET 0) AS t")
	out, err := command.CombinedOutput()
	if want := "t|1\nt|0\nf|0\n"; err != nil || string(out) != want {
		t.Errorf("got %q, %v, want %q", out, err, want)
	}
}

// They go as they came, and leave the table.
func TestFunctionsDown(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	withFunctions(t, db, nil)
	var before, after int
	count := "SELECT count(*) FROM pg_proc WHERE pronamespace = $1::regnamespace"
	if err := db.Pool.QueryRow(t.Context(), count, db.Schema).Scan(&before); err != nil || before < 10 {
		t.Fatalf("%d functions, %v", before, err)
	}
	inSchema(t, db, migrations.Functions.DownSQL())
	if err := db.Pool.QueryRow(t.Context(), count, db.Schema).Scan(&after); err != nil || after != 0 {
		t.Errorf("%d functions left, %v", after, err)
	}
	inSchema(t, db, migrations.Functions.UpSQL())
	if math.IsNaN(left(t, db)) {
		t.Error("the table is gone")
	}
}
