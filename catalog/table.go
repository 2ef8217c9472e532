package catalog

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/intx"
)

// ErrNotMigrated is the error when a table of the catalog is not where it is looked for: apply
// the set migrations.Catalog, or name the schema in [Config].
var ErrNotMigrated = errors.New("catalog: the tables of the catalog are not there")

// ErrOutcomeUnknown is the error of an edit in a transaction of its own whose context ended in COMMIT, or
// whose connection was lost there: it may be done. It is pgstore's error of that name.
var ErrOutcomeUnknown = intx.ErrUnknown

// errAgain reports an edit that must be decided again, because the limit or its rows changed
// meanwhile.
var errAgain = errors.New("the limit is being changed by somebody else")

// errBehind is the errAgain of an edit that waited too long for another edit, of any limit.
type errBehind struct{}

func (errBehind) Error() string {
	return "waited for a transaction that edits the catalog, perhaps another limit, and has not ended"
}

func (errBehind) Is(target error) bool { return target == errAgain }

// querier is implemented by pools and transactions.
type querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// table reads and writes the catalog in PostgreSQL.
type table struct {
	pool        *pgxpool.Pool
	definitions string            // the name of the definitions' table, with the schema
	names       *strings.Replacer // adds the schema to names
}

func newTable(pool *pgxpool.Pool, schema string) *table {
	if schema == "" {
		return &table{pool, "rate_limit_definitions", strings.NewReplacer()}
	}
	in := func(name string) string { return pgx.Identifier{schema, name}.Sanitize() }
	return &table{pool, in("rate_limit_definitions"), strings.NewReplacer(
		"rate_limit_definitions AS", in("rate_limit_definitions")+" AS",
		"rate_limit_history AS", in("rate_limit_history")+" AS",
		"rate_limit_pending AS", in("rate_limit_pending")+" AS")}
}

func (t *table) sql(text string) string { return t.names.Replace(text) }

// columns are the columns of a row, as scan reads them. Instants and spans are microseconds, so
// that no DateStyle or IntervalStyle changes them.
const columns = `d.name, d.key, d.kind, d.rate, (extract(epoch FROM d.period) * 1000000)::int8, d.capacity, d.max_reserved,
	d.shards, (extract(epoch FROM d.start) * 1000000)::int8, d.slots, d.every, d.zone, to_char(d.anchor, 'YYYY-MM-DD'), d.time,
	d.at_once, (extract(epoch FROM d.lease) * 1000000)::int8, d.mode, d.enabled, (extract(epoch FROM d.until) * 1000000)::int8,
	coalesce(d.note, ''), (extract(epoch FROM d.updated_at) * 1000000)::int8`

// clock reads the database's clock.
const clock = `(extract(epoch FROM clock_timestamp()) * 1000000)::int8`

// storedRow is a row as it is read. Without a row, every field is NULL.
type storedRow struct {
	name, key, kind             *string
	rate, capacity, maxReserved *float64
	period, lease               *int64
	shards, slots, atOnce       *int
	start, until, updatedAt     *int64
	every, zone, anchor, time   *string
	mode                        *string
	enabled                     *bool
	note                        string
}

func (s *storedRow) fields(more ...any) []any {
	return append([]any{
		&s.name, &s.key, &s.kind, &s.rate, &s.period, &s.capacity, &s.maxReserved,
		&s.shards, &s.start, &s.slots, &s.every, &s.zone, &s.anchor, &s.time, &s.atOnce, &s.lease, &s.mode, &s.enabled, &s.until, &s.note, &s.updatedAt,
	}, more...)
}

// addTo adds the row to a reading.
func (s *storedRow) addTo(r *reading) {
	switch {
	case s.name == nil:
	case s.kind != nil:
		p, err := s.published()
		if err == nil {
			r.published = append(r.published, p)
			return
		}
		r.breaks(place{*s.name, publishedKey}, fmt.Errorf("catalog: a definition is not used: %w", err))
	default:
		e, err := s.entry()
		if err != nil {
			r.breaks(place{e.Name, e.Key}, fmt.Errorf("catalog: an override is not used: %w", err))
			return
		}
		r.overrides = append(r.overrides, e)
	}
}

