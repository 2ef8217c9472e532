UPDATE %[1]s AS r
SET value = least(r.value + greatest(width_bucket(u.now, u.edges) - width_bucket(r.ts, u.had), 0) * u.rate, u.capacity) - u.total,
	ts = CASE WHEN width_bucket(u.now, u.edges) > width_bucket(r.ts, u.had) THEN u.edges[width_bucket(u.now, u.edges)] ELSE r.ts END
FROM (
	SELECT $1::text AS name, $2::text AS key, $3::int4 AS shard, $4::float8 AS total, $5::float8 AS need, $6::float8 AS capacity,
		$7::float8 AS rate, coalesce($8::timestamptz, statement_timestamp()) AS now, $9::timestamptz[] AS edges, $10::timestamptz[] AS had
) AS u
WHERE r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND width_bucket(u.now, u.edges) BETWEEN 1 AND cardinality(u.edges) - 1
	AND (r.ts >= u.had[1] OR r.value + width_bucket(u.now, u.edges) * u.rate >= u.capacity)
	AND r.value + greatest(width_bucket(u.now, u.edges) - width_bucket(r.ts, u.had), 0) * u.rate >= u.need
RETURNING r.value, r.ts, clock_timestamp()
