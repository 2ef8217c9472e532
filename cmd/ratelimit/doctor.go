package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

func doctorCommand(o *options) *cobra.Command {
	return o.onLimits(&cobra.Command{
		Use:   "doctor",
		Short: "Look for what is wrong with the database, its settings, and the definitions",
		Long: `Look at the server and its settings, the tables and the rights on them, the pooler, dead rows,
clocks, transactions that hold rows, and definitions that disagree. It changes nothing. Exit
status 1 if something fails, so that decisions cannot work; warnings leave it 0.`,
		Example: `  ratelimit doctor --database-url postgres://localhost/app`,
		GroupID: operating,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var file *definitionsFile
			if o.definitions != "" {
				var err error
				if file, err = readDefinitions(cmd.InOrStdin(), o.definitions); err != nil {
					return err
				}
			}
			return o.onStore(cmd, func(d *inspect.Inspector) error {
				examined := &doctor{Inspector: d, file: file}
				examined.examine(cmd.Context())
				return examined.report(o.printer(cmd))
			})
		},
	})
}

// doctor looks at a database.
type doctor struct {
	*inspect.Inspector
	file     *definitionsFile // nil without --definitions
	findings []finding
	there    bool // is the table there?
}

// A finding is the result of a check.
type finding struct {
	Verdict string `json:"verdict"`
	Check   string `json:"check"`
	Detail  string `json:"detail"`
	Advice  string `json:"advice,omitempty"` // what to do
}

// The verdicts.
const (
	fine    = "ok"
	warning = "warning"
	failed  = "failed"
	unknown = "unknown" // it could not be looked at
)

func (d *doctor) find(verdict, check, format string, args ...any) {
	d.findings = append(d.findings, finding{Verdict: verdict, Check: check, Detail: fmt.Sprintf(format, args...)})
}

// advise is find with what to do. The advice has a name, by which a test follows it.
func (d *doctor) advise(_, verdict, check, detail, advice string) {
	d.findings = append(d.findings, finding{verdict, check, detail, advice})
}

// warn is find with a warning if something is so, and otherwise fine.
func (d *doctor) warn(so bool, check, format string, args ...any) {
	verdict := fine
	if so {
		verdict = warning
	}
	d.find(verdict, check, format, args...)
}

// examine makes all checks.
func (d *doctor) examine(ctx context.Context) {
	d.make(ctx, check{"server", d.server}, check{"settings", d.settings}, check{"pooler", d.pooler}, check{"clock", d.clock}, check{"tables", d.tables})
	if d.there {
		d.make(ctx, check{"Citus", d.citus}, check{"rights", d.rights}, check{"other roles", d.otherRoles}, check{"indexes", d.indexes},
			check{"HOT updates", d.statistics}, check{"transactions", d.transactions}, check{"definitions", d.definitions})
	}
}

type check struct {
	name string
	make func(context.Context) error
}

// make makes checks. One that fails does not keep the next from being made.
func (d *doctor) make(ctx context.Context, checks ...check) {
	for _, check := range checks {
		bounded, cancel := context.WithTimeout(ctx, checkTimeout)
		if err := check.make(bounded); err != nil {
			d.find(unknown, check.name, "could not be looked at: %s", err)
		}
		cancel()
	}
}

// checkTimeout bounds a check.
const checkTimeout = 10 * time.Second

// report prints the findings. It is an error if something has failed.
func (d *doctor) report(p *printer) error {
	t := p.table("", "CHECK", "FOUND")
	failures := 0
	colours := map[string]string{fine: green, warning: yellow, failed: red, unknown: yellow}
	for _, f := range d.findings {
		if f.Verdict == failed {
			failures++
		}
		// All verdicts are as long with colour, so that columns stay in line.
		verdict := p.paint(colours[f.Verdict], fmt.Sprintf("%-7s", f.Verdict))
		if err := t.row(f, verdict, f.Check, visible.Lines(f.Detail+when(f.Advice != "", ": "+f.Advice))); err != nil {
			return err
		}
	}
	if err := t.end(); err != nil {
		return err
	}
	if failures > 0 {
		return fmt.Errorf("%s failed", plural(failures, "check"))
	}
	return nil
}

