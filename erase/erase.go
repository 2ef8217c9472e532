// Package erase forgets keys, for those who must forget a person: what the tables of the library have
// of a key is deleted from all of them.
package erase

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// Counts are rows of tables that have one of some keys.
type Counts struct {
	Rows      int64 `json:"rows"`      // of rate_limits, of all limits, permits and gates too
	Overrides int64 `json:"overrides"` // of rate_limit_definitions
	Changes   int64 `json:"changes"`   // of rate_limit_history
	Pending   int64 `json:"pending"`   // of rate_limit_pending
	Refusals  int64 `json:"refusals"`  // of rate_limit_refusals
}

// String returns the counts in a line.
func (c Counts) String() string {
	return fmt.Sprintf("rows of limits: %d, overrides: %d, changes in the history: %d, edits under way: %d, refusals: %d", c.Rows, c.Overrides, c.Changes, c.Pending, c.Refusals)
}

// tables are those that have keys: how rows are found in each, and how they are erased.
var tables = []struct {
	name  string
	where string
	erase []string
	count func(*Counts) *int64
}{
	// From one name to the next by the index, which begins with the name.
	{"rate_limits", `t.key = ANY ($1::text[]) AND t.name = ANY (ARRAY(WITH RECURSIVE n AS (
	(SELECT name FROM TABLE ORDER BY name LIMIT 1)
	UNION ALL
	SELECT (SELECT o.name FROM TABLE AS o WHERE o.name > n.name ORDER BY o.name LIMIT 1) FROM n WHERE n.name IS NOT NULL
) SELECT name FROM n WHERE name IS NOT NULL))`, []string{remove}, func(c *Counts) *int64 { return &c.Rows }},
	{"rate_limit_definitions", byKey, []string{remove}, func(c *Counts) *int64 { return &c.Overrides }},
	// After the overrides, whose trigger writes into it. A process finds by what is new there that an
	// override is gone: the newest change becomes one without a name, after which it reads all.
	{"rate_limit_history", byKey, []string{
		`UPDATE TABLE AS t SET at = DEFAULT, role = DEFAULT, who = DEFAULT, name = NULL, key = NULL, was = NULL, became = '{"erased": true}'
WHERE t.version = (SELECT max(n.version) FROM TABLE AS n WHERE n.key = ANY ($1::text[]))`, remove,
	}, func(c *Counts) *int64 { return &c.Changes }},
	{"rate_limit_pending", byKey, []string{remove}, func(c *Counts) *int64 { return &c.Pending }},
	{"rate_limit_refusals", byKey, []string{remove}, func(c *Counts) *int64 { return &c.Refusals }},
}

const (
	byKey  = `t.key = ANY ($1::text[])`
	remove = `DELETE FROM TABLE AS t WHERE `
)

// Count returns what there is of keys, and changes nothing. schema is that of the tables, "" for the
// search_path. Errors are those of [Keys].
func Count(ctx context.Context, tx pgx.Tx, schema string, keys ...string) (Counts, error) {
	return each(ctx, tx, schema, keys, func(in func(string) string, i int) (n int64, err error) {
		err = tx.QueryRow(ctx, in("SELECT count(*) FROM TABLE AS t WHERE "+tables[i].where), keys).Scan(&n)
		return n, err
	})
}

// Keys erases keys inside tx: all that the tables have of them, in any limit. schema is that of the
// tables, "" for the search_path. It returns how many rows that were. Of the history a row stays that
// says that something was erased, by whom and when.
//
// A key is erased as it is: that of [ratelimit.Key], or of a hash, is another one than its parts. While
// a program still calls a limit with a key, or holds tokens or counts of it in memory, it writes it
// again: erase when that has ended. Keys in notes of other overrides, in your own tables such as
// River's jobs, and in backups stay.
//
// An error is [ratelimit.ErrInvalid], such as of "", which is the key of limits that have no keys, or
// one of PostgreSQL and pgx; then roll tx back. A set of migrations that is not applied has nothing.
func Keys(ctx context.Context, tx pgx.Tx, schema string, keys ...string) (Counts, error) {
	return each(ctx, tx, schema, keys, func(in func(string) string, i int) (n int64, err error) {
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

// each does something in every table that is there.
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
		var there bool
		if err = tx.QueryRow(ctx, "SELECT to_regclass($1::text) IS NOT NULL", name).Scan(&there); err == nil && (there || i == 0) {
			*t.count(&counts), err = do(func(sql string) string { return strings.ReplaceAll(sql, "TABLE", name) }, i)
		}
		if err != nil {
			return Counts{}, fmt.Errorf("erase: %s: %w", t.name, err)
		}
	}
	return counts, nil
}
