SELECT l.value, l.ts, l.paused, l.slots, w.i, (SELECT clock_timestamp())
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[])) WITH ORDINALITY AS w (name, key, shard, i)
LEFT JOIN LATERAL (
	SELECT r.value, r.ts, r.paused, r.slots FROM %[1]s AS r
	WHERE r.name = w.name AND r.key = w.key AND r.shard = w.shard
	LIMIT 1 FOR UPDATE SKIP LOCKED
) AS l ON true
