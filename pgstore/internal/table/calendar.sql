-- The statements of a quota by the calendar. Its edges are not a period apart, so they are
-- arguments: some around now, growing, and beside each the ts from which on a row has had it.
-- The refill is Rate for each edge up to now that the row has not had. See bucket.sql, of which
-- these are the counterparts; give is that of a window, which does not count edges.
--
-- The edges sent are chosen by the machine's clock, and decide by the database's. If that is
-- not before the last one, or is before the first, nothing is counted by them, and the row is
-- turned away; and so is a row that is behind the first and would not be full by all of those
-- up to now. The caller reads it, and sends other edges, or writes it anew.
--
-- A row that stands on no edge has had the first one after it: see calendar.go. Its ts stays until
-- an edge counts.

-- name: take
-- Is a bucket's take. excluded.ts is the edge before now. Where that is not known it is one of
-- long ago: then a row that is made is full again whatever it was taken, and the caller has to
-- take it for one that is turned away.
--
-- $1 name  $2 key  $3 shard  $4 capacity  $5 count
-- $6 now: NULL for the database's clock  $7 edges  $8 had  $9 rate
-- $10 floor: the lowest value to leave behind
-- $11 over: an instant by which a pause is known to be over; NULL for none
-- $12 long_ago: an edge
INSERT INTO rate_limits AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	coalesce((($7::timestamptz[])[1 : cardinality($7::timestamptz[]) - 1])[width_bucket(coalesce($6::timestamptz, clock_timestamp()), $7::timestamptz[])],
		$12::timestamptz))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(width_bucket(excluded.ts, $7::timestamptz[]) - width_bucket(r.ts, $8::timestamptz[]), 0) * $9::float8, $4::float8) - $5::float8,
	ts = CASE WHEN width_bucket(excluded.ts, $7::timestamptz[]) > width_bucket(r.ts, $8::timestamptz[]) THEN excluded.ts ELSE r.ts END
WHERE least(r.value + greatest(width_bucket(excluded.ts, $7::timestamptz[]) - width_bucket(r.ts, $8::timestamptz[]), 0) * $9::float8, $4::float8) - $5::float8
		>= $10::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND width_bucket(excluded.ts, $7::timestamptz[]) BETWEEN 1 AND cardinality($7::timestamptz[]) - 1
	AND (r.ts >= ($8::timestamptz[])[1] OR r.value + width_bucket(excluded.ts, $7::timestamptz[]) * $9::float8 >= $4::float8)
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $11::timestamptz))
RETURNING value, ts, paused,
	clock_timestamp(), xmin::text

-- name: grant
-- Is a bucket's grant.
--
-- $1 name  $2 key  $3 shard  $4 count  $5 need  $6 capacity
-- $7 rate  $8 now: NULL for the database's clock  $9 edges  $10 had
UPDATE rate_limits AS r
SET value = least(r.value + greatest(width_bucket(u.now, u.edges) - width_bucket(r.ts, u.had), 0) * u.rate, u.capacity) - u.total,
	ts = CASE WHEN width_bucket(u.now, u.edges) > width_bucket(r.ts, u.had) THEN u.edges[width_bucket(u.now, u.edges)] ELSE r.ts END
FROM (
	SELECT $1::text AS name, $2::text AS key, $3::int4 AS shard, $4::float8 AS total, $5::float8 AS need, $6::float8 AS capacity,
		$7::float8 AS rate, coalesce($8::timestamptz, CURRENT_TIMESTAMP) AS now, $9::timestamptz[] AS edges, $10::timestamptz[] AS had
) AS u
WHERE set_config('lock_timeout', '1', true) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND width_bucket(u.now, u.edges) BETWEEN 1 AND cardinality(u.edges) - 1
	AND (r.ts >= u.had[1] OR r.value + width_bucket(u.now, u.edges) * u.rate >= u.capacity)
	AND r.value + greatest(width_bucket(u.now, u.edges) - width_bucket(r.ts, u.had), 0) * u.rate >= u.need
RETURNING r.value, r.ts, clock_timestamp()

