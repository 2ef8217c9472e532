// Package inspect reads limits for people, for the command ratelimit and the console. It changes
// nothing.
package inspect

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/gate"
	"github.com/pgratelimit/ratelimit/internal/parked"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// ErrUndefined reports a name without a known definition.
var ErrUndefined = errors.New("there is no definition of this limit")

// Inspector reads a table of limits by the definitions of a catalog. It is safe for concurrent use.
type Inspector struct {
	Pool    *pgxpool.Pool
	Schema  string           // of the table; "" for the connection's search_path
	Store   *pgstore.Store   // of that table
	Catalog *catalog.Catalog // already read; in memory if the definitions are from a file
}

// Limit returns the definition of a name, without overrides, or [ErrUndefined].
func (d *Inspector) Limit(name string) (ratelimit.Limit, error) {
	for _, definition := range d.Catalog.Definitions() {
		if definition.Name == name {
			return definition.Limit(), nil
		}
	}
	return nil, fmt.Errorf("%w: %q", ErrUndefined, name)
}

// InFlight returns the limit of how many at once of a name, without overrides, or [ErrUndefined].
func (d *Inspector) InFlight(name string) (ratelimit.InFlight, error) {
	for _, limit := range d.Catalog.InFlights() {
		if limit.Name == name {
			return limit, nil
		}
	}
	return ratelimit.InFlight{}, fmt.Errorf("%w: %q", ErrUndefined, name)
}

// Known returns [ErrUndefined] for a name without a definition of either kind.
func (d *Inspector) Known(name string) error {
	if _, err := d.InFlight(name); err == nil {
		return nil
	}
	_, err := d.Limit(name)
	return err
}

// GateOf returns the limit to which a gate belongs, and false for other names. Gates are rows by
// which riverlimit's HardStart bounds the starts of jobs; the program alone knows their definition.
func (d *Inspector) GateOf(name string) (limit string, ok bool) {
	limit, ok = gate.Of(name)
	if _, err := d.Limit(limit); !ok || err != nil {
		return "", false
	}
	return limit, d.Known(name) != nil
}

// MostCounted is the largest number of rows counted for a name.
const MostCounted = 10_000

// A Summary is a limit's name with its definition and number of rows.
type Summary struct {
	Name       string
	Definition *ratelimit.Definition // nil without a definition, as of a limit that is gone
	InFlight   *ratelimit.InFlight   // of a limit of how many at once
	GateOf     string                // the limit whose gate this is; "" if it is none
	Overrides  int                   // the override for all keys included
	Rows       int                   // in the table; MostCounted+1 means more than MostCounted
	Parked     parked.Line           // jobs of River that wait for its permits, of all keys
}

// Limits returns all names with definitions or rows, in order. It reads at most [MostCounted] rows
// of each, along the index.
func (d *Inspector) Limits(ctx context.Context) ([]Summary, error) {
	names, err := d.Store.Names(ctx)
	if err != nil {
		return nil, err
	}
	for _, definition := range d.Catalog.Definitions() {
		names = append(names, definition.Name)
	}
	for _, limit := range d.Catalog.InFlights() {
		names = append(names, limit.Name)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	counts, err := d.count(ctx, names)
	if err != nil {
		return nil, err
	}
	lines, err := parked.Totals(ctx, d.Pool, d.Schema)
	if err != nil {
		return nil, err
	}
	summaries := make([]Summary, len(names))
	for i, name := range names {
		summaries[i] = Summary{Name: name, Overrides: len(d.Catalog.Overrides(name)), Rows: counts[i], Parked: lines[name]}
		if limit, err := d.Limit(name); err == nil {
			definition := limit.Definition()
			summaries[i].Definition = &definition
		}
		if limit, err := d.InFlight(name); err == nil {
			summaries[i].InFlight = &limit
		}
		summaries[i].GateOf, _ = d.GateOf(name)
	}
	return summaries, nil
}

// count returns the number of rows of each name, up to [MostCounted] and one more.
func (d *Inspector) count(ctx context.Context, names []string) ([]int, error) {
	counts := make([]int, len(names))
	var batch pgx.Batch
	for i, name := range names {
		batch.Queue("SELECT count(*)::int4 FROM (SELECT r.key FROM "+d.Table()+" AS r WHERE r.name = $1::text LIMIT $2::int4) AS counted", name, MostCounted+1).
			QueryRow(func(row pgx.Row) error { return row.Scan(&counts[i]) })
	}
	if err := d.Pool.SendBatch(ctx, &batch).Close(); err != nil {
		return nil, fmt.Errorf("count rows: %w", err)
	}
	return counts, nil
}

// CountRows returns how many rows a name has, all of them.
func (d *Inspector) CountRows(ctx context.Context, name string) (n int, err error) {
	if err := d.Pool.QueryRow(ctx, "SELECT count(*)::int8 FROM "+d.Table()+" WHERE name = $1", name).Scan(&n); err != nil {
		return 0, fmt.Errorf("count rows: %w", err)
	}
	return n, nil
}

// Distributed reports whether Citus distributes the table of limits over nodes. A Store on it needs
// Config.Portable.
func (d *Inspector) Distributed(ctx context.Context) (distributed bool, err error) {
	const partitions = "pg_dist_partition"
	err = d.Pool.QueryRow(ctx, "SELECT to_regclass($1::text) IS NOT NULL", partitions).Scan(&distributed)
	if err == nil && distributed {
		err = d.Pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM "+partitions+" WHERE logicalrelid = to_regclass($1::text) AND partmethod = 'h')", d.Table()).Scan(&distributed)
	}
	if err != nil {
		return false, fmt.Errorf("look whether the table is distributed: %w", err)
	}
	return distributed, nil
}

