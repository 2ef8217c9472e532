package main

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/erase"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// A world is a database, with a program's store and catalog in it.
type world struct {
	*testing.T
	db      *pgtest.DB
	store   *pgstore.Store
	catalog *catalog.Catalog
}

var (
	api     = ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Hour, Capacity: 20, MaxReserved: 5}
	sharded = ratelimit.TokenBucket{Name: "sharded", Rate: 10, Period: time.Hour, Shards: 2}
	monthly = ratelimit.FixedWindow{Name: "monthly", Rate: 1000, Every: ratelimit.Month, Zone: "Europe/Berlin"}
)

// worldOf makes a store on a database.
func worldOf(t *testing.T, db *pgtest.DB) *world {
	t.Helper()
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	must(t, err)
	return &world{T: t, db: db, store: store}
}

// newWorld makes a database in which limits are published.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := worldOf(t, pgtest.New(t, pgtest.With(migrations.Catalog)))
	var err error
	w.catalog, err = catalog.New(w.db.Pool, &catalog.Config{Schema: w.db.Schema, Logger: silent})
	w.must(err)
	w.must(w.catalog.Publish(t.Context(), api, sharded, monthly))
	return w
}

// exec runs statements in the world's schema.
func (w *world) exec(sql string) {
	w.Helper()
	_, err := w.db.Pool.Exec(w.Context(), "BEGIN; SET LOCAL search_path = "+w.db.Schema+"; "+sql+"; COMMIT", pgx.QueryExecModeSimpleProtocol)
	w.must(err)
}

// acquire takes permits, which must be free.
func (w *world) acquire(of ratelimit.PermitRequest) ratelimit.Permit {
	w.Helper()
	permit, err := w.store.Permits().Acquire(w.Context(), of)
	if err != nil || !permit.OK {
		w.Fatal(permit, err)
	}
	return permit
}

func (w *world) must(err error) {
	w.Helper()
	must(w, err)
}

func (w *world) edited(_ catalog.Edit, err error) {
	w.Helper()
	w.must(err)
}

// take takes tokens, as a program does.
func (w *world) take(limit ratelimit.Limit, key string, count float64) {
	w.Helper()
	w.must(w.store.Take(w.Context(), w.catalog.ForN(limit, key, count)))
}

// left is how many whole tokens a key has.
func (w *world) left(limit ratelimit.Limit, key string) int64 {
	w.Helper()
	result, err := w.store.Check(w.Context(), w.catalog.ForN(limit, key, 0))
	w.must(err)
	return result.Remaining
}

// program runs the program on the database, in this process.
func (w *world) program(args ...string) outcome {
	w.Helper()
	end := slices.Index(args, "--")
	if end < 0 {
		end = len(args)
	}
	return execute(w.T, "", slices.Insert(slices.Clone(args), end, "--schema", w.db.Schema, "--database-url", w.db.URL)...)
}

// ok fails the test unless the program succeeded, and returns what it printed.
func (o outcome) ok(t *testing.T) string {
	t.Helper()
	o.wantStatus(t, exitOK)
	return o.stdout
}

// wantIn fails the test if a text lacks something.
func wantIn(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("lacks %q:\n%s", part, text)
		}
	}
}

// objects reads JSON, one object a line.
func objects[T any](t *testing.T, text string) (all []T) {
	t.Helper()
	for line := range strings.Lines(text) {
		var v T
		if err := json.Unmarshal([]byte(line), &v); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		all = append(all, v)
	}
	return all
}

