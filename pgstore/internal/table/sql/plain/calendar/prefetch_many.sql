UPDATE %[1]s AS r
SET (value, ts, ahead) = (
	SELECT c.settled - u.total - c.more, c.t, CASE WHEN u.prefetch IS NULL THEN r.ahead ELSE array[c.before + u.out + c.more,
		greatest(CASE WHEN NOT c.forgotten THEN r.ahead[2] END, tstzrange_subdiff(u.edges[width_bucket(c.t, u.had) + 1], '2000-01-01 00:00:00+00'::timestamptz)), c.more] END
	FROM (
		SELECT b.*, CASE WHEN u.prefetch IS NULL THEN 0
			ELSE greatest(least(u.prefetch, (b.settled - u.total) / 2, u.capacity / 2 - b.before - u.out), 0) END AS more
		FROM (
			SELECT a.*, CASE WHEN a.forgotten THEN 0
				ELSE greatest(r.ahead[1] - CASE WHEN u.spent_end > a.t THEN u.spent ELSE 0 END, 0) END AS before
			FROM (
				SELECT t.t, least(r.value + greatest(width_bucket(u.now, u.edges) - width_bucket(r.ts, u.had), 0) * u.rate, u.capacity) AS settled,
					(r.ahead[1] > 0) IS NOT TRUE OR r.ahead[2] <= tstzrange_subdiff(t.t, '2000-01-01 00:00:00+00'::timestamptz) AS forgotten
				FROM (SELECT CASE WHEN width_bucket(u.now, u.edges) > width_bucket(r.ts, u.had) THEN u.edges[width_bucket(u.now, u.edges)] ELSE r.ts END AS t OFFSET 0) AS t OFFSET 0
			) AS a OFFSET 0
		) AS b OFFSET 0
	) AS c
)
FROM (
	SELECT a.i, ($6::text[])[a.definition] AS name, a.key, coalesce(($3::int4[])[a.i], 0) AS shard,
		($4::float8[])[a.i] AS total, coalesce(($5::float8[])[a.i], ($4::float8[])[a.i]) AS need,
		($7::float8[])[a.definition] AS capacity, ($8::float8[])[a.definition] AS rate,
		($9::timestamptz[])[(a.definition - 1) * $11::int4 + 1 : a.definition * $11::int4] AS edges,
		($10::timestamptz[])[(a.definition - 1) * $11::int4 + 1 : a.definition * $11::int4] AS had,
		coalesce($12::timestamptz, CURRENT_TIMESTAMP) AS now,
		CASE WHEN ($13::float8[])[a.i] IS NOT NULL THEN coalesce(($14::float8[])[a.i], 0) END AS prefetch, ($15::float8[])[a.i] AS out, ($16::float8[])[a.i] AS spent, ($17::timestamptz[])[a.i] AS spent_end
	FROM unnest($1::text[], $2::int4[]) WITH ORDINALITY AS a (key, definition, i)
	WHERE a.i BETWEEN 1 AND 1000000000
) AS u
WHERE (SELECT set_config('lock_timeout', '1', true)) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND (u.total > 0 OR r.value <= u.capacity)
	AND width_bucket(u.now, u.edges) BETWEEN 1 AND cardinality(u.edges) - 1
	AND (r.ts >= u.had[1] OR r.value + width_bucket(u.now, u.edges) * u.rate >= u.capacity)
	AND r.ts < u.had[cardinality(u.had)]
	AND r.value + greatest(width_bucket(u.now, u.edges) - width_bucket(r.ts, u.had), 0) * u.rate >= u.need
RETURNING r.value, r.ts, clock_timestamp(), r.ahead[3], u.i
