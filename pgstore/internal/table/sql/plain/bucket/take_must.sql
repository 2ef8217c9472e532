INSERT INTO %[1]s AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8, coalesce($6::timestamptz, clock_timestamp()))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = CASE WHEN
	least(r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8) - $5::float8
		>= $9::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND (r.paused > excluded.ts) IS NOT TRUE
	THEN least(r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8) - $5::float8
	ELSE ($10::text || ' ' || encode(float8send(r.value) || timestamptz_send(r.ts) || timestamptz_send(excluded.ts)
		|| coalesce(timestamptz_send(r.paused), ''), 'hex') || ' .')::float8 END,
	ts = greatest(r.ts, excluded.ts)
RETURNING value, ts, paused, clock_timestamp(), xmin::text
