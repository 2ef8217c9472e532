package riverlimit

import (
	"context"
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
	priority int
	job      int64
	weight   int

	first bool // in its line, once it is parked
	err   error
}

// parkSQL parks jobs, and returns which are the first of their lines. A job that was parked before
// has its place by its priority and ID.
const parkSQL = `WITH jobs AS MATERIALIZED (
	SELECT j.*, row_number() OVER (PARTITION BY river, name, key ORDER BY priority, job) = 1 AS ahead
	FROM unnest($1::text[], $2::text[], $3::text[], $4::int2[], $5::int8[], $6::int4[]) WITH ORDINALITY AS j (river, name, key, priority, job, weight, i)
), put AS (
	INSERT INTO PARKED AS p (river, name, key, priority, job, weight)
	SELECT river, name, key, priority, job, weight FROM jobs ORDER BY river, job
	ON CONFLICT (river, job) DO UPDATE SET name = excluded.name, key = excluded.key, priority = excluded.priority, weight = excluded.weight
)
SELECT ahead AND NOT EXISTS (
	SELECT FROM PARKED AS p WHERE p.river = j.river AND p.name = j.name AND p.key = j.key AND (p.priority, p.job) < (j.priority, j.job))
FROM jobs AS j ORDER BY j.i`

// park parks jobs by one statement.
func park(ctx context.Context, db parked.Querier, schema string, jobs []*parking) error {
	var rivers, names, keys []string
	var priorities []int16
	var ids []int64
	var weights []int32
	for _, p := range jobs {
		rivers, names, keys = append(rivers, p.line.river), append(names, p.line.name), append(keys, p.line.key)
		priorities, ids, weights = append(priorities, int16(p.priority)), append(ids, p.job), append(weights, int32(p.weight))
	}
	rows, err := db.Query(ctx, strings.ReplaceAll(parkSQL, "PARKED", parked.In(schema)), rivers, names, keys, priorities, ids, weights)
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

	woken int
	more  bool // jobs are left
	room  bool // and permits for them
	dead  int  // jobs that were cancelled, deleted or retried, of the first fronts
}

// fronts is how many jobs of a line are examined at a time.
const fronts = 50

