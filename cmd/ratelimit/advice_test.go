package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// patient is a world and what doctor says in it.
type patient struct {
	*world
	options string // of the database's URL
	url     string // in place of the world's
}

// doctor returns the findings of a check.
func (p *patient) doctor(check string) (found []finding) {
	p.Helper()
	url := p.url
	if url == "" {
		url = withParameter(p.db.URL, p.options)
	}
	o := execute(p.T, "", "doctor", "--json", "--schema", p.db.Schema, "--database-url", url)
	for _, f := range objects[finding](p.T, o.stdout) {
		if f.Check == check || strings.HasPrefix(f.Check, check+" of ") {
			found = append(found, f)
		}
	}
	return found
}

// onCitus has the database look as if Citus distributed the table of limits.
func (p *patient) onCitus(recovery string) {
	p.Helper()
	p.exec(`CREATE TABLE pg_dist_partition (logicalrelid regclass, partmethod "char")`)
	p.exec("INSERT INTO pg_dist_partition VALUES ('rate_limits', 'h')")
	p.options = "search_path=" + p.db.Schema + "&citus.recover_2pc_interval=" + recovery
}

func withParameter(url, parameter string) string {
	if parameter == "" {
		return url
	}
	if strings.Contains(url, "?") {
		return url + "&" + parameter
	}
	return url + "?" + parameter
}

// advised returns the advice of a check that holds a text.
func (p *patient) advised(check, text string) string {
	p.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		found := p.doctor(check)
		for _, f := range found {
			if strings.Contains(f.Advice, text) {
				return f.Advice
			}
		}
		if time.Now().After(deadline) {
			p.Fatalf("%s: no advice has %q: %+v", check, text, found)
		}
	}
}

// well wants that a check gives no advice that has a text any more.
func (p *patient) well(check, text string) {
	p.Helper()
	for _, f := range p.doctor(check) {
		if f.Advice != "" && strings.Contains(f.Advice, text) {
			p.Errorf("%s: after the advice was followed, doctor says %+v", check, f)
		}
	}
}

// sh runs the command that an advice ends with.
func (p *patient) sh(advice string) {
	p.Helper()
	sh := exec.CommandContext(p.Context(), "sh", "-c", `ratelimit() { "$PROGRAM" "$@"; }; `+after(advice, "{ echo"))
	path := os.Getenv(throwaway.BinVariable) + ":" + os.Getenv("PATH")
	sh.Env = append(os.Environ(), asProgram+"=1", "PROGRAM="+os.Args[0], "DATABASE_URL="+p.db.URL, "PATH="+path)
	out, err := sh.CombinedOutput()
	if err != nil || regexp.MustCompile(`(?m)ERROR: ( .* does not exist|.* permission)`).Match(out) {
		p.Fatalf("%s: %v: %s", advice, err, out)
	}
}

// schema describes all that is in the world's schema.
func (p *patient) schema() (text string) {
	p.Helper()
	p.must(p.db.Pool.QueryRow(p.Context(), `SELECT string_agg(d, E'\n' ORDER BY d COLLATE "C") FROM (
		SELECT proname || pg_get_functiondef(oid) || coalesce(proacl::text, '') FROM pg_proc WHERE pronamespace = $1::regnamespace
		UNION ALL SELECT pg_get_indexdef(oid) FROM pg_class WHERE relnamespace = $1::regnamespace AND relkind = 'i'
		UNION ALL SELECT pg_get_viewdef(oid) || coalesce(reloptions::text, '') FROM pg_class WHERE relnamespace = $1::regnamespace AND relkind = 'v'
		UNION ALL SELECT pg_get_triggerdef(t.oid) FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = tgrelid WHERE relnamespace = $1::regnamespace
		UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = $1::regnamespace
		UNION ALL SELECT concat_ws(' ', relname, attname, format_type(atttypid, atttypmod), attnotnull, col_description(attrelid, attnum))
		FROM pg_attribute JOIN pg_class AS c ON c.oid = attrelid WHERE relnamespace = $1::regnamespace AND attnum > 0 AND NOT attisdropped
	) AS all_of_it(d)`, p.db.Schema).Scan(&text))
	return text
}

// after returns what stands in an advice behind a text: the command to run.
func after(advice, text string) string { return text + advice[strings.Index(advice, text)+len(text):] }

