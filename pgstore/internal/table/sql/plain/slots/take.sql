INSERT INTO %[1]s AS r (name, key, shard, value, ts, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz),
	array[$6::float8, 0, $4::float8 - $5::float8] || array_fill(0::float8, array[$9::int4 - 1]) || $5::float8)
ON CONFLICT (name, key, shard) DO UPDATE
SET value = $4::float8 - (r.slots[$9::int4 + 3] + $5::float8 - r.slots[4
		+ least(greatest(greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4]),
	ts = greatest(r.ts, excluded.ts),
	slots = array[$6::float8, 0, $4::float8 - (r.slots[$9::int4 + 3] + $5::float8 - r.slots[4
			+ least(greatest(greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4])]
		|| (r.slots || array_fill(r.slots[$9::int4 + 3], array[$9::int4]))[
			4 + least(greatest(greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4 :
			$9::int4 + 2 + least(greatest(greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4]
		|| (r.slots[$9::int4 + 3] + $5::float8)
WHERE r.slots[1] = $6::float8 AND cardinality(r.slots) = $9::int4 + 3 AND r.slots[3] = r.value AND r.slots[4] <= 8 * $4::float8
	AND date_bin($6::float8 * interval '1 microsecond', r.ts, $8::timestamptz) = r.ts
	AND greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2] >= 0
	AND r.slots[4 + least(greatest(greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4]
		> r.slots[$9::int4 + 3] + $5::float8 - $4::float8 - greatest(r.slots[$9::int4 + 3], $5::float8, $4::float8) * 1.4210854715202004e-14 + $10::float8
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $11::timestamptz))
RETURNING value, ts, paused, slots,
	clock_timestamp(), xmin::text
