package main

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

func TestCatalog(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := newWorld(t)
	run := func(args ...string) string {
		t.Helper()
		return w.program(append([]string{"catalog"}, args...)...).ok(t)
	}
	wantIn(t, run("set", "api", "alice", "--rate", "100", "--capacity", "none", "--until", "48h", "--note", "moving house", "--yes", "--lower"), "none → rate 100, capacity none, until", "(moving house)")
	run("set", "api", "--all-keys", "--max-reserved", "unlimited", "--mode", "shadow", "--yes")
	run("set", "api", "bob", "--rate", "7", "--dry-run")
	wantIn(t, run("ls"), "2", `token bucket "api"`)
	wantIn(t, run("ls", "api"), "max reserved unlimited, mode shadow", "(all keys)", "rate 100, capacity none", "alice")

	o := objects[overrideJSON](t, run("ls", "api", "--json"))
	if len(o) != 2 || o[1].Key == nil || *o[1].Key != "alice" || o[1].Rate != 100 || o[1].Until.Before(time.Now().Add(47*time.Hour)) {
		t.Errorf("got %+v", o)
	}
	history := objects[changeJSON](t, run("history", "api", "--json"))
	if len(history) != 3 || history[0].Key != nil || *history[1].Key != "alice" || history[1].Was != nil || history[1].Became == nil {
		t.Errorf("got %+v", history)
	}

	history = objects[changeJSON](t, run("history", "api", "alice", "--json"))
	if len(history) != 3 || len(objects[changeJSON](t, run("history", "api", "bob", "--json"))) != 2 {
		t.Errorf("of one key: got %+v", history)
	}

	w.must(w.catalog.PublishInFlight(t.Context(), ratelimit.InFlight{Name: "exports", Limit: 2, Lease: time.Minute}))
	w.program("catalog", "set", "exports", "alice", "--mode", "shadow", "--yes").wantStatus(t, exitBad, `Mode shadow: must be enforce or refuse for a limit of how many at once`)
	wantIn(t, run("set", "exports", "alice", "--at-once", "5", "--lease", "1h", "--yes"), "none → 5 at once, lease 1h")
	wantIn(t, run("ls"), `"exports": 2 at a time`)
	wantIn(t, run("ls", "exports"), "5 at once", "alice")
	if l := objects[limitJSON](t, w.program("ls", "--json").ok(t)); l[1].InFlight == nil || l[1].InFlight.Limit != 2 {
		t.Errorf("got %+v", l)
	}

	// What was exported is there again after an import elsewhere.
	exported := run("export")
	file := writeFile(t, exported)
	other := &world{T: t, db: pgtest.New(t, pgtest.With(migrations.Catalog))}
	other.program("catalog", "import", file).wantStatus(t, exitBad, "say --yes")
	wantIn(t, other.program("catalog", "import", file, "--dry-run").stderr, "would write 4 definitions and 3 overrides")
	if text := other.program("catalog", "export").ok(t); text != "" {
		t.Errorf("a dry run imported %s", text)
	}
	other.program("catalog", "import", file, "--yes").ok(t)
	if again := other.program("catalog", "export").ok(t); again != exported {
		t.Errorf("exported again:\n%s\nwant:\n%s", again, exported)
	}

	w.program("catalog", "unset", "api", "alice").wantStatus(t, exitBad, "say --yes")
	wantIn(t, run("unset", "api", "alice", "--yes"), "(moving house) → none")
	wantIn(t, run("unset", "api", "alice", "--yes"), "there was none")
	wantIn(t, run("unset", "api", "--all-keys", "--yes"), "max reserved unlimited, mode shadow → none")
	if text := run("ls", "api", "--json"); text != "" {
		t.Errorf("left: %s", text)
	}
}

