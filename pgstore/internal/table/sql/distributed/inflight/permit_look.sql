SELECT r.shard, r.value::int8, r.ts,
	false
FROM %[1]s AS r WHERE r.name = $1::text AND r.key = $2::text AND r.shard < 10000
ORDER BY r.shard
