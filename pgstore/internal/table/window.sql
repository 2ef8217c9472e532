-- The statements of a fixed window, which is refilled at edges, a period apart: it is a token
-- bucket with a clock that stands still in between. So ts is an edge, and the last edge before
-- now decides. See bucket.sql, of which these are the counterparts.

-- name: take
-- Is a bucket's take. In the conflict's clauses excluded.ts is the edge before now, counted
-- from origin. A row with other edges, since it was paused or had another Start, is turned
-- away, as excluded.ts says nothing about it: the caller reads it, and sends its ts as
-- origin. And a pause that has ended since the edge must be known to be over.
--
-- $1 name  $2 key  $3 shard  $4 capacity  $5 count
-- $6 period  $7 now: NULL for the database's clock  $8 origin: an edge
-- $9 rate  $10 floor: the lowest value to leave behind
-- $11 over: an instant by which a pause is known to be over; NULL for none
INSERT INTO rate_limits AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) * $9::float8 / $6::float8, $4::float8) - $5::float8,
	ts = greatest(r.ts, excluded.ts)
WHERE least(r.value + greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) * $9::float8 / $6::float8, $4::float8) - $5::float8
		>= $10::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND date_bin($6::float8 * interval '1 microsecond', r.ts, $8::timestamptz) = r.ts
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $11::timestamptz))
RETURNING value, ts, paused,
	clock_timestamp(), xmin::text

-- name: give
-- Is a bucket's give. What is out ends with its window, and until then nothing comes in. The
-- instant in the proposed ahead is now, since the proposed ts is an edge.
--
-- $1 name  $2 key  $3 shard  $4 capacity  $5 count
-- $6 period  $7 now: NULL for the database's clock  $8 origin: an edge
-- $9 most: above which nothing is given when nothing is out
-- $10 spent  $11 spent_end: until when that is counted in ahead
INSERT INTO rate_limits AS r (name, key, shard, value, ts, ahead)
VALUES ($1::text, $2::text, $3::int4, $4::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz),
	array[0, tstzrange_subdiff(coalesce($7::timestamptz, clock_timestamp()), '2000-01-01 00:00:00+00'::timestamptz)])
ON CONFLICT (name, key, shard) DO UPDATE
SET value = CASE WHEN r.ahead[2] > excluded.ahead[2]
		AND greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff($11::timestamptz, '2000-01-01 00:00:00+00'::timestamptz) > greatest(tstzrange_subdiff(r.ts, '2000-01-01 00:00:00+00'::timestamptz), excluded.ahead[2]) THEN $10::float8 ELSE 0 END, 0) > 0
		THEN greatest(least(r.value, $4::float8), least(r.value + $5::float8, $4::float8
			- greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff($11::timestamptz, '2000-01-01 00:00:00+00'::timestamptz) > greatest(tstzrange_subdiff(r.ts, '2000-01-01 00:00:00+00'::timestamptz), excluded.ahead[2]) THEN $10::float8 ELSE 0 END, 0)))
		ELSE least(r.value + $5::float8, greatest(r.value, $9::float8)) END,
	ahead = CASE WHEN r.ahead IS NOT NULL THEN array[
		greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff($11::timestamptz, '2000-01-01 00:00:00+00'::timestamptz) > greatest(tstzrange_subdiff(r.ts, '2000-01-01 00:00:00+00'::timestamptz), excluded.ahead[2]) THEN $10::float8 ELSE 0 END, 0), r.ahead[2]] END
RETURNING value, ts, paused, slots, ahead,
	clock_timestamp(), xmax = 0

-- name: grant
-- Is a bucket's grant, by the edges of the row.
--
-- $1 name  $2 key  $3 shard  $4 count  $5 need  $6 capacity
-- $7 rate  $8 period  $9 now: NULL for the database's clock
UPDATE rate_limits AS r
SET value = least(r.value
		+ greatest(round(tstzrange_subdiff(date_bin(u.tick, u.now, r.ts), r.ts) * 1000000), 0) * u.rate / u.period, u.capacity) - u.total,
	ts = greatest(r.ts, date_bin(u.tick, u.now, r.ts))
FROM (
	SELECT $1::text AS name, $2::text AS key, $3::int4 AS shard, $4::float8 AS total, $5::float8 AS need, $6::float8 AS capacity,
		$7::float8 AS rate, $8::float8 AS period, $8::float8 * interval '1 microsecond' AS tick,
		coalesce($9::timestamptz, CURRENT_TIMESTAMP) AS now
) AS u
WHERE set_config('lock_timeout', '1', true) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND r.value + greatest(round(tstzrange_subdiff(date_bin(u.tick, u.now, r.ts), r.ts) * 1000000), 0) * u.rate / u.period >= u.need
RETURNING r.value, r.ts, clock_timestamp()

-- name: grant_many
-- Is a bucket's grant_many.
--
-- $1 keys  $2 definitions  $3 shards  $4 counts  $5 needs
-- $6 names  $7 capacities  $8 rates  $9 periods  $10 now: NULL for the database's clock
UPDATE rate_limits AS r
SET value = least(r.value
		+ greatest(round(tstzrange_subdiff(date_bin(u.tick, u.now, r.ts), r.ts) * 1000000), 0) * u.rate / u.period, u.capacity) - u.total,
	ts = greatest(r.ts, date_bin(u.tick, u.now, r.ts))
FROM (
	SELECT a.i, ($6::text[])[a.definition] AS name, a.key, coalesce(($3::int4[])[a.i], 0) AS shard,
		($4::float8[])[a.i] AS total, coalesce(($5::float8[])[a.i], ($4::float8[])[a.i]) AS need,
		($7::float8[])[a.definition] AS capacity, ($8::float8[])[a.definition] AS rate, ($9::float8[])[a.definition] AS period,
		coalesce($10::timestamptz, CURRENT_TIMESTAMP) AS now, ($9::float8[])[a.definition] * interval '1 microsecond' AS tick
	FROM unnest($1::text[], $2::int4[]) WITH ORDINALITY AS a (key, definition, i)
	WHERE a.i BETWEEN 1 AND 1000000000
) AS u
WHERE (SELECT set_config('lock_timeout', '1', true)) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND (r.value >= u.need
		OR r.value + greatest(round(tstzrange_subdiff(date_bin(u.tick, u.now, r.ts), r.ts) * 1000000), 0) * u.rate / u.period >= u.need)
RETURNING r.value, r.ts, clock_timestamp(), u.i
