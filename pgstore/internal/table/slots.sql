-- The statements of a sliding window. A row's slots are an array: the length of a slot, how
-- many slots the newest is after that of ts, the value, and then the running totals (package
-- slots), so that a decision, and the row that it writes, are subscripts of it. ts is the start
-- of the slot that was written last. As the algebra has it:
--
--	passed	how many slots the one of now is after the newest; below 0 if that is ahead
--	newest	the newest total
--	later	as many as passed, and no more than move all totals out
--	held	newest less the total that is first when the slots have moved by later
--
-- and the granted count is added to newest, behind the totals that moved. A row that is not as its
-- definition writes it is turned away, read, and written anew before it is asked again; if the
-- value is another than in the array, a limit of another kind has written it.

-- name: take
-- Is a bucket's take, in the slot of now. In the conflict's clauses excluded.ts is where that
-- begins, counted from origin, a whole number of slots after ts.
--
-- $1 name  $2 key  $3 shard  $4 rate  $5 count
-- $6 tick: a slot, in microseconds  $7 now: NULL for the database's clock  $8 origin: where one begins
-- $9 size: how many totals, two more than slots  $10 floor: the lowest value to leave behind
-- $11 over: an instant by which a pause is known to be over; NULL for none
INSERT INTO rate_limits AS r (name, key, shard, value, ts, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz),
	array[$6::float8, 0, $4::float8 - $5::float8] || array_fill(0::float8, array[$9::int4 - 1]) || $5::float8)
ON CONFLICT (name, key, shard) DO UPDATE
SET value = $4::float8 - (r.slots[$9::int4 + 3] + $5::float8 - r.slots[4
		+ least(greatest(greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4]),
	ts = greatest(r.ts, excluded.ts),
	slots = array[$6::float8, 0, $4::float8 - (r.slots[$9::int4 + 3] + $5::float8 - r.slots[4
			+ least(greatest(greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4])]
		|| (r.slots || array_fill(r.slots[$9::int4 + 3], array[$9::int4]))[
			4 + least(greatest(greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4 :
			$9::int4 + 2 + least(greatest(greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4]
		|| (r.slots[$9::int4 + 3] + $5::float8)
WHERE r.slots[1] = $6::float8 AND cardinality(r.slots) = $9::int4 + 3 AND r.slots[3] = r.value AND r.slots[4] <= 8 * $4::float8
	AND date_bin($6::float8 * interval '1 microsecond', r.ts, $8::timestamptz) = r.ts
	AND greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) / $6::float8 - r.slots[2] >= 0
	AND r.slots[4 + least(greatest(greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4]
		> r.slots[$9::int4 + 3] + $5::float8 - $4::float8 - greatest(r.slots[$9::int4 + 3], $5::float8, $4::float8) * 1.4210854715202004e-14 + $10::float8
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $11::timestamptz))
RETURNING value, ts, paused, slots,
	clock_timestamp(), xmin::text

-- name: grant
-- Is a bucket's grant, in the slot of now. See prefetch_many in table.sql for the sub-select.
--
-- $1 name  $2 key  $3 shard  $4 count  $5 need
-- $6 rate  $7 tick  $8 size  $9 now: NULL for the database's clock
UPDATE rate_limits AS r
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

-- name: prefetch_many
-- Is grant for several rows, as a bucket's grant_many; and prefetches, as prefetch_many in
-- table.sql, for a lease that ends with the slot of now.
--
-- $1 keys  $2 definitions  $3 shards  $4 counts  $5 needs  $6 names  $7 rates
-- $8 ticks  $9 sizes  $10 now: NULL for the database's clock
-- $11 lasts  $12 prefetches  $13 outs  $14 spents  $15 spent_ends
UPDATE rate_limits AS r
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
