UPDATE %[1]s AS r
SET value = CASE WHEN u.next OR u.lease = 0 AND r.paused > u.now THEN greatest(r.value + 1, round(date_part('epoch', u.now) * 1000000)) ELSE r.value END,
	ts = CASE WHEN (u.next AND u.fence IS NOT NULL OR u.lease = 0) AND r.paused > u.now THEN r.paused
		WHEN u.lease > 0 THEN u.now + u.lease * interval '1 microsecond' ELSE '1970-01-01 00:00:00+00'::timestamptz END,
	paused = CASE WHEN u.next OR u.lease = 0 THEN NULL ELSE r.paused END,
	ahead = CASE WHEN u.fence IS NOT NULL AND (u.lease > 0 AND NOT u.next OR r.paused > u.now) THEN r.ahead END
FROM (
	SELECT a.name, a.key, a.number, a.lease, a.fence::float8 AS fence, a.next, a.i, coalesce($7::timestamptz, CURRENT_TIMESTAMP) AS now
	FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]), (SELECT $4::float8[]), (SELECT $5::int8[]), (SELECT $6::bool[]))
		WITH ORDINALITY AS a (name, key, number, lease, fence, next, i)
	WHERE a.i BETWEEN 1 AND 1000000000
) AS u
WHERE (SELECT set_config('lock_timeout', '1', true)) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.number
	AND CASE WHEN u.fence IS NULL THEN r.ts <= u.now ELSE r.value = u.fence AND r.ts > u.now END
RETURNING r.value::int8, r.ts, u.now, u.i, r.ahead IS NOT NULL
