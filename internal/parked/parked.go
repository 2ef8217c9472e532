// Package parked reads the lines of jobs that package riverlimit has parked, for it and for those who
// look at limits.
package parked

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Table is the table that the set migrations.River makes.
const Table = "rate_limit_parked"

// Line is the jobs that wait for permits of a limit's key.
type Line struct {
	Name, Key string
	Jobs      int
	Since     time.Time // the job that has waited longest was parked
}

// Querier is a pool, a connection or a transaction of pgx.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Lines returns the lines of a limit's keys, those of all limits if name is "", longest first and at
// most so many. Without the table there are none.
func Lines(ctx context.Context, db Querier, schema, name string, most int) ([]Line, error) {
	rows, err := db.Query(ctx, `SELECT name, key, count(*)::int4, min(since) FROM `+In(schema)+` WHERE $1::text IN ('', name)
GROUP BY name, key ORDER BY count(*) DESC, name, key LIMIT $2::int4`, name, most)
	if err != nil {
		return nil, fmt.Errorf("read the lines of jobs: %w", err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Line])
	if Missing(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the lines of jobs: %w", err)
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
