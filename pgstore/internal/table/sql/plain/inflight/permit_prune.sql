WITH idle AS (
	SELECT key, shard FROM %[1]s
	WHERE name = $1::text AND ts <= $2::timestamptz AND value < round(date_part('epoch', $2::timestamptz) * 1000000)
	LIMIT $3::int8 FOR UPDATE SKIP LOCKED
)
DELETE FROM %[1]s AS r USING idle WHERE r.name = $1::text AND r.key = idle.key AND r.shard = idle.shard