func TestLs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.take(api, "eu/alice", 5)
	w.take(api, "eu/bob", 19.5)
	w.take(api, "us/carol", 1)
	w.exec(`INSERT INTO rate_limits VALUES ('gone', '', 0, 1, now());
INSERT INTO rate_limits SELECT 'api', key, 0, 20, now() FROM unnest(ARRAY['eu/a full one', 'eu/z']) AS key`)
	w.take(sharded, "x", 1)
	w.edited(w.catalog.Set(t.Context(), "api", "us/carol", catalog.Override{Capacity: 40}))

	limits := objects[limitJSON](t, w.program("ls", "--json").ok(t))
	if len(limits) != 4 || limits[0].Name != "api" || limits[0].Rows != 5 || limits[0].Overrides != 1 || limits[1].Definition != nil {
		t.Errorf("got %+v", limits)
	}
	wantIn(t, w.program("ls").ok(t), `token bucket "api": 10 per 1h, capacity 20`, "gone: no definition is known", "Europe/Berlin")

	keys := func(args ...string) (keys []string) {
		for _, k := range objects[keyJSON](t, w.program(append([]string{"ls", "api", "--json"}, args...)...).ok(t)) {
			keys = append(keys, k.Key+" "+strconv.FormatInt(k.Remaining, 10))
		}
		return keys
	}
	for _, test := range []struct {
		args []string
		want []string
	}{
		{nil, []string{"eu/alice 15", "eu/bob 0", "us/carol 19"}},
		{[]string{"--prefix", "eu/"}, []string{"eu/alice 15", "eu/bob 0"}},
		{[]string{"--prefix", "eu/", "--after", "eu/alice"}, []string{"eu/bob 0"}},
		{[]string{"--most", "1"}, []string{"eu/alice 15"}},
		{[]string{"--short"}, []string{"eu/bob 0"}},
		{[]string{"--prefix", "none"}, nil},
	} {
		if got := keys(test.args...); !slices.Equal(got, test.want) {
			t.Errorf("%q: got %q, want %q", test.args, got, test.want)
		}
	}
	for _, k := range objects[keyJSON](t, w.program("ls", "api", "--json").ok(t)) {
		if overridden := k.Key == "us/carol"; k.Overridden != overridden || overridden != (k.Capacity == 40) {
			t.Errorf("by the wrong definition: %+v", k)
		}
	}
	wantIn(t, w.program("ls", "api").ok(t), "LEFT", "KEY", "0.5", "eu/bob")
	w.program("ls", "unknown").wantStatus(t, exitBad, `no definition of this limit: "unknown"`, "--definitions FILE")
}

// Overrides of more keys than are read by one statement.
func TestLsOfManyOverrides(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`INSERT INTO rate_limits SELECT 'api', 'k' || i, 0, 1, clock_timestamp() FROM generate_series(1, 2500) AS i;
INSERT INTO rate_limit_definitions (name, key, capacity) SELECT 'api', 'k' || i, 100 + i FROM generate_series(1, 2500) AS i`)
	listed := objects[keyJSON](t, w.program("ls", "api", "--most", "0", "--json").ok(t))
	if len(listed) != 2500 {
		t.Errorf("got %d keys, want 2500", len(listed))
	}
	for _, k := range listed {
		if n, err := strconv.Atoi(k.Key[1:]); err != nil || k.Capacity != float64(100+n) || !k.Overridden {
			t.Fatalf("by the wrong definition: %+v", k)
		}
	}
}

func TestShow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	show := func(args ...string) storyJSON {
		t.Helper()
		return objects[storyJSON](t, w.program(append([]string{"show", "--json"}, args...)...).ok(t))[0]
	}
	if s := show("api", "alice"); !s.OK || len(s.Rows) != 0 || s.Remaining != 20 {
		t.Errorf("without a row: %+v", s)
	}
	w.take(api, "alice", 18)
	if s := show("api", "alice", "2"); !s.OK || len(s.Rows) != 1 || s.Remaining != 2 {
		t.Errorf("what is there: %+v", s)
	}
	s := show("api", "alice", "3")
	retry, err := time.Parse(time.RFC3339Nano, s.RetryAt)
	if wait := time.Until(retry); s.OK || err != nil || wait > 6*time.Minute || wait < 4*time.Minute {
		t.Errorf("one more than there is: %+v, in %v", s, wait)
	}
	wantIn(t, s.Why, "refused", "3 would be granted at")
	if s := show("api", "alice", "21"); !s.Never || s.OK || s.RetryAt != "" {
		t.Errorf("more than the capacity: %+v", s)
	}
	if s := show("api", "alice", "3", "--reserve"); !s.OK || s.RetryAt == "" {
		t.Errorf("a reservation: %+v", s)
	}
	if s := show("api", "alice", "8", "--reserve"); s.OK || !strings.Contains(s.Why, "debt may be at most 5") {
		t.Errorf("a reservation that is too deep: %+v", s)
	}
	w.edited(w.catalog.Set(t.Context(), "api", "alice", catalog.Override{Capacity: 10, Note: "abuse\x1b[31m"}))
	text := w.program("show", "api", "alice", "9").ok(t)
	wantIn(t, text, "holds", "capacity 10", `override  capacity 10, ("abuse\x1b[31m")`, "changed", "refused: 9 wanted, 2", "shard 0: 2")
	if strings.Contains(text, "\x1b") {
		t.Errorf("an escape sequence where there is no terminal:\n%q", text)
	}
	w.must(errOf(w.store.Pause(t.Context(), api, "alice", time.Hour)))
	if s := show("api", "alice"); s.OK || s.PausedUntil == "" || !strings.Contains(s.Why, "paused until") {
		t.Errorf("a pause: %+v", s)
	}
	w.program("show", "unknown", "k").wantStatus(t, exitBad, `no definition of this limit: "unknown"`)
	w.program("show", "api", "k", "-1").wantStatus(t, exitBad, "shorthand") // a flag
	if s := show("--", "api", "k", "-1"); !s.Never {
		t.Errorf("a count that cannot be: %+v", s)
	}
	w.program("show", "api", strings.Repeat("k", 2049)).wantStatus(t, exitBad, "Key")
}

