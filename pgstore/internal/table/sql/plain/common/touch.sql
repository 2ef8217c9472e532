INSERT INTO %[1]s AS r (name, key, shard, value, ts, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8,
	date_bin($5::float8 * interval '1 microsecond', coalesce($6::timestamptz, clock_timestamp()), $7::timestamptz), $8::float8[])
ON CONFLICT (name, key, shard) DO UPDATE SET value = r.value
RETURNING value, ts, paused, slots, ahead,
	clock_timestamp(), xmax = 0