func (s *storedRow) published() (published, error) {
	if *s.kind == kindInFlight {
		l := ratelimit.InFlight{Name: *s.name, Limit: or(s.atOnce), Lease: microseconds(s.lease)}
		return inFlightOf(l), l.Validate()
	}
	d, err := s.definition()
	return published{Definition: d}, err
}

// microseconds returns a span that was read; 0 for NULL.
func microseconds(v *int64) time.Duration { return time.Duration(or(v)) * time.Microsecond }

// instant returns an instant that was read; the zero time for NULL.
func instant(v *int64) time.Time {
	if v == nil {
		return time.Time{}
	}
	return time.UnixMicro(*v).UTC()
}

func (s *storedRow) definition() (ratelimit.Definition, error) {
	kind, err := ratelimit.ParseKind(*s.kind)
	if err != nil {
		return ratelimit.Definition{}, err
	}
	d := ratelimit.Definition{
		Name: *s.name, Kind: kind, Rate: or(s.rate), Period: microseconds(s.period),
		Capacity: or(s.rate), MaxReserved: or(s.maxReserved), Shards: or(s.shards), Start: instant(s.start), Slots: or(s.slots),
	}
	if s.capacity != nil {
		d.Capacity = *s.capacity
	}
	if s.every != nil {
		if d.Every, err = ratelimit.ParseUnit(*s.every); err == nil {
			d.Anchor, err = ratelimit.ParseDate(or(s.anchor))
		}
		d.Time, _ = bucket.ParseTimeOfDay(or(s.time)) // the table checks it; NULL is midnight
		if err != nil {
			return ratelimit.Definition{}, err
		}
		d.Zone = or(s.zone)
	}
	return d, d.Validate()
}

func (s *storedRow) entry() (e Entry, err error) {
	e = Entry{
		Name: *s.name, Key: keyOf(s.key), UpdatedAt: instant(s.updatedAt),
		Override: Override{
			Rate: or(s.rate), Period: microseconds(s.period),
			Capacity: amount(s.capacity), MaxReserved: amount(s.maxReserved), Slots: or(s.slots),
			AtOnce: or(s.atOnce), Lease: microseconds(s.lease),
			Until: instant(s.until), Switch: Off, Note: s.note,
		},
	}
	if or(s.enabled) {
		e.Switch = On
	}
	if s.mode != nil {
		e.Mode, err = ratelimit.ParseMode(*s.mode)
	}
	return e, err
}

// poll reads the clock, the newest change, and the instant of a change that was read before, to see
// whether it is the same one.
const poll = `SELECT ` + clock + `,
	(SELECT h.version FROM rate_limit_history AS h ORDER BY h.version DESC LIMIT 1),
	(SELECT (extract(epoch FROM h.at) * 1000000)::int8 FROM rate_limit_history AS h WHERE h.version = $1::int8)`

// newest is joined with the rows of a query, so that it returns at least one row, in one snapshot
// with the clock and the newest version.
const newest = `(SELECT ` + clock + ` AS now) AS n
LEFT JOIN (SELECT h.version, (extract(epoch FROM h.at) * 1000000)::int8 AS at FROM rate_limit_history AS h ORDER BY h.version DESC LIMIT 1) AS v ON true`

const readAll = `SELECT ` + columns + `, n.now, v.version, v.at
FROM ` + newest + `
LEFT JOIN rate_limit_definitions AS d ON true`

// readChanged reads the rows of changed names and keys. A change whose row is gone has a row of
// NULLs. An index serves each part. Without the upper bound of versions the planner would expect a
// third of all, and compile the query for a second or two.
const readChanged = `SELECT ` + columns + `, n.now, v.version, v.at, c.name, c.key
FROM ` + newest + `
CROSS JOIN (SELECT DISTINCT h.name, h.key FROM rate_limit_history AS h WHERE h.version > $1::int8 AND h.version < 9223372036854775807) AS c
LEFT JOIN LATERAL (
	SELECT d.* FROM rate_limit_definitions AS d WHERE d.name = c.name AND d.key = c.key
	UNION ALL
	SELECT d.* FROM rate_limit_definitions AS d WHERE d.name = c.name AND d.kind IS NOT NULL AND c.key IS NULL
	UNION ALL
	SELECT d.* FROM rate_limit_definitions AS d WHERE d.name = c.name AND d.kind IS NULL AND d.key IS NULL AND c.key IS NULL
) AS d ON true`