// An edit changes what it names, says what was and what became, and asks; an edit for all keys says
// whom it concerns; and what is lower than published is asked for once more.
func TestCatalogEdits(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := newWorld(t)
	w.must(w.catalog.PublishInFlight(t.Context(), ratelimit.InFlight{Name: "exports", Limit: 2, Lease: time.Minute}))
	edit := func(args ...string) outcome {
		t.Helper()
		return w.program(append([]string{"catalog"}, args...)...)
	}
	wantIn(t, edit("set", "api", "alice", "--rate", "100", "--note", "moving house", "--yes").ok(t), "none → rate 100, (moving house)")
	for _, step := range []struct {
		args []string
		want string
	}{
		{[]string{"off", "api", "alice"}, "rate 100, (moving house) → rate 100, off, (moving house)"},
		{[]string{"set", "api", "alice", "--capacity", "300"}, "rate 100, off, (moving house) → rate 100, capacity 300, off, (moving house)"},
		{[]string{"on", "api", "alice"}, "rate 100, capacity 300, off, (moving house) → rate 100, capacity 300, (moving house)"},
		{[]string{"set", "api", "alice", "--until", "2126-01-01T00:00:00Z", "--clear", "note,rate"}, "→ capacity 300, until 2126-01-01 00:00:00.000Z"},
		{[]string{"set", "api", "alice", "--until", "never"}, "until 2126-01-01 00:00:00.000Z → capacity 300"},
		{[]string{"unset", "api", "alice"}, "capacity 300 → none"},
	} {
		before := w.program("catalog", "ls", "api", "--json").ok(t)
		edit(step.args...).wantStatus(t, exitBad, step.want, "say --yes")
		edit(append(step.args, "--dry-run")...).wantStatus(t, exitOK, "would change the override of key alice of api: ", step.want)
		if after := w.program("catalog", "ls", "api", "--json").ok(t); after != before {
			t.Fatalf("%q: got %s before it was confirmed", step.args, after)
		}
		wantIn(t, edit(append(step.args, "--yes")...).ok(t), step.want)
	}
	if made := objects[editJSON](t, edit("set", "api", "bob", "--capacity", "40", "--yes", "--json").ok(t)); made[0].Was != nil || made[0].Became.Capacity != 40 {
		t.Errorf("got %+v", made[0])
	}

	w.must(w.store.Reset(t.Context(), api, "alice")) // a full row, which the raise has made
	w.take(api, "short", 19.5)
	w.take(api, "used", 15)
	w.take(api, "bob", 1)
	before := w.program("catalog", "ls", "api", "--json").ok(t)
	lower := []string{"set", "api", "--all-keys", "--capacity", "4", "--mode", "enforce"}
	edit(lower...).wantStatus(t, exitBad, "it concerns 3 keys that have rows, of which 2 would be refused now", "it grants less than the program has published, by its Capacity")
	edit(append(lower, "--as-is")...).wantStatus(t, exitBad, "it concerns 3 keys that have rows, of which 1 would be refused now")
	edit(append(lower, "--yes")...).wantStatus(t, exitBad, "by its Capacity: say --lower as well")
	if after := w.program("catalog", "ls", "api", "--json").ok(t); after != before {
		t.Errorf("got %s", after)
	}
	edit(append(lower, "--yes", "--lower")...).ok(t)
	if keys := objects[keyJSON](t, w.program("ls", "api", "--json").ok(t)); keys[0].Value < 1 || keys[1].Value >= 1 || keys[2].Value >= 1 {
		t.Errorf("2 were foretold to be refused, and these are %+v", keys)
	}
	edit("set", "api", "--all-keys", "--note", "a small one", "--yes").ok(t)
	wantIn(t, edit("set", "api", "--all-keys", "--capacity", "4", "--yes").ok(t), "it is so already: capacity 4, mode enforce, (a small one)")

	for key, n := range map[string]int{"a": 2, "b": 1} {
		w.acquire(ratelimit.InFlight{Name: "exports", Limit: n, Lease: time.Minute}.ForN(key, n))
	}
	edit("set", "exports", "--all-keys", "--at-once", "1").wantStatus(t, exitBad, "it concerns 2 keys that have rows, of which 2 would be refused now", "by its AtOnce")
	edit("set", "exports", "--all-keys", "--at-once", "3").wantStatus(t, exitBad, "it concerns 2 keys that have rows, of which 0 would be refused now: say --yes")
}

