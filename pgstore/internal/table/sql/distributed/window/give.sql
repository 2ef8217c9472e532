WITH written AS (INSERT INTO %[1]s AS r (name, key, shard, value, ts, ahead)
VALUES ($1::text, $2::text, $3::int4, $4::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz),
	array[0, tstzrange_subdiff(coalesce($7::timestamptz, clock_timestamp()), '2000-01-01 00:00:00+00'::timestamptz)])
ON CONFLICT (name, key, shard) DO UPDATE
SET value = CASE WHEN r.ahead[2] > excluded.ahead[2]
		AND greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff($11::timestamptz, '2000-01-01 00:00:00+00'::timestamptz) > greatest(tstzrange_subdiff(r.ts, '2000-01-01 00:00:00+00'::timestamptz), excluded.ahead[2]) THEN $10::float8 ELSE 0 END, 0) > 0
		THEN greatest(r.value, least(r.value + $5::float8, $4::float8
			- greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff($11::timestamptz, '2000-01-01 00:00:00+00'::timestamptz) > greatest(tstzrange_subdiff(r.ts, '2000-01-01 00:00:00+00'::timestamptz), excluded.ahead[2]) THEN $10::float8 ELSE 0 END, 0)))
		ELSE least(r.value + $5::float8, greatest(r.value, $9::float8)) END,
	ahead = CASE WHEN r.ahead IS NOT NULL THEN array[
		greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff($11::timestamptz, '2000-01-01 00:00:00+00'::timestamptz) > greatest(tstzrange_subdiff(r.ts, '2000-01-01 00:00:00+00'::timestamptz), excluded.ahead[2]) THEN $10::float8 ELSE 0 END, 0), r.ahead[2]] END
RETURNING value, ts, paused, slots, ahead)
SELECT value, ts, paused, slots, ahead, clock_timestamp(), false FROM written