// read reads the changes since a mark: nil if there are none, or everything if the mark's change is
// gone. at is the clock.
func (t *table) read(ctx context.Context, known mark) (r *reading, at time.Time, err error) {
	if known.version == 0 {
		return t.readAll(ctx)
	}
	var now, version, knownAt *int64
	if err := t.pool.QueryRow(ctx, t.sql(poll), known.version).Scan(&now, &version, &knownAt); err != nil {
		return nil, at, fault("look for changes", err)
	}
	at = instant(now)
	switch {
	case knownAt == nil || *knownAt != known.at:
		return t.readAll(ctx)
	case *version == known.version:
		return nil, at, nil
	}
	return t.readChanged(ctx, known)
}

func (t *table) readAll(ctx context.Context) (r *reading, at time.Time, err error) {
	rows, err := t.pool.Query(ctx, t.sql(readAll))
	if err != nil {
		return nil, at, fault("read definitions", err)
	}
	r = &reading{whole: true}
	err = t.scan(rows, r)
	return r, r.at, err
}

func (t *table) scan(rows pgx.Rows, r *reading, more ...any) error {
	var (
		s                    storedRow
		now, version, newest *int64
	)
	_, err := pgx.ForEachRow(rows, s.fields(append([]any{&now, &version, &newest}, more...)...), func() error {
		r.at, r.mark = instant(now), mark{or(version), or(newest)}
		if len(more) == 2 {
			name, key := *more[0].(**string), *more[1].(**string)
			if name == nil {
				r.whole = true
				return nil
			}
			r.changed = append(r.changed, place{*name, keyOf(key)})
		}
		s.addTo(r)
		return nil
	})
	if err != nil {
		return fault("read definitions", err)
	}
	return nil
}

func (t *table) readChanged(ctx context.Context, known mark) (r *reading, at time.Time, err error) {
	rows, err := t.pool.Query(ctx, t.sql(readChanged), known.version)
	if err != nil {
		return nil, at, fault("read what has changed", err)
	}
	r = &reading{}
	var name, key *string
	if err := t.scan(rows, r, &name, &key); err != nil {
		return nil, at, err
	}
	if r.whole || r.mark.version == 0 { // truncated, or the change that was seen is gone
		return t.readAll(ctx)
	}
	return r, r.at, nil
}

const rowsOf = `SELECT ` + columns + `, ` + clock + ` FROM (
	SELECT d.* FROM rate_limit_definitions AS d WHERE d.name = ANY ($1::text[]) AND d.key = $2::text
	UNION ALL
	SELECT d.* FROM rate_limit_definitions AS d WHERE d.name = ANY ($1::text[]) AND d.kind IS NOT NULL
	UNION ALL
	SELECT d.* FROM rate_limit_definitions AS d WHERE d.name = ANY ($1::text[]) AND d.kind IS NULL AND d.key IS NULL
) AS d`

func (t *table) rowsOf(ctx context.Context, tx pgx.Tx, names []string, key string) (*reading, error) {
	rows, err := tx.Query(ctx, t.sql(rowsOf), names, keyArg(key))
	if err != nil {
		return nil, fault("read definitions", err)
	}
	r := &reading{whole: true}
	var s storedRow
	var now *int64
	_, err = pgx.ForEachRow(rows, s.fields(&now), func() error {
		r.at = instant(now)
		s.addTo(r)
		return nil
	})
	if err != nil {
		return nil, fault("read definitions", err)
	}
	return r, nil
}

const values = ` (name, key, kind, rate, period, capacity, max_reserved, shards, start, slots, enabled, until, note, every, zone, anchor, at_once, lease, mode, time)
VALUES ($1::text, $2::text, $3::text, $4::float8, $5::float8 * interval '1 microsecond', $6::float8, $7::float8,
	$8::int4, $9::timestamptz, $10::int4, $11::bool, $12::timestamptz, $13::text, $14::text, $15::text, $16::text::date,
	$17::int4, $18::float8 * interval '1 microsecond', $19::text, $20::text)`

const update = ` DO UPDATE SET kind = excluded.kind, rate = excluded.rate, period = excluded.period, capacity = excluded.capacity,
	max_reserved = excluded.max_reserved, shards = excluded.shards, start = excluded.start, slots = excluded.slots,
	every = excluded.every, zone = excluded.zone, anchor = excluded.anchor, time = excluded.time,
	at_once = excluded.at_once, lease = excluded.lease, mode = excluded.mode,
	enabled = excluded.enabled, until = excluded.until, note = excluded.note`

