UPDATE %[1]s AS r
SET (value, ts, slots) = (
	SELECT b.value, b.slot, array[u.width, 0, b.value] || (r.slots || array_fill(b.newest, array[u.totals]))[4 + b.later : u.totals + 2 + b.later] || b.newest + u.total
	FROM (
		SELECT a.*, u.rate - (a.newest + u.total - r.slots[4 + a.later]) AS value
		FROM (
			SELECT greatest(r.ts, date_bin(u.tick, u.now, r.ts)) AS slot, r.slots[u.totals + 3] AS newest,
				least(floor(greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) / u.width) - r.slots[2], u.totals - 1)::int4 AS later
			OFFSET 0
		) AS a OFFSET 0
	) AS b
)
FROM (
	SELECT $1::text AS name, $2::text AS key, $3::int4 AS shard, $4::float8 AS total, $5::float8 AS need,
		$6::float8 AS rate, $7::float8 AS width, $7::float8 * interval '1 microsecond' AS tick, $8::int4 AS totals,
		coalesce($9::timestamptz, CURRENT_TIMESTAMP) AS now
) AS u
WHERE set_config('lock_timeout', '1', true) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND r.slots[1] = u.width AND cardinality(r.slots) = u.totals + 3 AND r.slots[3] = r.value AND r.slots[4] <= 8 * u.rate
	AND floor(greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) / u.width) - r.slots[2] >= 0
	AND r.slots[4 + least(greatest(floor(greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) / u.width) - r.slots[2], 0), u.totals - 1)::int4]
		>= r.slots[u.totals + 3] + u.need - u.rate
RETURNING r.value, r.ts, clock_timestamp(), r.slots
