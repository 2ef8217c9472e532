package catalog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
)

// ErrNotMigrated is the error when a table of the catalog is not where it is looked for: apply
// the set migrations.Catalog, or name the schema in [Config].
var ErrNotMigrated = errors.New("catalog: the tables of the catalog are not there")

// querier is implemented by pools and transactions.
type querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// table is the catalog in PostgreSQL.
type table struct {
	pool  *pgxpool.Pool
	names *strings.Replacer // with the schema
}

func newTable(pool *pgxpool.Pool, schema string) *table {
	if schema == "" {
		return &table{pool, strings.NewReplacer()}
	}
	in := func(name string) string { return pgx.Identifier{schema, name}.Sanitize() }
	return &table{pool, strings.NewReplacer(
		"rate_limit_definitions AS", in("rate_limit_definitions")+" AS",
		"rate_limit_history AS", in("rate_limit_history")+" AS")}
}

func (t *table) sql(text string) string { return t.names.Replace(text) }

// columns are those of a definition or override, as scan reads them.
const columns = `d.name, d.key, d.kind, d.rate, (date_part('epoch', d.period) * 1000000)::int8, d.capacity, d.max_reserved,
	d.shards, d.start, d.slots, d.every, d.zone, d.anchor::text,
	d.at_once, (date_part('epoch', d.lease) * 1000000)::int8, d.mode, d.enabled, d.until, coalesce(d.note, ''), d.updated_at`

// stored is a row as it is read. All of it can be NULL where there is none.
type storedRow struct {
	name, key, kind             *string
	rate, capacity, maxReserved *float64
	period, lease               *int64
	shards, slots, atOnce       *int
	start, until, updatedAt     *time.Time
	every, zone, anchor, mode   *string
	enabled                     *bool
	note                        string
}

