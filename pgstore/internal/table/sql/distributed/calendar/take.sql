WITH written AS (INSERT INTO %[1]s AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	coalesce((($7::timestamptz[])[1 : cardinality($7::timestamptz[]) - 1])[width_bucket(coalesce($6::timestamptz, clock_timestamp()), $7::timestamptz[])],
		$12::timestamptz))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(width_bucket(excluded.ts, $7::timestamptz[]) - width_bucket(r.ts, $8::timestamptz[]), 0) * $9::float8, $4::float8) - $5::float8,
	ts = CASE WHEN width_bucket(excluded.ts, $7::timestamptz[]) > width_bucket(r.ts, $8::timestamptz[]) THEN excluded.ts ELSE r.ts END
WHERE least(r.value + greatest(width_bucket(excluded.ts, $7::timestamptz[]) - width_bucket(r.ts, $8::timestamptz[]), 0) * $9::float8, $4::float8) - $5::float8
		>= $10::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND width_bucket(excluded.ts, $7::timestamptz[]) BETWEEN 1 AND cardinality($7::timestamptz[]) - 1
	AND (r.ts >= ($8::timestamptz[])[1] OR r.value + width_bucket(excluded.ts, $7::timestamptz[]) * $9::float8 >= $4::float8)
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $11::timestamptz))
RETURNING value, ts, paused)
SELECT value, ts, paused, clock_timestamp(), pg_current_xact_id()::text FROM written
