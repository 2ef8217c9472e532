UPDATE %[1]s SET value = value WHERE name = $1::text AND key = $2::text RETURNING shard
