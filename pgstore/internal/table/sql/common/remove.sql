DELETE FROM %[1]s WHERE name = $1::text AND key = $2::text AND shard = $3::int4
