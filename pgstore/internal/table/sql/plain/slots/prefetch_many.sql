UPDATE %[1]s AS r
SET (value, ts, slots, ahead) = (
	SELECT d.value, d.slot, array[u.tick, 0, d.value] || (r.slots || array_fill(d.newest, array[u.totals]))[4 + d.later : u.totals + 2 + d.later] || d.newest + u.total + d.more,
		CASE WHEN u.lasts IS NULL THEN r.ahead ELSE array[d.before + u.out + d.more, tstzrange_subdiff(d.slot + u.lasts, '2000-01-01 00:00:00+00'::timestamptz), d.more] END
	FROM (
		SELECT c.*, u.rate - (c.newest + (u.total + c.more) - r.slots[4 + c.later]) AS value
		FROM (
			SELECT b.*, greatest(least(u.prefetch, (u.rate - (b.newest + u.total - r.slots[4 + b.later])) / 2, u.rate / 2 - b.before - u.out), 0) AS more
			FROM (
				SELECT a.*, CASE WHEN r.ahead[2] > tstzrange_subdiff(a.slot, '2000-01-01 00:00:00+00'::timestamptz)
					THEN greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff(u.spent_end, '2000-01-01 00:00:00+00'::timestamptz) = r.ahead[2] THEN u.spent ELSE 0 END, 0) ELSE 0 END AS before
				FROM (
					SELECT greatest(r.ts, date_bin(u.tick * interval '1 microsecond', u.now, r.ts)) AS slot, r.slots[u.totals + 3] AS newest,
						least(floor(greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) / u.tick) - r.slots[2], u.totals - 1)::int4 AS later
					OFFSET 0
				) AS a OFFSET 0
			) AS b OFFSET 0
		) AS c OFFSET 0
	) AS d
)
FROM (
	SELECT a.i, ($6::text[])[a.definition] AS name, a.key, coalesce(($3::int4[])[a.i], 0) AS shard,
		($4::float8[])[a.i] AS total, coalesce(($5::float8[])[a.i], ($4::float8[])[a.i]) AS need,
		($7::float8[])[a.definition] AS rate, ($8::float8[])[a.definition] AS tick, ($9::int4[])[a.definition] AS totals,
		coalesce($10::timestamptz, CURRENT_TIMESTAMP) AS now,
		($11::float8[])[a.i] * interval '1 microsecond' AS lasts, coalesce(($12::float8[])[a.i], 0) AS prefetch, ($13::float8[])[a.i] AS out,
		($14::float8[])[a.i] AS spent, ($15::timestamptz[])[a.i] AS spent_end
	FROM unnest($1::text[], $2::int4[]) WITH ORDINALITY AS a (key, definition, i)
	WHERE a.i BETWEEN 1 AND 1000000000
) AS u
WHERE (SELECT set_config('lock_timeout', '1', true)) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND r.slots[1] = u.tick AND cardinality(r.slots) = u.totals + 3 AND r.slots[3] = r.value AND r.slots[4] <= 8 * u.rate
	AND floor(greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) / u.tick) - r.slots[2] >= 0
	AND r.slots[4 + least(greatest(floor(greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) / u.tick) - r.slots[2], 0), u.totals - 1)::int4]
		>= r.slots[u.totals + 3] + u.need - u.rate
RETURNING r.value, r.ts, clock_timestamp(), r.slots, r.ahead[3], u.i
