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

// parkedFor is when a parked job comes back that nobody has woken: if its limit is not used any more, or
// all that could have woken it was killed.
const parkedFor = 24 * time.Hour

// Line is the jobs that are parked for permits of a limit's key. It is printed, logged and in JSON without
// the key.
type Line = parked.Line

// Lines returns the lines of parked jobs of a limit's keys, and of all limits if its name is "": the longest
// ones, at most so many. It is for metrics and alarms, and reads the whole table.
func Lines(ctx context.Context, store *pgstore.Store, limit string, most int) ([]Line, error) {
	if store == nil || store.Pool() == nil {
		return nil, invalid("Store", nil, "must have a pool")
	}
	return parked.Lines(ctx, store.Pool(), store.Schema(), limit, most)
}

// lineID is a line: the jobs that are parked for a limit's key, of those in one schema of River's.
type lineID struct{ river, name, key string }

// parking is a job that is to be parked.
type parking struct {
	line     lineID
	further  bool // the line is not that of the first limit that the job asks for, and goes by arrival
	priority int
	created  time.Time
	job      int64
	weight   int

	first bool // in its line, once it is parked
	err   error
}

// parkSQL parks jobs, and returns which are the first of their lines. A job that is in its line already
// keeps its place there. It stays in its old line while an insertion behind it has locked it,
// so that the line is not forgotten, and moves when it comes the next time.
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
	var rivers, names, keys []string
	var priorities []int16
	var ids []int64
	var weights []int32
	var places []*time.Time
	for _, p := range jobs {
		rivers, names, keys = append(rivers, p.line.river), append(names, p.line.name), append(keys, p.line.key)
		priorities, ids, weights = append(priorities, int16(p.priority)), append(ids, p.job), append(weights, int32(p.weight))
		if p.further {
			places = append(places, nil)
		} else {
			places = append(places, &p.created)
		}
	}
	rows, err := db.Query(ctx, strings.ReplaceAll(parkSQL, "PARKED", parked.In(schema)), rivers, names, keys, priorities, ids, weights, places)
	if err != nil {
		return parkedFault("park jobs", err)
	}
	i, first := 0, false
	_, err = pgx.ForEachRow(rows, []any{&first}, func() error {
		jobs[i].first = first
		i++
		return nil
	})
	return parkedFault("park jobs", err)
}

// parkedFault returns err with what was done, if there is one.
func parkedFault(doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case parked.Missing(err) && strings.Contains(err.Error(), parked.Table): // and not River's
		return fmt.Errorf("%w: %w", ErrNotMigrated, err)
	}
	return fmt.Errorf("riverlimit: %s: %w", doing, err)
}

// call is a question which jobs of a line are to be woken.
type call struct {
	line  lineID
	limit int           // permits of the key
	lease time.Duration // the first of those left comes by itself after so long
	freed int           // permits that the caller has released
	extra int           // permits' worth of jobs that may wait for one in workers of this process
	ended []int64       // jobs that leave the line: they run, or have ended
	parks int           // how many jobs had been parked there by this process

	woken int
	more  bool // jobs are left
	room  bool // and permits for them
	dead  int  // jobs at the front that were cancelled, deleted or retried
}

// fronts is how many jobs at the front of a line are examined for dead ones.
const fronts = 50

// wakeSQL is the statement by which parked jobs are woken.
//
//go:embed wake.sql
var wakeSQL string

// wakeStatement returns wakeSQL with the tables of the store and of a River schema.
func wakeStatement(store *pgstore.Store, river string) string {
	return strings.NewReplacer("PARKED", parked.In(store.Schema()), "LIMITS", parked.Qualified(store.Schema(), pgstore.Table),
		"RIVER_JOB", parked.Qualified(river, "river_job"), "RIVER_QUEUE", parked.Qualified(river, "river_queue")).Replace(wakeSQL)
}

// wake wakes jobs of lines of one River schema, and notes in the calls what it has done.
func wake(ctx context.Context, db parked.Querier, sql string, calls []*call) error {
	if len(calls) == 0 {
		return nil
	}
	n := len(calls)
	names, keys, leases := make([]string, n), make([]string, n), make([]time.Duration, n)
	limits, freed, extra := make([]int32, n), make([]int32, n), make([]int32, n)
	var ended []int64
	for i, c := range calls {
		names[i], keys[i], leases[i] = c.line.name, c.line.key, c.lease
		limits[i], freed[i], extra[i] = int32(c.limit), int32(c.freed), int32(c.extra)
		ended = append(ended, c.ended...)
	}
	rows, err := db.Query(ctx, sql, calls[0].line.river, names, keys, limits, leases, freed, extra, ended)
	if err != nil {
		return parkedFault("wake parked jobs", err)
	}
	i := 0
	var c call
	_, err = pgx.ForEachRow(rows, []any{&c.woken, &c.more, &c.room, &c.dead}, func() error {
		calls[i].woken, calls[i].more, calls[i].room, calls[i].dead = c.woken, c.more, c.room, c.dead
		i++
		return nil
	})
	return parkedFault("wake parked jobs", err)
}
