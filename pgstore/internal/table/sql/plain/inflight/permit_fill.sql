INSERT INTO %[1]s (name, key, shard, value, ts)
SELECT a.name, a.key, a.number, 0, '1970-01-01 00:00:00+00'::timestamptz
FROM unnest($1::text[], $2::text[], $3::int4[]) AS a (name, key, number)
ON CONFLICT (name, key, shard) DO NOTHING
