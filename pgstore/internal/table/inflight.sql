-- The statements of permits, of which a limit of how many at once has so many for each key. A
-- permit is a row: shard is its number, ts the end of its lease, and value its fence, which grows
-- each time that it is taken, and is at least the instant of that in microseconds since 1970.
-- A permit that was released has a ts of long ago, so that it is free whatever the clock does.
--
-- Leases are in microseconds. One that is renewed ends a lease from now, also when the clock
-- went back.
--
-- A permit that is held can be claimed: paused is the end of the claim, and ahead the turn of the
-- waiter that collects. When it is released, it is that waiter's: with a new fence, until the end
-- of the claim. What is taken is not claimed.

-- name: permit_take
-- Takes a permit whose lease is over, or that was never taken, and returns a row if and only if
-- it did. It leaves no predicate lock under SERIALIZABLE, unless it is in a subtransaction.
--
-- $1 name  $2 key  $3 number  $4 lease  $5 now: NULL for the database's clock
INSERT INTO rate_limits AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, round(date_part('epoch', coalesce($5::timestamptz, clock_timestamp())) * 1000000),
	coalesce($5::timestamptz, clock_timestamp()) + $4::float8 * interval '1 microsecond')
ON CONFLICT (name, key, shard) DO UPDATE
SET value = greatest(r.value + 1, excluded.value), ts = excluded.ts, paused = NULL, ahead = NULL
WHERE round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000) >= $4::float8
RETURNING value::int8, ts, false

-- name: permit_keep
-- Renews, hands on or releases a permit that is held by a fence, and returns that, or the new
-- one, if and only if it is held; and whether the waiter that has claimed it has it now. One that is
-- not there it makes, free and with a fence of 0. paused carries the end of the lease to where the
-- clock cannot be read, and is not kept.
--
-- $1 name  $2 key  $3 number  $4 lease: 0 to release  $5 now: NULL for the database's clock
-- $6 fence  $7 next: whether it is taken anew
INSERT INTO rate_limits AS r (name, key, shard, value, ts, paused)
VALUES ($1::text, $2::text, $3::int4, 0, coalesce($5::timestamptz, clock_timestamp()),
	coalesce($5::timestamptz, clock_timestamp()) + $4::float8 * interval '1 microsecond')
ON CONFLICT (name, key, shard) DO UPDATE
SET value = CASE WHEN $7::bool OR $4::float8 = 0 AND r.paused > excluded.ts
		THEN greatest(r.value + 1, round(tstzrange_subdiff(excluded.ts, '1970-01-01 00:00:00+00'::timestamptz) * 1000000)) ELSE r.value END,
	ts = CASE WHEN ($7::bool OR $4::float8 = 0) AND r.paused > excluded.ts THEN r.paused
		WHEN $4::float8 > 0 THEN excluded.paused ELSE '1970-01-01 00:00:00+00'::timestamptz END,
	paused = CASE WHEN $7::bool OR $4::float8 = 0 THEN NULL ELSE r.paused END,
	ahead = CASE WHEN $4::float8 > 0 AND NOT $7::bool OR r.paused > excluded.ts THEN r.ahead END
WHERE r.value = $6::int8::float8 AND r.ts > excluded.ts
RETURNING value::int8, ts, ahead IS NOT NULL

-- name: permit_change
-- Takes, renews, hands on and releases permits, each by itself, and returns those of which it
-- was true, and whether a waiter that has claimed it has it now. It passes over rows that somebody
-- has locked, as grant does.
--
-- $1 names  $2 keys  $3 numbers  $4 leases: 0 to release  $5 fences: NULL to take
-- $6 next: whether it is taken anew  $7 now: NULL for the database's clock
UPDATE rate_limits AS r
SET value = CASE WHEN u.next OR u.lease = 0 AND r.paused > u.now THEN greatest(r.value + 1, round(date_part('epoch', u.now) * 1000000)) ELSE r.value END,
	ts = CASE WHEN (u.next AND u.fence IS NOT NULL OR u.lease = 0) AND r.paused > u.now THEN r.paused
		WHEN u.lease > 0 THEN u.now + u.lease * interval '1 microsecond' ELSE '1970-01-01 00:00:00+00'::timestamptz END,
	paused = CASE WHEN u.next OR u.lease = 0 THEN NULL ELSE r.paused END,
	ahead = CASE WHEN u.fence IS NOT NULL AND (u.lease > 0 AND NOT u.next OR r.paused > u.now) THEN r.ahead END