const (
	putPublished = `INSERT INTO rate_limit_definitions AS d` + values + ` ON CONFLICT (name) WHERE kind IS NOT NULL` + update
	putAll       = `INSERT INTO rate_limit_definitions AS d` + values + ` ON CONFLICT (name) WHERE kind IS NULL AND key IS NULL` + update
	putKey       = `INSERT INTO rate_limit_definitions AS d` + values + ` ON CONFLICT (name, key) WHERE key IS NOT NULL` + update
)

func (t *table) publish(ctx context.Context, tx pgx.Tx, p *published) error {
	if l := p.inFlight; l != nil {
		_, err := tx.Exec(ctx, t.sql(putPublished), l.Name, nil, p.kind(), nil, nil, nil, nil, nil, nil, nil, true, nil, nil, nil, nil, nil,
			int32(l.Limit), float64(l.Lease.Microseconds()), nil, nil)
		return fault("publish", err)
	}
	d := &p.Definition
	var capacity *float64
	if !follows(*d) && d.Kind != ratelimit.KindSlidingWindow {
		capacity = &d.Capacity
	}
	var every, zone, anchor, at *string
	if d.Every != 0 {
		every, zone, anchor = notZero(d.Every.String()), &d.Zone, notZero(d.Anchor.String())
	}
	if d.Time != 0 {
		at = notZero(bucket.TimeOfDay(d.Time))
	}
	_, err := tx.Exec(ctx, t.sql(putPublished), d.Name, nil, d.Kind.String(), d.Rate, float64(d.Period.Microseconds()), capacity, d.MaxReserved,
		int32(d.Shards), orNull(d.Start), notZero(int32(d.Slots)), true, nil, nil, every, zone, anchor, nil, nil, nil, at)
	return fault("publish", err)
}

func (t *table) set(ctx context.Context, tx pgx.Tx, e *Entry) error {
	sql := putKey
	if e.Key == AllKeys {
		sql = putAll
	}
	var mode *string
	if e.Mode != 0 {
		mode = notZero(e.Mode.String())
	}
	_, err := tx.Exec(ctx, t.sql(sql), e.Name, keyArg(e.Key), nil, notZero(e.Rate), notZero(float64(e.Period.Microseconds())), stored(e.Capacity), stored(e.MaxReserved),
		nil, nil, notZero(int32(e.Slots)), e.Switch != Off, orNull(e.Until), notZero(e.Note), nil, nil, nil,
		notZero(int32(e.AtOnce)), notZero(float64(e.Lease.Microseconds())), mode, nil)
	return fault("set an override", err)
}

const (
	unsetKey = `DELETE FROM rate_limit_definitions AS d WHERE d.name = $1::text AND d.key = $2::text`
	unsetAll = `DELETE FROM rate_limit_definitions AS d WHERE d.name = $1::text AND d.key IS NULL AND d.kind IS NULL AND $2::text IS NULL`
	forget   = `DELETE FROM rate_limit_definitions AS d WHERE d.name = $1::text`
)

func (t *table) unset(ctx context.Context, tx pgx.Tx, at place) error {
	sql := unsetKey
	if at.key == AllKeys {
		sql = unsetAll
	}
	_, err := tx.Exec(ctx, t.sql(sql), at.name, keyArg(at.key))
	return fault("unset an override", err)
}

// lock takes the lock for writing definitions, which the history's trigger takes too. The next
// statement sees what the holder before has committed.
const lock = `SELECT pg_advisory_xact_lock(hashtextextended('rate_limit_definitions', $1::text::regclass::oid::int8))`

func (t *table) lock(ctx context.Context, tx pgx.Tx) (unlock func(), err error) {
	_, err = tx.Exec(ctx, lock, t.definitions)
	return func() {}, fault("wait for those who write definitions", err)
}

func (t *table) as(ctx context.Context, tx pgx.Tx, who string) error {
	_, err := tx.Exec(ctx, "SELECT set_config('ratelimit.who', $1::text, true)", who)
	return fault("say who makes a change", err)
}

