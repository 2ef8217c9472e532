SELECT value = $4::int8::float8 AND ts > coalesce($5::timestamptz, clock_timestamp()) FROM %[1]s
WHERE name = $1::text AND key = $2::text AND shard = $3::int4
