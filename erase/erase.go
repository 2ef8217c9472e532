// Package erase deletes all rows about a key from all tables of the library, for those who must
// forget a person.
package erase

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/parked"
)

// Counts holds the number of rows about some keys, by table.
type Counts struct {
	Rows      int64 `json:"rows"`      // of rate_limits, of all limits, permits and gates too
	Overrides int64 `json:"overrides"` // of rate_limit_definitions
	Changes   int64 `json:"changes"`   // of rate_limit_history
	Pending   int64 `json:"pending"`   // of rate_limit_pending
	Refusals  int64 `json:"refusals"`  // of rate_limit_refusals
	Parked    int64 `json:"parked"`    // of rate_limit_parked: the jobs themselves stay, and start
}

// String returns the counts in a line.
func (c Counts) String() string {
	return fmt.Sprintf("rows of limits: %d, overrides: %d, changes in the history: %d, edits under way: %d, refusals: %d, parked jobs, which start: %d", c.Rows, c.Overrides, c.Changes, c.Pending, c.Refusals, c.Parked)
}

// tables lists the tables that hold keys, with how to find a key's rows and how to erase them.
var tables = []struct {
	name  string
	where string
	erase []string
	count func(*Counts) *int64
}{
	// The index begins with the name, so this steps from one name to the next.
	{"rate_limits", `t.key = ANY ($1::text[]) AND t.name = ANY (ARRAY(WITH RECURSIVE n AS (
	(SELECT name FROM TABLE ORDER BY name LIMIT 1)
	UNION ALL
	SELECT (SELECT o.name FROM TABLE AS o WHERE o.name > n.name ORDER BY o.name LIMIT 1) FROM n WHERE n.name IS NOT NULL
) SELECT name FROM n WHERE name IS NOT NULL))`, []string{remove}, func(c *Counts) *int64 { return &c.Rows }},
	{"rate_limit_definitions", byKey, []string{remove}, func(c *Counts) *int64 { return &c.Overrides }},
	// Erased after the overrides, whose trigger writes into the history. Processes learn from the
	// newest change that an override is gone, so that change stays, without a name: a process that
	// meets it reads everything anew.
	{"rate_limit_history", byKey, []string{
		`UPDATE TABLE AS t SET at = DEFAULT, role = DEFAULT, who = DEFAULT, name = NULL, key = NULL, was = NULL, became = '{"erased": true}'
WHERE t.version = (SELECT max(n.version) FROM TABLE AS n WHERE n.key = ANY ($1::text[]))`, remove,
	}, func(c *Counts) *int64 { return &c.Changes }},
	// One that has come as far as a key begins anew.
	{"rate_limit_pending", byKey, []string{`UPDATE TABLE AS t SET done = NULL WHERE t.done = ANY ($1::text[])`, remove}, func(c *Counts) *int64 { return &c.Pending }},
	{"rate_limit_refusals", byKey, []string{remove}, func(c *Counts) *int64 { return &c.Refusals }},
	{parked.Table, byKey, nil, func(c *Counts) *int64 { return &c.Parked }},
}

const (
	byKey  = `t.key = ANY ($1::text[])`
	remove = `DELETE FROM TABLE AS t WHERE `
)

// Count returns the number of rows about keys, and changes nothing. schema is the tables', "" for
// the search_path. Errors are those of [Keys].
func Count(ctx context.Context, tx pgx.Tx, schema string, keys ...string) (Counts, error) {
	return each(ctx, tx, schema, keys, func(in func(string) string, i int) (n int64, err error) {
		err = tx.QueryRow(ctx, in("SELECT count(*) FROM TABLE AS t WHERE "+tables[i].where), keys).Scan(&n)
		return n, err
	})
}

// Keys erases keys inside tx, in all limits and tables, and returns the number of rows erased.
// schema is the tables', "" for the search_path. The history keeps one row that says that something
// was erased, by whom and when.
//
// Keys are matched exactly: a key joined by [ratelimit.Key] or hashed is another key than its
// parts. A program that still calls a limit with the key, or holds its tokens or counts in memory,
// writes it again, so erase after that has ended. Notes of other overrides, your own tables such as
// River's jobs, and backups are not searched. A permit that is held is lost, and the holder's context ends.
// A job that is parked for a key starts, since nothing would wake it for a day: cancel it first if it must not.
// (One that River is only just putting off still waits for that day.)
//
// Errors are [ratelimit.ErrInvalid], also for "", the key of limits without keys, and those of
// PostgreSQL and pgx; roll tx back after one. A set of migrations that was not applied counts 0.
func Keys(ctx context.Context, tx pgx.Tx, schema string, keys ...string) (Counts, error) {
	return each(ctx, tx, schema, keys, func(in func(string) string, i int) (n int64, err error) {
		if tables[i].name == parked.Table {
			return unpark(ctx, tx, in("TABLE"), keys)
		}
		for _, sql := range tables[i].erase {
			if sql == remove {
				sql += tables[i].where
			}
			tag, err := tx.Exec(ctx, in(sql), keys)
			if err != nil {
				return 0, err
			}
			n += tag.RowsAffected()
		}
		return n, nil
	})
}

// unpark erases the lines of keys, and makes the jobs available that were parked in them.
func unpark(ctx context.Context, tx pgx.Tx, table string, keys []string) (n int64, err error) {
	rows, err := tx.Query(ctx, "WITH gone AS (DELETE FROM "+table+" AS t WHERE "+byKey+" RETURNING river, job) SELECT river, array_agg(job) FROM gone GROUP BY river", keys)
	if err != nil {
		return 0, err
	}
	lines, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct {
		River string
		Jobs  []int64
	}])
	for i := 0; i < len(lines) && err == nil; i++ {
		n += int64(len(lines[i].Jobs))
		jobs, there := parked.Qualified(lines[i].River, "river_job"), false
		err = tx.QueryRow(ctx, "SELECT to_regclass($1::text) IS NOT NULL", jobs).Scan(&there)
		if err == nil && there {
			_, err = tx.Exec(ctx, "UPDATE "+jobs+" SET state = 'available', scheduled_at = least(created_at, now()) WHERE id = ANY ($1::int8[]) AND (state = 'scheduled' OR state = 'available' AND scheduled_at > now())", lines[i].Jobs)
		}
	}
	return n, err
}

// each runs one step for every table that exists.
func each(ctx context.Context, tx pgx.Tx, schema string, keys []string, do func(in func(string) string, i int) (int64, error)) (counts Counts, err error) {
	for _, key := range keys {
		if key == "" || !utf8.ValidString(key) || strings.ContainsRune(key, 0) {
			return counts, &ratelimit.FieldError{Package: "erase", Field: "Key", Value: key, Reason: "must not be empty, and be valid UTF-8 without zero bytes"}
		}
	}
	for i, t := range tables {
		name := pgx.Identifier{t.name}.Sanitize()
		if schema != "" {
			name = pgx.Identifier{schema, t.name}.Sanitize()
		}
		var there, citus bool
		if err = tx.QueryRow(ctx, "SELECT to_regclass($1::text) IS NOT NULL, to_regclass('pg_dist_partition') IS NOT NULL", name).Scan(&there, &citus); err == nil && (there || i == 0) {
			*t.count(&counts), err = do(func(sql string) string {
				if citus { // which cannot step from name to name, and distributes by key
					sql = strings.Replace(sql, t.where, byKey, 1)
				}
				return strings.ReplaceAll(sql, "TABLE", name)
			}, i)
		}
		if err != nil {
			return Counts{}, fmt.Errorf("erase: %s: %w", t.name, err)
		}
	}
	return counts, nil
}
