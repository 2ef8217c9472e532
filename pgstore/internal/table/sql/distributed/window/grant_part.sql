INSERT INTO %[1]s AS r (name, key, shard, value, ts)
VALUES %%s
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $3::float8 / $4::float8, $2::float8) - ($2::float8 - excluded.value),
	ts = greatest(r.ts, excluded.ts)
WHERE r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $3::float8 / $4::float8 >= $2::float8 - excluded.value
	AND date_bin($4::float8 * interval '1 microsecond', r.ts, excluded.ts) = r.ts
	AND (r.paused IS NULL OR r.paused <= excluded.ts)
RETURNING key, shard, value, ts
