WITH made AS (
	INSERT INTO %[1]s (name, key, shard, value, ts)
	SELECT $1::text, $2::text, 10000, 0, CURRENT_TIMESTAMP
	WHERE NOT EXISTS (SELECT FROM %[1]s AS r WHERE r.name = $1::text AND r.key = $2::text AND r.shard = 10000)
	ON CONFLICT (name, key, shard) DO NOTHING
	RETURNING value
), due AS (
	SELECT FROM %[1]s AS r
	WHERE r.name = $1::text AND r.key = $2::text AND r.shard = 10000
		AND r.ts NOT BETWEEN CURRENT_TIMESTAMP - $5::float8 * interval '1 microsecond' AND CURRENT_TIMESTAMP + interval '1 second'
	FOR UPDATE SKIP LOCKED
), turn AS (
	UPDATE %[1]s AS r
	SET value = CASE WHEN r.value + $4::int4 < $3::int4 THEN r.value + $4::int4 ELSE 0 END, ts = CURRENT_TIMESTAMP
	FROM due WHERE r.name = $1::text AND r.key = $2::text AND r.shard = 10000
	RETURNING r.value
)
SELECT t.first, p.shard, p.value::int8, p.ts, p.locked
FROM (SELECT value::int4 AS first FROM made UNION ALL SELECT value::int4 FROM turn) AS t
LEFT JOIN LATERAL (
	SELECT r.shard, r.value, r.ts,
		NOT (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot())) AS locked
	FROM %[1]s AS r
	WHERE r.name = $1::text AND r.key = $2::text AND r.shard >= t.first AND r.shard < least(t.first + $4::int4, 10000)
	ORDER BY r.shard
) AS p ON true
