WITH written AS (INSERT INTO %[1]s AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $9::float8 / $6::float8, $4::float8) - $5::float8,
	ts = greatest(r.ts, excluded.ts)
WHERE r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $9::float8 / $6::float8 - $5::float8
		>= $10::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND date_bin($6::float8 * interval '1 microsecond', r.ts, $8::timestamptz) = r.ts
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $11::timestamptz))
RETURNING value, ts, paused)
SELECT value, ts, paused, clock_timestamp(), pg_current_xact_id()::text FROM written