FROM (
	SELECT a.name, a.key, a.number, a.lease, a.fence::float8 AS fence, a.next, a.i, coalesce($7::timestamptz, CURRENT_TIMESTAMP) AS now
	FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]), (SELECT $4::float8[]), (SELECT $5::int8[]), (SELECT $6::bool[]))
		WITH ORDINALITY AS a (name, key, number, lease, fence, next, i)
	WHERE a.i BETWEEN 1 AND 1000000000
) AS u
WHERE (SELECT set_config('lock_timeout', '1', true)) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.number
	AND CASE WHEN u.fence IS NULL THEN r.ts <= u.now ELSE r.value = u.fence AND r.ts > u.now END
RETURNING r.value::int8, r.ts, u.now, u.i, r.ahead IS NOT NULL

-- name: permit_all
-- Takes, renews and releases permits, all or none, and returns them. If another transaction has one
-- locked, it is none.
--
-- $1 names  $2 keys  $3 numbers  $4 leases: 0 to release  $5 fences: NULL to take
-- $6 now: NULL for the database's clock
WITH u AS MATERIALIZED (
	SELECT a.name, a.key, a.number, a.lease, a.fence::float8 AS fence, a.fence IS NULL AS next, a.i, coalesce($6::timestamptz, CURRENT_TIMESTAMP) AS now
	FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]), (SELECT $4::float8[]), (SELECT $5::int8[]))
		WITH ORDINALITY AS a (name, key, number, lease, fence, i)
	WHERE a.i BETWEEN 1 AND 1000000000
), fit AS MATERIALIZED (
	SELECT FROM u JOIN rate_limits AS r ON r.name = u.name AND r.key = u.key AND r.shard = u.number
	WHERE CASE WHEN u.fence IS NULL THEN r.ts <= u.now ELSE r.value = u.fence AND r.ts > u.now END
	ORDER BY u.i FOR UPDATE OF r SKIP LOCKED
)
UPDATE rate_limits AS r
SET value = CASE WHEN u.next OR u.lease = 0 AND r.paused > u.now THEN greatest(r.value + 1, round(date_part('epoch', u.now) * 1000000)) ELSE r.value END,
	ts = CASE WHEN (u.next AND u.fence IS NOT NULL OR u.lease = 0) AND r.paused > u.now THEN r.paused
		WHEN u.lease > 0 THEN u.now + u.lease * interval '1 microsecond' ELSE '1970-01-01 00:00:00+00'::timestamptz END,
	paused = CASE WHEN u.next OR u.lease = 0 THEN NULL ELSE r.paused END,
	ahead = CASE WHEN u.fence IS NOT NULL AND (u.lease > 0 AND NOT u.next OR r.paused > u.now) THEN r.ahead END
FROM u
WHERE r.name = u.name AND r.key = u.key AND r.shard = u.number AND (SELECT count(*) FROM fit) = cardinality($1::text[])
RETURNING r.value::int8, r.ts, u.now, u.i, r.ahead IS NOT NULL

-- name: permit_fill
-- Makes permits that are not there, free.
--
-- $1 names  $2 keys  $3 numbers
INSERT INTO rate_limits (name, key, shard, value, ts)
SELECT a.name, a.key, a.number, 0, '1970-01-01 00:00:00+00'::timestamptz
FROM unnest($1::text[], $2::text[], $3::int4[]) AS a (name, key, number)
ON CONFLICT (name, key, shard) DO NOTHING