// followed are the pieces of advice that doctor gives, by their names. Each test makes a database
// ill, follows the advice, and looks what happened: doctor does not give it any more, and nothing
// that was there is lost.
var followed = map[string]func(p *patient){
	"isolation": func(p *patient) {
		p.options = "default_transaction_isolation=serializable"
		p.advised("isolation", "AllowFunc")
		pool, err := pgxpool.New(p.Context(), withParameter(p.db.URL, p.options))
		p.must(err)
		defer pool.Close()
		store, err := pgstore.New(pool, &pgstore.Config{Schema: p.db.Schema})
		p.must(err)
		errs := make(chan error)
		for range 8 {
			go func() {
				_, err := store.AllowFunc(p.Context(), []ratelimit.Request{api.For("k")}, func(pgx.Tx, ratelimit.Result) error { return nil })
				errs <- err
			}()
		}
		for range 8 {
			p.must(<-errs)
		}
	},
	"portable": func(p *patient) {
		p.onCitus("5s")
		p.advised("Citus", "Config.Portable")
		store, err := pgstore.New(p.db.Pool, &pgstore.Config{Schema: p.db.Schema, Portable: true})
		p.must(err)
		p.must(store.Take(p.Context(), api.For("k")))
		wantIn(p.T, execute(p.T, "", "ls", "--schema", p.db.Schema, "--database-url", withParameter(p.db.URL, p.options)).ok(p.T), "api")
	},
	"recovery": func(p *patient) {
		p.onCitus("1min")
		p.advised("Citus", "SET citus.recover_2pc_interval = '5s'")
		p.options = strings.Replace(p.options, "1min", "5s", 1)
		p.well("Citus", "recover")
	},
	"local tables": func(p *patient) {
		p.onCitus("5s")
		p.exec("CREATE TABLE orders ()")
		const follow = "SELECT citus_add_local_table_to_metadata('"
		p.exec("CREATE FUNCTION citus_add_local_table_to_metadata(regclass) RETURNS void LANGUAGE sql AS $$ INSERT INTO pg_dist_partition VALUES ($1, 'n') $$")
		p.exec(after(p.advised("Citus", follow+"orders"), follow))
		p.well("Citus", "orders")
		p.exec("INSERT INTO pg_dist_partition VALUES ('rate_limit_definitions', 'n')")
		if found := p.doctor("Citus"); !slices.ContainsFunc(found, func(f finding) bool {
			return f.Verdict == failed && strings.HasPrefix(f.Detail, "rate_limit_definitions must not")
		}) {
			p.Errorf("doctor says %+v", found)
		}
	},
	"date style": func(p *patient) {
		p.options = "datestyle=SQL"
		p.advised("DateStyle", "datestyle=ISO")
		p.options = "datestyle=ISO&default_query_exec_mode=exec"
		p.well("DateStyle", "")
		execute(p.T, "", "show", "api", "k", "--schema", p.db.Schema, "--database-url", withParameter(p.db.URL, p.options)).ok(p.T)
	},
	"pooler": func(p *patient) {
		bouncer, err := throwaway.PgBouncer(p.Context(), p.db.URL, 5)
		if err != nil {
			p.Skip("no PgBouncer: ", err)
		}
		p.Cleanup(func() { _ = bouncer.Close() })
		p.url = bouncer.URL
		p.advised("pooler", "default_query_exec_mode=exec")
		p.url = withParameter(bouncer.URL, "default_query_exec_mode=exec")
		p.well("pooler", "")
	},
	"table": func(p *patient) {
		empty := pgtest.NewEmpty(p.T)
		p.world = &world{T: p.T, db: empty}
		p.program("doctor").wantStatus(p.T, exitFailed, "1 check failed")
		p.program(strings.Fields(after(p.advised("table", "ratelimit migrate up"), "ratelimit "))[1:]...).ok(p.T)
		p.well("table", "")
	},
	"migrations": func(p *patient) {
		p.world = &world{T: p.T, db: pgtest.NewEmpty(p.T)}
		p.program("migrate", "up").ok(p.T)
		p.program("migrate", "up", "--set", "catalog").ok(p.T)
		p.exec("DELETE FROM " + versions(p) + " WHERE version_id = 2; DROP VIEW rate_limits_in_flight, rate_limits_short, rate_limits_now; DROP FUNCTION rate_limits_at, rate_limits_had, rate_limits_edges, rate_limits_edge")
		advice := p.advised("migrations of catalog", "ratelimit migrate up --set catalog")
		p.program(strings.Fields(advice)[1:]...).ok(p.T)
		p.well("migrations of catalog", "")
		p.exec("SELECT * FROM rate_limits_now")
	},
	"schema": func(p *patient) {
		p.exec("CREATE TABLE rate_limits_version (id int GENERATED ALWAYS AS IDENTITY, version_id int8, is_applied bool, tstamp timestamp DEFAULT now()); INSERT INTO rate_limits_version (version_id, is_applied) SELECT generate_series(0, 4), true")
		p.program("migrate", "up", "--all").ok(p.T)
		before := p.schema()
		for drop, lacks := range map[string]string{
			"DROP TRIGGER rate_limit_definitions_log_update ON rate_limit_definitions": "(trigger rate_limit_definitions_log_update)",
			"DROP INDEX rate_limit_definitions_key":                                    "(index rate_limit_definitions_key)",
			"DROP VIEW rate_limits_short":                                              "(view rate_limits_short)",
			"DROP FUNCTION rate_limit_definitions_log CASCADE":                         "(function rate_limit_definitions_log, trigger ",
			"DROP TABLE rate_limit_pending, rate_limit_history":                        "(table rate_limit_history, index rate_limit_history_name, table rate_limit_pending, trigger ",
			"DROP TABLE rate_limit_definitions CASCADE":                                "(table rate_limit_definitions, ",
			"DROP FUNCTION rate_limit_take(text, text, float8)":                        "(function rate_limit_take)",
			"DROP TYPE rate_limit_request CASCADE":                                     " more)",
			"DROP INDEX rate_limit_refusals_minute_idx":                                "(index rate_limit_refusals_minute_idx)",
			"DROP TABLE rate_limit_refusals":                                           "(table rate_limit_refusals, index ",
			"DROP INDEX rate_limit_parked_line":                                        "(index rate_limit_parked_line)",
			"ALTER TABLE rate_limits DROP COLUMN slots CASCADE":                        "(function rate_limits_at, view ",
			"DROP TABLE rate_limits CASCADE":                                           "(table rate_limits)",
		} {
			p.exec(drop)
			details, broken := "", p.doctor("migrations")
			for _, f := range p.doctor("table") {
				wantIn(p.T, broken[0].Advice, f.Advice)
			}
			for _, f := range broken {
				if f.Advice != "" {
					details += f.Detail
					p.sh(f.Advice)
				}
			}
			wantIn(p.T, details, lacks)
			p.well("migrations", "")
			if after := p.schema(); after != before {
				p.Errorf("after %s the schema is\n%s\nand was\n%s", drop, after, before)
			}
		}
		p.must(p.store.Take(p.Context(), api.For("k")))
		p.must(p.catalog.Publish(p.Context(), api))
		p.exec("SELECT rate_limit_take('api', 'k'), rate_limit_take('x', 'k', 1, '1 s'); SELECT * FROM rate_limits_short")
	},
	"rights": func(p *patient) {
		if p.url = p.as(""); p.url == "" {
			p.Skip("the user may make no role")
		}
		o := execute(p.T, "", "doctor", "--schema", p.db.Schema, "--database-url", p.url)
		if o.wantStatus(p.T, exitFailed); strings.Contains(o.stdout+o.stderr, "secret") {
			p.Error("the password is shown")
		}
		for _, lacks := range []string{"SELECT", "DELETE"} {
			p.exec("REVOKE " + lacks + " ON rate_limits FROM " + p.db.Schema + "_role")
			p.exec(after(p.advised("rights", "GRANT "), "GRANT "))
			p.well("rights", "")
		}
	},
	"statistics": func(p *patient) {
		if p.url = p.as("SELECT, INSERT, UPDATE, DELETE"); p.url == "" {
			p.Skip("the user may make no role")
		}
		p.exec(after(p.advised("transactions", "GRANT "), "GRANT "))
		p.well("transactions", "GRANT ")
	},
	"indexes": func(p *patient) {
		p.exec("CREATE INDEX by_value ON rate_limits (value)")
		p.exec(after(p.advised("indexes", "DROP INDEX "), "DROP INDEX "))
		p.well("indexes", "")
	},
	"fill factor": func(p *patient) {
		for _, full := range []string{"RESET (fillfactor)", "SET (fillfactor = 100)", "SET (fillfactor = 71)"} {
			p.exec("ALTER TABLE rate_limits " + full)
			p.exec(p.advised("fill factor", "ALTER TABLE "))
			p.well("fill factor", "")
		}
	},
	"transactions": func(p *patient) {
		tx, err := p.db.Pool.Begin(p.Context())
		p.must(err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		p.must(p.store.TakeTx(p.Context(), tx, api.ForN("k", 20)))
		p.exec(after(p.advised("transactions", "SELECT pg_terminate_backend"), "SELECT pg_terminate_backend"))
		p.well("transactions", "pg_terminate_backend")
		if left := p.left(api, "k"); left != 20 {
			p.Errorf("%d tokens are left of a take that was rolled back, want 20", left)
		}
	},
	"snapshot": func(p *patient) {
		tx, err := p.db.Pool.BeginTx(p.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		p.must(err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		p.must(p.store.Take(p.Context(), api.For("k")))
		table := p.db.Schema + ".rate_limits"
		p.must(errOf(tx.Exec(p.Context(), "SELECT FROM "+table)))
		p.must(errOf(p.db.Pool.Exec(p.Context(), "DO $$ BEGIN FOR i IN 1..11000 LOOP UPDATE "+table+" SET value = value; COMMIT; END LOOP; END $$")))
		p.exec("ANALYZE rate_limits")
		p.exec(after(p.advised("oldest snapshot", "SELECT pg_terminate_backend"), "SELECT pg_terminate_backend"))
		p.well("oldest snapshot", "pg_terminate_backend")
	},
	"overdue": func(p *patient) {
		p.take(monthly, "k", 1000)
		p.program("catalog", "set", "monthly", "k", "--rate", "2000", "--yes").ok(p.T)
		p.exec("UPDATE rate_limit_pending SET due = clock_timestamp() - interval '2 minutes'")
		p.advised("definitions", "ratelimit catalog complete")
		p.program("catalog", "complete").ok(p.T)
		p.well("definitions", "catalog complete")
		p.must(p.catalog.Refresh(p.Context()))
		if left := p.left(p.catalog.For(monthly, "k").Limit, "k"); left != 1000 {
			p.Errorf("%v tokens are left, want 1000", left)
		}
	},
	"not used": func(p *patient) {
		p.exec("INSERT INTO rate_limit_definitions (name, key, rate) VALUES ('sharded', 'k', 0.5), ('sharded', 'l', 0.5)")
		p.advised("definitions", "ratelimit catalog set")
		p.program("catalog", "set", "sharded", "k", "--capacity", "10", "--yes", "--lower").ok(p.T)
		p.program("catalog", "unset", "sharded", "l", "--yes").ok(p.T)
		p.well("definitions", "catalog set")
		p.must(p.catalog.Refresh(p.Context()))
		if d := p.catalog.For(sharded, "k").Limit.Definition(); d.Rate != 0.5 || d.Capacity != 10 {
			p.Errorf("got %v", d)
		}
	},
	"time zone": func(p *patient) { // for PostgreSQL CET is that without summer time
		quota := ratelimit.FixedWindow{Name: "quota", Rate: 10, Every: ratelimit.Month, Zone: "CET"}
		p.must(p.catalog.Publish(p.Context(), quota))
		p.advised("time zones", "by a city")
		quota.Zone = "Europe/Berlin"
		p.must(p.catalog.Publish(p.Context(), quota))
		p.well("time zones", "")
	},
	"shards": func(p *patient) {
		four := sharded
		four.Shards = 4
		p.must(p.store.Take(p.Context(), four.ForN("k", 6)))
		p.exec("UPDATE rate_limits SET value = 1 WHERE shard >= 2; INSERT INTO rate_limits VALUES ('sharded', 'k', 3, 1, clock_timestamp()) ON CONFLICT DO NOTHING")
		before := p.left(four, "k")
		command, statement, _ := strings.Cut(after(p.advised("definitions", "ratelimit change "), "change "), ", and then ")
		p.program(append(strings.Fields(command), "--yes")...).ok(p.T)
		p.exec(statement)
		p.well("definitions", "change")
		if left := p.left(sharded, "k"); left != before {
			p.Errorf("%d tokens are left, want %d", left, before)
		}
	},
	"unlike": func(p *patient) {
		for _, key := range []string{"198.51.100.7/32", "2001:db8::/64"} {
			p.take(api, key, 1)
		}
		for _, key := range []string{"192.0.2.1", "192.0.2.2/32", "2001:db8:7::/64"} {
			p.edited(p.catalog.Set(p.Context(), "api", key, catalog.Override{Capacity: 40}))
		}
		p.must(errOf(p.store.Pause(p.Context(), api, "192.0.2.3", time.Hour)))
		write := regexp.MustCompile(`the key (\S+), and remove this one`)
		advised := write.FindStringSubmatch(p.advised("keys", "give the override the key "))
		p.program("catalog", "set", "api", advised[1], "--capacity", "40", "--yes").ok(p.T)
		p.program("catalog", "unset", "api", "192.0.2.1", "--yes").ok(p.T)
		advised = write.FindStringSubmatch(p.advised("keys", "give the pause the key "))
		p.program("pause", "api", advised[1], "1h", "--yes").ok(p.T)
		p.program("reset", "api", "192.0.2.3", "--yes").ok(p.T)
		p.well("keys", "key")
		p.must(p.catalog.Refresh(p.Context()))
		if d := p.catalog.For(api, "192.0.2.1/32").Limit.Definition(); d.Capacity != 40 {
			p.Errorf("the address has a capacity of %v, want 40", d.Capacity)
		}
		if left := p.left(api, "192.0.2.3/32"); left != 0 {
			p.Errorf("%d tokens are left of an address that is paused, want 0", left)
		}
	},
	"undefined": func(p *patient) {
		jobs := ratelimit.TokenBucket{Name: "jobs", Rate: 1, Period: time.Hour, Capacity: 5}
		p.must(p.store.Take(p.Context(), jobs.ForN("k", 4)))
		p.advised("definitions", "have its program publish it")
		p.well("definitions", "forget")
		p.must(p.catalog.Publish(p.Context(), jobs))
		p.well("definitions", "publish")
		if left := p.left(jobs, "k"); left != 1 {
			p.Errorf("%d tokens are left, want 1", left)
		}
	},
	"gone": func(p *patient) {
		p.take(api, "k", 15)
		p.exec("INSERT INTO rate_limits VALUES ('gone', 'a', 0, 1, clock_timestamp() - interval '500 days')")
		advice := p.advised("definitions", "ratelimit forget ")
		p.program(append(strings.Fields(after(advice, "forget ")), "--yes")...).ok(p.T)
		p.well("definitions", "forget")
		if left := p.left(api, "k"); left != 5 {
			p.Errorf("%d tokens of another limit are left, want 5", left)
		}
	},
}

// versions returns the name of the table of versions of the set catalog.
func versions(p *patient) (name string) {
	p.Helper()
	p.must(p.db.Pool.QueryRow(p.Context(), "SELECT relname::text FROM pg_class WHERE relnamespace = $1::regnamespace AND relkind = 'r' AND relname LIKE '%catalog%version%'", p.db.Schema).Scan(&name))
	return name
}

func TestAdvice(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	source, err := os.ReadFile("doctor.go")
	must(t, err)
	given := map[string]bool{}
	for _, found := range regexp.MustCompile(`d\.advise\("([^"]+)"`).FindAllStringSubmatch(string(source), -1) {
		given[found[1]] = true
		if followed[found[1]] == nil {
			t.Errorf("the advice %q of doctor.go is not followed by a test", found[1])
		}
	}
	for name, follow := range followed {
		if !given[name] {
			t.Errorf("doctor gives no advice %q", name)
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			follow(&patient{world: newWorld(t)})
		})
	}
}

// Permits of a published limit and the gates of starts of jobs are no rows to forget, and show
// knows both.
func TestPermitsAndGatesAreKnown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	exports := ratelimit.InFlight{Name: "exports", Limit: 2, Lease: time.Hour}
	w.must(w.catalog.PublishInFlight(t.Context(), exports))
	w.edited(w.catalog.Set(t.Context(), "exports", "bob", catalog.Override{AtOnce: 1, Note: "slow"}))
	var until time.Time
	w.edited(w.catalog.Set(t.Context(), "exports", "carol", catalog.Override{AtOnce: 1}))
	for _, key := range []string{"alice", "bob"} {
		until = w.acquire(w.catalog.InFlight(exports, key).For(key)).Until
	}
	w.exec(`INSERT INTO rate_limits VALUES ('api:start', 'alice', 0, 3, now() - interval '500 days'), ('unknown:start', 'alice', 0, 3, now()),
		('exports', 'carol', 1, 1.8e15, now() + interval '1 hour')`)
	for _, f := range objects[finding](t, w.program("doctor", "--json").ok(t)) {
		if strings.Contains(f.Advice, "forget") || strings.Contains(f.Detail, "exports") || strings.Contains(f.Detail, "api:start") && !strings.Contains(f.Detail, "bounds the starts of jobs by api") {
			t.Errorf("doctor says %+v", f)
		}
	}
	wantIn(t, w.program("show", "exports", "alice").ok(t), `"exports": 2 at a time, lease 1h`, "granted: 1 of 2 permits are held", "held     permit ", ", fence ")
	wantIn(t, w.program("show", "exports", "bob").ok(t), "refused: 1 of 1 permits are held; the first lease ends at "+until.UTC().Format("2006-01-02 15:04:05"), "1 at once, (slow)", "changed")
	if s := objects[permitsJSON](t, w.program("show", "exports", "bob", "--json").ok(t))[0]; s.OK || len(s.Held) != 1 || s.Holds.Limit != 1 || s.Published.Limit != 2 || s.Override == nil || len(s.Changes) != 2 {
		t.Errorf("got %+v", s)
	}
	wantIn(t, w.program("show", "exports", "nobody").ok(t), "granted: 0 of 2 permits are held")
	wantIn(t, w.program("show", "exports", "alice", "2").ok(t), "refused: 1 of 2 permits are held")
	wantIn(t, w.program("show", "exports", "carol").ok(t), "granted: 0 of 1 permits are held, and 1 more from when the limit was larger")
	w.acquire(w.catalog.InFlight(exports, "carol").For("carol"))
	wantIn(t, w.program("show", "exports", "alice", "3").ok(t), "never: ", "at most 2 can")
	w.program("show", "exports", "alice", "0.5").wantStatus(t, exitBad, "permits are whole")
	w.program("show", "exports", "alice", "--reserve").wantStatus(t, exitBad, "are not reserved")
	for _, args := range [][]string{{"reset", "exports", "alice"}, {"pause", "exports", "alice", "5s"}, {"change", "exports", "alice", "--to", "rate=1"}} {
		w.program(append(args, "--yes")...).wantStatus(t, exitBad, "exports is a limit of how many at once", "ratelimit inflight")
	}
	wantIn(t, w.program("show", "api:start", "alice").ok(t), "api:start bounds the starts of River's jobs by api", "shard 0: 3")
	if g := objects[gateJSON](t, w.program("show", "api:start", "alice", "--json").ok(t))[0]; g.Of != "api" || len(g.Rows) != 1 {
		t.Errorf("got %+v", g)
	}
	w.program("show", "unknown:start", "alice").wantStatus(t, exitBad, "no definition of this limit")
	wantIn(t, w.program("ls").ok(t), "api:start: bounds the starts of jobs by api")
	for name, what := range map[string]string{"api:start": ", which bounds the starts of jobs by api", "exports": ", which a program has published"} {
		w.program("forget", name, "--dry-run").wantStatus(t, exitOK, "would delete", fmt.Sprintf("of %s%s", name, what))
	}
}

// Where nothing is published, doctor advises to forget nothing that is in use.
func TestDoctorWithoutACatalog(t *testing.T) {
	t.Parallel()
	w := worldOf(t, pgtest.New(t))
	w.must(w.store.Take(t.Context(), api.For("k"), monthly.For("k")))
	w.acquire(ratelimit.InFlight{Name: "exports", Limit: 1}.For("k"))
	if text := w.program("doctor", "--json").ok(t); strings.Contains(text, "forget") || !strings.Contains(text, "publish it") {
		t.Errorf("got %s", text)
	}
}