-- name: prefetch_many
-- Is a bucket's grant_many; and prefetches, as a window's prefetch_many, where lasts is not
-- NULL, for a lease that lasts to the next edge. The edges are those of all definitions, with as
-- many for each.
--
-- $1 keys  $2 definitions  $3 shards  $4 counts  $5 needs  $6 names  $7 capacities  $8 rates
-- $9 all_edges  $10 all_had  $11 each  $12 now: NULL for the database's clock
-- $13 prefetches  $14 outs  $15 spents  $16 spent_ends  $17 lasts
UPDATE rate_limits AS r
SET (value, ts, ahead) = (
	SELECT c.settled - u.total - c.more, c.t, CASE WHEN u.prefetch IS NULL THEN r.ahead ELSE array[c.before + u.out + c.more,
		greatest(CASE WHEN NOT c.forgotten THEN r.ahead[2] END, tstzrange_subdiff(u.edges[width_bucket(c.t, u.had) + 1], '2000-01-01 00:00:00+00'::timestamptz)), c.more] END
	FROM (
		SELECT b.*, CASE WHEN u.prefetch IS NULL THEN 0
			ELSE greatest(least(u.prefetch, (b.settled - u.total) / 2, u.capacity / 2 - b.before - u.out), 0) END AS more
		FROM (
			SELECT a.*, CASE WHEN a.forgotten THEN 0
				ELSE greatest(r.ahead[1] - CASE WHEN u.spent_end > a.t THEN u.spent ELSE 0 END, 0) END AS before
			FROM (
				SELECT t.t, least(r.value + greatest(width_bucket(u.now, u.edges) - width_bucket(r.ts, u.had), 0) * u.rate, u.capacity) AS settled,
					(r.ahead[1] > 0) IS NOT TRUE OR r.ahead[2] <= tstzrange_subdiff(t.t, '2000-01-01 00:00:00+00'::timestamptz) AS forgotten
				FROM (SELECT CASE WHEN width_bucket(u.now, u.edges) > width_bucket(r.ts, u.had) THEN u.edges[width_bucket(u.now, u.edges)] ELSE r.ts END AS t OFFSET 0) AS t OFFSET 0
			) AS a OFFSET 0
		) AS b OFFSET 0
	) AS c
)
FROM (
	SELECT a.i, ($6::text[])[a.definition] AS name, a.key, coalesce(($3::int4[])[a.i], 0) AS shard,
		($4::float8[])[a.i] AS total, coalesce(($5::float8[])[a.i], ($4::float8[])[a.i]) AS need,
		($7::float8[])[a.definition] AS capacity, ($8::float8[])[a.definition] AS rate,
		($9::timestamptz[])[(a.definition - 1) * $11::int4 + 1 : a.definition * $11::int4] AS edges,
		($10::timestamptz[])[(a.definition - 1) * $11::int4 + 1 : a.definition * $11::int4] AS had,
		coalesce($12::timestamptz, CURRENT_TIMESTAMP) AS now,
		CASE WHEN ($17::float8[])[a.i] IS NOT NULL THEN coalesce(($13::float8[])[a.i], 0) END AS prefetch, ($14::float8[])[a.i] AS out, ($15::float8[])[a.i] AS spent, ($16::timestamptz[])[a.i] AS spent_end
	FROM unnest($1::text[], $2::int4[]) WITH ORDINALITY AS a (key, definition, i)
	WHERE a.i BETWEEN 1 AND 1000000000
) AS u
WHERE (SELECT set_config('lock_timeout', '1', true)) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND width_bucket(u.now, u.edges) BETWEEN 1 AND cardinality(u.edges) - 1
	AND (r.ts >= u.had[1] OR r.value + width_bucket(u.now, u.edges) * u.rate >= u.capacity)
	AND r.ts < u.had[cardinality(u.had)]
	AND r.value + greatest(width_bucket(u.now, u.edges) - width_bucket(r.ts, u.had), 0) * u.rate >= u.need
RETURNING r.value, r.ts, clock_timestamp(), r.ahead[3], u.i
