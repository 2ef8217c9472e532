WITH same AS (
	SELECT r.key, r.shard FROM unnest($2::text[], $3::int4[], $4::float8[], $5::timestamptz[], $6::timestamptz[]) AS w (key, shard, value, ts, paused)
	JOIN %[1]s AS r ON r.name = $1::text AND r.key = w.key AND r.shard = w.shard AND r.ts = w.ts AND abs(r.value - w.value) <= abs(r.value) * 1e-14
		AND r.paused IS NOT DISTINCT FROM w.paused
	FOR UPDATE OF r SKIP LOCKED
)
DELETE FROM %[1]s AS r USING same
WHERE r.name = $1::text AND r.key = same.key AND r.shard = same.shard