// An override or a pause of what no call of the limit can have as its key is told, when it is made and
// afterwards, with the key to write.
func TestKeysOfAnotherShape(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := newWorld(t)
	exports := ratelimit.InFlight{Name: "exports", Limit: 2, Lease: time.Hour}
	w.must(w.catalog.PublishInFlight(t.Context(), exports))
	if text := w.program("show", "api", "192.0.2.1").ok(t); strings.Contains(text, "unlike") {
		t.Errorf("without rows: got %s", text)
	}
	for i := range 300 { // of FirstOf: users, and then addresses
		w.take(api, ratelimit.Key("0", "user "+strconv.Itoa(i)), 1)
	}
	w.take(api, "1:198.51.100.7/32", 1)
	hash := strings.Repeat("A", 43)
	w.take(sharded, hash, 1)
	w.acquire(exports.For("198.51.100.7/32"))
	for _, test := range []struct{ limit, key, write string }{
		{"api", "192.0.2.1", "1:192.0.2.1/32"},
		{"api", "1:192.0.2.1", ""},
		{"api", "1:192.0.2.1/32", "none"},
		{"sharded", "sk_live", "W_Uo7EB4atmMR4KMRborfzM80uV81E951YjKuZ3erBw"},
		{"monthly", "192.0.2.1", "none"},
		{"exports", "192.0.2.1", "192.0.2.1/32"},
		{"exports", "198.51.100.7/32", "none"},
	} {
		text := w.program("show", test.limit, test.key).ok(t)
		switch unlike := strings.Contains(text, "unlike"); {
		case test.write == "none":
			if unlike {
				t.Errorf("%s of %s: got %s", test.key, test.limit, text)
			}
		case !unlike || test.write != "" && !strings.Contains(text, "): write "+test.write+"\n"):
			t.Errorf("%s of %s: got %s, want to write %q", test.key, test.limit, text, test.write)
		}
	}
	const told = "key 192.0.2.1: rows of the limit have keys such as 1:198.51.100.7/32 (text:IPv4/32, text:text), and this is another shape (address): write 1:192.0.2.1/32\n"
	for _, args := range [][]string{
		{"catalog", "set", "api", "192.0.2.1", "--rate", "20", "--yes"},
		{"catalog", "off", "api", "192.0.2.1", "--yes"},
		{"pause", "api", "192.0.2.1", "1h", "--dry-run"},
		{"reset", "api", "192.0.2.1", "--dry-run"},
		{"credit", "api", "192.0.2.1", "1", "--yes"},
	} {
		o := w.program(args...)
		o.wantStatus(t, exitOK)
		if args[1] != "off" && !strings.Contains(o.stderr, told) {
			t.Errorf("%q: got %q, want %q", args, o.stderr, told)
		}
	}
	if s := objects[storyJSON](t, w.program("show", "sharded", "sk_live", "--json").ok(t))[0]; !strings.Contains(s.Unlike, "(hash)") {
		t.Errorf("got %+v", s)
	}
}