// oldestServer is the oldest server_version_num that the statements run on.
const oldestServer = 14_00_00

func (d *doctor) server(ctx context.Context) error {
	var version int
	var text string
	var standby bool
	err := d.Pool.QueryRow(ctx, "SELECT current_setting('server_version_num')::int4, version(), pg_is_in_recovery()").Scan(&version, &text, &standby)
	if err != nil {
		return err
	}
	text, _, _ = strings.Cut(text, ",")
	if version < oldestServer {
		d.find(failed, "server", "%s: the oldest that the statements run on is 14", text)
	} else {
		d.find(fine, "server", "%s", text)
	}
	if standby {
		d.find(failed, "server", "it is a standby, and only the primary can grant")
	}
	return nil
}

func (d *doctor) settings(ctx context.Context) error {
	var isolation, readOnly, commit, dateStyle, idle string
	err := d.Pool.QueryRow(ctx, `SELECT current_setting('default_transaction_isolation'), current_setting('default_transaction_read_only'),
	current_setting('synchronous_commit'), current_setting('DateStyle'), current_setting('idle_in_transaction_session_timeout')`).
		Scan(&isolation, &readOnly, &commit, &dateStyle, &idle)
	if err != nil {
		return err
	}
	strict := isolation != "read committed" && isolation != "read uncommitted"
	if detail := "transactions are " + isolation + " by default"; strict {
		d.advise("isolation", warning, "isolation", detail+", and one that takes is aborted (40001) when another takes from its row", "run it again, as AllowFunc does")
	} else {
		d.find(fine, "isolation", "%s", detail)
	}
	if readOnly == "on" {
		d.find(failed, "read only", "transactions are read only by default: nothing can be taken")
	}
	d.warn(commit == "off", "durability", "synchronous_commit is %s%s", commit, when(commit == "off", ": after a crash, the last decisions are forgotten and granted again"))
	if !strings.HasPrefix(dateStyle, "ISO") {
		d.advise("date style", warning, "DateStyle", "is "+dateStyle+", with which every call fails in the query modes exec and simple_protocol", "put datestyle=ISO into the URL")
	}
	if idle == "0" {
		d.find(fine, "idle time-out", "idle_in_transaction_session_timeout is not set: a program that hangs in a transaction keeps its rows locked for ever")
	}
	return nil
}

// when is a text if something is so.
func when(so bool, text string) string {
	if so {
		return text
	}
	return ""
}

// pooler finds a pooler by the number of the process: it gives its clients one of its own.
func (d *doctor) pooler(ctx context.Context) error {
	conn, err := d.Pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	var pid uint32
	if err := conn.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		return err
	}
	mode := d.Pool.Config().ConnConfig.DefaultQueryExecMode
	prepares := mode == pgx.QueryExecModeCacheStatement
	switch {
	case pid == conn.Conn().PgConn().PID():
		d.find(fine, "pooler", "none between here and the server")
	case prepares:
		d.advise("pooler", warning, "pooler", "there is one, and this connection prepares statements, which fails if it pools transactions", "put default_query_exec_mode=exec into the URL")
	default:
		d.find(fine, "pooler", "there is one, and this connection prepares nothing (%s)", mode)
	}
	return nil
}

// clock compares the server's clock with this machine's.
func (d *doctor) clock(ctx context.Context) error {
	best := time.Duration(math.MaxInt64)
	var ahead time.Duration
	for range 5 { // the quickest answer is the most exact
		var at time.Time
		asked := time.Now()
		if err := d.Pool.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at); err != nil {
			return err
		}
		if took := time.Since(asked); took < best {
			best, ahead = took, at.Sub(asked.Add(took/2))
		}
	}
	off := ahead.Abs() > time.Second+best
	d.warn(off, "clock", "the server's is %s ahead of this machine's, to %s%s", ahead.Round(time.Millisecond), best.Round(100*time.Microsecond),
		when(off, ": only the server's decides, but those who sleep until a RetryAt by this one wake at another instant"))
	return nil
}