// The history has whom --who names with each command that edits the catalog.
func TestCatalogWho(t *testing.T) {
	t.Setenv("RATELIMIT_WHO", "the environment")
	w := newWorld(t)
	limits := writeFile(t, w.program("catalog", "export", "api").ok(t)+`{"override": {"name": "api", "key": "imported", "rate": 3}}`)
	for _, args := range [][]string{
		{"catalog", "set", "api", "k", "--rate", "50", "--who", "ann"},
		{"catalog", "off", "api", "k", "--who", "bob"},
		{"catalog", "unset", "api", "k"},
		{"catalog", "import", limits, "--who", "carol"},
		{"forget", "api", "--catalog", "--who", "dan"},
	} {
		w.program(append(args, "--yes")...).ok(t)
	}
	w.program("catalog", "import", limits, "--yes", "--who", "a\xffb").wantStatus(t, exitBad, "Who")
	var who []string
	for _, c := range objects[changeJSON](t, w.program("catalog", "history", "api", "--json").ok(t)) {
		if who = append(who, c.Who); c.Role == "" {
			t.Errorf("%+v has no role", c)
		}
	}
	want := []string{"dan", "carol", "the environment", "bob", "ann"}
	if who = slices.Compact(who); !slices.Equal(who[:5], want) {
		t.Errorf("got %q, want %q", who, want)
	}
	wantIn(t, w.program("catalog", "history", "api").ok(t), "ann (", "the environment (")
}

// With --yes an edit that others were faster than begins anew: several scripts edit one override.
func TestCatalogEditsAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var all sync.WaitGroup
	for script := range 4 {
		all.Go(func() {
			for i := range 5 {
				if o := w.program("catalog", "set", "api", "k", "--rate", strconv.Itoa(20+10*script+i), "--yes"); o.status != exitOK {
					t.Errorf("got status %d: %s", o.status, o.stderr)
				}
			}
		})
	}
	all.Wait()
	if changes, err := w.catalog.KeyHistory(t.Context(), "api", "k", 0); err != nil || len(changes) != 21 { // and that of Publish
		t.Errorf("got %d changes (%v), want 20", len(changes), err)
	}
}

func TestCatalogRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"set", "unknown", "k", "--rate", "5"}, "no program has published"},
		{[]string{"unset", "unknown", "k"}, "no program has published"},
		{[]string{"set", "api", "\xff", "--rate", "5", "--yes"}, "Key of 1 bytes: must be valid UTF-8"},
		{[]string{"set", "api", "k", "--rate", "-5"}, "Rate -5"},
		{[]string{"set", "sharded", "k", "--rate", "-5"}, "ratelimit: limit \"sharded\": Rate -5: must not be negative\n"},
		{[]string{"set", "api", "-", "--rate", "5"}, `the key - is '"-"'`},
		{[]string{"set", "api", "-3", "--rate", "5"}, `what is no flag comes after --`},
		{[]string{"set", "api", "k", "--rate", "0"}, `--rate "0": must not be 0`},
		{[]string{"set", "api", "k", "--note", ""}, `--note "": must not be 0 or empty: clear it`},
		{[]string{"set", "api", "k"}, "names no field"},
		{[]string{"off", "api", "k"}, "there is none to turn on or off"},
		{[]string{"set", "api", "k", "--clear", "shards"}, `--clear "shards": must be among rate, period`},
		{[]string{"set", "api", `"\x00all keys"`, "--rate", "5"}, "no key can be this"},
		{[]string{"set", "api", "k", "--slots", "5"}, "sliding window only"},
		{[]string{"set", "api", "k", "--at-once", "5"}, "how many at once only"},
		{[]string{"set", "api", "k", "--lease", "0s"}, `--lease "0s"`},
		{[]string{"set", "api", "k", "--until", "soon"}, `--until "soon"`},
		{[]string{"set", "api", "k", "--until", "-1h"}, "is over"},
		{[]string{"set", "api", "k", "--capacity", "NaN"}, `--capacity "NaN"`},
		{[]string{"set", "api"}, "--all-keys"},
		{[]string{"set", "api", "k", "--all-keys"}, "--all-keys"},
		{[]string{"unset", "api"}, "--all-keys"},
		{[]string{"ls", "unknown"}, "no definition of this limit"},
		{[]string{"export", "unknown"}, "no definition of this limit"},
		{[]string{"history", "--most", "-1"}, "--most -1"},
		{[]string{"history", "api", `"`}, "begins with a quote"},
	} {
		o := w.program(append([]string{"catalog"}, test.args...)...)
		o.wantStatus(t, exitBad, test.want)
		if strings.Count(o.stderr, "\n") > 1 || strings.Contains(o.stderr, "ratelimit: ratelimit:") {
			t.Errorf("%q: told %q", test.args, o.stderr)
		}
		if o.stdout != "" {
			t.Errorf("%q printed %q", test.args, o.stdout)
		}
	}
	execute(t, "", "catalog").wantStatus(t, exitBad, "want one of ls")
	empty := pgtest.New(t)
	execute(t, "", "catalog", "ls", "--schema", empty.Schema, "--database-url", empty.URL).wantStatus(t, exitFailed, "migrate up --set catalog")
}

// An import of which a line is wrong leaves nothing, also when it is wrong by what is in the
// database only.
func TestImportIsWhole(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before := w.program("catalog", "export").ok(t)
	good := `{"limit": {"name": "new", "kind": "token bucket", "rate": 1, "period": "1m"}}` + "\n"
	for _, test := range []struct{ line, want string }{
		{`{"override": {"name": "monthly", "key": "k", "period": "1h"}}`, "is not for a quota by the calendar"},
		{`{"override": {"name": "api", "key": "k", "slots": 3}}`, "sliding window only"},
		{`{"override": {"name": "missing", "key": "k", "rate": 3}}`, "no program has published"},
		{`{"limit": {"name": "bad", "kind": "token bucket", "rate": 0, "period": "1m"}}`, "Rate 0"},
	} {
		file := writeFile(t, good+test.line)
		w.program("catalog", "import", file, "--yes").wantStatus(t, exitBad, file+":2: ", test.want)
		if after := w.program("catalog", "export").ok(t); after != before {
			t.Errorf("%s: half of it was written:\n%s", test.line, after)
		}
	}
}

func TestInFlight(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := newWorld(t)
	exports := ratelimit.InFlight{Name: "exports", Limit: 2, Lease: time.Hour}
	for _, key := range []string{"alice", "alice", "bob\x1b[2J", "carol"} {
		w.acquire(exports.For(key))
	}
	ls := func(args ...string) []permitJSON {
		t.Helper()
		return objects[permitJSON](t, w.program(append([]string{"inflight", "ls", "exports", "--json"}, args...)...).ok(t))
	}
	if all := ls(); len(all) != 4 || all[2].Key != "bob\x1b[2J" || all[0].Fence == 0 {
		t.Errorf("got %+v", all)
	}
	if got := ls("--prefix", "c"); len(got) != 1 || got[0].Key != "carol" {
		t.Errorf("by prefix: %+v", got)
	}
	if got := ls("--after", "alice", "--most", "1"); len(got) != 1 || got[0].Key != "bob\x1b[2J" {
		t.Errorf("a page: %+v", got)
	}
	wantIn(t, w.program("inflight", "ls", "exports", "alice").ok(t), "HELD UNTIL", "alice")
	first := ls("alice")[0]
	release := []string{"inflight", "release", "exports", "alice", strconv.Itoa(first.Number), strconv.FormatInt(first.Fence, 10)}
	w.program(release...).wantStatus(t, exitBad, "say --yes")
	w.program(append(release, "--dry-run")...).wantStatus(t, exitOK, "would release permit")
	if got := len(ls("alice")); got != 2 {
		t.Errorf("%d permits after a dry run, want 2", got)
	}
	w.program(append(release, "--yes")...).ok(t)
	if got := ls("alice"); len(got) != 1 || got[0].Number == first.Number {
		t.Errorf("left: %+v", got)
	}
	w.program(append(release, "--yes")...).wantStatus(t, exitFailed, "not held any more")
	w.program("inflight", "reset", "exports", `"bob\x1b[2J"`, "--yes").ok(t)
	if got := ls(); len(got) != 2 {
		t.Errorf("left: %+v", got)
	}
	w.program("inflight", "ls", "api").wantStatus(t, exitBad, "no limit of how many at once")
	w.program("inflight", "release", "exports", "alice", "x", "1", "--yes").wantStatus(t, exitBad, `permit "x"`)
}