// A transaction that has a key's row locked, and waits for nothing, is named.
func TestShowNamesTheHolder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.take(sharded, "k", 2)
	tx, err := w.db.Pool.Begin(t.Context())
	w.must(err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	w.must(w.store.TakeTx(t.Context(), tx, sharded.For("k")))
	pid := 0
	w.must(tx.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
	held := 0
	for _, row := range objects[storyJSON](t, w.program("show", "sharded", "k", "--json").ok(t))[0].Rows {
		if row.Holder != nil {
			held++
			if row.PID != pid || row.State != "idle in transaction" || row.Since.IsZero() {
				t.Errorf("got %+v, want process %d", row, pid)
			}
		}
	}
	if held != 1 {
		t.Errorf("%d rows are locked, want 1", held)
	}
	wantIn(t, w.program("show", "sharded", "k").ok(t), "locked by", "idle in transaction", strconv.Itoa(pid))
}

func TestEdits(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := newWorld(t)
	for _, key := range []string{"a", "b"} {
		w.take(api, key, 15)
	}
	wantIn(t, w.program("credit", "api", "a", "3", "--yes").ok(t), "credited a: 8")
	w.program("credit", "--yes", "--", "api", "a", "-3").wantStatus(t, exitBad, "Count -3")

	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"reset", "api", "a", "b"}, "reset 2 keys of api"},
		{[]string{"reset", "api", "a"}, "reset key a of api, which has 8"},
		{[]string{"credit", "api", "a", "2"}, "give 2 to key a of api, which has 8"},
		{[]string{"resume", "api", "a"}, "end the pause of key a of api"},
		{[]string{"pause", "api", "a", "b", "1h"}, "pause for 1h0m0s 2 keys of api"},
		{[]string{"forget", "api"}, "delete 2 rows of api"},
		{[]string{"change", "api", "a", "--from", "rate=5", "--to", "shards=2,rate=30"}, "change key a of api from rate=5 to rate=30,shards=2"},
		{[]string{"prune", "--history-age", "1ns"}, "delete 0 rows that mean the same as no row, and changes of the catalog that are older than 1ns"},
	} {
		o := w.program(test.args...)
		o.wantStatus(t, exitBad, "say --yes, or --dry-run to see")
		o = w.program(append(test.args, "--dry-run")...)
		o.wantStatus(t, exitOK, "would "+test.want)
		if o.stdout != "" || w.left(api, "a") != 8 || w.left(api, "b") != 5 {
			t.Errorf("%q did something", test.args)
		}
	}

	wantIn(t, w.program("pause", "api", "a", "b", "1h", "--yes").ok(t), "paused a", "paused b", "paused until")
	if w.left(api, "a") != 0 || w.left(api, "b") != 0 {
		t.Error("not paused")
	}
	if got := objects[keyJSON](t, w.program("resume", "api", "a", "--json", "--yes").ok(t)); len(got) != 1 || got[0].Key != "a" || got[0].PausedUntil != "" {
		t.Errorf("got %+v", got)
	}
	w.program("reset", "api", "a", "--yes").ok(t)
	if w.left(api, "a") != 20 || w.left(api, "b") != 0 {
		t.Errorf("left: %d and %d, want 20 and 0", w.left(api, "a"), w.left(api, "b"))
	}

	w.take(api, "c", 10)
	wantIn(t, w.program("change", "api", "--all-keys", "--to", "shards=2", "--yes").ok(t), "changed 2 keys")
	two := api
	two.Shards = 2
	if got := w.left(two, "c"); got != 10 {
		t.Errorf("two rows have %d, want 10", got)
	}
	wantIn(t, w.program("change", "api", "c", "--from", "shards=2", "--to", "shards=2,capacity=30", "--yes").ok(t), "changed c: 10", " of 20 left → 20", " of 30 left")
	w.program("change", "api", "c", "--to", "rate=none", "--yes").wantStatus(t, exitBad, "rate")
	wantIn(t, w.program("forget", "api", "--catalog", "--yes").ok(t), "deleted 4 rows", "deleted 1 row of the catalog")
	w.program("ls", "api").wantStatus(t, exitBad, "no definition")
	// A key of all that is malformed, and none is changed.
	w.take(sharded, "a", 5)
	w.program("reset", "sharded", "a", strings.Repeat("k", 2049), "--yes").wantStatus(t, exitBad, "Key")
	if w.left(sharded, "a") != 5 {
		t.Error("half done")
	}
}

