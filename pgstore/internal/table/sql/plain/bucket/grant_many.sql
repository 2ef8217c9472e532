UPDATE %[1]s AS r
SET value = least(r.value + greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) * u.rate / u.period, u.capacity) - u.total,
	ts = greatest(r.ts, u.now)
FROM (
	SELECT a.i, ($6::text[])[a.definition] AS name, a.key, coalesce(($3::int4[])[a.i], 0) AS shard,
		($4::float8[])[a.i] AS total, coalesce(($5::float8[])[a.i], ($4::float8[])[a.i]) AS need,
		($7::float8[])[a.definition] AS capacity, ($8::float8[])[a.definition] AS rate, ($9::float8[])[a.definition] AS period,
		coalesce($10::timestamptz, CURRENT_TIMESTAMP) AS now
	FROM unnest($1::text[], $2::int4[]) WITH ORDINALITY AS a (key, definition, i)
	WHERE a.i BETWEEN 1 AND 1000000000
) AS u
WHERE (SELECT set_config('lock_timeout', '1', true)) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND (r.value >= u.need OR r.value + greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) * u.rate / u.period >= u.need)
RETURNING r.value, r.ts, clock_timestamp(), u.i
