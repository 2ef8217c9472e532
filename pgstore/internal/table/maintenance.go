package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Page reads the rows of after's name that follow after, in order; most bounds their number. With
// idle it reads only rows that may be full at that instant.
func (t *Table) Page(ctx context.Context, q Querier, after decide.Row, most int, idle, now *time.Time) (*Rows, error) {
	rows, err := q.Query(ctx, t.maintenance["page"], after.Name, after.Key.Key, int32(after.Shard), int64(most), idle)
	if err != nil {
		return nil, err
	}
	var (
		page  Rows
		s     state
		key   string
		shard int
	)
	_, err = pgx.ForEachRow(rows, s.fields(&key, &shard, &page.At), func() error {
		read, _ := s.get()
		page.Rows = append(page.Rows, decide.Row{Key: decide.Key{Name: after.Name, Key: key}, Shard: shard})
		page.States = append(page.States, read)
		return nil
	})
	page.At = instant(now, page.At).UTC()
	return &page, err
}

// DeleteSame deletes the rows of one name that are still as they were listed. It leaves rows that
// another transaction has locked; on a distributed table it waits for them. Values are compared
// with a tolerance, since a connection may write them as text with 15 digits.
func (t *Table) DeleteSame(ctx context.Context, q Querier, r *Rows) (int64, error) {
	if len(r.Rows) == 0 {
		return 0, nil
	}
	if t.distributed {
		return t.deleteSameEach(ctx, q, r)
	}
	_, keys, shards := r.columns()
	values, ts, paused := r.states()
	tag, err := q.Exec(ctx, t.maintenance["delete_listed"], r.Rows[0].Name, keys, shards, values, ts, paused)
	return tag.RowsAffected(), err
}

func (t *Table) deleteSameEach(ctx context.Context, q Querier, r *Rows) (deleted int64, err error) {
	for i, row := range r.Rows {
		tag, err := q.Exec(ctx, t.maintenance["delete_same"], row.Name, row.Key.Key, int32(row.Shard), r.States[i].Value, r.States[i].TS, orNull(r.States[i].Paused))
		if err != nil {
			return deleted, err
		}
		deleted += tag.RowsAffected()
	}
	return deleted, nil
}

// Names reads the names of limits that have rows, in order.
func (t *Table) Names(ctx context.Context, q Querier) ([]string, error) {
	rows, err := q.Query(ctx, t.maintenance["names"])
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// versionsSQL returns one row, even if nothing holds a snapshot. Logical slots keep only old
// versions of system tables, and VACUUM keeps none.
const versionsSQL = `SELECT coalesce((SELECT n_dead_tup FROM pg_stat_all_tables WHERE relid = $1::text::regclass), 0), coalesce(h.kind, ''), coalesce(h.who, ''), coalesce(h.since, 0)
FROM (SELECT) AS one LEFT JOIN (
	SELECT 'transaction' AS kind, pid::text AS who, age(backend_xmin)::int8 AS since FROM pg_stat_activity
	WHERE pid <> pg_backend_pid() AND datname = current_database() AND backend_xmin IS NOT NULL AND backend_type <> 'autovacuum worker'
	UNION ALL SELECT 'standby', application_name, age(backend_xmin) FROM pg_stat_replication WHERE backend_xmin IS NOT NULL
	UNION ALL SELECT 'replication slot', slot_name, age(xmin) FROM pg_replication_slots WHERE xmin IS NOT NULL
	UNION ALL SELECT 'prepared transaction', gid, age(transaction) FROM pg_prepared_xacts WHERE database = current_database()
	ORDER BY since DESC LIMIT 1
) AS h ON true`

// Versions reads how many dead versions the table has, and what holds the oldest snapshot: its
// kind, its name, and how many transactions have begun since. Without a snapshot they are zero.
func (t *Table) Versions(ctx context.Context, q Querier) (dead int64, kind, who string, since int64, err error) {
	name := pgx.Identifier{conn.Table}
	if t.schema != "" {
		name = pgx.Identifier{t.schema, conn.Table}
	}
	err = q.QueryRow(ctx, versionsSQL, name.Sanitize()).Scan(&dead, &kind, &who, &since)
	return dead, kind, who, since, err
}

// Forget deletes all rows of a name.
func (t *Table) Forget(ctx context.Context, q Querier, name string) (int64, error) {
	tag, err := q.Exec(ctx, t.maintenance["forget"], name)
	return tag.RowsAffected(), err
}

// Ready returns an error if the table or one of its columns is missing.
func (t *Table) Ready(ctx context.Context, q Querier) error {
	_, err := q.Exec(ctx, t.maintenance["ready"])
	return err
}
