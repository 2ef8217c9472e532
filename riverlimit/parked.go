package riverlimit

import (
	"context"
	_ "embed" // the statement
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/parked"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// ErrNotMigrated is the error of a database that lacks the table of parked jobs.
var ErrNotMigrated = errors.New("riverlimit: table " + parked.Table + " is missing; make it with `ratelimit migrate up --set river`, or migrate.Up with migrations.River")

// parkedFor is after how long a parked job comes by itself: its limit may not be used any more, or
// all that could have woken it was killed.
const parkedFor = 24 * time.Hour

// Line describes the jobs that are parked for permits of a limit's key. It is printed, logged and
// in JSON without the key.
type Line = parked.Line

// Lines returns the longest lines of parked jobs; most bounds their number. They are the lines of a
// limit's keys, or of all limits if limit is "". It is for metrics and alarms, and reads the whole
// table.
func Lines(ctx context.Context, store *pgstore.Store, limit string, most int) ([]Line, error) {
	if store == nil || store.Pool() == nil {
		return nil, invalid("Store", nil, "must have a pool")
	}
	return parked.Lines(ctx, store.Pool(), store.Schema(), limit, most)
}

// lineID names a line: the jobs of one River schema that are parked for a limit's key.
type lineID struct{ river, name, key string }

// parking is a job that is to be parked.
type parking struct {
	line     lineID
	place    *time.Time // among jobs of its priority: CreatedAt in the line of the job's first limit; nil for now
	priority int
	job      int64
	weight   int

	first bool // in its line, once it is parked
	err   error
}

// parkSQL parks jobs, and returns which are the first of their lines. A job that is in its line
// already keeps its place there. While an insertion behind the job has it locked, the job stays in
// its old line, so that the line is not forgotten. It moves when it comes the next time.
const parkSQL = `WITH jobs AS MATERIALIZED (
	SELECT n.*, row_number() OVER (PARTITION BY river, name, key ORDER BY priority, place, job) = 1 AS ahead FROM (
		SELECT a.river, a.name, a.key, a.priority, a.job, a.weight, a.i, coalesce(p.place, a.place, clock_timestamp()) AS place
		FROM unnest($1::text[], $2::text[], $3::text[], $4::int2[], $5::int8[], $6::int4[], $7::timestamptz[])
			WITH ORDINALITY AS a (river, name, key, priority, job, weight, place, i)
		LEFT JOIN PARKED AS p USING (river, job, name, key) ORDER BY a.i) AS n
), free AS MATERIALIZED (
	SELECT p.river, p.job FROM PARKED AS p JOIN jobs AS j ON j.river = p.river AND j.job = p.job FOR UPDATE OF p SKIP LOCKED
), put AS (
	INSERT INTO PARKED AS p (river, name, key, priority, job, weight, place)
	SELECT river, name, key, priority, job, weight, place FROM jobs ORDER BY river, job
	ON CONFLICT (river, job) DO UPDATE SET name = excluded.name, key = excluded.key, priority = excluded.priority, weight = excluded.weight, place = excluded.place
	WHERE EXISTS (SELECT FROM free AS f WHERE f.river = p.river AND f.job = p.job)
)
SELECT ahead AND NOT EXISTS (
	SELECT FROM PARKED AS p WHERE p.river = j.river AND p.name = j.name AND p.key = j.key AND (p.priority, p.place, p.job) < (j.priority, j.place, j.job))
FROM jobs AS j ORDER BY j.i`

// park parks jobs by one statement.
func park(ctx context.Context, db parked.Querier, schema string, jobs []*parking) error {
	rows, _ := db.Query(ctx, strings.ReplaceAll(parkSQL, "PARKED", parked.In(schema)),
		column(jobs, func(p *parking) string { return p.line.river }),
		column(jobs, func(p *parking) string { return p.line.name }),
		column(jobs, func(p *parking) string { return p.line.key }),
		column(jobs, func(p *parking) int { return p.priority }),
		column(jobs, func(p *parking) int64 { return p.job }),
		column(jobs, func(p *parking) int { return p.weight }),
		column(jobs, func(p *parking) *time.Time { return p.place }))
	first, err := pgx.CollectRows(rows, pgx.RowTo[bool])
	for i, f := range first {
		jobs[i].first = f
	}
	return parkedFault("park jobs", err)
}

// column returns the argument of a statement that has a value of each element.
func column[T, V any](of []T, value func(T) V) []V {
	values := make([]V, len(of))
	for i, t := range of {
		values[i] = value(t)
	}
	return values
}

// parkedFault adds to err what was being done; nil stays nil.
func parkedFault(doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case parked.Missing(err) && strings.Contains(err.Error(), parked.Table): // and not River's
		return fmt.Errorf("%w: %w", ErrNotMigrated, err)
	}
	return fmt.Errorf("riverlimit: %s: %w", doing, err)
}

// call asks which jobs of a line to wake, and holds the answer.
type call struct {
	line  lineID
	limit int           // permits of the key
	lease time.Duration // the first of those left comes by itself after so long
	freed int           // permits that the caller has released
	extra int           // weight of the jobs that may be woken to wait in workers here, beyond the free permits
	ended []int64       // jobs that leave the line: they run, or have ended
	parks int           // how many jobs had been parked there by this process
	found
}

// found is what the statement has done in a line, and found there.
type found struct {
	Woken int
	More  bool // jobs are left
	Room  bool // and permits for them
	Dead  int  // jobs at the front that were cancelled, deleted or retried
}

// fronts is how many jobs at the front of a line are examined for dead ones.
const fronts = 50

// wakeSQL is the statement by which parked jobs are woken.
//
//go:embed wake.sql
var wakeSQL string

// wake wakes jobs of lines of one River schema, and notes in the calls what it has done.
func wake(ctx context.Context, db parked.Querier, store *pgstore.Store, calls []*call) error {
	if len(calls) == 0 {
		return nil
	}
	var ended []int64
	for _, c := range calls {
		ended = append(ended, c.ended...)
	}
	river := calls[0].line.river
	sql := strings.NewReplacer("PARKED", parked.In(store.Schema()), "LIMITS", parked.Qualified(store.Schema(), pgstore.Table),
		"RIVER_JOB", parked.Qualified(river, "river_job"), "RIVER_QUEUE", parked.Qualified(river, "river_queue")).Replace(wakeSQL)
	rows, _ := db.Query(ctx, sql, river,
		column(calls, func(c *call) string { return c.line.name }),
		column(calls, func(c *call) string { return c.line.key }),
		column(calls, func(c *call) int { return c.limit }),
		column(calls, func(c *call) time.Duration { return c.lease }),
		column(calls, func(c *call) int { return c.freed }),
		column(calls, func(c *call) int { return c.extra }), ended)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[found])
	for i, f := range found {
		calls[i].found = f
	}
	return parkedFault("wake parked jobs", err)
}