// An incident has a list: of more keys than one call has, in the form in which they are printed.
func TestKeysFromStandardInput(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := newWorld(t)
	list := "\n-\r\n" + `"-"` + "\n" + `"a\nb"` + "\n" + `""` + "\n"
	keys := []string{"-", "a\nb", ""}
	for i := range 2*ratelimit.MaxRequests + 2 {
		keys = append(keys, "k"+strconv.Itoa(i))
		list += keys[len(keys)-1] + "\n" + keys[len(keys)-1] + "\n" // twice is once
	}
	list = strings.Replace(list, "-\r\n", "k0\r\n", 1)
	for _, key := range keys {
		w.take(api, key, 19)
	}
	feed := func(args ...string) outcome {
		t.Helper()
		return execute(t, list, append(args, "--schema", w.db.Schema, "--database-url", w.db.URL)...)
	}
	for _, test := range []struct {
		args []string
		want int64
	}{
		{[]string{"credit", "api", "-", "4"}, 5},
		{[]string{"pause", "api", "-", "1h"}, 0},
		{[]string{"resume", "api", "-"}, 0},
		{[]string{"change", "api", "-", "--to", "capacity=30"}, 10},
		{[]string{"reset", "api", "-"}, 20},
	} {
		feed(test.args...).wantStatus(t, exitBad, "133 keys of api", "say --yes")
		if got := strings.Count(feed(append(test.args, "--yes")...).ok(t), "\n"); got != len(keys) {
			t.Errorf("%q: told of %d keys, want %d", test.args, got, len(keys))
		}
		for _, key := range keys {
			if left := w.left(api, key); left != test.want {
				t.Errorf("%q: %q has %d left, want %d", test.args, key, left, test.want)
			}
		}
	}
	list = "fine\n" + strings.Repeat("k", 2049) + "\n"
	feed("reset", "api", "-", "--yes").wantStatus(t, exitBad, "Key")
	list = "fine\n\"\n"
	feed("reset", "api", "-", "--yes").wantStatus(t, exitBad, "<stdin>:2: ")
	list = "\ufefffine\r\n\r\nfine"
	if got := feed("reset", "api", "-", "--yes").ok(t); got != "reset fine: 20 of 20 left\n" {
		t.Errorf("got %q", got)
	}
}

// Of several keys, those that were changed before one failed are named, so that no one is credited twice.
func TestKeyThatFailsAmongOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, key := range []string{"a", "bad", "c"} {
		w.take(api, key, 10)
	}
	_, err := w.db.Pool.Exec(t.Context(), strings.ReplaceAll(`CREATE FUNCTION {}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'not this one'; END$$;
		CREATE TRIGGER refuse BEFORE UPDATE ON {}.rate_limits FOR EACH ROW WHEN (NEW.key = 'bad') EXECUTE FUNCTION {}.refuse()`, "{}", w.db.Schema), pgx.QueryExecModeSimpleProtocol)
	w.must(err)
	got := w.program("credit", "api", "a", "bad", "c", "5", "--yes")
	got.wantStatus(t, exitFailed, "2 of 3 keys are credited", "not this one")
	wantIn(t, got.stdout, "credited a: ", "credited c: ")
	if strings.Contains(got.stdout, "bad") {
		t.Errorf("got %q, want nothing of the key that failed", got.stdout)
	}
}

func TestPrune(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`INSERT INTO rate_limits
SELECT 'api', key, 0, 25, clock_timestamp() - interval '1 hour' FROM unnest(ARRAY['full', 'larger']) AS key`)
	w.edited(w.catalog.Set(t.Context(), "api", "larger", catalog.Override{Capacity: 1000, Rate: 1, Switch: catalog.Off}))
	w.take(api, "used", 5)
	wantIn(t, w.program("prune").ok(t), "deleted 1 row") // that of the override is far from full by it
	w.must(errOf(w.catalog.Unset(t.Context(), "api", "larger")))
	exports := ratelimit.InFlight{Name: "exports", Limit: 2, Lease: time.Hour}
	w.must(w.catalog.PublishInFlight(t.Context(), exports))
	w.acquire(exports.For("held"))
	w.exec(`INSERT INTO rate_limits
SELECT 'exports', 'free', n, 1, clock_timestamp() - interval '1 hour' FROM generate_series(0, 1) AS n`)
	for range 2 { // which deletes nothing
		wantIn(t, w.program("prune", "--dry-run").stderr, "would delete 3 rows that mean the same as no row\n")
	}
	wantIn(t, w.program("prune", "--history-age", "1h").stderr, "this would delete 3 rows that mean the same as no row, and changes of the catalog")
	wantIn(t, w.program("prune", "--history-age", "1h", "--yes").ok(t), "deleted 3 rows", "deleted 0 changes")
	w.edited(w.catalog.Set(t.Context(), "api", "used", catalog.Override{Capacity: 40}))
	w.edited(w.catalog.Set(t.Context(), "api", "used", catalog.Override{Capacity: 50}))
	wantIn(t, w.program("prune", "--history-age", "0s", "--yes").ok(t), "deleted 0 rows\n")
	if changes, err := w.catalog.History(t.Context(), "", 0); err != nil || len(changes) != 1 {
		t.Errorf("the history has %v, %v, want the newest change", changes, err)
	}
	if w.left(api, "used") != 15 {
		t.Error("a row that is used was deleted")
	}
}

