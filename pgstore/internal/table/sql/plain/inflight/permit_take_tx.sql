INSERT INTO %[1]s AS r (name, key, shard, value, ts)
SELECT $1::text, $2::text, $3::int4, round(date_part('epoch', coalesce($5::timestamptz, clock_timestamp())) * 1000000),
	coalesce($5::timestamptz, clock_timestamp()) + $4::float8 * interval '1 microsecond'
WHERE CASE WHEN NOT (pg_try_advisory_xact_lock($6::int8) OR $7::bool) THEN false
	WHEN set_config('ratelimit.lock_timeout', current_setting('lock_timeout'), true) IS NOT NULL
	THEN set_config('lock_timeout', '1ms', true) IS NOT NULL END
ON CONFLICT (name, key, shard) DO UPDATE
SET value = greatest(r.value + 1, excluded.value), ts = excluded.ts, paused = NULL, ahead = NULL
WHERE round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000) >= $4::float8
RETURNING value::int8, ts, set_config('lock_timeout', current_setting('ratelimit.lock_timeout'), true) IS NULL
