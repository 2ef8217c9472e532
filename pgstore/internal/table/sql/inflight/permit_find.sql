SELECT count(*) = cardinality($1::text[])
FROM unnest($1::text[], $2::text[], $3::int4[], $4::int8[]) AS a (name, key, number, fence)
JOIN %[1]s AS r ON r.name = a.name AND r.key = a.key AND r.shard = a.number
WHERE r.value = a.fence::float8 AND r.ts > coalesce($5::timestamptz, clock_timestamp())