// Table returns the table's qualified name.
func (d *Inspector) Table() string { return d.View(pgstore.Table) }

// View returns the qualified name of a view or function of the catalog.
func (d *Inspector) View(name string) string {
	if d.Schema == "" {
		return pgx.Identifier{name}.Sanitize()
	}
	return pgx.Identifier{d.Schema, name}.Sanitize()
}

// A Key is the present state of a key, by the definition that holds for it.
type Key struct {
	ratelimit.Status
	Overridden bool
}

// Short reports whether the key is limited now: paused, or with less than one token.
func (k *Key) Short() bool { return k.Value < 1 || !k.PausedUntil.IsZero() }

// Full reports whether the key's rows say the same as no row.
func (k *Key) Full() bool { return k.ResetAfter == 0 && k.PausedUntil.IsZero() }

// keysAtOnce is the number of keys that Keys reads before it passes them on.
const keysAtOnce = 1000

// Keys returns the state of each key with a row, as [pgstore.Store.Rows] does, but by the
// definition that holds for the key.
func (d *Inspector) Keys(ctx context.Context, limit ratelimit.Limit, page ratelimit.Page) iter.Seq2[Key, error] {
	return func(yield func(Key, error) bool) {
		var keys []Key
		for status, err := range d.Store.Rows(ctx, limit, page) {
			if err != nil {
				yield(Key{}, err)
				return
			}
			keys = append(keys, Key{Status: status})
			if len(keys) == min(keysAtOnce, ratelimit.MaxChecks/limit.Definition().Shards) {
				if !d.tell(ctx, keys, yield) {
					return
				}
				keys = keys[:0]
			}
		}
		d.tell(ctx, keys, yield)
	}
}

// tell passes keys on, after those with an override have been read by it.
func (d *Inspector) tell(ctx context.Context, keys []Key, yield func(Key, error) bool) bool {
	var requests []ratelimit.Request
	var places []int
	for i := range keys {
		asked := keys[i].Request
		held := d.Catalog.Resolve(asked)
		if held.Limit.Definition() != asked.Limit.Definition() {
			requests, places = append(requests, held), append(places, i)
		}
	}
	if len(requests) > 0 {
		statuses, err := d.Store.CheckEach(ctx, requests...)
		if err != nil {
			return yield(Key{}, err) && false
		}
		for i, status := range statuses {
			keys[places[i]] = Key{status, true}
		}
	}
	for _, key := range keys {
		if !yield(key, nil) {
			return false
		}
	}
	return true
}

// PermitKeys returns up to most keys of a name that have rows of permits, in order: those with a
// prefix, after a key.
func (d *Inspector) PermitKeys(ctx context.Context, name string, page ratelimit.Page) ([]string, error) {
	rows, _ := d.Pool.Query(ctx, d.permitKeys(), name, page.Prefix, page.After, page.Most)
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	return keys, nil
}

// permitKeys reads one key in each step along the index, however many permits it has, as far as the
// prefix goes. On a distributed table it reads all rows behind the prefix.
func (d *Inspector) permitKeys() string {
	if d.Store.Portable() {
		return `SELECT DISTINCT r.key FROM ` + d.Table() + ` AS r
WHERE r.name = $1::text AND r.key >= $2::text AND starts_with(r.key, $2::text) AND ($3::text = '' OR r.key > $3::text) ORDER BY r.key LIMIT nullif($4::int8, 0)`
	}
	return `WITH RECURSIVE next AS (
	(SELECT r.key FROM ` + d.Table() + ` AS r WHERE r.name = $1::text AND r.key >= $2::text AND ($3::text = '' OR r.key > $3::text) ORDER BY r.key LIMIT 1)
	UNION ALL
	SELECT (SELECT r.key FROM ` + d.Table() + ` AS r WHERE r.name = $1::text AND r.key > n.key ORDER BY r.key LIMIT 1)
	FROM next AS n WHERE starts_with(n.key, $2::text)
)
SELECT key FROM next WHERE starts_with(key, $2::text) LIMIT nullif($4::int8, 0)`
}
