-- The statements of a token bucket, to which tokens come in all the time:
--
--	settled = least(value + greatest(now - ts, 0) * rate / period, capacity)
--
-- in the order of operations of the algebra, so that both have the same number to the last
-- bit. Rates are tokens per period, and periods microseconds. An executor that starts looks
-- up each function of its statement, which costs more than calling it; so nothing is in a
-- text that it does not need.

-- name: take
-- Takes a count, and returns a row if and only if it took. It leaves no predicate lock under
-- SERIALIZABLE, unless it is in a subtransaction, since it never reads but through the row
-- that it conflicts with. The clock is read before the wait for the row's lock, so another
-- transaction may have left a later ts behind; greatest then counts no time, rather than the
-- same time twice.
--
-- $1 name  $2 key  $3 shard  $4 capacity  $5 count  $6 now: NULL for the database's clock
-- $7 rate  $8 period  $9 floor: the lowest value to leave behind
-- $10 over: an instant by which a pause is known to be over; NULL for none
INSERT INTO rate_limits AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8, coalesce($6::timestamptz, clock_timestamp()))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8) - $5::float8,
	ts = greatest(r.ts, excluded.ts)
WHERE least(r.value + greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8) - $5::float8
		>= $9::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $10::timestamptz))
RETURNING value, ts, paused,
	clock_timestamp(), xmin::text

-- name: give
-- Gives back a count, and reports spent tokens. The row is not settled for that, since the
-- refill can be added before or after the count. If tokens are out (ahead has their number, and
-- their latest end in seconds since 2000), it leaves room for them and for the refill until that
-- end. After the end they fade as fast as the row is refilled.
--
-- $1 name  $2 key  $3 shard  $4 capacity  $5 count  $6 now: NULL for the database's clock
-- $7 rate  $8 period  $9 most: above which nothing is given when nothing is out
-- $10 spent  $11 spent_end: until when that is counted in ahead
INSERT INTO rate_limits AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8, coalesce($6::timestamptz, clock_timestamp()))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = CASE WHEN r.ahead[1] > 0 THEN r.value + greatest(least($5::float8, $4::float8
		- least(r.value + greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8)
		- CASE WHEN (r.ahead[1] - CASE WHEN $11::timestamptz > greatest(r.ts, excluded.ts) THEN $10::float8 ELSE 0 END) > 0 THEN
			greatest((r.ahead[1] - CASE WHEN $11::timestamptz > greatest(r.ts, excluded.ts) THEN $10::float8 ELSE 0 END)
				+ round((r.ahead[2] - tstzrange_subdiff(excluded.ts, '2000-01-01 00:00:00+00'::timestamptz)) * 1000000) * $7::float8 / $8::float8, 0)
		ELSE 0 END), 0)
	ELSE least(r.value + $5::float8, greatest(r.value, $9::float8)) END,
	ahead = CASE WHEN r.ahead[1] > 0 THEN
		array[greatest((r.ahead[1] - CASE WHEN $11::timestamptz > greatest(r.ts, excluded.ts) THEN $10::float8 ELSE 0 END), 0), r.ahead[2]] ELSE r.ahead END
RETURNING value, ts, paused, slots, ahead,
	clock_timestamp(), xmax = 0

-- The next statements are for decisions on their own, on plain PostgreSQL. They write and lock
-- only the rows that they take from, and pass over rows that another transaction has locked:
-- xmax is the last one that did, and if the snapshot does not see it, it may not have ended.
-- That can be wrong, as xmax may be a savepoint, or an ID of another epoch; and a row can be
-- locked between the reading of xmax and the writing. Then there is an error after the
-- lock_timeout, and nothing has happened. (Locking rows with SKIP LOCKED before they are
-- written needs neither, but makes a statement for many rows slower by a sixth.)
--
-- They turn away calls that the algebra would grant in a pause, or by its tolerance: those are
-- left to the statements that lock and write. A need must be no more than the capacity.
-- Parameters have their names from the sub-select, which the planner dissolves. The
-- transaction began with the statement, or just before it.

-- name: grant
-- Takes a count from a row that has as many tokens as are needed.
--
-- $1 name  $2 key  $3 shard  $4 count  $5 need  $6 capacity
-- $7 rate  $8 period  $9 now: NULL for the database's clock
UPDATE rate_limits AS r
SET value = least(r.value + greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) * u.rate / u.period, u.capacity) - u.total,
	ts = greatest(r.ts, u.now)
FROM (
	SELECT $1::text AS name, $2::text AS key, $3::int4 AS shard, $4::float8 AS total, $5::float8 AS need, $6::float8 AS capacity,
		$7::float8 AS rate, $8::float8 AS period, coalesce($9::timestamptz, CURRENT_TIMESTAMP) AS now
) AS u
WHERE set_config('lock_timeout', '1', true) IS NOT NULL
	AND (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused > u.now) IS NOT TRUE
	AND r.value + greatest(round(tstzrange_subdiff(u.now, r.ts) * 1000000), 0) * u.rate / u.period >= u.need
RETURNING r.value, r.ts, clock_timestamp()

-- name: grant_many
-- Is grant for several rows, in the order given. keys to needs are arrays with a value for each
-- row, and names to periods arrays with one for each limit; definitions counts these from 1.
-- shards is NULL if no limit has them, needs if each row needs its count. To subscript an array
-- costs less than to unnest it. The range of i is always true, and is there for the planner: it
-- takes it for selective, and so goes to each row by the index rather than through the whole
-- table, also while the table is young and the plan is kept that was made when it was small.
--
-- $1 keys  $2 definitions  $3 shards  $4 counts  $5 needs
-- $6 names  $7 capacities  $8 rates  $9 periods  $10 now: NULL for the database's clock
UPDATE rate_limits AS r
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
