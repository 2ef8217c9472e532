WITH u AS MATERIALIZED (
	SELECT a.name, a.key, a.number, a.lease, a.fence::float8 AS fence, a.fence IS NULL AS next, a.i, coalesce($6::timestamptz, CURRENT_TIMESTAMP) AS now
	FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]), (SELECT $4::float8[]), (SELECT $5::int8[]))
		WITH ORDINALITY AS a (name, key, number, lease, fence, i)
	WHERE a.i BETWEEN 1 AND 1000000000
), fit AS MATERIALIZED (
	SELECT r.name, r.key, r.shard FROM u JOIN %[1]s AS r ON r.name = u.name AND r.key = u.key AND r.shard = u.number
	WHERE CASE WHEN u.fence IS NULL THEN r.ts <= u.now ELSE r.value = u.fence AND r.ts > u.now END
	ORDER BY u.i FOR UPDATE OF r SKIP LOCKED
)
UPDATE %[1]s AS r
SET value = CASE WHEN u.next OR u.lease = 0 AND r.paused > u.now THEN greatest(r.value + 1, round(date_part('epoch', u.now) * 1000000)) ELSE r.value END,
	ts = CASE WHEN (u.next AND u.fence IS NOT NULL OR u.lease = 0) AND r.paused > u.now THEN r.paused
		WHEN u.lease > 0 THEN u.now + u.lease * interval '1 microsecond' ELSE '1970-01-01 00:00:00+00'::timestamptz END,
	paused = CASE WHEN u.next OR u.lease = 0 THEN NULL ELSE r.paused END,
	ahead = CASE WHEN u.fence IS NOT NULL AND (u.lease > 0 AND NOT u.next OR r.paused > u.now) THEN r.ahead END
FROM u
WHERE r.name = u.name AND r.key = u.key AND r.shard = u.number AND (SELECT count(DISTINCT (name, key, shard)) FROM fit) = cardinality($1::text[])
RETURNING r.value::int8, r.ts, u.now, u.i, r.ahead IS NOT NULL