// A key is erased from all tables once somebody has agreed, who is told what there is in each.
func TestErase(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, key := range []string{"ann", "bob", "carol"} {
		w.take(api, key, 5)
		w.take(monthly, key, 1)
		w.edited(w.catalog.Set(t.Context(), "api", key, catalog.Override{Capacity: 40}))
	}
	const there = "rows of limits: 2, overrides: 1, changes in the history: 1, edits under way: 0, refusals: 0, parked jobs, which start: 0"
	w.program("erase", "ann").wantStatus(t, exitBad, "this would erase key ann: "+there)
	w.program("erase", "ann", "--dry-run").wantStatus(t, exitOK, "would erase key ann: "+there)
	if got := objects[erase.Counts](t, w.program("erase", "ann", "--yes", "--json").ok(t))[0]; got != (erase.Counts{Rows: 2, Overrides: 1, Changes: 2}) {
		t.Errorf("got %+v", got)
	}
	wantIn(t, execute(t, "bob\nnobody\n", "erase", "-", "--yes", "--schema", w.db.Schema, "--database-url", w.db.URL).ok(t), "erased rows of limits: 2, overrides: 1")
	for _, list := range [][]string{{"ls", "api"}, {"catalog", "ls", "api"}, {"catalog", "history"}} {
		text := w.program(list...).ok(t)
		if strings.Contains(text, "ann") || strings.Contains(text, "bob") || !strings.Contains(text, "carol") {
			t.Errorf("%q: got %s", list, text)
		}
	}
	w.program("erase", "", "--yes").wantStatus(t, exitBad, "Key", "must not be empty")
}

// The key that a door makes, of what is known of a client.
func TestKey(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ args, stdin, want string }{
		{"--address 192.0.2.1", "", "192.0.2.1/32"},
		{"--address ::ffff:192.0.2.1 --ipv4-bits 24", "", "192.0.2.0/24"},
		{"--address 2001:db8::1 --place 1", "", `1:2001\:db8\:\:/64`},
		{"--address alice 192.0.2.1", "", "alice:192.0.2.1/32"},
		{"alice a:b", "", `alice:a\:b`},
		{"a:b", "", "a:b"},
		{"--hashed -", "sk_live\n", "W_Uo7EB4atmMR4KMRborfzM80uV81E951YjKuZ3erBw"},
		{"--hashed sk_live --place 0", "", "0:W_Uo7EB4atmMR4KMRborfzM80uV81E951YjKuZ3erBw"},
		{"--shape 1:192.0.2.1/32", "", "text:IPv4/32"},
	} {
		o := execute(t, test.stdin, append([]string{"key"}, strings.Fields(test.args)...)...)
		if o.ok(t) != test.want+"\n" {
			t.Errorf("%s: got %q, want %q", test.args, o.stdout, test.want)
		}
	}
	for args, want := range map[string]string{
		"--address alice": "no part is an address", "--address 192.0.2.1 --ipv4-bits 33": "IPv4Bits 33", "--place -2 a": "--place -2: must not be negative", "-": "must be one line",
		strings.Repeat("k", 2049): "2049 bytes",
	} {
		execute(t, "a\nb\n", append([]string{"key"}, strings.Fields(args)...)...).wantStatus(t, exitBad, want)
	}
}

