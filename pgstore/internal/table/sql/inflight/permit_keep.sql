INSERT INTO %[1]s AS r (name, key, shard, value, ts, paused)
VALUES ($1::text, $2::text, $3::int4, 0, coalesce($5::timestamptz, clock_timestamp()),
	coalesce($5::timestamptz, clock_timestamp()) + $4::float8 * interval '1 microsecond')
ON CONFLICT (name, key, shard) DO UPDATE
SET value = CASE WHEN $7::bool OR $4::float8 = 0 AND r.paused > excluded.ts
		THEN greatest(r.value + 1, round(tstzrange_subdiff(excluded.ts, '1970-01-01 00:00:00+00'::timestamptz) * 1000000)) ELSE r.value END,
	ts = CASE WHEN ($7::bool OR $4::float8 = 0) AND r.paused > excluded.ts THEN r.paused
		WHEN $4::float8 > 0 THEN excluded.paused ELSE '1970-01-01 00:00:00+00'::timestamptz END,
	paused = CASE WHEN $7::bool OR $4::float8 = 0 THEN NULL ELSE r.paused END,
	ahead = CASE WHEN $4::float8 > 0 AND NOT $7::bool OR r.paused > excluded.ts THEN r.ahead END
WHERE r.value = $6::int8::float8 AND r.ts > excluded.ts
RETURNING value::int8, ts, ahead IS NOT NULL
