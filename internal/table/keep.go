package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// The statements that keep the table: Prune's, and those that ask what is there.
const (
	// listFullSQL lists full rows of a limit from a place on:
	//
	//	$1 name   $2 key and $3 shard after which to go on
	//	$4 capacity   $5 rate   $6 period   $7 tick   $8 now   $9 rows at most
	listFullSQL = `SELECT value, ts, paused, slots, key, shard FROM {table}
WHERE name = $1::text AND (key, shard) > ($2::text, $3::int4) AND ts <= $8::timestamptz
	AND least(value
		+ round(date_part('epoch', date_bin($7::float8 * interval '1 microsecond', $8::timestamptz, ts) - ts) * 1000000)
			* $5::float8 / $6::float8,
		$4::float8) >= $4::float8
ORDER BY key, shard
LIMIT $9::int8`

	// deleteListedSQL deletes those of the listed rows that have not changed
	// and that nobody has locked. A connection may write values as text with 15
	// digits; no count that can be taken is as small as that.
	deleteListedSQL = `WITH same AS (
	SELECT r.key, r.shard FROM unnest($2::text[], $3::int4[], $4::float8[], $5::timestamptz[], $6::timestamptz[]) AS w (key, shard, value, ts, paused)
	JOIN {table} AS r ON r.name = $1::text AND r.key = w.key AND r.shard = w.shard AND r.ts = w.ts AND abs(r.value - w.value) <= abs(r.value) * 1e-14
		AND r.paused IS NOT DISTINCT FROM w.paused
	FOR UPDATE OF r SKIP LOCKED
)
DELETE FROM {table} AS l USING same
WHERE l.name = $1::text AND l.key = same.key AND l.shard = same.shard`

	// deleteSameSQL is its portable form, for one row.
	deleteSameSQL = `DELETE FROM {table}
WHERE name = $1::text AND key = $2::text AND shard = $3::int4 AND ts = $5::timestamptz AND abs(value - $4::float8) <= abs(value) * 1e-14
	AND coalesce(paused = $6::timestamptz, paused IS NULL AND $6::timestamptz IS NULL)`

	// namesSQL goes from one name to the next by the index.
	namesSQL = `WITH RECURSIVE n AS (
	(SELECT name FROM {table} ORDER BY name LIMIT 1)
	UNION ALL
	SELECT (SELECT name FROM {table} WHERE name > n.name ORDER BY name LIMIT 1) FROM n WHERE n.name IS NOT NULL
)
SELECT name FROM n WHERE name IS NOT NULL`

	// pageSQL lists rows of a name from a place on, in the order of the index.
	pageSQL = `SELECT value, ts, paused, slots, key, shard, coalesce($5::timestamptz, clock_timestamp()) FROM {table}
WHERE name = $1::text AND (key, shard) > ($2::text, $3::int4)
ORDER BY key, shard
LIMIT $4::int8`

	forgetSQL = `DELETE FROM {table} WHERE name = $1::text`

	// readySQL reads every column that a statement of this package names.
	readySQL = `SELECT name, key, shard, value, ts, paused, slots FROM {table} LIMIT 0`
)

// ListFull reads rows of a definition's name, after a row, that are full by it at
// an instant; most of them at most.
func (t *Table) ListFull(ctx context.Context, q Querier, d *bucket.Definition, after decide.Row, now time.Time, most int) (*Rows, error) {
	sql, args := t.listFull, []any{d.Name, after.Key.Key, int32(after.Shard), d.Capacity, d.Rate, micros(d.Period), tick(d), now, int64(most)}
	if d.Kind == bucket.SlidingWindow {
		sql, args = t.listEmpty, append(args[:3], int32(d.Slots+2), tick(d), now, int64(most))
	}
	rows, err := q.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	listed := &Rows{At: now}
	var (
		s     state
		key   string
		shard int
	)
	_, err = pgx.ForEachRow(rows, append(s.fields(), &key, &shard), func() error {
		read, _ := s.get()
		listed.Rows = append(listed.Rows, decide.Row{Key: decide.Key{Name: d.Name, Key: key}, Shard: shard})
		listed.States = append(listed.States, read)
		return nil
	})
	return listed, err
}

// Page reads rows of a row's name after it, most of them at most, in order.
func (t *Table) Page(ctx context.Context, q Querier, after decide.Row, most int, now *time.Time) (*Rows, error) {
	rows, err := q.Query(ctx, t.page, after.Name, after.Key.Key, int32(after.Shard), int64(most), now)
	if err != nil {
		return nil, err
	}
	var (
		page  Rows
		s     state
		key   string
		shard int
	)
	_, err = pgx.ForEachRow(rows, append(s.fields(), &key, &shard, &page.At), func() error {
		read, _ := s.get()
		page.Rows = append(page.Rows, decide.Row{Key: decide.Key{Name: after.Name, Key: key}, Shard: shard})
		page.States = append(page.States, read)
		return nil
	})
	page.At = page.At.UTC()
	return &page, err
}

// DeleteSame deletes those rows of one name that are still as they were listed, but
// not those that somebody has locked.
func (t *Table) DeleteSame(ctx context.Context, q Querier, r *Rows) (int64, error) {
	if len(r.Rows) == 0 {
		return 0, nil
	}
	_, keys, shards := r.columns()
	values, ts, paused := r.states()
	tag, err := q.Exec(ctx, t.deleteListed, r.Rows[0].Name, keys, shards, values, ts, paused)
	return tag.RowsAffected(), err
}

// DeleteSameEach is the portable form of DeleteSame, which waits for rows that
// somebody has locked.
func (t *Table) DeleteSameEach(ctx context.Context, q Querier, r *Rows) (deleted int64, err error) {
	for i, row := range r.Rows {
		tag, err := q.Exec(ctx, t.deleteSame, row.Name, row.Key.Key, int32(row.Shard), r.States[i].Value, r.States[i].TS, instant(r.States[i].Paused))
		if err != nil {
			return deleted, err
		}
		deleted += tag.RowsAffected()
	}
	return deleted, nil
}

// Names reads the names of limits that have rows, in order.
func (t *Table) Names(ctx context.Context, q Querier) ([]string, error) {
	rows, err := q.Query(ctx, t.names)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// Forget deletes all rows of a name.
func (t *Table) Forget(ctx context.Context, q Querier, name string) (int64, error) {
	tag, err := q.Exec(ctx, t.forget, name)
	return tag.RowsAffected(), err
}

// Ready fails if the table is not there, or lacks a column.
func (t *Table) Ready(ctx context.Context, q Querier) error {
	_, err := q.Exec(ctx, t.ready)
	return err
}

// Now reads the clock, unless now is given.
func Now(ctx context.Context, q Querier, now *time.Time) (at time.Time, err error) {
	if now != nil {
		return *now, nil
	}
	err = q.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&at)
	return at.UTC(), err
}

// QueueNow puts into a batch the reading of the clock, unless now is given.
func QueueNow(batch *pgx.Batch, now, at *time.Time) {
	if now != nil {
		*at = *now
		return
	}
	batch.Queue(`SELECT clock_timestamp()`).QueryRow(func(row pgx.Row) error {
		err := row.Scan(at)
		*at = at.UTC()
		return err
	})
}
