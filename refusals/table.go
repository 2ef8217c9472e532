package refusals

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/intx"
)

// Table is the name of the table that the set migrations.Refusals creates.
const Table = "rate_limit_refusals"

// Kept is the age at which refusals are deleted.
const Kept = time.Hour

// ErrNotMigrated reports that the database has no table of refusals where it is looked for.
var ErrNotMigrated = errors.New("refusals: table " + Table + " is missing; make it with `ratelimit migrate up --set refusals`, or migrate.Up with migrations.Refusals")

// Querier is a pool, a connection or a transaction of pgx.
type Querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// in returns a statement with the table's qualified name.
func in(schema, sql string) string {
	table := pgx.Identifier{Table}
	if schema != "" {
		table = pgx.Identifier{schema, Table}
	}
	return strings.ReplaceAll(sql, "TABLE", table.Sanitize())
}

func fault(doing string, err error) error {
	if intx.Code(err) == "42P01" {
		return fmt.Errorf("%w: %w", ErrNotMigrated, err)
	}
	return fmt.Errorf("refusals: %s: %w", doing, err)
}

// add locks rows in the order of the key, so that two processes do not deadlock.
const add = `INSERT INTO TABLE AS t (name, key, minute, times, uncertain, last, retry_at)
SELECT n.name, n.key, date_trunc('minute', now()), n.times, n.uncertain, n.last, n.retry_at
FROM unnest($1::text[], $2::text[], $3::int8[], $4::int8[], $5::timestamptz[], $6::timestamptz[]) AS n (name, key, times, uncertain, last, retry_at)
ORDER BY n.name COLLATE "C", n.key COLLATE "C"
ON CONFLICT (name, key, minute) DO UPDATE SET
	times = t.times + excluded.times, uncertain = t.uncertain + excluded.uncertain,
	last = greatest(t.last, excluded.last),
	retry_at = CASE WHEN excluded.last < t.last THEN t.retry_at ELSE excluded.retry_at END`

// write adds counts.
func write(ctx context.Context, db Querier, schema string, limits map[string]limit) error {
	var names, keys []string
	var times, uncertain []int64
	var last []time.Time
	var retryAt []*time.Time
	for name, l := range limits {
		for key, c := range l {
			names, keys = append(names, name), append(keys, key)
			times, uncertain = append(times, c.times), append(uncertain, c.uncertain)
			last = append(last, c.last)
			var at *time.Time
			if !c.retryAt.IsZero() {
				at = &c.retryAt
			}
			retryAt = append(retryAt, at)
		}
	}
	if len(names) == 0 {
		return nil
	}
	if _, err := db.Exec(ctx, in(schema, add), names, keys, times, uncertain, last, retryAt); err != nil {
		return fault("write", err)
	}
	return nil
}

// remove does nothing while another process prunes, and passes over locked rows.
const remove = `DELETE FROM TABLE AS t WHERE (t.name, t.key, t.minute) IN (
	SELECT o.name, o.key, o.minute FROM TABLE AS o
	WHERE o.minute < now() - $1::interval
		OR o.minute < date_trunc('minute', now()) AND (o.name, o.key, o.minute) NOT IN (
			SELECT m.name, m.key, m.minute FROM TABLE AS m ORDER BY m.times DESC, m.minute DESC LIMIT $2::int8)
	FOR UPDATE SKIP LOCKED)`

// prune deletes rows older than Kept. Of each finished minute it keeps the rows with the most
// refusals.
func prune(ctx context.Context, db Querier, schema string, rows int) error {
	if _, err := db.Exec(ctx, in(schema, remove), Kept, rows); err != nil {
		return fault("prune", err)
	}
	return nil
}

// Query selects refusals for [Top]. The zero value selects those of all limits in the last minute
// or two.
type Query struct {
	// Limit is the name of one limit; "" selects all.
	Limit string

	// Since is how far back to look, in minutes that have begun, up to [Kept]. The default is a
	// minute.
	Since time.Duration

	// Most is the largest number of keys to return. The default is 20.
	Most int
}

// Key is a refused key with its counts. Printing, logging and JSON leave out the key itself.
type Key struct {
	Limit string
	Key   string `json:"-"`

	// Times is the number of refusals. At most Uncertain of them were of other keys: it is above 0
	// only if a process met more keys than it counts.
	Times, Uncertain int64

	// Last is the instant of the last refusal and RetryAt its RetryAt, zero for permits; both on
	// the database's clock.
	Last, RetryAt time.Time
}

// String returns the counts in one line, without the key.
func (k Key) String() string { return fmt.Sprintf("a key of %q: refused %d times", k.Limit, k.Times) }

// LogValue returns the counts as a group, without the key.
func (k Key) LogValue() slog.Value {
	return slog.GroupValue(slog.String("limit", k.Limit), slog.Int64("times", k.Times), slog.Time("last", k.Last))
}

const top = `SELECT t.name, t.key, sum(t.times)::int8, sum(t.uncertain)::int8, max(t.last),
	(array_agg(t.retry_at ORDER BY t.last DESC))[1]
FROM TABLE AS t
WHERE t.minute >= date_trunc('minute', now() - $2::interval) AND ($1::text = '' OR t.name = $1)
GROUP BY t.name, t.key
ORDER BY sum(t.times) DESC, t.name, t.key
LIMIT $3::int8`

// Top returns the keys with the most refusals in all processes, largest first, as of up to
// Config.Every ago. It reads the table of refusals and no limit's rows. schema is the table's, ""
// for the search_path of db. Errors are [ratelimit.ErrInvalid], [ErrNotMigrated], and those of
// PostgreSQL and pgx.
func Top(ctx context.Context, db Querier, schema string, q Query) ([]Key, error) {
	switch {
	case q.Since < 0 || q.Since > Kept:
		return nil, &ratelimit.FieldError{Package: "refusals", Field: "Since", Value: q.Since, Reason: "must be from 0 to " + Kept.String()}
	case q.Most < 0:
		return nil, &ratelimit.FieldError{Package: "refusals", Field: "Most", Value: q.Most, Reason: "must not be negative"}
	}
	q.Since, q.Most = cmp.Or(q.Since, time.Minute), cmp.Or(q.Most, 20)
	rows, err := db.Query(ctx, in(schema, top), q.Limit, q.Since, q.Most)
	if err != nil {
		return nil, fault("read", err)
	}
	keys, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (k Key, err error) {
		var retryAt *time.Time
		err = row.Scan(&k.Limit, &k.Key, &k.Times, &k.Uncertain, &k.Last, &retryAt)
		if k.Last = k.Last.UTC(); retryAt != nil {
			k.RetryAt = retryAt.UTC()
		}
		return k, err
	})
	if err != nil {
		return nil, fault("read", err)
	}
	return keys, nil
}
