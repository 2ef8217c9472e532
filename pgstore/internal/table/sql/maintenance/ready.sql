SELECT name, key, shard, value, ts, paused, slots, ahead FROM %[1]s LIMIT 0
