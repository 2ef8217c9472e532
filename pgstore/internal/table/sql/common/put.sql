INSERT INTO %[1]s AS r (name, key, shard, value, ts, paused, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8, $5::timestamptz, $6::timestamptz, $7::float8[])
ON CONFLICT (name, key, shard) DO UPDATE
SET value = excluded.value, ts = excluded.ts, paused = excluded.paused, slots = coalesce(excluded.slots, r.slots)
