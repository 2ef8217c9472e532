INSERT INTO %[1]s (name, key, shard, value, ts)
SELECT u.name, u.key, u.shard, u.capacity, date_bin(u.tick * interval '1 microsecond', n.now, u.origin)
FROM (SELECT coalesce($7::timestamptz, clock_timestamp()) AS now OFFSET 0) AS n,
	unnest($1::text[], $2::text[], $3::int4[], $4::float8[], $5::float8[], $6::timestamptz[])
		AS u (name, key, shard, capacity, tick, origin)
ON CONFLICT (name, key, shard) DO NOTHING