func (d *doctor) tables(ctx context.Context) error {
	err := d.Store.Ready(ctx)
	var pgErr *pgconn.PgError
	denied := errors.As(err, &pgErr) && pgErr.Code == "42501" // what is lacking is another check
	d.there = err == nil || denied
	switch {
	case errors.Is(err, pgstore.ErrNotMigrated):
		mend := upCommand("", d.Schema)
		_, lacks := migrate.Status(ctx, d.Pool, &migrate.Config{Schema: d.Schema})
		if damage, ok := errors.AsType[*migrate.SchemaError](lacks); ok {
			mend = damage.Mend // of what was applied once
		}
		d.advise("table", failed, "table", err.Error(), mend)
	case err != nil && !denied:
		return err
	}
	for _, set := range migrations.Sets() {
		if err := d.migrations(ctx, set); err != nil {
			d.find(unknown, migrationsOf(set), "could not be looked at: %s", err)
		}
	}
	return nil
}

// citus looks at the database of a table that Citus distributes over nodes.
func (d *doctor) citus(ctx context.Context) error {
	if !d.Store.Portable() {
		return nil
	}
	d.advise("portable", fine, "Citus", "the table is distributed, and rate_limits_now, rate_limits_short, rate_limits_at and the SQL functions do not work on it", "give each program on it Config.Portable")
	var interval string
	var slow bool
	err := d.Pool.QueryRow(ctx, `SELECT current_setting('citus.recover_2pc_interval'), current_setting('citus.recover_2pc_interval')::interval NOT BETWEEN '0 s' AND '5 s'`).Scan(&interval, &slow)
	if err != nil {
		return err
	}
	if slow {
		d.advise("recovery", warning, "Citus", "citus.recover_2pc_interval is "+interval+": a node that fails can leave rows locked for as long", "ALTER SYSTEM SET citus.recover_2pc_interval = '5s', and then SELECT pg_reload_conf()")
	}
	var local, ours []string
	if err := d.Pool.QueryRow(ctx, localTables).Scan(&local, &ours); err != nil {
		return err
	}
	if len(local) > 0 {
		d.advise("local tables", warning, "Citus", "the coordinator alone has "+strings.Join(local, ", ")+": what a transaction writes there may fail after its takes are committed",
			"for each table that is written with takes, SELECT citus_add_local_table_to_metadata('"+strings.ReplaceAll(local[0], "'", "''")+"')")
	}
	if len(ours) > 0 {
		d.find(failed, "Citus", "%s must not be in the metadata of Citus: their triggers fail there, and no definition can be published", strings.Join(ours, ", "))
	}
	return nil
}

// localTables lists the tables that are not in Citus' metadata, a few of them, without those of this
// library; and those with triggers that are.
const localTables = `SELECT coalesce((array_agg(t.name ORDER BY t.name) FILTER (WHERE NOT t.known AND NOT t.ours))[1:5], '{}'),
	coalesce(array_agg(t.name ORDER BY t.name) FILTER (WHERE t.known AND t.triggers), '{}')
FROM (
	SELECT c.oid::regclass::text AS name, c.oid IN (SELECT logicalrelid FROM pg_dist_partition) AS known,
		c.relname ~ '^rate_limit' AND c.relname <> 'rate_limit_parked' AS ours, c.relname IN ('rate_limit_definitions', 'rate_limit_history') AS triggers
	FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
	WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname !~ '^(pg_|information_schema$|citus|columnar)'
		AND NOT EXISTS (SELECT FROM pg_depend AS e WHERE e.objid = c.oid AND e.deptype = 'e')
) AS t`

func migrationsOf(set migrations.Set) string {
	if set == "" {
		return "migrations"
	}
	return "migrations of " + string(set)
}

