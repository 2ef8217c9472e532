SELECT value, ts, paused, slots, key, shard, clock_timestamp() FROM %[1]s
WHERE name = $1::text AND (key, shard) > ($2::text, $3::int4)
	AND ($5::timestamptz IS NULL OR ts <= $5::timestamptz
		AND (ahead[1] > 0 AND ahead[2] > tstzrange_subdiff($5::timestamptz, '2000-01-01 00:00:00+00'::timestamptz)) IS NOT TRUE)
ORDER BY key, shard
LIMIT $4::int8
