UPDATE %[1]s AS r
SET value = least(r.value + greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) * u.rate / u.period, u.capacity) - u.total,
	ts = greatest(r.ts, u.now)
FROM (
	SELECT $1::text AS name, $2::text AS key, $3::int4 AS shard, $4::float8 AS total, $5::float8 AS need, $6::float8 AS capacity,
		$7::float8 AS rate, $8::float8 AS period, coalesce($9::timestamptz, statement_timestamp()) AS now
) AS u
WHERE r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND r.value + greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) * u.rate / u.period >= u.need
RETURNING r.value, r.ts, clock_timestamp()