// What strangers have chosen does no harm to a terminal or a spreadsheet, and what is printed can
// be given back.
func TestHostileKeys(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := newWorld(t)
	keys := []string{
		"\x1b[2J\x1b]0;pwned\a", "a\nb\tc", "\u202egnp.exe", "\u009b31m", "\u2028", "a\x7fb", "=cmd|' /C calc'!A0", "+1", "@SUM(1)", `"a","b"`, "-rf",
		"<script>alert(1)</script>", strings.Repeat("k", 2048), " ", "", "\ufeff\u200b", "plain",
	}
	for _, key := range keys {
		w.take(api, key, 1)
	}
	slices.Sort(keys)
	harmless := func(text string) {
		t.Helper()
		for _, r := range text {
			if r != '\n' && !strconv.IsPrint(r) {
				t.Errorf("%q is in what is printed", r)
			}
		}
	}
	for _, args := range [][]string{nil, {"--json"}, {"--csv"}} {
		text := w.program(append([]string{"ls", "api"}, args...)...).ok(t)
		harmless(text)
	}
	var listed []string
	for _, k := range objects[keyJSON](t, w.program("ls", "api", "--json").ok(t)) {
		listed = append(listed, k.Key)
	}
	if !slices.Equal(listed, keys) {
		t.Errorf("listed as JSON: %q, want %q", listed, keys)
	}
	rows, err := csv.NewReader(strings.NewReader(w.program("ls", "api", "--csv").ok(t))).ReadAll()
	w.must(err)
	for i, row := range rows[1:] {
		cell := row[len(row)-1]
		if strings.ContainsRune("=+-@", rune(cell[0])) {
			t.Errorf("%q is a formula", cell)
		}
		text := w.program("show", "--", "api", cell).ok(t)
		harmless(text)
		wantIn(t, text, "granted: 1", " of 20, full at")
		if key, err := keyOf(cell); err != nil || key != keys[i] {
			t.Errorf("%s is read as %q, want %q", cell, key, keys[i])
		}
	}
	// In a message, too.
	o := w.program("show", "\x1b[31mred", "\x1b[31mred")
	o.wantStatus(t, exitBad)
	harmless(o.stderr)
}

// Databases that are not as they should be.
func TestBrokenDatabases(t *testing.T) {
	t.Parallel()
	file := writeFile(t, strings.TrimSpace(bucket))
	empty := pgtest.NewEmpty(t)
	older := pgtest.NewEmpty(t)
	sql, err := migrations.DownSQLFrom(3)
	if err == nil {
		_, err = older.Pool.Exec(t.Context(), "SELECT set_config('search_path', '"+older.Schema+"', false); "+migrations.UpSQL()+sql, pgx.QueryExecModeSimpleProtocol)
	}
	must(t, err)
	denied := newWorld(t)
	for _, test := range []struct {
		name, url, schema, want string
	}{
		{"without the table", empty.URL, empty.Schema, "ratelimit migrate up"},
		{"too old", older.URL, older.Schema, "ratelimit migrate up"},
		{"without rights", denied.as(""), denied.db.Schema, "permission denied"},
		{"nobody there", "postgres://127.0.0.1:1/none", "s", "reach the database"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			if test.url == "" {
				t.Skip("the user may make no role")
			}
			for _, args := range [][]string{{"ls"}, {"show", "l", "k"}, {"prune"}, {"reset", "l", "k", "--yes"}} {
				o := execute(t, "", append(args, "--schema", test.schema, "--definitions", file, "--database-url", test.url)...)
				o.wantStatus(t, exitFailed, test.want)
				if strings.Contains(o.stderr, "secret") || o.stdout != "" {
					t.Errorf("%q printed %q, %q", args, o.stdout, o.stderr)
				}
			}
		})
	}
}

// as makes a role that may use the schema, and what is granted to it on the table, and returns a
// URL of it; or "" where the tests' user may make no role.
func (w *world) as(granted string) (url string) {
	w.Helper()
	may := false
	w.must(w.db.Pool.QueryRow(w.Context(), "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user").Scan(&may))
	if !may {
		return ""
	}
	role := w.db.Schema + "_role"
	sql := "CREATE ROLE " + role + " LOGIN PASSWORD 'secret'; GRANT USAGE ON SCHEMA " + w.db.Schema + " TO " + role
	if granted != "" {
		sql += "; GRANT " + granted + " ON " + w.db.Schema + ".rate_limits TO " + role
	}
	w.must(errOf(w.db.Pool.Exec(w.Context(), sql)))
	w.Cleanup(func() {
		w.must(errOf(w.db.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role)))
	})
	config, err := pgx.ParseConfig(w.db.URL)
	w.must(err)
	return "user=" + role + " password=secret host=" + config.Host + " port=" + strconv.Itoa(int(config.Port)) + " dbname=" + config.Database
}

