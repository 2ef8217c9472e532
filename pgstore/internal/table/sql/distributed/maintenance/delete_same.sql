DELETE FROM %[1]s
WHERE name = $1::text AND key = $2::text AND shard = $3::int4 AND ts = $5::timestamptz AND abs(value - $4::float8) <= abs(value) * 1e-14
	AND coalesce(paused = $6::timestamptz, paused IS NULL AND $6::timestamptz IS NULL)
