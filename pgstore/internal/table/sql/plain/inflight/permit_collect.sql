WITH c AS MATERIALIZED (
	SELECT coalesce($7::timestamptz, CURRENT_TIMESTAMP) AS now, coalesce($7::timestamptz, CURRENT_TIMESTAMP) + $5::float8 * interval '1 microsecond' AS until,
		coalesce($7::timestamptz, CURRENT_TIMESTAMP) + $5::float8 * interval '0.5 microsecond' AS soon
), turn AS MATERIALIZED (
	SELECT CASE WHEN $6::int8 > 0 THEN r.value ELSE greatest(r.value + 1, round(date_part('epoch', c.now) * 1000000)) END AS fence
	FROM c JOIN %[1]s AS r ON r.name = $1::text AND r.key = $2::text AND r.shard = 10001
	WHERE CASE WHEN $6::int8 > 0 THEN r.value = $6::int8::float8 AND r.ts > c.now ELSE r.ts <= c.now END
	FOR UPDATE OF r SKIP LOCKED
), mine AS MATERIALIZED (
	SELECT r.shard FROM turn JOIN %[1]s AS r ON r.name = $1::text AND r.key = $2::text AND r.shard >= $8::int4 AND r.shard < $9::int4 CROSS JOIN c
	WHERE $6::int8 > 0 AND r.ahead[1] = turn.fence AND r.paused IS NULL AND r.ts > c.now
	FOR UPDATE OF r SKIP LOCKED
), free AS MATERIALIZED (
	SELECT r.shard FROM turn JOIN %[1]s AS r ON r.name = $1::text AND r.key = $2::text AND r.shard >= $8::int4 AND r.shard < least($3::int4, $9::int4) CROSS JOIN c
	WHERE r.ts <= c.now LIMIT $4::int4
	FOR UPDATE OF r SKIP LOCKED
), got AS MATERIALIZED (
	SELECT shard, what FROM (SELECT shard, 'keep' AS what FROM mine WHERE shard < $3::int4 UNION ALL SELECT shard, 'take' FROM free) AS m ORDER BY what LIMIT $4::int4
), done AS MATERIALIZED (
	SELECT count(*) = $4::int4 AS done FROM got
), claims AS MATERIALIZED (
	SELECT r.shard FROM turn JOIN %[1]s AS r ON r.name = $1::text AND r.key = $2::text AND r.shard >= $8::int4 AND r.shard < $9::int4 CROSS JOIN c CROSS JOIN done
	WHERE r.ts > c.now AND (r.ahead IS NULL OR r.paused IS NOT NULL)
		AND CASE WHEN done.done OR r.shard >= $3::int4 THEN r.ahead[1] = turn.fence ELSE r.ahead[1] IS DISTINCT FROM turn.fence OR r.paused < c.soon END
	LIMIT 1000 FOR UPDATE OF r SKIP LOCKED
), w AS (
	SELECT shard, what FROM got
	UNION ALL SELECT shard, 'drop' FROM mine WHERE shard NOT IN (SELECT shard FROM got)
	UNION ALL SELECT shard, CASE WHEN done.done OR shard >= $3::int4 THEN 'leave' ELSE 'claim' END FROM claims CROSS JOIN done
	UNION ALL SELECT 10001, 'turn' FROM turn
)
UPDATE %[1]s AS r
SET value = CASE what WHEN 'take' THEN greatest(r.value + 1, round(date_part('epoch', c.now) * 1000000)) WHEN 'turn' THEN turn.fence + done.done::int4 ELSE r.value END,
	ts = CASE WHEN what = 'turn' AND done.done THEN c.now + least((round(date_part('epoch', c.now) * 1000000) - turn.fence), $5::float8) * interval '1 microsecond'
		WHEN what IN ('take', 'keep', 'turn') THEN c.until WHEN what = 'drop' THEN '1970-01-01 00:00:00+00'::timestamptz ELSE r.ts END,
	paused = CASE what WHEN 'claim' THEN c.until END,
	ahead = CASE WHEN what IN ('take', 'keep', 'claim') AND NOT done.done THEN ARRAY[turn.fence] END
FROM w CROSS JOIN turn CROSS JOIN c CROSS JOIN done
WHERE (SELECT count(*) FROM turn) = 1 AND r.name = $1::text AND r.key = $2::text AND r.shard = w.shard AND (w.what <> 'keep' OR done.done OR r.ts < c.soon)
RETURNING r.shard, r.value::int8, w.what, done.done, c.now, c.until