// A database without a catalog is read by definitions from a file.
func TestDefinitionsFromAFile(t *testing.T) {
	t.Parallel()
	w := worldOf(t, pgtest.New(t))
	w.must(w.store.Take(t.Context(), api.ForN("alice", 5)))
	wantIn(t, w.program("ls").ok(t), "api: no definition is known")
	for name, text := range map[string]string{
		"bare":     `{"name": "api", "kind": "token bucket", "rate": 10, "period": "1h", "capacity": 20}`,
		"an array": "[\n" + `{"name": "api", "kind": "token bucket", "rate": 10, "period": "1h", "capacity": 20},` + "\n" + `{"name": "b", "kind": "token bucket", "rate": 10, "period": "1h"}` + "\n]",
		"lines":    "# mine\n" + `{"limit": {"name": "api", "kind": "token bucket", "rate": 10, "period": "1h"}}` + "\n" + `{"override": {"name": "api", "key": "alice", "capacity": 20, "note": "moved"}}`,
	} {
		if s := objects[storyJSON](t, w.program("show", "api", "alice", "--json", "--definitions", writeFile(t, text)).ok(t))[0]; len(s.Changes) > 0 || s.Remaining != 15 || s.Capacity != 20 {
			t.Errorf("%s: got %+v", name, s)
		}
	}
}

func TestMalformedDefinitions(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, line, want string
	}{
		{"no JSON", "limit l", "invalid character"},
		{"cut short", `{"name": "m"`, "does not end"},
		{"no object", `3`, "want a JSON object"},
		{"unknown field", `{"name": "m", "kind": "token bucket", "rate": 1, "period": "1s", "burst": 5}`, "burst 5: is no field"},
		{"rate", `{"limit": {"name": "m", "kind": "token bucket", "rate": -1, "period": "1s"}}`, "Rate -1"},
		{"twice", strings.TrimSpace(bucket), `limit "l" is defined twice, first in line 1`},
		{"override of nothing", `{"override": {"name": "m", "key": "k", "rate": 5}}`, `no program has published a limit of this name`},
		{"override without a name", `{"override": {"key": "k", "rate": 5}}`, `"name" is missing`},
		{"field of an override", `{"override": {"name": "l", "key": "k", "shards": 5}}`, `unknown field "shards"`},
		{"amount", `{"override": {"name": "l", "key": "k", "capacity": "lots"}}`, `must be a number, "none" or "unlimited"`},
		{"misfit", `{"override": {"name": "l", "key": "k", "slots": 5}}`, "is for a sliding window only"},
		{"in flight", `{"inFlight": {"name": "m", "limit": 0}}`, "Limit 0"},
		{"in flight twice", `{"inFlight": {"name": "l", "limit": 1}}`, `limit "l" is defined twice`},
		{"until", `{"override": {"name": "l", "key": "k", "until": "soon"}}`, "soon"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			file := writeFile(t, bucket+"\n# a comment\n"+test.line+"\n")
			// No database is asked.
			execute(t, "", "ls", "--database-url", "postgres://127.0.0.1:1/none", "--definitions", file).wantStatus(t, exitBad, file+":4: ", test.want)
		})
	}
	for text, want := range map[string]string{"[" + bucket + "]" + bucket: "unexpected text", bucket + "}": "unexpected text", "[": "the array does not end"} {
		file := writeFile(t, text)
		execute(t, "", "ls", "--database-url", "postgres://127.0.0.1:1/none", "--definitions", file).wantStatus(t, exitBad, file+": "+want)
	}
	open := writeFile(t, "[\n"+strings.TrimSpace(bucket))
	execute(t, "", "ls", "--database-url", "postgres://127.0.0.1:1/none", "--definitions", open).wantStatus(t, exitBad, open+": the array does not end")
}