// migrations says which migrations of a set there are.
func (d *doctor) migrations(ctx context.Context, set migrations.Set) error {
	all, err := migrate.Status(ctx, d.Pool, &migrate.Config{Schema: d.Schema, Set: set})
	if damage, ok := errors.AsType[*migrate.SchemaError](err); ok {
		d.advise("schema", warning, migrationsOf(set), damage.Fault, damage.Mend)
		return nil
	}
	if err != nil {
		return err
	}
	applied := 0
	for _, m := range all {
		if m.Applied {
			applied++
		}
	}
	check := migrationsOf(set)
	switch {
	case all[0].Untracked:
		d.find(fine, check, "another tool made the table")
	case all[len(all)-1].Newer:
		d.find(warning, check, "there is %s, which this one does not know: use that program's command", all[len(all)-1].Name)
	case applied == len(all):
		d.find(fine, check, "all %d are applied", applied)
	case applied == 0 && set != "":
		d.find(fine, check, "not applied, which is a choice")
	default:
		d.advise("migrations", warning, check, fmt.Sprintf("%d of %d are applied", applied, len(all)), upCommand(set, d.Schema))
	}
	return nil
}

func (d *doctor) rights(ctx context.Context) error {
	var user string
	var lacks []string
	err := d.Pool.QueryRow(ctx, `SELECT current_user::text, coalesce(array_agg(p) FILTER (WHERE NOT has_table_privilege($1::regclass, p)), '{}')
FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p`, d.Table()).Scan(&user, &lacks)
	if err != nil {
		return err
	}
	if len(lacks) > 0 {
		missing := strings.Join(lacks, ", ")
		d.advise("rights", failed, "rights", user+" lacks "+missing+" on the table", "GRANT "+missing+" ON "+d.Table()+" TO "+pgx.Identifier{user}.Sanitize())
		return nil
	}
	d.find(fine, "rights", "%s may read and write the table", user)
	return nil
}

// otherRoles lists the roles, besides the owner, that can change limits or read their keys.
func (d *doctor) otherRoles(ctx context.Context) error {
	all, err := d.Rights(ctx)
	if err != nil {
		return err
	}
	for _, r := range all {
		d.warn(r.Beyond, "other roles", "%s%s", visible.Text(r.String()), when(r.Beyond, ": more than a program needs; docs/setup.md has what to revoke"))
	}
	if len(all) == 0 {
		d.find(fine, "other roles", "none but the owner can write limits, choose a rate, or read keys")
	}
	return nil
}

func (d *doctor) indexes(ctx context.Context) error {
	var others []string
	var options []string
	var keyed bool
	err := d.Pool.QueryRow(ctx, `SELECT coalesce(c.reloptions, '{}'), EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary),
	ARRAY(SELECT i.indexrelid::regclass::text FROM pg_index AS i WHERE i.indrelid = c.oid AND NOT i.indisprimary)
FROM pg_class AS c WHERE c.oid = $1::regclass`, d.Table()).Scan(&options, &keyed, &others)
	if err != nil {
		return err
	}
	if !keyed {
		d.find(failed, "indexes", "there is no primary key, without which nothing can be taken")
	} else if len(others) > 0 {
		names := strings.Join(others, ", ")
		d.advise("indexes", warning, "indexes", names+": every take writes into them, and is not HOT if they have value or ts", "if nothing reads by them, DROP INDEX "+names)
	} else {
		d.find(fine, "indexes", "the primary key only")
	}
	full := 100
	for _, o := range options {
		if text, ok := strings.CutPrefix(o, "fillfactor="); ok {
			full, _ = strconv.Atoi(text)
		}
	}
	if full > 70 {
		d.advise("fill factor", warning, "fill factor", cmp.Or(strings.Join(options, ", "), "none is set")+", and updates find no room on their page", "ALTER TABLE "+d.Table()+" SET (fillfactor = 50)")
	}
	return nil
}

