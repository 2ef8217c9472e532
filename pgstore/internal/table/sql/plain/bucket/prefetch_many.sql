UPDATE %[1]s AS r
SET (value, ts, ahead) = (
	SELECT c.settled - u.total - c.more, c.t, CASE WHEN u.lasts IS NULL THEN r.ahead ELSE array[c.before + u.out + c.more,
		greatest(CASE WHEN NOT c.forgotten THEN r.ahead[2] END, tstzrange_subdiff(c.t + u.lasts, '2000-01-01 00:00:00+00'::timestamptz)), c.more] END
	FROM (
		SELECT b.*, greatest(least(u.prefetch, (b.settled - u.total) / 2, u.capacity / 2 - b.before - u.out), 0) AS more
		FROM (
			SELECT a.*, CASE WHEN a.forgotten THEN 0
				ELSE greatest(r.ahead[1] - CASE WHEN u.spent_end > a.t THEN u.spent ELSE 0 END, 0) END AS before
			FROM (
				SELECT t.t, least(r.value + greatest(round(tstzrange_subdiff(t.t, r.ts) * 1000000), 0) * u.rate / u.period, u.capacity) AS settled,
					(r.ahead[1] > 0) IS NOT TRUE OR CASE WHEN u.fades
						THEN r.ahead[2] + 1 <= tstzrange_subdiff(t.t, '2000-01-01 00:00:00+00'::timestamptz)
							AND r.ahead[1] <= round((tstzrange_subdiff(t.t, '2000-01-01 00:00:00+00'::timestamptz) - r.ahead[2]) * 1000000) * u.rate / u.period
						ELSE r.ahead[2] <= tstzrange_subdiff(t.t, '2000-01-01 00:00:00+00'::timestamptz) END AS forgotten
				FROM (SELECT greatest(r.ts, date_bin(u.tick, u.now, r.ts)) AS t OFFSET 0) AS t OFFSET 0
			) AS a OFFSET 0
		) AS b OFFSET 0
	) AS c
)
FROM (
	SELECT a.i, ($6::text[])[a.definition] AS name, a.key, coalesce(($3::int4[])[a.i], 0) AS shard,
		($4::float8[])[a.i] AS total, coalesce(($5::float8[])[a.i], ($4::float8[])[a.i]) AS need,
		($7::float8[])[a.definition] AS capacity, ($8::float8[])[a.definition] AS rate, ($9::float8[])[a.definition] AS period,
		coalesce($10::timestamptz, CURRENT_TIMESTAMP) AS now, ($11::float8[])[a.definition] * interval '1 microsecond' AS tick, ($11::float8[])[a.definition] = 1 AS fades,
		($12::float8[])[a.i] * interval '1 microsecond' AS lasts, coalesce(($13::float8[])[a.i], 0) AS prefetch, ($14::float8[])[a.i] AS out,
		($15::float8[])[a.i] AS spent, ($16::timestamptz[])[a.i] AS spent_end, ($17::float8[])[a.definition] AS whole
	FROM unnest($1::text[], $2::int4[]) WITH ORDINALITY AS a (key, definition, i)
	WHERE a.i BETWEEN 1 AND 1000000000
) AS u
WHERE (SELECT set_config('lock_timeout', '1', true)) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND (u.total > 0 OR r.value <= u.whole)
	AND (r.value >= u.need
		OR r.value + greatest(round(tstzrange_subdiff(date_bin(u.tick, u.now, r.ts), r.ts) * 1000000), 0) * u.rate / u.period >= u.need)
RETURNING r.value, r.ts, clock_timestamp(), r.ahead[3], u.i
