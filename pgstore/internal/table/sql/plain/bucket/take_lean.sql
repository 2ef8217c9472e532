INSERT INTO %[1]s AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8, coalesce($6::timestamptz, clock_timestamp()))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8) - $5::float8,
	ts = greatest(r.ts, excluded.ts)
WHERE r.value + round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000) * $7::float8 / $8::float8 >= $9::float8
	AND (r.paused > excluded.ts) IS NOT TRUE
RETURNING value, ts, xmin::text
