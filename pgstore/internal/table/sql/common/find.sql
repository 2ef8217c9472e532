SELECT value, ts, paused, slots, shard FROM %[1]s WHERE name = $1::text AND key = $2::text
