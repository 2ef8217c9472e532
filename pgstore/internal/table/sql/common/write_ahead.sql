UPDATE %[1]s SET value = $4::float8, ts = $5::timestamptz, slots = coalesce($6::float8[], slots), ahead = $7::float8[]
WHERE name = $1::text AND key = $2::text AND shard = $3::int4
