-- The statements that maintain the table, of Prune and of listings; and those that read the
-- outcome of a transaction.

-- name: delete_listed
-- Deletes those of the listed rows that have not changed and that no transaction has locked. A
-- connection may write values as text with 15 digits; no count that can be taken is as small
-- as that.
--
-- $1 name  $2 keys  $3 shards  $4 values  $5 ts  $6 paused
WITH same AS (
	SELECT r.key, r.shard FROM unnest($2::text[], $3::int4[], $4::float8[], $5::timestamptz[], $6::timestamptz[]) AS w (key, shard, value, ts, paused)
	JOIN rate_limits AS r ON r.name = $1::text AND r.key = w.key AND r.shard = w.shard AND r.ts = w.ts AND abs(r.value - w.value) <= abs(r.value) * 1e-14
		AND r.paused IS NOT DISTINCT FROM w.paused
	FOR UPDATE OF r SKIP LOCKED
)
DELETE FROM rate_limits AS r USING same
WHERE r.name = $1::text AND r.key = same.key AND r.shard = same.shard

-- name: delete_same
-- Is delete_listed for one row, of a table that is distributed.
--
-- $1 name  $2 key  $3 shard  $4 value  $5 ts  $6 paused
DELETE FROM rate_limits
WHERE name = $1::text AND key = $2::text AND shard = $3::int4 AND ts = $5::timestamptz AND abs(value - $4::float8) <= abs(value) * 1e-14
	AND coalesce(paused = $6::timestamptz, paused IS NULL AND $6::timestamptz IS NULL)

-- name: names
-- Goes from one name to the next by the index.
WITH RECURSIVE n AS (
	(SELECT name FROM rate_limits ORDER BY name LIMIT 1)
	UNION ALL
	SELECT (SELECT name FROM rate_limits WHERE name > n.name ORDER BY name LIMIT 1) FROM n WHERE n.name IS NOT NULL
)
SELECT name FROM n WHERE name IS NOT NULL

-- name: page
-- Lists rows of a name from a place on, in the order of the index; or only those that may be
-- full, as they have a ts up to an instant at which nothing of them is out.
--
-- $1 name  $2 key, $3 shard after which to go on  $4 rows at most  $5 instant: NULL for all rows
SELECT value, ts, paused, slots, key, shard, clock_timestamp() FROM rate_limits
WHERE name = $1::text AND (key, shard) > ($2::text, $3::int4)
	AND ($5::timestamptz IS NULL OR ts <= $5::timestamptz
		AND (ahead[1] > 0 AND ahead[2] > tstzrange_subdiff($5::timestamptz, '2000-01-01 00:00:00+00'::timestamptz)) IS NOT TRUE)
ORDER BY key, shard
LIMIT $4::int8

-- name: versions
-- Reads how many dead versions the table has, and what has the oldest snapshot of those that keep
-- them: of no row if nothing has one. Logical slots keep those of the system's tables only, and
-- VACUUM keeps none.
--
-- $1 table
SELECT coalesce((SELECT n_dead_tup FROM pg_stat_all_tables WHERE relid = $1::text::regclass), 0), coalesce(h.kind, ''), coalesce(h.who, ''), coalesce(h.since, 0)
FROM (SELECT) AS one LEFT JOIN (
	SELECT 'transaction' AS kind, pid::text AS who, age(backend_xmin)::int8 AS since FROM pg_stat_activity
	WHERE pid <> pg_backend_pid() AND datname = current_database() AND backend_xmin IS NOT NULL AND backend_type <> 'autovacuum worker'
	UNION ALL SELECT 'standby', application_name, age(backend_xmin) FROM pg_stat_replication WHERE backend_xmin IS NOT NULL
	UNION ALL SELECT 'replication slot', slot_name, age(xmin) FROM pg_replication_slots WHERE xmin IS NOT NULL
	UNION ALL SELECT 'prepared transaction', gid, age(transaction) FROM pg_prepared_xacts WHERE database = current_database()
	ORDER BY since DESC LIMIT 1
) AS h ON true

-- name: forget
-- $1 name
DELETE FROM rate_limits WHERE name = $1::text

-- name: ready
-- Reads every column that a statement names.
SELECT name, key, shard, value, ts, paused, slots, ahead FROM rate_limits LIMIT 0

-- name: wrote
-- Asks whether a row is the very version that a transaction left behind.
--
-- $1 name  $2 key  $3 shard  $4 xmin  $5 value  $6 ts
SELECT EXISTS (SELECT FROM rate_limits
WHERE name = $1::text AND key = $2::text AND shard = $3::int4 AND xmin::text = $4::text
	AND value = $5::float8 AND ts = $6::timestamptz)

-- name: now
SELECT clock_timestamp()

-- name: outcome
-- Reads the outcome of a transaction or savepoint. A row has the lower half of its ID only:
-- it is the one that is nearest to the newest that is known here. One beyond that is not over,
-- or of a server that has lost it in a crash; the server is asked for it only if it is known
-- to be its own, since it fails otherwise.
--
-- $1 xid  $2 own: it was on this very connection
SELECT CASE
	WHEN id > newest AND NOT $2::bool THEN 'in progress'
	WHEN id < 3 THEN ''
	ELSE coalesce(pg_xact_status(id::text::xid8), '')
	END
FROM (
	SELECT newest, newest + (($1::text::int8 - newest + 2147483648) & 4294967295) - 2147483648 AS id
	FROM (SELECT greatest(pg_current_xact_id()::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8 - 1) AS newest) AS n
) AS t

-- name: xid
SELECT pg_current_xact_id()::text

-- name: holds
-- Asks for the lock that a transaction has on its own ID, and on those of its savepoints that
-- have not ended.
--
-- $1 xid
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock'
	AND pid = pg_backend_pid() AND transactionid::text::int8 = $1::text::int8 & 4294967295)

-- name: server
-- Reads what a crash, a restart or a promotion changes: when the server began, which time line
-- it writes, and, as a crash of one backend has the others begin anew without a restart, when
-- its statistics were last thrown away.
SELECT concat_ws(' ', pg_postmaster_start_time(), pg_stat_get_bgwriter_stat_reset_time(),
	CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END)

-- name: up_since
-- $1 at
SELECT coalesce(greatest(pg_postmaster_start_time(), pg_stat_get_bgwriter_stat_reset_time()) < $1::timestamptz, false)
