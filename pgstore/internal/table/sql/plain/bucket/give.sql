INSERT INTO %[1]s AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8, coalesce($6::timestamptz, clock_timestamp()))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = CASE WHEN r.ahead[1] > 0 THEN r.value + greatest(least($5::float8, $4::float8
		- least(r.value + greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8)
		- CASE WHEN (r.ahead[1] - CASE WHEN $11::timestamptz > greatest(r.ts, excluded.ts) THEN $10::float8 ELSE 0 END) > 0 THEN
			greatest((r.ahead[1] - CASE WHEN $11::timestamptz > greatest(r.ts, excluded.ts) THEN $10::float8 ELSE 0 END)
				+ round((r.ahead[2] - tstzrange_subdiff(excluded.ts, '2000-01-01 00:00:00+00'::timestamptz)) * 1000000) * $7::float8 / $8::float8, 0)
		ELSE 0 END), 0)
	ELSE least(r.value + $5::float8, greatest(r.value, $9::float8)) END,
	ahead = CASE WHEN r.ahead[1] > 0 THEN
		array[greatest((r.ahead[1] - CASE WHEN $11::timestamptz > greatest(r.ts, excluded.ts) THEN $10::float8 ELSE 0 END), 0), r.ahead[2]] ELSE r.ahead END
RETURNING value, ts, paused, slots, ahead,
	clock_timestamp(), xmax = 0
