// Package parked reads the lines of jobs that package riverlimit has parked, for it and for those who
// look at limits.
package parked

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Table is the table that the set migrations.River makes.
const Table = "rate_limit_parked"

// Line is the jobs that are parked for permits of a limit's key. It is printed, logged and in JSON without
// the key.
type Line struct {
	Limit string    `json:"limit"`
	Key   string    `json:"-"`
	Jobs  int       `json:"jobs"`
	Since time.Time `json:"since"` // the job that has waited longest was parked
}

// String returns the line without the key.
func (l Line) String() string {
	return fmt.Sprintf("%d jobs parked for %q since %s", l.Jobs, l.Limit, l.Since.UTC().Format(time.RFC3339))
}

// LogValue returns the line without the key.
func (l Line) LogValue() slog.Value {
	return slog.GroupValue(slog.String("limit", l.Limit), slog.Int("jobs", l.Jobs), slog.Time("since", l.Since))
}

// Querier is a pool, a connection or a transaction of pgx.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Lines returns the lines of a limit's keys, those of all limits if name is "", the longest first and at
// most so many. Without the table there are none.
func Lines(ctx context.Context, db Querier, schema, name string, most int) ([]Line, error) {
	return read(ctx, db, `SELECT name, key, count(*)::int4, min(since) FROM `+In(schema)+` WHERE $1::text IN ('', name)
GROUP BY name, key ORDER BY count(*) DESC, name, key LIMIT $2::int4`, name, most)
}

// Totals returns the jobs of each limit, of all its keys together.
func Totals(ctx context.Context, db Querier, schema string) (map[string]Line, error) {
	lines, err := read(ctx, db, `SELECT name, '', count(*)::int4, min(since) FROM `+In(schema)+` GROUP BY name`)
	totals := make(map[string]Line, len(lines))
	for _, l := range lines {
		totals[l.Limit] = l
	}
	return totals, err
}

func read(ctx context.Context, db Querier, sql string, args ...any) ([]Line, error) {
	rows, err := db.Query(ctx, sql, args...)
	var lines []Line
	if err == nil {
		lines, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Line])
	}
	switch {
	case Missing(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read the lines of parked jobs: %w", err)
	}
	return lines, nil
}

// Missing reports whether an error is that of a table that is not there.
func Missing(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "42P01"
}

// In returns the table's name in a schema, "" for the search_path.
func In(schema string) string { return Qualified(schema, Table) }

// Qualified returns a table's name in a schema, "" for the search_path.
func Qualified(schema, table string) string {
	if schema == "" {
		return pgx.Identifier{table}.Sanitize()
	}
	return pgx.Identifier{schema, table}.Sanitize()
}