// statistics looks at HOT updates and dead rows.
func (d *doctor) statistics(ctx context.Context) error {
	var updates, hot, live, dead int64
	var size string
	var bytes int64
	err := d.Pool.QueryRow(ctx, `SELECT s.n_tup_upd, s.n_tup_hot_upd, s.n_live_tup, s.n_dead_tup,
	pg_size_pretty(pg_total_relation_size(s.relid)), pg_total_relation_size(s.relid)
FROM pg_stat_all_tables AS s WHERE s.relid = $1::regclass`, d.Table()).Scan(&updates, &hot, &live, &dead, &size, &bytes)
	if err != nil {
		return err
	}
	if updates < 1000 {
		d.find(fine, "HOT updates", "%d updates so far, too few to tell", updates)
	} else {
		share := 100 * float64(hot) / float64(updates)
		d.warn(share < 90, "HOT updates", "%.1f %% of %d updates%s", share, updates, when(share < 90, ": others write every index and leave dead rows for VACUUM; look for indexes, and for transactions that stay open"))
	}
	bloated := dead > max(10_000, 2*live) || bytes > 64<<20 && bytes > 2000*max(live, 1)
	d.warn(bloated, "dead rows", "%d live rows, %d dead ones, %s%s", live, dead, size, when(bloated, ": VACUUM cannot keep up; look at the oldest snapshot"))
	return nil
}

// transactions looks for those that hold rows, or keep dead ones alive.
func (d *doctor) transactions(ctx context.Context) error {
	var sees bool
	var user string
	if err := d.Pool.QueryRow(ctx, "SELECT pg_has_role(current_user, 'pg_read_all_stats', 'usage'), current_user::text").Scan(&sees, &user); err != nil {
		return err
	}
	holders, err := d.Holders(ctx)
	if err != nil {
		return err
	}
	for _, h := range holders {
		if detail := h.Text() + ", and holds rows of limits"; h.Lasts > idleFor {
			d.advise("transactions", warning, "transactions", detail, fmt.Sprintf("mend its program; to roll it back, SELECT pg_terminate_backend(%d)", h.PID))
		} else {
			d.find(fine, "transactions", "%s", detail)
		}
	}
	if len(holders) == 0 {
		d.find(fine, "transactions", "none is idle and holds rows of limits")
	}
	if err := d.snapshot(ctx); err != nil {
		return err
	}
	if !sees {
		d.advise("statistics", unknown, "transactions", "this role does not see those of others", "to look, GRANT pg_read_all_stats TO "+pgx.Identifier{user}.Sanitize())
	}
	return nil
}

// snapshot looks for what keeps old versions of rows.
func (d *doctor) snapshot(ctx context.Context) error {
	v, err := d.Store.Versions(ctx)
	if err != nil {
		return err
	}
	held := "nothing holds one"
	if v.Kind != "" {
		held = fmt.Sprintf("%s %s%s has it, and %d transactions have begun since", v.Kind, when(v.Kind == "transaction", "of process "), visible.Text(v.Holder), v.Since)
	}
	if v.Since < heldSince || v.Dead < heldDead {
		d.find(fine, "oldest snapshot", "%s", held)
		return nil
	}
	holder := strings.ReplaceAll(v.Holder, "'", "''")
	d.advise("snapshot", warning, "oldest snapshot", fmt.Sprintf("%s: it keeps %d old versions of rows, through which each take from a hot key has to look", held, v.Dead), map[string]string{
		"transaction":          "have dumps and reports run on a standby, and for minutes, not hours; to end it, SELECT pg_terminate_backend(" + holder + ")",
		"standby":              "set hot_standby_feedback = off there, with a max_standby_streaming_delay as long as its queries",
		"replication slot":     "if its standby is gone, SELECT pg_drop_replication_slot('" + holder + "'), and else set hot_standby_feedback = off there",
		"prepared transaction": "COMMIT PREPARED or ROLLBACK PREPARED '" + holder + "'",
	}[v.Kind])
	return nil
}

// idleFor is from when on an idle transaction is worth a warning, and the others from when on a
// snapshot is: a minute of a key that is taken from 200 times a second.
const (
	idleFor   = time.Second
	heldSince = 10_000
	heldDead  = 10_000
)

