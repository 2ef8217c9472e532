-- The statements that are the same for all kinds of limits.
--
-- A tick is the time in which a kind's clock stands still, in microseconds: 1 for a token
-- bucket, the period of a fixed window, the width of a sliding window's slot. Ticks are
-- counted from an origin.
--
-- The arrays of some statements are behind sub-selects to hide their lengths from the
-- planner. It would otherwise find that it can do better for a short one, and plan each time,
-- which costs more than the statement.

-- name: touch
-- Locks a row, and returns it as it is; or makes it, full. It leaves no predicate lock under
-- SERIALIZABLE.
--
-- $1 name  $2 key  $3 shard  $4 capacity  $5 tick  $6 now: NULL for the database's clock
-- $7 origin  $8 slots: NULL for other kinds
INSERT INTO rate_limits AS r (name, key, shard, value, ts, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8,
	date_bin($5::float8 * interval '1 microsecond', coalesce($6::timestamptz, clock_timestamp()), $7::timestamptz), $8::float8[])
ON CONFLICT (name, key, shard) DO UPDATE SET value = r.value
RETURNING value, ts, paused, slots, ahead,
	clock_timestamp(), xmax = 0

-- name: put
-- Writes a row whatever is there. Slots that are NULL stay.
--
-- $1 name  $2 key  $3 shard  $4 value  $5 ts  $6 paused  $7 slots
INSERT INTO rate_limits AS r (name, key, shard, value, ts, paused, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8, $5::timestamptz, $6::timestamptz, $7::float8[])
ON CONFLICT (name, key, shard) DO UPDATE
SET value = excluded.value, ts = excluded.ts, paused = excluded.paused, slots = coalesce(excluded.slots, r.slots)

-- name: make
-- Makes a row that is not there.
--
-- $1 name  $2 key  $3 shard  $4 value  $5 ts  $6 slots
INSERT INTO rate_limits (name, key, shard, value, ts, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8, $5::timestamptz, $6::float8[])
ON CONFLICT (name, key, shard) DO NOTHING

-- name: renew
-- Writes a sliding window's row anew that has not changed since it was read. The value does
-- not tell whether a slot that is ahead has been given more, but the newest total does. A
-- connection may write numbers as text with 15 digits; no count that can be taken is as small
-- as that.
--
-- $1 name  $2 key  $3 shard  $4 value  $5 ts  $6 slots
-- $7 ts, $8 value, $9 newest total as they were read; that is NULL for slots that were not
UPDATE rate_limits SET value = $4::float8, ts = $5::timestamptz, slots = $6::float8[]
WHERE name = $1::text AND key = $2::text AND shard = $3::int4 AND ts = $7::timestamptz AND abs(value - $8::float8) <= abs(value) * 1e-14
	AND ($9::float8 IS NULL OR abs(slots[cardinality(slots)] - $9::float8) <= $9::float8 * 1e-15)

-- name: remove
-- $1 name  $2 key  $3 shard
DELETE FROM rate_limits WHERE name = $1::text AND key = $2::text AND shard = $3::int4

-- name: reset
-- Deletes the rows of a key of which nothing can be out.
--
-- $1 name  $2 key
DELETE FROM rate_limits WHERE name = $1::text AND key = $2::text AND (ahead[1] > 0) IS NOT TRUE

-- name: reset_left
-- Locks the others.
--
-- $1 name  $2 key
UPDATE rate_limits SET value = value WHERE name = $1::text AND key = $2::text RETURNING shard

-- name: find
-- $1 name  $2 key  $3 shard
SELECT value, ts, paused, slots FROM rate_limits WHERE name = $1::text AND key = $2::text AND shard = $3::int4

-- name: find_locked
-- Is find that waits for the row, and locks it.
--
-- $1 name  $2 key  $3 shard
SELECT value, ts, paused, slots, ahead FROM rate_limits WHERE name = $1::text AND key = $2::text AND shard = $3::int4 FOR UPDATE

-- name: write_ahead
-- Writes a row that is locked, and what of it is out. Slots that are NULL stay.
--
-- $1 name  $2 key  $3 shard  $4 value  $5 ts  $6 slots  $7 ahead
UPDATE rate_limits SET value = $4::float8, ts = $5::timestamptz, slots = coalesce($6::float8[], slots), ahead = $7::float8[]
WHERE name = $1::text AND key = $2::text AND shard = $3::int4