// wakeSQL makes parked jobs available, as many of each line as there are permits for, and takes them out
// of the line; those too that were cancelled, deleted or retried by hand, and those that have ended. A
// job whose snooze River has not written is passed over, unless it wants several permits, and so is one
// that another transaction has locked. The first of those left is scheduled for the end of a lease, in
// case the holder dies. River hears of it as of an insertion. A woken job comes before those that were
// inserted after it: it may start.
//
// It waits for no lock, so the order in which transactions wake does not matter.
const wakeSQL = `WITH asked AS MATERIALIZED (
	SELECT * FROM unnest($2::text[], $3::text[], $4::int4[], $5::interval[], $6::int4[], $7::int4[]) WITH ORDINALITY AS a (name, key, most, lease, freed, extra, i)
), front AS MATERIALIZED (
	SELECT a.i, f.priority, f.job, f.weight, j.state::text AS state
	FROM asked AS a CROSS JOIN LATERAL (
		SELECT p.priority, p.job, p.weight FROM PARKED AS p WHERE p.river = $1 AND p.name = a.name AND p.key = a.key
		ORDER BY p.priority, p.job LIMIT 50) AS f
	LEFT JOIN RIVER_JOB AS j ON j.id = f.job
), room AS MATERIALIZED (
	SELECT a.*, a.extra + CASE WHEN a.freed >= h.weight THEN a.freed ELSE a.most - (
		SELECT count(*)::int4 FROM LIMITS AS r WHERE r.name = a.name AND r.key = a.key AND r.shard < a.most AND r.ts > clock_timestamp()) END AS room
	FROM asked AS a CROSS JOIN LATERAL (
		SELECT f.weight FROM front AS f WHERE f.i = a.i AND f.state IN ('scheduled', 'available') ORDER BY f.priority, f.job LIMIT 1) AS h
), ready AS MATERIALIZED (
	SELECT r.i, r.room, r.extra, c.job, c.weight, sum(c.weight) OVER line AS sum, max(c.weight) OVER line AS widest
	FROM room AS r CROSS JOIN LATERAL (
		SELECT p.priority, p.job, p.weight FROM PARKED AS p JOIN RIVER_JOB AS j ON j.id = p.job
		WHERE p.river = $1 AND p.name = r.name AND p.key = r.key
			AND (j.state IN ('scheduled', 'available') OR j.state = 'running' AND p.weight > 1 AND j.attempted_at > now() - interval '2 s')
		ORDER BY p.priority, p.job LIMIT greatest(r.room, 0) FOR UPDATE OF j SKIP LOCKED) AS c
	WINDOW line AS (PARTITION BY r.i ORDER BY c.priority, c.job)
), woken AS (
	UPDATE RIVER_JOB AS j SET state = 'available', scheduled_at = least(j.created_at, now())
	FROM ready AS r WHERE j.id = r.job AND j.state <> 'running' AND r.sum <= r.room - CASE WHEN r.widest > 1 THEN r.extra ELSE 0 END
	RETURNING j.id, j.queue, r.i, r.weight
), head AS (
	UPDATE RIVER_JOB AS j SET scheduled_at = now() + h.lease
	FROM asked AS a CROSS JOIN LATERAL (
		SELECT p.job, a.lease FROM PARKED AS p JOIN RIVER_JOB AS j ON j.id = p.job
		WHERE p.river = $1 AND p.name = a.name AND p.key = a.key AND j.state = 'scheduled' AND NOT EXISTS (SELECT FROM ready AS r WHERE r.job = p.job)
		ORDER BY p.priority, p.job LIMIT 1 FOR UPDATE OF j SKIP LOCKED) AS h
	WHERE j.id = h.job AND j.scheduled_at > now() + h.lease + interval '1 minute'
), gone AS (
	DELETE FROM PARKED AS p WHERE p.river = $1 AND p.job IN (
		SELECT d.job FROM PARKED AS d WHERE d.river = $1 AND d.job = ANY (ARRAY(
			SELECT f.job FROM front AS f WHERE f.state IS NULL OR f.state IN ('cancelled', 'completed', 'discarded', 'retryable')
			UNION ALL SELECT id FROM woken UNION ALL SELECT unnest($8::int8[]))) FOR UPDATE SKIP LOCKED)
	RETURNING p.job
), heard AS MATERIALIZED (
	SELECT count(pg_notify(concat(coalesce(nullif($1, ''), current_schema()), '.river_insert'), json_build_object('queue', q.queue)::text)) AS n
	FROM (SELECT DISTINCT queue FROM woken) AS q
)
SELECT (SELECT count(*)::int4 FROM woken AS w WHERE w.i = a.i),
	EXISTS (SELECT FROM PARKED AS p WHERE p.river = $1 AND p.name = a.name AND p.key = a.key AND NOT EXISTS (SELECT FROM gone AS g WHERE g.job = p.job)),
	coalesce((SELECT r.room FROM room AS r WHERE r.i = a.i), 1) > coalesce((SELECT sum(w.weight) FROM woken AS w WHERE w.i = a.i), 0),
	(SELECT count(*)::int4 FROM front AS f WHERE f.i = a.i AND (f.state IS NULL OR f.state IN ('cancelled', 'completed', 'discarded', 'retryable')))
FROM asked AS a CROSS JOIN heard AS h ORDER BY a.i`

// wakeStatement returns wakeSQL with the tables of the store and of a River schema.
func wakeStatement(store *pgstore.Store, river string) string {
	return strings.NewReplacer("PARKED", parked.In(store.Schema()), "LIMITS", parked.Qualified(store.Schema(), pgstore.Table),
		"RIVER_JOB", parked.Qualified(river, "river_job")).Replace(wakeSQL)
}

// wake wakes jobs of lines of one River schema, and notes in the calls what it has done. The jobs that
// have ended leave their lines.
func wake(ctx context.Context, db parked.Querier, sql string, calls []*call, ended ...int64) error {
	if len(calls) == 0 {
		return nil
	}
	n := len(calls)
	names, keys, leases := make([]string, n), make([]string, n), make([]time.Duration, n)
	limits, freed, extra := make([]int32, n), make([]int32, n), make([]int32, n)
	for i, c := range calls {
		names[i], keys[i], leases[i] = c.line.name, c.line.key, c.lease
		limits[i], freed[i], extra[i] = int32(c.limit), int32(c.freed), int32(c.extra)
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
