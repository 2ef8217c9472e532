INSERT INTO %[1]s AS r (name, key, shard, value, ts)
SELECT $1::text, $2::text, $3::int4, round(date_part('epoch', coalesce($5::timestamptz, clock_timestamp())) * 1000000),
	coalesce($5::timestamptz, clock_timestamp()) + $4::float8 * interval '1 microsecond'
WHERE pg_try_advisory_xact_lock($6::int8)
ON CONFLICT (name, key, shard) DO UPDATE
SET value = greatest(r.value + 1, excluded.value), ts = excluded.ts, paused = NULL, ahead = NULL
WHERE round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000) >= $4::float8
RETURNING value::int8, ts, false