// definitions looks for those that disagree.
func (d *doctor) definitions(ctx context.Context) error {
	if err := openCatalog(ctx, d.Inspector); err != nil {
		return err
	}
	published := d.Catalog
	if d.file != nil {
		inFile, err := d.file.catalog(ctx)
		if err != nil {
			return err
		}
		d.compare(published, inFile)
		if len(published.Definitions()) == 0 {
			d.Catalog = inFile
		}
	}
	for _, fault := range published.Ignored() {
		d.advise("not used", warning, "definitions", "a row of the catalog is not used: "+fault.Error(), "mend it by ratelimit catalog set, or remove it by catalog unset")
	}
	late, err := published.Overdue(ctx, overdue)
	if err != nil && !errors.Is(err, catalog.ErrNotMigrated) {
		return err
	}
	for _, name := range late {
		d.advise("overdue", warning, "definitions", "keys of "+visible.Text(name)+" have not got what a raise gives them", "give a program's catalog a Config.Store and Run, or run ratelimit catalog complete")
	}
	if err := errors.Join(d.turns(ctx, published), d.zones(ctx, published)); err != nil {
		return err
	}
	return d.rowsDisagree(ctx)
}

// compare tells of definitions that a file has otherwise than the catalog.
func (d *doctor) compare(published, inFile *catalog.Catalog) {
	known := map[string]ratelimit.Definition{}
	for _, p := range published.Definitions() {
		known[p.Name] = p
	}
	for _, f := range inFile.Definitions() {
		if p, ok := known[f.Name]; ok && p != f {
			d.find(warning, "definitions", "the file has %s, and the catalog %s", f, p)
		}
	}
}

// clocks is what clocks show on each day from a year ago, by the time zone data of the server.
const clocks = `SELECT extract(epoch FROM at)::int8, extract(epoch FROM at AT TIME ZONE $1::text)::int8
FROM generate_series(date_trunc('day', now()) - interval '1 year', now() + interval '3 years', interval '1 day') AS at ORDER BY 1`

// zones tells of time zones of quotas that the server has otherwise than this program: views and SQL
// functions go by its data.
func (d *doctor) zones(ctx context.Context, c *catalog.Catalog) error {
	seen := map[string]bool{"": true}
	for _, definition := range c.Definitions() {
		zone := definition.Zone
		if seen[zone] {
			continue
		}
		seen[zone] = true
		location, err := time.LoadLocation(zone)
		if err != nil {
			return err
		}
		rows, _ := d.Pool.Query(ctx, clocks, zone) // its error is that of reading them
		var at, shown int64
		first := "" // difference
		_, err = pgx.ForEachRow(rows, []any{&at, &shown}, func() error {
			here := time.Unix(at, 0).In(location)
			if there := time.Unix(shown, 0).UTC(); first == "" && here.Format(time.DateTime) != there.Format(time.DateTime) {
				first = fmt.Sprintf("clocks show %s here, and %s on the server", here.Format(time.DateTime), there.Format(time.DateTime))
			}
			return nil
		})
		var unknown *pgconn.PgError
		if errors.As(err, &unknown) && unknown.Code == "22023" {
			first, err = "the server does not know it", nil
		}
		if err != nil {
			return err
		}
		if first != "" {
			d.advise("time zone", warning, "time zones", "of "+visible.Text(zone)+" "+first+", so views and SQL functions have other edges than calls from Go",
				"name the zone by a city, as in Europe/Berlin, or bring the time zone data of the older of the two up to date")
		}
	}
	return nil
}

// overdue is for how long a raise can be due before nobody seems to complete it.
const overdue = time.Minute

// Programs that publish different definitions under one name change it with each start.
const (
	turnsWithin = time.Hour
	turnsMost   = 4
)

// turns tells of definitions that programs publish in turn.
func (d *doctor) turns(ctx context.Context, c *catalog.Catalog) error {
	changes, err := c.History(ctx, "", 1000)
	if err != nil {
		return err
	}
	times := map[string]int{}
	for _, change := range changes {
		if change.Key == catalog.AllKeys && strings.Contains(string(change.Became), `"kind"`) && change.Was != nil && time.Since(change.At) < turnsWithin {
			times[change.Name]++
		}
	}
	for name, n := range times {
		if n >= turnsMost {
			d.find(warning, "definitions", "%s was published otherwise %d times within %s: two versions of a program disagree", visible.Text(name), n, turnsWithin)
		}
	}
	return nil
}