func TestDoctor(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := newWorld(t)
	w.take(api, "k", 1)
	verdicts := map[string]string{}
	for _, f := range objects[finding](t, w.program("doctor", "--json").ok(t)) {
		verdicts[f.Check] = f.Verdict
	}
	for _, check := range []string{"server", "isolation", "durability", "pooler", "clock", "rights", "indexes", "HOT updates", "dead rows", "migrations of catalog", "definitions"} {
		if verdicts[check] != fine && verdicts[check] != warning {
			t.Errorf("%s: %q", check, verdicts[check])
		}
	}
	wantIn(t, w.program("doctor").ok(t), "CHECK", "primary key only", "ok")
	for i := range turnsMost + 1 {
		changed := sharded
		changed.Rate += float64(i % 2)
		w.must(w.catalog.Publish(t.Context(), changed))
	}
	file := writeFile(t, `{"name": "api", "kind": "token bucket", "rate": 11, "period": "1h"}`)
	wantIn(t, w.program("doctor", "--definitions", file).ok(t), "was published otherwise", "the file has token bucket")
}

func TestMan(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "man1")
	execute(t, "", "man", dir).ok(t)
	text, err := os.ReadFile(filepath.Join(dir, "ratelimit-catalog-set.1"))
	must(t, err)
	wantIn(t, string(text), ".TH", "moving house", "all-keys")
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		wantIn(t, execute(t, "", "completion", shell).ok(t), "ratelimit")
	}
}

// What was used stays used, and it is said before and after; with --as-is what is left stays.
func TestCatalogKeepsWhatWasUsed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.take(monthly, "acme", 1000)
	left := func(want float64) {
		t.Helper()
		w.must(w.catalog.Refresh(t.Context()))
		statuses, err := w.store.CheckEach(t.Context(), w.catalog.ForN(monthly, "acme", 0))
		w.must(err)
		if statuses[0].Value != want {
			t.Errorf("%v left, want %v", statuses[0].Value, want)
		}
	}
	raise := []string{"catalog", "set", "monthly", "acme", "--rate", "10000"}
	const said = "0 left of 1000 → 9000 left of 10000 (within 10s)"
	w.program(append(raise, "--dry-run")...).wantStatus(t, exitOK, said)
	wantIn(t, w.program(append(raise, "--yes")...).ok(t), "acme: "+said)
	left(0)
	wantIn(t, w.program("catalog", "complete").ok(t), "looked at 0 keys")
	w.exec("UPDATE rate_limit_pending SET due = clock_timestamp()")
	wantIn(t, w.program("catalog", "complete").ok(t), "looked at 1 key")
	left(9000)
	if out := w.program("catalog", "set", "monthly", "acme", "--rate", "15000", "--as-is", "--yes").ok(t); strings.Contains(out, "left") {
		t.Errorf("it says %q", out)
	}
	left(9000)
}