func (s *storedRow) fields(more ...any) []any {
	return append([]any{
		&s.name, &s.key, &s.kind, &s.rate, &s.period, &s.capacity, &s.maxReserved,
		&s.shards, &s.start, &s.slots, &s.every, &s.zone, &s.anchor, &s.atOnce, &s.lease, &s.mode, &s.enabled, &s.until, &s.note, &s.updatedAt,
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
		r.breaks(*s.name, fmt.Errorf("catalog: a definition is not used: %w", err))
	default:
		e, err := s.entry()
		if err != nil {
			r.breaks(e.Name, fmt.Errorf("catalog: an override is not used: %w", err))
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

// microseconds is a time as it is read, 0 for NULL.
func microseconds(v *int64) time.Duration { return time.Duration(or(v)) * time.Microsecond }

func (s *storedRow) definition() (ratelimit.Definition, error) {
	kind, err := ratelimit.ParseKind(*s.kind)
	if err != nil {
		return ratelimit.Definition{}, err
	}
	d := ratelimit.Definition{
		Name: *s.name, Kind: kind, Rate: or(s.rate), Period: microseconds(s.period),
		Capacity: or(s.rate), MaxReserved: or(s.maxReserved), Shards: or(s.shards), Start: or(s.start).UTC(), Slots: or(s.slots),
	}
	if s.capacity != nil {
		d.Capacity = *s.capacity
	}
	if s.every != nil {
		if d.Every, err = ratelimit.ParseUnit(*s.every); err == nil {
			d.Anchor, err = ratelimit.ParseDate(or(s.anchor))
		}
		if err != nil {
			return ratelimit.Definition{}, err
		}
		d.Zone = or(s.zone)
	}
	return d, d.Validate()
}

func (s *storedRow) entry() (e Entry, err error) {
	e = Entry{
		Name: *s.name, Key: or(s.key), All: s.key == nil, UpdatedAt: or(s.updatedAt).UTC(),
		Override: Override{
			Rate: or(s.rate), Period: microseconds(s.period),
			Capacity: amount(s.capacity), MaxReserved: amount(s.maxReserved), Slots: or(s.slots),
			AtOnce: or(s.atOnce), Lease: microseconds(s.lease),
			Until: or(s.until).UTC(), Off: !or(s.enabled), Note: s.note,
		},
	}
	if s.mode != nil {
		e.Mode, err = ratelimit.ParseMode(*s.mode)
	}
	return e, err
}

// poll reads the clock and the newest change, and whether the one that is known is there as it
// was read.
const poll = `SELECT clock_timestamp(),
	(SELECT h.version FROM rate_limit_history AS h ORDER BY h.version DESC LIMIT 1),
	(SELECT h.at FROM rate_limit_history AS h WHERE h.version = $1::int8)`

// newest is joined to by queries of rows, so that there is a row in any case, of one snapshot.
const newest = `(SELECT clock_timestamp() AS now) AS n
LEFT JOIN (SELECT h.version, h.at FROM rate_limit_history AS h ORDER BY h.version DESC LIMIT 1) AS v ON true`

const readAll = `SELECT ` + columns + `, n.now, v.version, v.at
FROM ` + newest + `
LEFT JOIN rate_limit_definitions AS d ON true`

// readChanged reads the rows of names and keys that have changed, or a change without a row.
const readChanged = `SELECT ` + columns + `, n.now, v.version, v.at, c.name, c.key
FROM ` + newest + `
CROSS JOIN (SELECT DISTINCT h.name, h.key FROM rate_limit_history AS h WHERE h.version > $1::int8) AS c
LEFT JOIN LATERAL (
	SELECT d.* FROM rate_limit_definitions AS d WHERE d.name = c.name AND d.key = c.key
	UNION ALL
	SELECT d.* FROM rate_limit_definitions AS d WHERE d.name = c.name AND d.key IS NULL AND c.key IS NULL
) AS d ON true`

// read reads the changes since a mark, nil when there are none; all, if they cannot be told. at
// is the clock.
func (t *table) read(ctx context.Context, known mark) (r *reading, at time.Time, err error) {
	if known.version == 0 {
		return t.readAll(ctx)
	}
	var version *int64
	var knownAt *time.Time
	if err := t.pool.QueryRow(ctx, t.sql(poll), known.version).Scan(&at, &version, &knownAt); err != nil {
		return nil, at, fault("look for changes", err)
	}
	switch {
	case knownAt == nil || !knownAt.Equal(known.at):
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
		s       storedRow
		version *int64
		newest  *time.Time
	)
	_, err := pgx.ForEachRow(rows, s.fields(append([]any{&r.at, &version, &newest}, more...)...), func() error {
		r.mark = mark{or(version), or(newest)}
		if len(more) == 2 {
			name, key := *more[0].(**string), *more[1].(**string)
			if name == nil {
				r.whole = true
				return nil
			}
			r.changed = append(r.changed, place{name: *name, key: or(key), all: key == nil})
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
	if r.whole || r.mark.version == 0 { // truncated, or without the change that was seen
		return t.readAll(ctx)
	}
	return r, r.at, nil
}

// rowsOf reads the rows of names, in a transaction; key is nil for all keys.
const rowsOf = `SELECT ` + columns + `, clock_timestamp() FROM rate_limit_definitions AS d
WHERE d.name = ANY ($1::text[]) AND (d.key IS NULL OR d.key = $2::text)`

func (t *table) rowsOf(ctx context.Context, q querier, names []string, key *string) (*reading, error) {
	rows, err := q.Query(ctx, t.sql(rowsOf), names, key)
	if err != nil {
		return nil, fault("read definitions", err)
	}
	r := &reading{whole: true}
	var s storedRow
	_, err = pgx.ForEachRow(rows, s.fields(&r.at), func() error {
		s.addTo(r)
		return nil
	})
	if err != nil {
		return nil, fault("read definitions", err)
	}
	return r, nil
}

const values = ` (name, key, kind, rate, period, capacity, max_reserved, shards, start, slots, enabled, until, note, every, zone, anchor, at_once, lease, mode)
VALUES ($1::text, $2::text, $3::text, $4::float8, $5::float8 * interval '1 microsecond', $6::float8, $7::float8,
	$8::int4, $9::timestamptz, $10::int4, $11::bool, $12::timestamptz, $13::text, $14::text, $15::text, $16::text::date,
	$17::int4, $18::float8 * interval '1 microsecond', $19::text)`

const update = ` DO UPDATE SET kind = excluded.kind, rate = excluded.rate, period = excluded.period, capacity = excluded.capacity,
	max_reserved = excluded.max_reserved, shards = excluded.shards, start = excluded.start, slots = excluded.slots,
	every = excluded.every, zone = excluded.zone, anchor = excluded.anchor,
	at_once = excluded.at_once, lease = excluded.lease, mode = excluded.mode,
	enabled = excluded.enabled, until = excluded.until, note = excluded.note`

const (
	putPublished = `INSERT INTO rate_limit_definitions AS d` + values + ` ON CONFLICT (name) WHERE kind IS NOT NULL` + update
	putAll       = `INSERT INTO rate_limit_definitions AS d` + values + ` ON CONFLICT (name) WHERE kind IS NULL AND key IS NULL` + update
	putKey       = `INSERT INTO rate_limit_definitions AS d` + values + ` ON CONFLICT (name, key) WHERE key IS NOT NULL` + update
)

func (t *table) publish(ctx context.Context, q querier, p *published) error {
	if l := p.slots; l != nil {
		_, err := q.Exec(ctx, t.sql(putPublished), l.Name, nil, p.kind(), nil, nil, nil, nil, nil, nil, nil, true, nil, nil, nil, nil, nil,
			int32(l.Limit), float64(l.Lease.Microseconds()), nil)
		return fault("publish", err)
	}
	d := &p.Definition
	var capacity *float64
	if !follows(*d) && d.Kind != ratelimit.KindSlidingWindow {
		capacity = &d.Capacity
	}
	var every, zone, anchor *string
	if d.Every != 0 {
		every, zone, anchor = notZero(d.Every.String()), &d.Zone, notZero(d.Anchor.String())
	}
	_, err := q.Exec(ctx, t.sql(putPublished), d.Name, nil, d.Kind.String(), d.Rate, float64(d.Period.Microseconds()), capacity, d.MaxReserved,
		int32(d.Shards), orNull(d.Start), notZero(int32(d.Slots)), true, nil, nil, every, zone, anchor, nil, nil, nil)
	return fault("publish", err)
}

func (t *table) set(ctx context.Context, q querier, e *Entry) error {
	sql, key := putKey, &e.Key
	if e.All {
		sql, key = putAll, nil
	}
	var mode *string
	if e.Mode != 0 {
		mode = notZero(e.Mode.String())
	}
	_, err := q.Exec(ctx, t.sql(sql), e.Name, key, nil, notZero(e.Rate), notZero(float64(e.Period.Microseconds())), stored(e.Capacity), stored(e.MaxReserved),
		nil, nil, notZero(int32(e.Slots)), !e.Off, orNull(e.Until), notZero(e.Note), nil, nil, nil,
		notZero(int32(e.AtOnce)), notZero(float64(e.Lease.Microseconds())), mode)
	return fault("set an override", err)
}

const (
	unsetKey = `DELETE FROM rate_limit_definitions AS d WHERE d.name = $1::text AND d.key = $2::text`
	unsetAll = `DELETE FROM rate_limit_definitions AS d WHERE d.name = $1::text AND d.key IS NULL AND d.kind IS NULL AND $2::text IS NULL`
	forget   = `DELETE FROM rate_limit_definitions AS d WHERE d.name = $1::text`
)

func (t *table) unset(ctx context.Context, q querier, name string, key *string) (int64, error) {
	sql := unsetKey
	if key == nil {
		sql = unsetAll
	}
	tag, err := q.Exec(ctx, t.sql(sql), name, key)
	return tag.RowsAffected(), fault("unset an override", err)
}

func (t *table) forget(ctx context.Context, q querier, name string) (int64, error) {
	tag, err := q.Exec(ctx, t.sql(forget), name)
	return tag.RowsAffected(), fault("forget a limit", err)
}

const history = `SELECT h.version, h.at, h.who, coalesce(h.name, ''), coalesce(h.key, ''), h.key IS NULL, h.was::text, h.became::text
FROM rate_limit_history AS h WHERE ($1::text IS NULL OR h.name = $1::text) ORDER BY h.version DESC LIMIT $2::int8`

func (t *table) history(ctx context.Context, name string, most int) ([]Change, error) {
	rows, err := t.pool.Query(ctx, t.sql(history), notZero(name), notZero(int64(most)))
	if err != nil {
		return nil, fault("read the history", err)
	}
	changes, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (c Change, err error) {
		var was, became *string
		err = row.Scan(&c.Version, &c.At, &c.Who, &c.Name, &c.Key, &c.All, &was, &became)
		c.At = c.At.UTC()
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

// notZero is an argument that is NULL for the zero value.
func notZero[T comparable](v T) *T {
	if v == *new(T) {
		return nil
	}
	return &v
}

// orNull is an instant as an argument.
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
	const undefinedTable, undefinedColumn = "42P01", "42703"
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && (pgErr.Code == undefinedTable || pgErr.Code == undefinedColumn) {
		return fmt.Errorf("%w (ratelimit migrate up --set catalog; Config.Schema): %w", ErrNotMigrated, err)
	}
	return fmt.Errorf("catalog: %s: %w", doing, err)
}
