WITH written AS (INSERT INTO %[1]s AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8, coalesce($6::timestamptz, clock_timestamp()))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8) - $5::float8,
	ts = greatest(r.ts, excluded.ts)
WHERE r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $7::float8 / $8::float8 - $5::float8
		>= $9::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $10::timestamptz))
RETURNING value, ts, paused)
SELECT value, ts, paused, clock_timestamp(), pg_current_xact_id()::text FROM written
