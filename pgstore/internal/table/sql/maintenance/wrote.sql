SELECT EXISTS (SELECT name FROM %[1]s
WHERE name = $1::text AND key = $2::text AND shard = $3::int4 AND xmin::text = $4::text
	AND value = $5::float8 AND ts = $6::timestamptz)