-- name: states
-- All rows of a limit and key; the aggregates make them one always. PostgreSQL does not
-- aggregate arrays that may be missing, so slots are texts.
--
-- $1 name  $2 key
SELECT array_agg(shard), array_agg(value), array_agg(ts), array_agg(paused), array_agg(slots::text), clock_timestamp()
FROM rate_limits WHERE name = $1::text AND key = $2::text

-- name: read
-- Reads rows in the order given, by one look-up in the index each, with one clock for all.
--
-- $1 names  $2 keys  $3 shards
SELECT l.value, l.ts, l.paused, l.slots, w.i, (SELECT clock_timestamp())
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[])) WITH ORDINALITY AS w (name, key, shard, i)
LEFT JOIN LATERAL (
	SELECT r.value, r.ts, r.paused, r.slots FROM rate_limits AS r
	WHERE r.name = w.name AND r.key = w.key AND r.shard = w.shard
	LIMIT 1
) AS l ON true

-- name: lock
-- Is read that locks the rows, but for those that somebody else has locked.
--
-- $1 names  $2 keys  $3 shards
SELECT l.value, l.ts, l.paused, l.slots, w.i, (SELECT clock_timestamp())
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[])) WITH ORDINALITY AS w (name, key, shard, i)
LEFT JOIN LATERAL (
	SELECT r.value, r.ts, r.paused, r.slots FROM rate_limits AS r
	WHERE r.name = w.name AND r.key = w.key AND r.shard = w.shard
	LIMIT 1 FOR UPDATE SKIP LOCKED
) AS l ON true

-- name: await
-- Waits for one row, and locks it.
--
-- $1 name  $2 key  $3 shard
SELECT 1 FROM rate_limits WHERE name = $1::text AND key = $2::text AND shard = $3::int4 FOR UPDATE

-- name: fill
-- Makes the rows that are not there: full, which means the same. It waits for a transaction
-- that has made one of them and has not ended.
--
-- $1 names  $2 keys  $3 shards  $4 capacities  $5 ticks  $6 origins
-- $7 now: NULL for the database's clock
INSERT INTO rate_limits (name, key, shard, value, ts)
SELECT u.name, u.key, u.shard, u.capacity, date_bin(u.tick * interval '1 microsecond', n.now, u.origin)
FROM (SELECT coalesce($7::timestamptz, clock_timestamp()) AS now OFFSET 0) AS n,
	unnest($1::text[], $2::text[], $3::int4[], $4::float8[], $5::float8[], $6::timestamptz[])
		AS u (name, key, shard, capacity, tick, origin)
ON CONFLICT (name, key, shard) DO NOTHING

-- name: write
-- Writes rows that are locked. Slots, which are texts, stay where they are NULL.
--
-- $1 names  $2 keys  $3 shards  $4 values  $5 ts  $6 paused  $7 slots
UPDATE rate_limits AS r
SET value = w.value, ts = w.ts, paused = w.paused, slots = coalesce(w.slots::float8[], r.slots)
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]),
	(SELECT $4::float8[]), (SELECT $5::timestamptz[]), (SELECT $6::timestamptz[]), (SELECT $7::text[]))
	WITH ORDINALITY AS w (name, key, shard, value, ts, paused, slots, i)
WHERE r.name = w.name AND r.key = w.key AND r.shard = w.shard AND w.i BETWEEN 1 AND 1000000000

-- name: bounds
-- Bounds, in milliseconds and for this transaction, a wait for a lock, and the time that the
-- server keeps what is locked while it hears nothing of the client.
--
-- $1 wait  $2 silence
SELECT set_config('lock_timeout', $1::text, true), set_config('idle_in_transaction_session_timeout', $2::text, true)

-- name: statistics
-- Asks whether PostgreSQL has statistics of the table, which was not tiny when they were made.
SELECT reltuples >= 1000
	AND coalesce(pg_stat_get_last_analyze_time(oid), pg_stat_get_last_autoanalyze_time(oid)) IS NOT NULL
FROM pg_class WHERE oid = 'rate_limits'::regclass
