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
-- Reads the rows of a key.
--
-- $1 name  $2 key
SELECT value, ts, paused, slots, shard FROM rate_limits WHERE name = $1::text AND key = $2::text

-- name: await
-- Waits for one row, locks it, and reads it. At stricter levels it finds nothing, since it would
-- leave a predicate lock.
--
-- $1 name  $2 key  $3 shard
SELECT value, ts, paused, slots, ahead FROM rate_limits WHERE name = $1::text AND key = $2::text AND shard = $3::int4
	AND current_setting('transaction_isolation') LIKE 'read %committed' FOR UPDATE

-- name: write_ahead
-- Writes a row that is locked, and its tokens that are out. Slots that are NULL stay.
--
-- $1 name  $2 key  $3 shard  $4 value  $5 ts  $6 slots  $7 ahead
UPDATE rate_limits SET value = $4::float8, ts = $5::timestamptz, slots = coalesce($6::float8[], slots), ahead = $7::float8[]
WHERE name = $1::text AND key = $2::text AND shard = $3::int4

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
-- Is read that locks the rows, but for those that another transaction has locked.
--
-- $1 names  $2 keys  $3 shards
SELECT l.value, l.ts, l.paused, l.slots, w.i, (SELECT clock_timestamp())
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[])) WITH ORDINALITY AS w (name, key, shard, i)
LEFT JOIN LATERAL (
	SELECT r.value, r.ts, r.paused, r.slots FROM rate_limits AS r
	WHERE r.name = w.name AND r.key = w.key AND r.shard = w.shard
	LIMIT 1 FOR UPDATE SKIP LOCKED
) AS l ON true

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

-- name: prefetch_many
-- Is the grant_many of kinds that have no slots, and prefetches where lasts is not NULL: it
-- takes more for a lease, but no more than half of the tokens left then. Row and leases are
-- together never more than the capacity: that of a bucket is lower by the refill while the lease
-- lasts, and the lease of a window lasts to the edge. Afterwards ahead is the tokens that were
-- out, less those spent since; the tokens of calls that may still put them back; and the new
-- lease. That is never more than half of the capacity, so that the tokens of killed processes do
-- not add up. It begins from 0 when nothing is out, and no token that was out can be taken off
-- any more: of a bucket a second after the end, and when it has faded. spent_end is until when
-- it counts the spent tokens. SET has a sub-select, in which an expression that is needed twice
-- has a name: OFFSET 0 keeps the planner from writing it out.
--
-- $1 keys  $2 definitions  $3 shards  $4 counts  $5 needs
-- $6 names  $7 capacities  $8 rates  $9 periods  $10 now: NULL for the database's clock
-- $11 ticks  $12 lasts  $13 prefetches  $14 outs  $15 spents  $16 spent_ends
UPDATE rate_limits AS r
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
		($15::float8[])[a.i] AS spent, ($16::timestamptz[])[a.i] AS spent_end
	FROM unnest($1::text[], $2::int4[]) WITH ORDINALITY AS a (key, definition, i)
	WHERE a.i BETWEEN 1 AND 1000000000
) AS u
WHERE (SELECT set_config('lock_timeout', '1', true)) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND (r.value >= u.need
		OR r.value + greatest(round(tstzrange_subdiff(date_bin(u.tick, u.now, r.ts), r.ts) * 1000000), 0) * u.rate / u.period >= u.need)
RETURNING r.value, r.ts, clock_timestamp(), r.ahead[3], u.i

-- name: bounds
-- Bounds, in milliseconds and for this transaction, a wait for a lock, and the time that the
-- server keeps locks while it hears nothing of the client.
--
-- $1 wait  $2 silence
SELECT set_config('lock_timeout', $1::text, true), set_config('idle_in_transaction_session_timeout', $2::text, true)

-- name: turn
-- Is bounds, and then waits for an advisory lock, which is the transaction's until it ends. It
-- returns for how long it waited, in nanoseconds. From then on another bound holds. With early, the
-- transaction's COMMIT does not wait for the disk. The statements of the transaction find one row by
-- its key, for which a plan for any values is as good: a session would make five for theirs before
-- it made that one.
--
-- $1 turn  $2 silence  $3 early  $4 lock  $5 wait
SELECT set_config('lock_timeout', $1::text, true), set_config('idle_in_transaction_session_timeout', $2::text, true),
	set_config('plan_cache_mode', 'force_generic_plan', true),
	set_config('synchronous_commit', CASE WHEN $3::bool THEN 'off' ELSE current_setting('synchronous_commit') END, true),
	CASE WHEN pg_advisory_xact_lock($4::int8) IS NOT NULL THEN (date_part('epoch', clock_timestamp() - statement_timestamp()) * 1000000)::int8 * 1000 END,
	set_config('lock_timeout', $5::text, true)
