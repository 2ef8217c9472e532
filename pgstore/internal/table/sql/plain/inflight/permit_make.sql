INSERT INTO %[1]s (name, key, shard, value, ts)
SELECT u.name, u.key, u.number, round(date_part('epoch', u.now) * 1000000), u.now + u.lease * interval '1 microsecond'
FROM (
	SELECT a.name, a.key, a.number, a.lease, coalesce($5::timestamptz, CURRENT_TIMESTAMP) AS now
	FROM unnest($1::text[], $2::text[], $3::int4[], $4::float8[]) AS a (name, key, number, lease)
	WHERE set_config('lock_timeout', '1', true) IS NOT NULL
) AS u
ON CONFLICT (name, key, shard) DO NOTHING
RETURNING name, key, shard, value::int8, ts
