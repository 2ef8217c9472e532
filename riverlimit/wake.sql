-- Makes parked jobs of one River schema available, as many of each line as there are permits for,
-- and takes them out of the line. It waits for no lock, so the order in which transactions wake does not
-- matter. PARKED, LIMITS, RIVER_JOB and RIVER_QUEUE stand for the tables.

-- The lines, a row each: the limit's permits, how many of them the caller has released, and how many jobs
-- more may wait for one in its workers.
WITH asked AS MATERIALIZED (
	SELECT * FROM unnest($2::text[], $3::text[], $4::int4[], $5::interval[], $6::int4[], $7::int4[])
		WITH ORDINALITY AS a (name, key, permits, lease, freed, extra, i)
),
-- The queues in which River starts nothing: their jobs stay in line.
paused AS MATERIALIZED (SELECT name FROM RIVER_QUEUE WHERE paused_at IS NOT NULL),
-- Jobs at the front that were cancelled, deleted or retried by hand, or have ended.
dead AS MATERIALIZED (
	SELECT a.i, f.job FROM asked AS a CROSS JOIN LATERAL (
		SELECT p.job FROM PARKED AS p WHERE p.river = $1 AND p.name = a.name AND p.key = a.key
		ORDER BY p.priority, p.place, p.job LIMIT 50) AS f
	LEFT JOIN RIVER_JOB AS j ON j.id = f.job
	WHERE j.id IS NULL OR j.state IN ('cancelled', 'completed', 'discarded', 'retryable')
),
-- How many permits' worth of jobs may start: as many as were released, if the first job wants no more.
-- Lines without a job that can start have no row. (A job whose snooze ends within 5 seconds is available, but not yet due.)
room AS MATERIALIZED (
	SELECT a.*, a.extra + CASE WHEN a.freed >= f.weight THEN a.freed ELSE a.permits - (
		SELECT count(*)::int4 FROM LIMITS AS r WHERE r.name = a.name AND r.key = a.key AND r.shard < a.permits AND r.ts > clock_timestamp()) END AS room
	FROM asked AS a CROSS JOIN LATERAL (
		SELECT p.weight FROM PARKED AS p JOIN RIVER_JOB AS j ON j.id = p.job
		WHERE p.river = $1 AND p.name = a.name AND p.key = a.key AND (j.state = 'scheduled' OR j.state = 'available' AND j.scheduled_at > now()) AND j.queue NOT IN (SELECT name FROM paused)
		ORDER BY p.priority, p.place, p.job LIMIT 1) AS f
),
-- The first jobs. Those that another transaction has locked, or that wait for River to write their snooze,
-- are passed over; but of the latter not those that want several permits, or they would never get them.
first AS MATERIALIZED (
	SELECT r.i, r.room, r.extra, c.job, c.weight, sum(c.weight) OVER line AS sum, max(c.weight) OVER line AS widest
	FROM room AS r CROSS JOIN LATERAL (
		SELECT p.priority, p.place, p.job, p.weight FROM PARKED AS p JOIN RIVER_JOB AS j ON j.id = p.job
		WHERE p.river = $1 AND p.name = r.name AND p.key = r.key AND j.queue NOT IN (SELECT name FROM paused)
			AND (j.state = 'scheduled' OR j.state = 'available' AND j.scheduled_at > now() OR j.state = 'running' AND p.weight > 1 AND j.attempted_at > now() - interval '2 s')
		ORDER BY p.priority, p.place, p.job LIMIT greatest(r.room, 0) FOR UPDATE OF j SKIP LOCKED) AS c
	WINDOW line AS (PARTITION BY r.i ORDER BY c.priority, c.place, c.job)
),
-- Those that fit. They come before jobs that were inserted after them.
woken AS (
	UPDATE RIVER_JOB AS j SET state = 'available', scheduled_at = least(j.created_at, now())
	FROM first AS f WHERE j.id = f.job AND j.state <> 'running' AND f.sum <= f.room - CASE WHEN f.widest > 1 THEN f.extra ELSE 0 END
	RETURNING j.id, j.queue, f.i, f.weight
),
-- The first of those left comes when a lease ends, in case all that could wake it are killed.
head AS (
	UPDATE RIVER_JOB AS j SET scheduled_at = now() + h.lease
	FROM asked AS a CROSS JOIN LATERAL (
		SELECT p.job, a.lease FROM PARKED AS p JOIN RIVER_JOB AS j ON j.id = p.job
		WHERE p.river = $1 AND p.name = a.name AND p.key = a.key AND (j.state = 'scheduled' OR j.state = 'available' AND j.scheduled_at > now()) AND j.queue NOT IN (SELECT name FROM paused)
			AND NOT EXISTS (SELECT FROM woken AS w WHERE w.id = p.job)
		ORDER BY p.priority, p.place, p.job LIMIT 1 FOR UPDATE OF j SKIP LOCKED) AS h
	WHERE j.id = h.job AND j.scheduled_at > now() + h.lease + interval '1 minute'
),
-- A row stays while an insertion behind it has locked it, so that the line is not forgotten.
gone AS (
	DELETE FROM PARKED AS p WHERE p.river = $1 AND p.job IN (
		SELECT d.job FROM PARKED AS d WHERE d.river = $1 AND d.job = ANY (ARRAY(
			SELECT job FROM dead UNION ALL SELECT id FROM woken UNION ALL SELECT unnest($8::int8[]))) FOR UPDATE SKIP LOCKED)
	RETURNING p.job
),
-- River hears of it as of an insertion.
heard AS MATERIALIZED (
	SELECT count(pg_notify(concat(coalesce(nullif($1, ''), current_schema()), '.river_insert'), json_build_object('queue', q.queue)::text)) AS n
	FROM (SELECT DISTINCT queue FROM woken) AS q
)
-- How many were woken, whether jobs are left, and room for them, and how many were dead.
SELECT (SELECT count(*)::int4 FROM woken AS w WHERE w.i = a.i),
	EXISTS (SELECT FROM PARKED AS p WHERE p.river = $1 AND p.name = a.name AND p.key = a.key AND NOT EXISTS (SELECT FROM gone AS g WHERE g.job = p.job)),
	coalesce((SELECT r.room FROM room AS r WHERE r.i = a.i), 1) > coalesce((SELECT sum(w.weight) FROM woken AS w WHERE w.i = a.i), 0),
	(SELECT count(*)::int4 FROM dead AS d WHERE d.i = a.i)
FROM asked AS a CROSS JOIN heard AS h ORDER BY a.i