// quiet is for how long no row of a name was written, if its limit is gone: a row of a quota by
// the year has the instant at which the year began.
const quiet = 400 * 24 * time.Hour

// rowsDisagree tells of rows that no definition has.
func (d *doctor) rowsDisagree(ctx context.Context) error {
	limits, err := d.Limits(ctx)
	if err != nil {
		return err
	}
	known := len(d.Catalog.Definitions()) + len(d.Catalog.InFlights())
	agree := true
	for _, l := range limits {
		switch {
		case l.InFlight != nil:
		case l.GateOf != "":
			d.find(fine, "definitions", "%s bounds the starts of jobs by %s", visible.Text(l.Name), visible.Text(l.GateOf))
		case l.Definition == nil:
			err = d.undefined(ctx, l.Name)
		case l.Rows > 0:
			var more bool
			more, err = d.moreShards(ctx, l.Definition)
			agree = agree && !more
		}
		if err == nil && l.Rows > 0 {
			err = d.unlike(ctx, l.Name)
		}
		if err != nil {
			return err
		}
	}
	if agree && known > 0 {
		d.find(fine, "definitions", "%s known, and rows agree with them", plural(known, "definition"))
	}
	return nil
}

// unlike tells of overrides and pauses that hold for no call, since their keys are not made as the
// limit's are.
func (d *doctor) unlike(ctx context.Context, name string) error {
	overrides, pauses, err := d.UnlikeOverrides(ctx, name)
	for i, unlike := range [][]inspect.Unlike{overrides, pauses} {
		if len(unlike) == 0 {
			continue
		}
		what, u := [...]string{"override", "pause"}[i], unlike[0]
		advice := "give the " + what + " the key that the program makes: see ratelimit key"
		if u.Write != "" {
			advice = "give the " + what + " the key " + visible.Text(u.Write)
		}
		d.advise("unlike", warning, "keys", fmt.Sprintf("%s of %s that no call may meet, such as of the key %s: %s",
			plural(len(unlike), what), visible.Text(name), visible.Text(u.Key), u.String()), advice+", and remove this one")
	}
	return err
}

// moreShards tells of rows of more shards than a limit has. What they hold goes into the others; what is
// left of them would be taken for rows of a program that is at work.
func (d *doctor) moreShards(ctx context.Context, of *ratelimit.Definition) (more bool, err error) {
	var from *int
	err = d.Pool.QueryRow(ctx, "SELECT max(r.shard) + 1 FROM "+d.Table()+" AS r WHERE r.name = $1::text AND r.shard >= $2::int4", of.Name, of.Shards).Scan(&from)
	if err != nil || from == nil {
		return false, err
	}
	d.advise("shards", warning, "definitions", fmt.Sprintf("%s has rows of more shards than the %d that are defined", visible.Text(of.Name), of.Shards),
		fmt.Sprintf("if no program with more is at work any more, ratelimit change %s --all-keys --from shards=%d, and then DELETE FROM %s WHERE name = '%s' AND shard >= %d",
			visible.Shell(visible.Text(of.Name)), *from, d.Table(), strings.ReplaceAll(of.Name, "'", "''"), of.Shards))
	return true, nil
}

// undefined tells of a name that has rows and no definition. They may be of a program that
// publishes nothing: only those that nobody has written for long are of a limit that is gone.
func (d *doctor) undefined(ctx context.Context, name string) error {
	var used bool
	err := d.Pool.QueryRow(ctx, "SELECT EXISTS (SELECT r.key FROM "+d.Table()+" AS r WHERE r.name = $1::text AND r.ts > clock_timestamp() - $2::float8 * interval '1 second')",
		name, quiet.Seconds()).Scan(&used)
	switch shown := visible.Text(name); {
	case err != nil:
		return err
	case used:
		d.advise("undefined", fine, "definitions", shown+" has rows and no definition", "have its program publish it, or give it with --definitions")
	default:
		d.advise("gone", fine, "definitions", fmt.Sprintf("%s has rows and no definition, and none was written for %d days", shown, int(quiet.Hours()/24)),
			"if its limit is gone, ratelimit forget "+visible.Shell(shown))
	}
	return nil
}