-- name: permit_collect
-- Takes what is free of a key's permits for the one waiter that collects there, and claims those that
-- are held, until it has as many as it wants; then it lets go of its claims. It returns each row that it
-- changed, and when it is done all that it has; nothing if it has not the turn. The turn is a permit too, with
-- the number 10001, which no other has. When the waiter has all, the turn is nobody's for as long as it
-- lasted, so that others are served between two that collect. It passes over rows that somebody has locked.
--
-- $1 name  $2 key  $3 limit  $4 wanted  $5 lease  $6 turn: its fence, or 0 to take it
-- $7 now: NULL for the database's clock
WITH c AS MATERIALIZED (
	SELECT coalesce($7::timestamptz, CURRENT_TIMESTAMP) AS now, coalesce($7::timestamptz, CURRENT_TIMESTAMP) + $5::float8 * interval '1 microsecond' AS until,
		coalesce($7::timestamptz, CURRENT_TIMESTAMP) + $5::float8 * interval '0.5 microsecond' AS soon
), turn AS MATERIALIZED (
	SELECT CASE WHEN $6::int8 > 0 THEN r.value ELSE greatest(r.value + 1, round(date_part('epoch', c.now) * 1000000)) END AS fence
	FROM c JOIN rate_limits AS r ON r.name = $1::text AND r.key = $2::text AND r.shard = 10001
	WHERE CASE WHEN $6::int8 > 0 THEN r.value = $6::int8::float8 AND r.ts > c.now ELSE r.ts <= c.now END
	FOR UPDATE OF r SKIP LOCKED
), mine AS MATERIALIZED (
	SELECT r.shard FROM turn JOIN rate_limits AS r ON r.name = $1::text AND r.key = $2::text AND r.shard < $3::int4 CROSS JOIN c
	WHERE $6::int8 > 0 AND r.ahead[1] = turn.fence AND r.paused IS NULL AND r.ts > c.now
	FOR UPDATE OF r SKIP LOCKED
), free AS MATERIALIZED (
	SELECT r.shard FROM turn JOIN rate_limits AS r ON r.name = $1::text AND r.key = $2::text AND r.shard < $3::int4 CROSS JOIN c
	WHERE r.ts <= c.now LIMIT $4::int4
	FOR UPDATE OF r SKIP LOCKED
), got AS MATERIALIZED (
	SELECT shard, what FROM (SELECT shard, 'keep' AS what FROM mine UNION ALL SELECT shard, 'take' FROM free) AS m ORDER BY what LIMIT $4::int4
), done AS MATERIALIZED (
	SELECT count(*) = $4::int4 AS done FROM got
), claims AS MATERIALIZED (
	SELECT r.shard FROM turn JOIN rate_limits AS r ON r.name = $1::text AND r.key = $2::text AND r.shard < $3::int4 CROSS JOIN c CROSS JOIN done
	WHERE r.ts > c.now AND r.shard NOT IN (SELECT shard FROM mine)
		AND CASE WHEN done.done THEN r.ahead[1] = turn.fence ELSE r.ahead[1] IS DISTINCT FROM turn.fence OR r.paused < c.soon END
	LIMIT 1000 FOR UPDATE OF r SKIP LOCKED
), w AS (
	SELECT shard, what FROM got
	UNION ALL SELECT shard, 'drop' FROM mine WHERE shard NOT IN (SELECT shard FROM got)
	UNION ALL SELECT shard, CASE WHEN done.done THEN 'leave' ELSE 'claim' END FROM claims CROSS JOIN done
	UNION ALL SELECT 10001, 'turn' FROM turn
)
UPDATE rate_limits AS r
SET value = CASE what WHEN 'take' THEN greatest(r.value + 1, round(date_part('epoch', c.now) * 1000000)) WHEN 'turn' THEN turn.fence ELSE r.value END,
	ts = CASE WHEN what = 'turn' AND done.done THEN c.now + least((round(date_part('epoch', c.now) * 1000000) - turn.fence), $5::float8) * interval '1 microsecond'
		WHEN what IN ('take', 'keep', 'turn') THEN c.until WHEN what = 'drop' THEN '1970-01-01 00:00:00+00'::timestamptz ELSE r.ts END,
	paused = CASE what WHEN 'claim' THEN c.until END,
	ahead = CASE WHEN what IN ('take', 'keep', 'claim') THEN ARRAY[turn.fence] END
FROM w CROSS JOIN turn CROSS JOIN c CROSS JOIN done
WHERE r.name = $1::text AND r.key = $2::text AND r.shard = w.shard AND (w.what <> 'keep' OR done.done OR r.ts < c.soon)
RETURNING r.shard, r.value::int8, w.what, done.done, c.now, c.until

-- name: permit_abandon
-- Lets go of what a waiter has and claims that collects no more, and of its turn. It returns how many
-- rows are left, since another transaction has them locked.
--
-- $1 name  $2 key  $3 turn
WITH its AS MATERIALIZED (
	SELECT r.shard FROM rate_limits AS r
	WHERE r.name = $1::text AND r.key = $2::text AND CASE r.shard WHEN 10001 THEN r.value ELSE r.ahead[1] END = $3::int8::float8
), free AS MATERIALIZED (
	SELECT r.shard FROM rate_limits AS r
	WHERE r.name = $1::text AND r.key = $2::text AND CASE r.shard WHEN 10001 THEN r.value ELSE r.ahead[1] END = $3::int8::float8
	FOR UPDATE SKIP LOCKED
), freed AS (
	UPDATE rate_limits AS r SET ts = CASE WHEN r.paused IS NULL THEN '1970-01-01 00:00:00+00'::timestamptz ELSE r.ts END, paused = NULL, ahead = NULL
	FROM free WHERE r.name = $1::text AND r.key = $2::text AND r.shard = free.shard
)
SELECT (SELECT count(*) FROM its) - (SELECT count(*) FROM free)

