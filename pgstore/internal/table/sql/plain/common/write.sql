UPDATE %[1]s AS r
SET value = w.value, ts = w.ts, paused = w.paused, slots = coalesce(w.slots::float8[], r.slots)
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]),
	(SELECT $4::float8[]), (SELECT $5::timestamptz[]), (SELECT $6::timestamptz[]), (SELECT $7::text[]))
	WITH ORDINALITY AS w (name, key, shard, value, ts, paused, slots, i)
WHERE r.name = w.name AND r.key = w.key AND r.shard = w.shard AND w.i BETWEEN 1 AND 1000000000