// lockFor is lock for a bounded time, after which it returns errBehind. The statement restores the
// lock_timeout, and so does a rollback.
const lockFor = `SELECT set_config('ratelimit.lock_timeout', current_setting('lock_timeout'), true), set_config('lock_timeout', $2::text, true),
	pg_advisory_xact_lock(hashtextextended('rate_limit_definitions', $1::text::regclass::oid::int8)),
	set_config('lock_timeout', current_setting('ratelimit.lock_timeout'), true)`

func (t *table) lockFor(ctx context.Context, tx pgx.Tx, most time.Duration) error {
	_, err := tx.Exec(ctx, lockFor, t.definitions, strconv.FormatInt(most.Milliseconds(), 10))
	if code := intx.Code(err); code == intx.LockNotAvailable || code == intx.QueryCanceled { // QueryCanceled: the lock came just then
		return errBehind{}
	}
	return fault("wait for those who write definitions", err)
}

// lockWait is how long a try waits for another edit while no call waits for its rows. It is less
// than the server's deadlock_timeout.
const lockWait = 200 * time.Millisecond

// await waits until no other edit is under way, and keeps none from beginning.
func (t *table) await(ctx context.Context, tx pgx.Tx) error {
	behind, err := tx.Begin(ctx)
	if err != nil {
		return fault("wait for those who write definitions", err)
	}
	err = t.lockFor(ctx, behind, lockWait)
	return cmp.Or(err, fault("wait for those who write definitions", behind.Rollback(ctx)))
}

func (t *table) forget(ctx context.Context, tx pgx.Tx, name string) (int64, error) {
	tag, err := tx.Exec(ctx, t.sql(forget), name)
	return tag.RowsAffected(), fault("forget a limit", err)
}

const history = `SELECT h.version, (extract(epoch FROM h.at) * 1000000)::int8, h.role, coalesce(h.who, ''), coalesce(h.name, ''), h.key, h.was::text, h.became::text
FROM rate_limit_history AS h WHERE ($1::text IS NULL OR h.name = $1::text)
	AND ($3::text IS NULL OR h.key IS NULL OR h.key = $3::text) ORDER BY h.version DESC LIMIT $2::int8`

func (t *table) history(ctx context.Context, name string, key *string, most int) ([]Change, error) {
	rows, err := t.pool.Query(ctx, t.sql(history), notZero(name), notZero(int64(most)), key)
	if err != nil {
		return nil, fault("read the history", err)
	}
	changes, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (c Change, err error) {
		var at *int64
		var key, was, became *string
		err = row.Scan(&c.Version, &at, &c.Role, &c.Who, &c.Name, &key, &was, &became)
		c.At, c.Key = instant(at), keyOf(key)
		if was != nil {
			c.Was = json.RawMessage(*was)
		}
		if became != nil {
			c.Became = json.RawMessage(*became)
		}
		return c, err
	})
	if err != nil {
		return nil, fault("read the history", err)
	}
	return changes, nil
}

const pruneHistory = `DELETE FROM rate_limit_history AS h
WHERE h.at < clock_timestamp() - $1::float8 * interval '1 microsecond'
	AND h.version < (SELECT n.version FROM rate_limit_history AS n ORDER BY n.version DESC LIMIT 1)`

func (t *table) pruneHistory(ctx context.Context, age time.Duration) (int64, error) {
	tag, err := t.pool.Exec(ctx, t.sql(pruneHistory), float64(age.Microseconds()))
	return tag.RowsAffected(), fault("prune the history", err)
}

// notZero returns an argument that is NULL for the zero value.
func notZero[T comparable](v T) *T {
	if v == *new(T) {
		return nil
	}
	return &v
}

// orNull returns an instant as an argument; NULL for the zero time.
func orNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// fault wraps an error of the database.
func fault(doing string, err error) error {
	if err == nil {
		return nil
	}
	switch intx.Code(err) {
	case "42P01", "42703": // undefined_table, undefined_column
		return fmt.Errorf("%w (ratelimit migrate up --set catalog; Config.Schema): %w", ErrNotMigrated, err)
	case intx.LockNotAvailable:
		return fmt.Errorf("catalog: %s: a transaction edits the catalog, or has locked a row or table of the catalog: %w", doing, err)
	}
	return fmt.Errorf("catalog: %s: %w", doing, err)
}
