INSERT INTO %[1]s AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz))
ON CONFLICT (name, key, shard) DO UPDATE
SET (value, ts) = (
	SELECT CASE WHEN b.refilled - $5::float8 >= $10::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
			AND (r.paused > b.now) IS NOT TRUE
		THEN b.refilled - $5::float8
		ELSE ($11::text || ' ' || encode(float8send(r.value) || timestamptz_send(r.ts) || timestamptz_send(b.now)
			|| coalesce(timestamptz_send(r.paused), ''), 'hex') || ' .')::float8 END,
		b.edge
	FROM (
		SELECT a.now, a.edge, least(r.value + round(tstzrange_subdiff(a.edge, r.ts) * 1000000) * $9::float8 / $6::float8, $4::float8) AS refilled
		FROM (
			SELECT n.now, date_bin($6::float8 * interval '1 microsecond', greatest(n.now, r.ts), r.ts) AS edge
			FROM (SELECT coalesce($7::timestamptz, clock_timestamp()) AS now OFFSET 0) AS n OFFSET 0
		) AS a OFFSET 0
	) AS b
)
RETURNING value, ts, paused, clock_timestamp(), xmin::text