-- name: permit_make
-- Takes permits that are not there.
--
-- $1 names  $2 keys  $3 numbers  $4 leases  $5 now: NULL for the database's clock
INSERT INTO rate_limits (name, key, shard, value, ts)
SELECT u.name, u.key, u.number, round(date_part('epoch', u.now) * 1000000), u.now + u.lease * interval '1 microsecond'
FROM (
	SELECT a.name, a.key, a.number, a.lease, coalesce($5::timestamptz, CURRENT_TIMESTAMP) AS now
	FROM unnest($1::text[], $2::text[], $3::int4[], $4::float8[]) AS a (name, key, number, lease)
	WHERE set_config('lock_timeout', '1', true) IS NOT NULL
) AS u
ON CONFLICT (name, key, shard) DO NOTHING
RETURNING name, key, shard, value::int8, ts

-- name: permit_look
-- Reads the permits of a key, and whether somebody has them locked.
--
-- $1 name  $2 key
SELECT r.shard, r.value::int8, r.ts,
	NOT (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
FROM rate_limits AS r WHERE r.name = $1::text AND r.key = $2::text AND r.shard < 10000
ORDER BY r.shard

-- name: permit_look_part
-- Reads the next part of the permits of a key, and returns its first number with each permit, or
-- alone. It returns nothing if a process has read one less than a turn ago, so that waiting
-- processes together read a bounded number of rows a second. The turn is a row with the number
-- 10000, which no permit has: value is the first number of the part, ts when it was read.
--
-- $1 name  $2 key  $3 limit  $4 permits of a part  $5 turn, in microseconds
WITH made AS (
	INSERT INTO rate_limits (name, key, shard, value, ts)
	SELECT $1::text, $2::text, 10000, 0, CURRENT_TIMESTAMP
	WHERE NOT EXISTS (SELECT FROM rate_limits AS r WHERE r.name = $1::text AND r.key = $2::text AND r.shard = 10000)
	ON CONFLICT (name, key, shard) DO NOTHING
	RETURNING value
), due AS (
	SELECT FROM rate_limits AS r
	WHERE r.name = $1::text AND r.key = $2::text AND r.shard = 10000
		AND r.ts NOT BETWEEN CURRENT_TIMESTAMP - $5::float8 * interval '1 microsecond' AND CURRENT_TIMESTAMP + interval '1 second'
	FOR UPDATE SKIP LOCKED
), turn AS (
	UPDATE rate_limits AS r
	SET value = CASE WHEN r.value + $4::int4 < $3::int4 THEN r.value + $4::int4 ELSE 0 END, ts = CURRENT_TIMESTAMP
	FROM due WHERE r.name = $1::text AND r.key = $2::text AND r.shard = 10000
	RETURNING r.value
)
SELECT t.first, p.shard, p.value::int8, p.ts, p.locked
FROM (SELECT value::int4 AS first FROM made UNION ALL SELECT value::int4 FROM turn) AS t
LEFT JOIN LATERAL (
	SELECT r.shard, r.value, r.ts,
		NOT (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot())) AS locked
	FROM rate_limits AS r
	WHERE r.name = $1::text AND r.key = $2::text AND r.shard >= t.first AND r.shard < least(t.first + $4::int4, 10000)
	ORDER BY r.shard
) AS p ON true

-- name: permit_find
-- Reports whether permits are held by their fences, all of them.
--
-- $1 names  $2 keys  $3 numbers  $4 fences  $5 now: NULL for the database's clock
SELECT count(*) = cardinality($1::text[])
FROM unnest($1::text[], $2::text[], $3::int4[], $4::int8[]) AS a (name, key, number, fence)
JOIN rate_limits AS r ON r.name = a.name AND r.key = a.key AND r.shard = a.number
WHERE r.value = a.fence::float8 AND r.ts > coalesce($5::timestamptz, clock_timestamp())

-- name: permit_reset
-- Frees all permits of a key. Their fences grow, so that nobody holds them any more.
--
-- $1 name  $2 key
UPDATE rate_limits SET value = value + 1, ts = '1970-01-01 00:00:00+00'::timestamptz
WHERE name = $1::text AND key = $2::text

-- name: permit_prune
-- Deletes permits of a name that are free, and were taken so long ago that the next fence is
-- larger in any case; most of them at most, after a place. It passes over rows that somebody
-- has locked.
--
-- $1 name  $2 before  $3 most
WITH idle AS (
	SELECT key, shard FROM rate_limits
	WHERE name = $1::text AND ts <= $2::timestamptz AND value < round(date_part('epoch', $2::timestamptz) * 1000000)
	LIMIT $3::int8 FOR UPDATE SKIP LOCKED
)
DELETE FROM rate_limits AS r USING idle WHERE r.name = $1::text AND r.key = idle.key AND r.shard = idle.shard

-- name: permit_prune_each
-- Is permit_prune for a table that is distributed.
--
-- $1 name  $2 before  $3 not used
DELETE FROM rate_limits
WHERE name = $1::text AND ts <= $2::timestamptz AND value < round(date_part('epoch', $2::timestamptz) * 1000000) AND $3::int8 > 0
