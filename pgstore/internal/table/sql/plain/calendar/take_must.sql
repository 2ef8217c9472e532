INSERT INTO %[1]s AS r (name, key, shard, value, ts)
SELECT $1::text, $2::text, $3::int4, CASE WHEN n.i BETWEEN 1 AND cardinality($7::timestamptz[]) - 1
		THEN $4::float8 - $5::float8 ELSE ($11::text || ' ' || n.now::text)::float8 END, ($7::timestamptz[])[n.i]
FROM (
	SELECT now, width_bucket(now, $7::timestamptz[]) AS i FROM (SELECT coalesce($6::timestamptz, clock_timestamp()) AS now OFFSET 0) AS m OFFSET 0
) AS n
ON CONFLICT (name, key, shard) DO UPDATE
SET (value, ts) = (
	SELECT CASE WHEN b.refilled - $5::float8 >= $10::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
			AND b.i BETWEEN 1 AND cardinality($7::timestamptz[]) - 1
			AND (r.ts >= ($8::timestamptz[])[1] OR r.value + b.i * $9::float8 >= $4::float8)
			AND (r.paused > b.now) IS NOT TRUE
		THEN b.refilled - $5::float8
		ELSE ($11::text || ' ' || encode(float8send(r.value) || timestamptz_send(r.ts) || timestamptz_send(b.now)
			|| coalesce(timestamptz_send(r.paused), ''), 'hex') || ' .')::float8 END,
		CASE WHEN b.i > b.had THEN ($7::timestamptz[])[b.i] ELSE r.ts END
	FROM (
		SELECT a.now, a.i, a.had, least(r.value + greatest(a.i - a.had, 0) * $9::float8, $4::float8) AS refilled
		FROM (
			SELECT n.now, width_bucket(n.now, $7::timestamptz[]) AS i, width_bucket(r.ts, $8::timestamptz[]) AS had
			FROM (SELECT coalesce($6::timestamptz, clock_timestamp()) AS now OFFSET 0) AS n OFFSET 0
		) AS a OFFSET 0
	) AS b
)
RETURNING value, ts, paused, clock_timestamp(), xmin::text
