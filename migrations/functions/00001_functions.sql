-- +goose Up

-- The verbs of a limit as SQL functions, for programs that are not in Go, triggers and psql.
-- The statement below a comment such as "sql/plain/bucket/take.sql" is that file of pgstore/internal/table, copied by
-- go test ./pgstore/internal/table -run Functions -write.
--
-- Each runs with the rights of its owner, who needs SELECT, INSERT, UPDATE and DELETE on
-- rate_limits, and SELECT on rate_limit_definitions for those by name. Nobody else may call one
-- until it is granted. They name the schema in which rate_limits is found now. The catalog must be
-- in the same schema, and may be made later. A result only grows: read its fields by their names.

-- +goose StatementBegin
DO $migration$
DECLARE
	statement text;
	home      text := (SELECT quote_ident(n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = 'rate_limits'::regclass);
	before    oid[] := ARRAY(SELECT oid FROM pg_proc WHERE pronamespace = home::regnamespace);
BEGIN
	EXECUTE replace($functions$

CREATE TYPE @schema@.rate_limit_result AS (
	ok           boolean,
	retry_after  interval,
	retry_at     timestamptz,
	value        double precision,
	remaining    bigint,
	capacity     double precision,
	reset_after  interval,
	paused_until timestamptz,
	at           timestamptz,
	name         text,
	key          text,
	shadowed     boolean
);

COMMENT ON TYPE @schema@.rate_limit_result IS
	'What a limit answers: whether it took; when the same call would be accepted, or a reservation may run; how many tokens there are, in all and in whole ones; the capacity; how long until that is there; the end of a pause; the instant of the decision; and of which limit and key that is, which of several is the one that a caller must know; and whether a limit in mode shadow would have refused.';

CREATE TYPE @schema@.rate_limit_request AS (
	name          text,
	key           text,
	count         double precision,
	rate          double precision,
	period        interval,
	capacity      double precision,
	max_reserved  double precision,
	kind          text,
	start         timestamptz,
	above         double precision,
	mode          text,
	refused_until timestamptz,
	shards        integer,
	slots         integer,
	every         text,
	zone          text,
	anchor        date,
	"time"        text
);

COMMENT ON TYPE @schema@.rate_limit_request IS
	'A count of tokens of a limit, with its definition: see rate_limit_request().';

CREATE TYPE @schema@.rate_limit_state AS (
	value  double precision,
	ts     timestamptz,
	paused timestamptz,
	slots  double precision[]
);

COMMENT ON TYPE @schema@.rate_limit_state IS
	'A row of rate_limits, which means something by a definition only.';

CREATE TYPE @schema@.rate_limit_permit AS (
	ok         boolean,
	number     integer,
	fence      bigint,
	at         timestamptz,
	until      timestamptz,
	not_before timestamptz
);

COMMENT ON TYPE @schema@.rate_limit_permit IS
	'One of the permits of a limit of how many at once: whether it is held; its number and fence, by which it is renewed and released; the instant of the decision; the end of the lease; and of a refusal, the first end of a lease of another.';

CREATE TYPE @schema@.rate_limit_permits AS (
	ok         boolean,
	numbers    integer[],
	fences     bigint[],
	at         timestamptz,
	until      timestamptz,
	not_before timestamptz
);

COMMENT ON TYPE @schema@.rate_limit_permits IS
	'Several permits of a limit of how many at once, which are held together: as rate_limit_permit, with the numbers and fences of all.';

-- The statements, with numbered arguments. They are in PL/pgSQL, whose plans a session keeps;
-- before PostgreSQL 18 a function in SQL is planned at each call.

CREATE FUNCTION @schema@.rate_limit_bucket_take(text, text, int4, float8, float8, timestamptz, float8, float8, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, at timestamptz, xid text) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
-- sql/plain/bucket/take.sql
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8, coalesce($6::timestamptz, clock_timestamp()))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8) - $5::float8,
	ts = greatest(r.ts, excluded.ts)
WHERE r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $7::float8 / $8::float8 - $5::float8
		>= $9::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $10::timestamptz))
RETURNING value, ts, paused,
	clock_timestamp(), xmin::text;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_window_take(text, text, int4, float8, float8, float8, timestamptz, timestamptz, float8, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, at timestamptz, xid text) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
-- sql/plain/window/take.sql
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $9::float8 / $6::float8, $4::float8) - $5::float8,
	ts = greatest(r.ts, excluded.ts)
WHERE r.value + greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) * $9::float8 / $6::float8 - $5::float8
		>= $10::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND date_bin($6::float8 * interval '1 microsecond', r.ts, $8::timestamptz) = r.ts
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $11::timestamptz))
RETURNING value, ts, paused,
	clock_timestamp(), xmin::text;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_calendar_take(text, text, int4, float8, float8, timestamptz, timestamptz[], timestamptz[], float8, float8, timestamptz, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, at timestamptz, xid text) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
-- sql/plain/calendar/take.sql
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	coalesce((($7::timestamptz[])[1 : cardinality($7::timestamptz[]) - 1])[width_bucket(coalesce($6::timestamptz, clock_timestamp()), $7::timestamptz[])],
		$12::timestamptz))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(width_bucket(excluded.ts, $7::timestamptz[]) - width_bucket(r.ts, $8::timestamptz[]), 0) * $9::float8, $4::float8) - $5::float8,
	ts = CASE WHEN width_bucket(excluded.ts, $7::timestamptz[]) > width_bucket(r.ts, $8::timestamptz[]) THEN excluded.ts ELSE r.ts END
WHERE least(r.value + greatest(width_bucket(excluded.ts, $7::timestamptz[]) - width_bucket(r.ts, $8::timestamptz[]), 0) * $9::float8, $4::float8) - $5::float8
		>= $10::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND width_bucket(excluded.ts, $7::timestamptz[]) BETWEEN 1 AND cardinality($7::timestamptz[]) - 1
	AND (r.ts >= ($8::timestamptz[])[1] OR r.value + width_bucket(excluded.ts, $7::timestamptz[]) * $9::float8 >= $4::float8)
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $11::timestamptz))
RETURNING value, ts, paused,
	clock_timestamp(), xmin::text;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_slots_take(text, text, int4, float8, float8, float8, timestamptz, timestamptz, int4, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, slots float8[], at timestamptz, xid text) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
-- sql/plain/slots/take.sql
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz),
	array[$6::float8, 0, $4::float8 - $5::float8] || array_fill(0::float8, array[$9::int4 - 1]) || $5::float8)
ON CONFLICT (name, key, shard) DO UPDATE
SET value = $4::float8 - (r.slots[$9::int4 + 3] + $5::float8 - r.slots[4
		+ least(greatest(greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4]),
	ts = greatest(r.ts, excluded.ts),
	slots = array[$6::float8, 0, $4::float8 - (r.slots[$9::int4 + 3] + $5::float8 - r.slots[4
			+ least(greatest(greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4])]
		|| (r.slots || array_fill(r.slots[$9::int4 + 3], array[$9::int4]))[
			4 + least(greatest(greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4 :
			$9::int4 + 2 + least(greatest(greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4]
		|| (r.slots[$9::int4 + 3] + $5::float8)
WHERE r.slots[1] = $6::float8 AND cardinality(r.slots) = $9::int4 + 3 AND r.slots[3] = r.value AND r.slots[4] <= 8 * $4::float8
	AND date_bin($6::float8 * interval '1 microsecond', r.ts, $8::timestamptz) = r.ts
	AND greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2] >= 0
	AND r.slots[4 + least(greatest(greatest(round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000), 0) / $6::float8 - r.slots[2], 0), $9::int4 - 1)::int4]
		> r.slots[$9::int4 + 3] + $5::float8 - $4::float8 - greatest(r.slots[$9::int4 + 3], $5::float8, $4::float8) * 1.4210854715202004e-14 + $10::float8
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $11::timestamptz))
RETURNING value, ts, paused, slots,
	clock_timestamp(), xmin::text;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_bucket_give(text, text, int4, float8, float8, timestamptz, float8, float8, float8, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, slots float8[], ahead float8[], at timestamptz, made boolean) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
-- sql/plain/bucket/give.sql
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
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
	clock_timestamp(), xmax = 0;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_window_give(text, text, int4, float8, float8, float8, timestamptz, timestamptz, float8, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, slots float8[], ahead float8[], at timestamptz, made boolean) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
-- sql/plain/window/give.sql
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts, ahead)
VALUES ($1::text, $2::text, $3::int4, $4::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz),
	array[0, tstzrange_subdiff(coalesce($7::timestamptz, clock_timestamp()), '2000-01-01 00:00:00+00'::timestamptz)])
ON CONFLICT (name, key, shard) DO UPDATE
SET value = CASE WHEN r.ahead[2] > excluded.ahead[2]
		AND greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff($11::timestamptz, '2000-01-01 00:00:00+00'::timestamptz) > greatest(tstzrange_subdiff(r.ts, '2000-01-01 00:00:00+00'::timestamptz), excluded.ahead[2]) THEN $10::float8 ELSE 0 END, 0) > 0
		THEN greatest(r.value, least(r.value + $5::float8, $4::float8
			- greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff($11::timestamptz, '2000-01-01 00:00:00+00'::timestamptz) > greatest(tstzrange_subdiff(r.ts, '2000-01-01 00:00:00+00'::timestamptz), excluded.ahead[2]) THEN $10::float8 ELSE 0 END, 0)))
		ELSE least(r.value + $5::float8, greatest(r.value, $9::float8)) END,
	ahead = CASE WHEN r.ahead IS NOT NULL THEN array[
		greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff($11::timestamptz, '2000-01-01 00:00:00+00'::timestamptz) > greatest(tstzrange_subdiff(r.ts, '2000-01-01 00:00:00+00'::timestamptz), excluded.ahead[2]) THEN $10::float8 ELSE 0 END, 0), r.ahead[2]] END
RETURNING value, ts, paused, slots, ahead,
	clock_timestamp(), xmax = 0;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_put(text, text, int4, float8, timestamptz, timestamptz, float8[])
RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
-- sql/common/put.sql
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts, paused, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8, $5::timestamptz, $6::timestamptz, $7::float8[])
ON CONFLICT (name, key, shard) DO UPDATE
SET value = excluded.value, ts = excluded.ts, paused = excluded.paused, slots = coalesce(excluded.slots, r.slots);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_touch(text, text, int4, float8, float8, timestamptz, timestamptz, float8[])
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, slots float8[], ahead float8[], at timestamptz, made boolean) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
-- sql/plain/common/touch.sql
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8,
	date_bin($5::float8 * interval '1 microsecond', coalesce($6::timestamptz, clock_timestamp()), $7::timestamptz), $8::float8[])
ON CONFLICT (name, key, shard) DO UPDATE SET value = r.value
RETURNING value, ts, paused, slots, ahead,
	clock_timestamp(), xmax = 0;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_permit_take(text, text, int4, float8, timestamptz, int8, boolean)
RETURNS TABLE (fence int8, until timestamptz, given boolean) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
-- sql/plain/inflight/permit_take_tx.sql
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
SELECT $1::text, $2::text, $3::int4, round(date_part('epoch', coalesce($5::timestamptz, clock_timestamp())) * 1000000),
	coalesce($5::timestamptz, clock_timestamp()) + $4::float8 * interval '1 microsecond'
WHERE CASE WHEN NOT (pg_try_advisory_xact_lock($6::int8) OR $7::bool) THEN false
	WHEN set_config('ratelimit.lock_timeout', current_setting('lock_timeout'), true) IS NOT NULL
	THEN set_config('lock_timeout', '1ms', true) IS NOT NULL END
ON CONFLICT (name, key, shard) DO UPDATE
SET value = greatest(r.value + 1, excluded.value), ts = excluded.ts, paused = NULL, ahead = NULL
WHERE round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000) >= $4::float8
RETURNING value::int8, ts, set_config('lock_timeout', current_setting('ratelimit.lock_timeout'), true) IS NULL;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_permit_keep(text, text, int4, float8, timestamptz, int8, boolean, int8)
RETURNS TABLE (fence int8, until timestamptz, given boolean) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY
-- sql/plain/inflight/permit_keep_tx.sql
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts, paused)
SELECT $1::text, $2::text, $3::int4, 0, coalesce($5::timestamptz, clock_timestamp()),
	coalesce($5::timestamptz, clock_timestamp()) + $4::float8 * interval '1 microsecond'
WHERE pg_try_advisory_xact_lock($8::int8) IS NOT NULL
ON CONFLICT (name, key, shard) DO UPDATE
SET value = CASE WHEN $7::bool OR $4::float8 = 0 AND r.paused > excluded.ts
		THEN greatest(r.value + 1, round(tstzrange_subdiff(excluded.ts, '1970-01-01 00:00:00+00'::timestamptz) * 1000000)) ELSE r.value END,
	ts = CASE WHEN ($7::bool OR $4::float8 = 0) AND r.paused > excluded.ts THEN r.paused
		WHEN $4::float8 > 0 THEN excluded.paused ELSE '1970-01-01 00:00:00+00'::timestamptz END,
	paused = CASE WHEN $7::bool OR $4::float8 = 0 THEN NULL ELSE r.paused END,
	ahead = CASE WHEN $4::float8 > 0 AND NOT $7::bool OR r.paused > excluded.ts THEN r.ahead END
WHERE r.value = $6::int8::float8 AND r.ts > excluded.ts
RETURNING value::int8, ts, ahead IS NOT NULL;
END
$body$;

-- The algebra: see package internal/bucket. d is the definition of a row, which is a shard's share.

-- Microseconds since 1970, as the functions of the catalog count them, and back.
CREATE FUNCTION @schema@.rate_limit_micros(at timestamptz) RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
	SELECT (extract(epoch FROM at) * 1000000)::int8
$body$;

CREATE FUNCTION @schema@.rate_limit_at(micros float8) RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $body$
	SELECT '1970-01-01 00:00:00+00'::timestamptz + micros * interval '1 microsecond'
$body$;

-- A period in microseconds.
CREATE FUNCTION @schema@.rate_limit_period(d @schema@.rate_limit_request) RETURNS float8 LANGUAGE sql IMMUTABLE AS $body$
	SELECT extract(epoch FROM d.period)::float8 * 1000000
$body$;

-- The microseconds from one tick of a row's clock to the next. Edges of the calendar are not alike:
-- by them the tick does not end.
CREATE FUNCTION @schema@.rate_limit_tick(d @schema@.rate_limit_request) RETURNS float8 LANGUAGE sql IMMUTABLE AS $body$
	SELECT CASE WHEN d.kind = 'token bucket' THEN 1 WHEN d.every IS NOT NULL THEN 1e17 ELSE ceil(@schema@.rate_limit_period(d) / coalesce(d.slots, 1)) END
$body$;

-- The share of one shard.
CREATE FUNCTION @schema@.rate_limit_shard(r @schema@.rate_limit_request) RETURNS @schema@.rate_limit_request LANGUAGE plpgsql IMMUTABLE AS $body$
BEGIN
	IF r.shards > 1 THEN
		r.rate := r.rate / r.shards;
		r.capacity := r.capacity / r.shards;
		r.max_reserved := r.max_reserved / r.shards;
	END IF;
	RETURN r;
END
$body$;

-- How far rounding may have moved a comparison.
CREATE FUNCTION @schema@.rate_limit_slack(a float8, b float8, c float8) RETURNS float8 LANGUAGE sql IMMUTABLE AS $body$
	SELECT greatest(abs(a), abs(b), abs(c)) * 1.4210854715202004e-14
$body$;

-- A hash of bytes: FNV-1a of 64 bits.
CREATE FUNCTION @schema@.rate_limit_hash(bytes bytea) RETURNS numeric LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	hash numeric := 14695981039346656037;
	low integer;
BEGIN
	FOR i IN 0 .. length(bytes) - 1 LOOP
		low := mod(hash, 256);
		hash := mod((hash - low + (low # get_byte(bytes, i))) * 1099511628211, 18446744073709551616);
	END LOOP;
	RETURN hash;
END
$body$;

-- An unsigned number of 64 bits as a signed one.
CREATE FUNCTION @schema@.rate_limit_signed(n numeric) RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
	SELECT (CASE WHEN n >= 9223372036854775808 THEN n - 18446744073709551616 ELSE n END)::bigint
$body$;

-- The phase of a fixed window without a start, in microseconds: a hash of name and key (with
-- the finalizer of MurmurHash3), modulo the period.
CREATE FUNCTION @schema@.rate_limit_phase(name text, key text, period float8) RETURNS float8 LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	hash numeric := @schema@.rate_limit_hash(convert_to(name, 'UTF8') || decode('00', 'hex') || convert_to(key, 'UTF8'));
	signed bigint;
	factor numeric;
BEGIN
	FOREACH factor IN ARRAY ARRAY[18397679294719823053, 14181476777654086739, 1] LOOP
		signed := @schema@.rate_limit_signed(hash);
		signed := signed # ((signed >> 33) & 2147483647);
		hash := mod((CASE WHEN signed < 0 THEN signed::numeric + 18446744073709551616 ELSE signed END) * factor, 18446744073709551616);
	END LOOP;
	RETURN mod(hash, period::numeric);
END
$body$;

-- An edge of a quota by the calendar.
CREATE FUNCTION @schema@.rate_limit_edge(d @schema@.rate_limit_request, n bigint) RETURNS timestamptz LANGUAGE plpgsql IMMUTABLE AS $body$
BEGIN
	RETURN @schema@.rate_limit_at(@schema@.rate_limits_edge(d.every, d.zone, d.anchor, d."time", n));
END
$body$;

-- The number of the last edge up to an instant, that edge, and the next one. rate_limits_edges
-- returns the number too, but is planned at each call.
CREATE FUNCTION @schema@.rate_limit_last_edge(d @schema@.rate_limit_request, at timestamptz, OUT n bigint, OUT last timestamptz, OUT next timestamptz) RETURNS record LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	day   date := at AT TIME ZONE 'UTC';
	units float8 := coalesce(substring(d.every, '^[0-9]+')::int, 1) * CASE substring(d.every, '[a-z]') WHEN 'w' THEN 7 WHEN 'y' THEN 12 ELSE 1 END;
BEGIN
	n := floor(CASE WHEN d.every ~ 'day|week' THEN day - d.anchor ELSE 12 * (date_part('year', day) - date_part('year', d.anchor)) + date_part('month', day) - date_part('month', d.anchor) END / units);
	last := @schema@.rate_limit_edge(d, n);
	WHILE last > at LOOP
		n := n - 1;
		next := last;
		last := @schema@.rate_limit_edge(d, n);
	END LOOP;
	WHILE next IS NULL OR next <= at LOOP
		last := coalesce(next, last);
		n := n + CASE WHEN next IS NULL THEN 0 ELSE 1 END;
		next := @schema@.rate_limit_edge(d, n + 1);
	END LOOP;
END
$body$;

-- For how long after an edge a ts counts as that edge: time zones are that far apart. Below a week
-- it covers summer time only.
CREATE FUNCTION @schema@.rate_limit_standing(d @schema@.rate_limit_request) RETURNS interval LANGUAGE sql IMMUTABLE AS $body$
	SELECT CASE WHEN d.every ~ '^([1-6] )?days?$' THEN interval '3 hours' ELSE interval '26 hours' END
$body$;

-- The number of the last edge that a row has had, as by rate_limits_had, and the next edge.
CREATE FUNCTION @schema@.rate_limit_had_edge(d @schema@.rate_limit_request, ts timestamptz, OUT n bigint, OUT next timestamptz) RETURNS record LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	last timestamptz;
BEGIN
	SELECT e.n, e.last, e.next INTO n, last, next FROM @schema@.rate_limit_last_edge(d, ts) AS e;
	IF ts - last > @schema@.rate_limit_standing(d) THEN
		n := n + 1;
		next := @schema@.rate_limit_edge(d, n + 1);
	END IF;
END
$body$;

-- An edge of a fixed window, or of a sliding window's slots, before every instant that a limit is
-- asked about.
CREATE FUNCTION @schema@.rate_limit_origin(name text, key text, period float8, start timestamptz) RETURNS timestamptz LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	back numeric;
BEGIN
	IF start IS NULL THEN
		RETURN '0001-01-01 00:00:00+00'::timestamptz + @schema@.rate_limit_phase(name, key, period) * interval '1 microsecond';
	END IF;
	back := ceil(greatest(extract(epoch FROM start - '0300-01-01 00:00:00+00'::timestamptz) * 1000000, 0) / period::numeric) * period::numeric;
	RETURN start - div(back, 3600000000)::float8 * interval '1 hour' - mod(back, 3600000000)::float8 * interval '1 microsecond';
END
$body$;

CREATE FUNCTION @schema@.rate_limit_origin(d @schema@.rate_limit_request, now timestamptz) RETURNS timestamptz LANGUAGE plpgsql STABLE AS $body$
BEGIN
	IF d.every IS NOT NULL THEN
		RETURN (@schema@.rate_limit_last_edge(d, now)).last;
	ELSIF d.kind = 'token bucket' THEN
		RETURN now;
	END IF;
	RETURN @schema@.rate_limit_origin(d.name, d.key, CASE WHEN d.start IS NULL THEN @schema@.rate_limit_period(d) ELSE @schema@.rate_limit_tick(d) END, d.start);
END
$body$;

-- The row of a key that has none: full.
CREATE FUNCTION @schema@.rate_limit_fresh(d @schema@.rate_limit_request, now timestamptz) RETURNS @schema@.rate_limit_state LANGUAGE plpgsql STABLE AS $body$
DECLARE
	s @schema@.rate_limit_state := ROW(d.capacity, now, NULL, NULL);
BEGIN
	IF d.every IS NOT NULL THEN
		s.ts := @schema@.rate_limit_origin(d, now);
	ELSIF d.kind <> 'token bucket' THEN
		s.ts := date_bin(@schema@.rate_limit_tick(d) * interval '1 microsecond', now, @schema@.rate_limit_origin(d, now));
	END IF;
	IF d.slots IS NOT NULL THEN
		s.slots := array[@schema@.rate_limit_tick(d), 0, d.rate] || array_fill(0::float8, array[d.slots + 2]);
	END IF;
	RETURN s;
END
$body$;

-- A row brought to an instant.
CREATE FUNCTION @schema@.rate_limit_refilled(d @schema@.rate_limit_request, s @schema@.rate_limit_state, now timestamptz) RETURNS @schema@.rate_limit_state LANGUAGE plpgsql STABLE AS $body$
DECLARE
	had  record;
	last record;
	tick timestamptz;
BEGIN
	IF d.slots IS NOT NULL THEN
		RETURN @schema@.rate_limit_slid(d, s, now);
	ELSIF d.every IS NOT NULL THEN
		had := @schema@.rate_limit_had_edge(d, s.ts);
		IF had.next <= now THEN
			last := @schema@.rate_limit_last_edge(d, now);
			s.value := s.value + (last.n - had.n) * d.rate;
			s.ts := last.last;
		END IF;
	ELSE
		tick := greatest(s.ts, date_bin(@schema@.rate_limit_tick(d) * interval '1 microsecond', now, s.ts));
		s.value := s.value + round(date_part('epoch', tick - s.ts) * 1000000) * d.rate / @schema@.rate_limit_period(d);
		s.ts := tick;
	END IF;
	s.value := least(s.value, d.capacity);
	RETURN s;
END
$body$;

-- When a row, which is settled, has been refilled with n tokens; at the next tick for n = 0.
CREATE FUNCTION @schema@.rate_limit_reach(d @schema@.rate_limit_request, ts timestamptz, n float8) RETURNS timestamptz LANGUAGE plpgsql STABLE AS $body$
DECLARE
	period float8 := @schema@.rate_limit_period(d);
	had    record;
BEGIN
	IF d.every IS NOT NULL AND n / d.rate * period <= 12614400000000000 THEN
		had := @schema@.rate_limit_had_edge(d, ts);
		RETURN CASE WHEN n <= d.rate THEN had.next ELSE @schema@.rate_limit_edge(d, had.n + ceil(n / d.rate)::int8) END;
	END IF;
	RETURN CASE
		WHEN n / d.rate * period > 12614400000000000 THEN ts + interval '3504000 hours'
		WHEN d.kind = 'fixed window' THEN ts + greatest(ceil(n / d.rate), 1) * period * interval '1 microsecond'
		WHEN n = 0 THEN ts + @schema@.rate_limit_tick(d) * interval '1 microsecond'
		ELSE ts + ceil(n * period / d.rate) * interval '1 microsecond'
	END;
END
$body$;

-- When a row, which is settled, holds want tokens, of which n are to be taken.
CREATE FUNCTION @schema@.rate_limit_enough(d @schema@.rate_limit_request, s @schema@.rate_limit_state, want float8, n float8) RETURNS timestamptz LANGUAGE plpgsql STABLE AS $body$
DECLARE
	missing float8 := want - s.value - @schema@.rate_limit_slack(s.value, n, d.capacity) / 2;
BEGIN
	RETURN CASE WHEN missing > 0 THEN @schema@.rate_limit_reach(d, s.ts, missing) ELSE s.ts END;
END
$body$;

-- When n tokens can be taken from a settled row so that the floor is left.
CREATE FUNCTION @schema@.rate_limit_ready(d @schema@.rate_limit_request, s @schema@.rate_limit_state, now timestamptz, n float8, floor float8) RETURNS timestamptz LANGUAGE plpgsql STABLE AS $body$
DECLARE
	slack float8;
	ready timestamptz;
BEGIN
	IF d.slots IS NULL THEN
		RETURN @schema@.rate_limit_enough(d, s, n + floor, n);
	END IF;
	slack := @schema@.rate_limit_slack(s.slots[cardinality(s.slots)], n, d.rate) / 2;
	ready := @schema@.rate_limit_slot(d, s, @schema@.rate_limit_first(s, n + greatest(0, floor), d.rate, slack, @schema@.rate_limit_unpaused(s, now)), floor);
	IF s.paused > now AND ready > s.paused THEN
		RETURN greatest(@schema@.rate_limit_slot(d, s, @schema@.rate_limit_first(s, n + greatest(0, floor), d.rate, slack, 0), floor), s.paused);
	END IF;
	RETURN ready;
END
$body$;

-- The row after n tokens were taken from it so that the floor is left; NULL if it is short.
CREATE FUNCTION @schema@.rate_limit_less(d @schema@.rate_limit_request, s @schema@.rate_limit_state, now timestamptz, n float8, floor float8) RETURNS @schema@.rate_limit_state LANGUAGE plpgsql STABLE AS $body$
DECLARE
	settled @schema@.rate_limit_state := @schema@.rate_limit_refilled(d, s, now);
	later   bigint;
BEGIN
	IF d.slots IS NULL THEN
		IF settled.value - n < floor - @schema@.rate_limit_slack(s.value, n, d.capacity) THEN
			RETURN NULL;
		END IF;
		RETURN @schema@.rate_limit_spent(d, settled, n, 0);
	ELSIF n > d.rate + @schema@.rate_limit_slack(n, d.rate, 0) THEN
		RETURN NULL;
	END IF;
	later := @schema@.rate_limit_first(settled, n + greatest(0, floor), d.rate, @schema@.rate_limit_slack(settled.slots[cardinality(settled.slots)], n, d.rate),
		@schema@.rate_limit_unpaused(settled, now));
	IF settled.slots[2] + later > 0
		AND @schema@.rate_limit_delayed(d, date_part('epoch', @schema@.rate_limit_slot(d, settled, later, 0) - now) * 1000000) > greatest(0, -floor) THEN
		RETURN NULL;
	END IF;
	RETURN @schema@.rate_limit_spent(d, settled, n, later);
END
$body$;

-- A settled row after n tokens were taken from it. later is for sliding windows: how many slots
-- after the newest the slot is from which they are taken.
CREATE FUNCTION @schema@.rate_limit_spent(d @schema@.rate_limit_request, s @schema@.rate_limit_state, n float8, later bigint) RETURNS @schema@.rate_limit_state LANGUAGE plpgsql STABLE AS $body$
BEGIN
	IF d.slots IS NULL THEN
		s.value := s.value - n;
		RETURN s;
	END IF;
	s.slots := @schema@.rate_limit_moved(s.slots, later, s.slots[2] + later);
	s.slots[d.slots + 5] := s.slots[d.slots + 5] + n;
	RETURN @schema@.rate_limit_valued(d, s);
END
$body$;

-- When the work may run for which n tokens were taken. s is the row that the take left.
CREATE FUNCTION @schema@.rate_limit_due(d @schema@.rate_limit_request, s @schema@.rate_limit_state, now timestamptz, n float8) RETURNS timestamptz LANGUAGE plpgsql STABLE AS $body$
BEGIN
	RETURN greatest(now, s.paused, CASE
		WHEN d.slots IS NOT NULL THEN CASE WHEN s.slots[2] > 0 THEN @schema@.rate_limit_slot(d, s, 0, 0) END
		WHEN s.value < 0 - @schema@.rate_limit_slack(s.value, n, d.capacity) THEN @schema@.rate_limit_enough(d, s, 0, 0) END);
END
$body$;

-- Sliding windows: the array slots has the length of a slot, the number of slots from that of ts to
-- the newest, the value, and the running totals. These are the totals before the oldest slot,
-- before the next one, and so on.

-- A sliding window's row brought to an instant.
CREATE FUNCTION @schema@.rate_limit_slid(d @schema@.rate_limit_request, s @schema@.rate_limit_state, now timestamptz) RETURNS @schema@.rate_limit_state LANGUAGE plpgsql STABLE AS $body$
DECLARE
	width  float8 := @schema@.rate_limit_tick(d);
	tick   timestamptz;
	passed float8;
	base   float8;
BEGIN
	IF (cardinality(s.slots) = d.slots + 5 AND s.slots[1] = width AND abs(s.slots[3] - s.value) <= abs(s.value) * 1e-14) IS NOT TRUE THEN
		s := @schema@.rate_limit_adopted(d, s);
	END IF;
	tick := greatest(s.ts, date_bin(width * interval '1 microsecond', now, s.ts));
	passed := round(date_part('epoch', tick - s.ts) * 1000000) / width;
	IF passed > 0 THEN
		s.slots := @schema@.rate_limit_moved(s.slots, greatest(0, passed - s.slots[2])::int8, greatest(0, s.slots[2] - passed));
	END IF;
	s.ts := tick;
	IF s.slots[4] > 8 * d.rate THEN -- totals grow with all that was ever given
		base := s.slots[4];
		FOR i IN 4 .. cardinality(s.slots) LOOP
			s.slots[i] := s.slots[i] - base;
		END LOOP;
	END IF;
	RETURN @schema@.rate_limit_valued(d, s);
END
$body$;

-- A sliding window's row with its value: the tokens left. If the newest slot is in the future, it
-- is the time until that slot, as tokens below 0.
CREATE FUNCTION @schema@.rate_limit_valued(d @schema@.rate_limit_request, s @schema@.rate_limit_state) RETURNS @schema@.rate_limit_state LANGUAGE plpgsql STABLE AS $body$
BEGIN
	s.value := CASE WHEN s.slots[2] > 0 THEN -@schema@.rate_limit_delayed(d, s.slots[2] * s.slots[1]) ELSE d.rate - (s.slots[cardinality(s.slots)] - s.slots[4]) END;
	s.slots[3] := s.value;
	RETURN s;
END
$body$;

-- The tokens that come in during a time in microseconds, as max_reserved counts them.
CREATE FUNCTION @schema@.rate_limit_delayed(d @schema@.rate_limit_request, micros float8) RETURNS float8 LANGUAGE sql IMMUTABLE AS $body$
	SELECT round(micros) * d.rate / @schema@.rate_limit_period(d)
$body$;

-- When a slot begins; later is how many slots it is after the newest. With a floor below 0: from
-- when on a reservation in that slot may be taken.
CREATE FUNCTION @schema@.rate_limit_slot(d @schema@.rate_limit_request, s @schema@.rate_limit_state, later bigint, floor float8) RETURNS timestamptz LANGUAGE plpgsql STABLE AS $body$
DECLARE
	ahead float8 := 0;
BEGIN
	IF floor < 0 THEN
		IF s.slots[2] + later = 0 THEN
			RETURN s.ts;
		END IF;
		ahead := trunc(least(-floor * @schema@.rate_limit_period(d) / d.rate, 12614400000000000));
		WHILE @schema@.rate_limit_delayed(d, ahead) > -floor LOOP
			ahead := ahead - 1;
		END LOOP;
		WHILE ahead < 12614400000000000 AND @schema@.rate_limit_delayed(d, ahead + 1) <= -floor LOOP
			ahead := ahead + 1;
		END LOOP;
	END IF;
	RETURN s.ts + ((s.slots[2] + later) * s.slots[1] - ahead) * interval '1 microsecond';
END
$body$;

-- The array of slots after the newest has moved on; later is by how many slots.
CREATE FUNCTION @schema@.rate_limit_moved(slots float8[], later bigint, ahead float8) RETURNS float8[] LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	size integer := cardinality(slots) - 3;
	gone integer := least(later, size);
BEGIN
	RETURN array[slots[1], ahead, slots[3]] || (slots[4:] || array_fill(slots[size + 3], array[size]))[gone + 1 : gone + size];
END
$body$;

-- How many slots after the newest the first slot is in which n more fit; begins is the least
-- answer.
CREATE FUNCTION @schema@.rate_limit_first(s @schema@.rate_limit_state, n float8, most float8, slack float8, begins bigint) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	over   float8 := s.slots[cardinality(s.slots)] + n - most - slack;
	low    integer := 0;
	high   integer := cardinality(s.slots) - 4;
	middle integer;
BEGIN
	WHILE low < high LOOP
		middle := (low + high) / 2;
		IF s.slots[middle + 4] > over THEN
			high := middle;
		ELSE
			low := middle + 1;
		END IF;
	END LOOP;
	RETURN greatest(begins, low);
END
$body$;

-- How many slots after the newest the first slot is that begins after the pause; 0 without a pause.
CREATE FUNCTION @schema@.rate_limit_unpaused(s @schema@.rate_limit_state, now timestamptz) RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
	SELECT CASE WHEN s.paused > now THEN greatest(ceil(round(date_part('epoch', s.paused - s.ts) * 1000000 - s.slots[2] * s.slots[1]) / s.slots[1]), 0)::int8 ELSE 0 END
$body$;

-- A row that another definition has written, in the slots of this one. Tokens go to the slot in
-- which their old slot ends. If the row is of another kind of limit, its value is the tokens left.
CREATE FUNCTION @schema@.rate_limit_adopted(d @schema@.rate_limit_request, s @schema@.rate_limit_state) RETURNS @schema@.rate_limit_state LANGUAGE plpgsql STABLE AS $body$
DECLARE
	width  bigint := @schema@.rate_limit_tick(d);
	ts     bigint := @schema@.rate_limit_micros(s.ts);
	start  bigint := coalesce(@schema@.rate_limit_micros(d.start), ts);
	first  bigint := ts - ((ts - start) % width + width) % width;
	size   integer := d.slots + 5;
	slots  float8[] := array[width, 0, 0] || array_fill(0::float8, array[d.slots + 2]);
	last   integer := cardinality(s.slots);
	place  bigint;
	held   float8;
BEGIN
	s.ts := @schema@.rate_limit_at(first);
	IF (last >= 6 AND s.slots[1] >= 1 AND abs(s.slots[3] - s.value) <= abs(s.value) * 1e-14) IS NOT TRUE THEN
		slots[2] := floor((ts + least(ceil(greatest(-s.value, 0) * @schema@.rate_limit_period(d) / d.rate), 12614400000000000)::int8 - first)::numeric / width);
		slots[size] := least(greatest(d.rate - s.value, 0), d.rate);
	ELSE
		slots[2] := floor((ts + ((s.slots[2] + 1) * s.slots[1])::int8 - 1 - first)::numeric / width);
		FOR i IN 5 .. last LOOP
			held := s.slots[i] - s.slots[i - 1];
			place := floor((ts + ((s.slots[2] + 1 + i - last) * s.slots[1])::int8 - 1 - first)::numeric / width) - slots[2] + d.slots;
			IF place >= 0 AND held > 0 THEN
				FOR j IN place + 5 .. size LOOP
					slots[j] := slots[j] + held;
				END LOOP;
			END IF;
		END LOOP;
	END IF;
	s.slots := slots;
	RETURN @schema@.rate_limit_valued(d, s);
END
$body$;

-- Shards: see package internal/decide, spread.go.

-- How many tokens to take from each of the rows; NULL if they are short.
CREATE FUNCTION @schema@.rate_limit_spread(r @schema@.rate_limit_request, states @schema@.rate_limit_state[], now timestamptz, floor float8) RETURNS float8[] LANGUAGE plpgsql STABLE AS $body$
DECLARE
	n      integer := cardinality(states);
	d      @schema@.rate_limit_request := @schema@.rate_limit_shard(r);
	held   float8[];
	counts float8[];
	level  float8;
	due    timestamptz;
	best   timestamptz;
	after  @schema@.rate_limit_state;
BEGIN
	IF n = 1 THEN
		after := @schema@.rate_limit_less(d, states[1], now, r.count, floor);
		RETURN CASE WHEN after.ts IS NOT NULL THEN array[r.count] END;
	END IF;
	held := ARRAY(SELECT (@schema@.rate_limit_refilled(d, s, now)).value FROM unnest(states) AS s);
	IF floor > 0 AND (SELECT sum(v) FROM unnest(held) AS v) - r.count < floor - @schema@.rate_limit_slack(r.count, r.capacity, floor) THEN
		RETURN NULL;
	END IF;
	counts := @schema@.rate_limit_drawn(r, held, 0);
	IF counts IS NOT NULL OR floor >= 0 THEN
		RETURN counts;
	ELSIF d.slots IS NOT NULL THEN
		FOR i IN 1 .. n LOOP
			after := @schema@.rate_limit_less(d, states[i], now, r.count, floor / n);
			due := @schema@.rate_limit_due(d, after, now, r.count);
			IF after.ts IS NOT NULL AND (best IS NULL OR due < best) THEN
				best := due;
				counts := array_fill(0::float8, array[n]);
				counts[i] := r.count;
			END IF;
		END LOOP;
		RETURN counts;
	END IF;
	level := @schema@.rate_limit_level(r, held, floor / n);
	FOR i IN 1 .. n LOOP
		IF held[i] = (SELECT max(v) FROM unnest(held) AS v) AND held[i] - r.count >= greatest(floor / n - @schema@.rate_limit_slack(r.count, d.capacity, floor / n), 2 * level) THEN
			counts := array_fill(0::float8, array[n]);
			counts[i] := r.count;
			RETURN counts;
		END IF;
	END LOOP;
	RETURN @schema@.rate_limit_drawn(r, held, level);
END
$body$;

-- How many tokens of a request to draw from each of the rows, the fullest first; NULL if they are
-- short.
CREATE FUNCTION @schema@.rate_limit_drawn(r @schema@.rate_limit_request, held float8[], floor float8) RETURNS float8[] LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	counts  float8[] := array_fill(0::float8, array[cardinality(held)]);
	missing float8 := r.count;
	taken   integer := 0;
	it      record;
BEGIN
	FOR it IN SELECT u.i, u.v - floor AS have FROM unnest(held) WITH ORDINALITY AS u (v, i) ORDER BY u.v DESC, u.i LOOP
		IF it.have >= missing - @schema@.rate_limit_slack(r.count, CASE WHEN taken = 0 THEN r.capacity / r.shards ELSE r.capacity END, floor) * (1 + taken / 64.0) THEN
			counts[it.i] := missing;
			RETURN counts;
		END IF;
		EXIT WHEN it.have <= 0;
		counts[it.i] := it.have;
		missing := missing - it.have;
		taken := taken + 1;
	END LOOP;
	RETURN NULL;
END
$body$;

-- The highest level above which the rows together have the tokens of a request, or the floor if
-- that is higher.
CREATE FUNCTION @schema@.rate_limit_level(r @schema@.rate_limit_request, held float8[], floor float8) RETURNS float8 LANGUAGE sql IMMUTABLE AS $body$
	SELECT greatest(max(l.level), floor)
	FROM (SELECT (sum(v) OVER (ORDER BY v DESC, i) - r.count) / row_number() OVER (ORDER BY v DESC, i) AS level FROM unnest(held) WITH ORDINALITY AS u (v, i)) AS l
$body$;

-- When rows that are short have enough. Several fill at different times, so it is searched for.
CREATE FUNCTION @schema@.rate_limit_wait(r @schema@.rate_limit_request, states @schema@.rate_limit_state[], now timestamptz, floor float8) RETURNS timestamptz LANGUAGE plpgsql STABLE AS $body$
DECLARE
	d      @schema@.rate_limit_request := @schema@.rate_limit_shard(r);
	one    @schema@.rate_limit_state := @schema@.rate_limit_refilled(d, states[1], now);
	s      @schema@.rate_limit_state;
	likely timestamptz;
	low    float8 := 0;
	high   float8;
	step   float8 := 1;
BEGIN
	IF cardinality(states) = 1 THEN
		RETURN @schema@.rate_limit_ready(d, one, now, r.count, floor);
	ELSIF d.slots IS NOT NULL THEN
		FOREACH s IN ARRAY states LOOP
			likely := greatest(likely, @schema@.rate_limit_ready(d, @schema@.rate_limit_refilled(d, s, now), now, r.count / r.shards, floor / r.shards));
		END LOOP;
	ELSE
		FOREACH s IN ARRAY states[2:] LOOP
			s := @schema@.rate_limit_refilled(d, s, now);
			one.value := one.value + s.value;
			one.ts := greatest(one.ts, s.ts);
		END LOOP;
		likely := @schema@.rate_limit_ready(r, @schema@.rate_limit_refilled(r, one, now), now, r.count, floor);
	END IF;
	high := greatest(round(date_part('epoch', likely - now) * 1000000), 1);
	WHILE high < 9e15 AND @schema@.rate_limit_spread(r, states, now + high * interval '1 microsecond', floor) IS NULL LOOP
		low := high;
		high := high + step;
		step := 2 * step;
	END LOOP;
	step := 1;
	WHILE high - step > low AND @schema@.rate_limit_spread(r, states, now + (high - step) * interval '1 microsecond', floor) IS NOT NULL LOOP
		high := high - step;
		step := 2 * step;
	END LOOP;
	low := greatest(low, high - step);
	WHILE high - low > 1 LOOP
		step := trunc((low + high) / 2);
		IF @schema@.rate_limit_spread(r, states, now + step * interval '1 microsecond', floor) IS NULL THEN
			low := step;
		ELSE
			high := step;
		END IF;
	END LOOP;
	RETURN now + high * interval '1 microsecond';
END
$body$;

-- A result, of the rows of all shards that are known.
CREATE FUNCTION @schema@.rate_limit_told(r @schema@.rate_limit_request, ok boolean, states @schema@.rate_limit_state[], instant timestamptz, retry_at timestamptz)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql STABLE AS $body$
DECLARE
	d      @schema@.rate_limit_request := @schema@.rate_limit_shard(r);
	s      @schema@.rate_limit_state;
	value  float8 := 0;
	paused timestamptz;
	filled timestamptz;
BEGIN
	FOREACH s IN ARRAY states LOOP
		s := @schema@.rate_limit_refilled(d, s, instant);
		value := value + CASE WHEN d.slots IS NOT NULL AND s.slots[2] > 0
			THEN -@schema@.rate_limit_delayed(d, date_part('epoch', @schema@.rate_limit_slot(d, s, 0, 0) - instant) * 1000000) ELSE s.value END;
		paused := greatest(paused, s.paused);
		s.paused := NULL;
		filled := greatest(filled, @schema@.rate_limit_ready(d, s, s.ts, d.capacity, 0));
	END LOOP;
	RETURN ROW(ok, retry_at - instant, retry_at, value,
		greatest(floor(value + @schema@.rate_limit_slack(value, 1, r.capacity)), 0)::int8, r.capacity,
		greatest(greatest(filled, paused) - instant, interval '0'),
		CASE WHEN paused > instant THEN paused END, instant, r.name, r.key, false)::@schema@.rate_limit_result;
END
$body$;

-- The edges around now that a calendar's take receives, and beside each the first instant of a row
-- that has had it: see calendar.go. The clock that decides is read just before the take, so one
-- edge to spare is enough.
CREATE FUNCTION @schema@.rate_limit_edges(d @schema@.rate_limit_request, OUT edges timestamptz[], OUT had timestamptz[]) RETURNS record LANGUAGE plpgsql AS $body$
DECLARE
	now    record := @schema@.rate_limit_last_edge(d, clock_timestamp());
	first  bigint := now.n - least(ceil(d.capacity / d.rate), 64)::int8;
	before timestamptz := @schema@.rate_limit_edge(d, first - 1);
	at     timestamptz;
BEGIN
	FOR n IN first .. now.n + 2 LOOP
		at := CASE n WHEN now.n THEN now.last WHEN now.n + 1 THEN now.next ELSE @schema@.rate_limit_edge(d, n) END;
		edges := edges || at;
		had := had || least(before + @schema@.rate_limit_standing(d) + interval '1 microsecond', at);
		before := at;
	END LOOP;
END
$body$;

-- Takes by the statement that Go sends, if the row has enough; ts is NULL if not, and the row is
-- locked then. A sliding window's reservations have no statement, so their ts is NULL, and the row
-- is not locked.
CREATE FUNCTION @schema@.rate_limit_try(d @schema@.rate_limit_request, shard integer, floor float8, reserve boolean,
	OUT value float8, OUT ts timestamptz, OUT paused timestamptz, OUT slots float8[], OUT at timestamptz) RETURNS record LANGUAGE plpgsql AS $body$
DECLARE
	over timestamptz := CASE WHEN reserve THEN 'infinity' END;
	sent record;
BEGIN
	IF d.kind = 'token bucket' THEN
		SELECT t.value, t.ts, t.paused, t.at INTO value, ts, paused, at
			FROM @schema@.rate_limit_bucket_take(d.name, d.key, shard, d.capacity, d.count, NULL, d.rate, @schema@.rate_limit_period(d), floor, over) AS t;
	ELSIF d.every IS NOT NULL THEN
		sent := @schema@.rate_limit_edges(d);
		SELECT t.value, t.ts, t.paused, t.at INTO value, ts, paused, at
			FROM @schema@.rate_limit_calendar_take(d.name, d.key, shard, d.capacity, d.count, NULL, sent.edges, sent.had, d.rate, floor, over, '0300-01-01 00:00:00+00') AS t
			WHERE t.ts > '0300-01-01 00:00:00+00';
	ELSIF d.slots IS NULL THEN
		SELECT t.value, t.ts, t.paused, t.at INTO value, ts, paused, at
			FROM @schema@.rate_limit_window_take(d.name, d.key, shard, d.capacity, d.count, @schema@.rate_limit_period(d), NULL, @schema@.rate_limit_origin(d, NULL), d.rate, floor, over) AS t;
	ELSIF NOT reserve THEN
		SELECT t.value, t.ts, t.paused, t.slots, t.at INTO value, ts, paused, slots, at
			FROM @schema@.rate_limit_slots_take(d.name, d.key, shard, d.rate, d.count, @schema@.rate_limit_tick(d), NULL, @schema@.rate_limit_origin(d, NULL), d.slots + 2, floor, over) AS t;
	END IF;
END
$body$;

-- The same of one of several shards, behind a savepoint: one that is short must not stay locked.
CREATE FUNCTION @schema@.rate_limit_try_apart(d @schema@.rate_limit_request, shard integer, reserve boolean,
	OUT value float8, OUT ts timestamptz, OUT paused timestamptz, OUT slots float8[], OUT at timestamptz) RETURNS record LANGUAGE plpgsql AS $body$
BEGIN
	SELECT t.value, t.ts, t.paused, t.slots, t.at INTO value, ts, paused, slots, at FROM @schema@.rate_limit_try(d, shard, 0, reserve) AS t;
	IF ts IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'RL000';
	END IF;
EXCEPTION WHEN SQLSTATE 'RL000' THEN
	NULL; -- it is as it was
END
$body$;

-- Locks a row. A missing row is made, full.
CREATE FUNCTION @schema@.rate_limit_locked(d @schema@.rate_limit_request, shard integer, OUT s @schema@.rate_limit_state, OUT ahead float8[], OUT at timestamptz, OUT made boolean) RETURNS record LANGUAGE plpgsql AS $body$
DECLARE
	l record;
BEGIN
	SELECT * INTO l FROM @schema@.rate_limit_touch(d.name, d.key, shard, d.capacity, @schema@.rate_limit_tick(d), NULL,
		CASE WHEN d.kind = 'token bucket' THEN '2000-01-01 00:00:00+00' ELSE @schema@.rate_limit_origin(d, clock_timestamp()) END,
		CASE WHEN d.slots IS NOT NULL THEN (@schema@.rate_limit_fresh(d, clock_timestamp())).slots END);
	s := ROW(l.value, l.ts, l.paused, l.slots);
	ahead := l.ahead;
	at := l.at;
	made := l.made;
END
$body$;

-- The rows of a limit's key as they are, without a lock.
CREATE FUNCTION @schema@.rate_limit_seen(d @schema@.rate_limit_request, OUT states @schema@.rate_limit_state[], OUT at timestamptz) RETURNS record LANGUAGE plpgsql AS $body$
DECLARE
	l record;
BEGIN
	states[coalesce(d.shards, 1)] := NULL;
	states[1] := NULL;
	FOR l IN SELECT r.shard, ROW(r.value, r.ts, r.paused, r.slots)::@schema@.rate_limit_state AS s FROM @schema@.rate_limits AS r
		WHERE r.name = d.name AND r.key = d.key AND r.shard < cardinality(states) LOOP
		states[l.shard + 1] := l.s;
	END LOOP;
	at := clock_timestamp();
	FOR i IN 1 .. cardinality(states) LOOP
		IF (states[i]).ts IS NULL THEN
			states[i] := @schema@.rate_limit_fresh(d, at);
		END IF;
	END LOOP;
END
$body$;

-- What a request would take from each of the rows, and when it may run, or may be asked again.
CREATE FUNCTION @schema@.rate_limit_found(r @schema@.rate_limit_request, states @schema@.rate_limit_state[], now timestamptz, floor float8, reserve boolean,
	OUT ok boolean, OUT counts float8[], OUT due timestamptz) RETURNS record LANGUAGE plpgsql STABLE AS $body$
DECLARE
	d       @schema@.rate_limit_request := @schema@.rate_limit_shard(r);
	lowest  float8 := @schema@.rate_limit_lowest(r, floor);
	fullest integer := @schema@.rate_limit_fullest(r, states, now);
	after   @schema@.rate_limit_state;
	paused  timestamptz;
BEGIN
	IF NOT reserve THEN
		FOR i IN 1 .. cardinality(states) LOOP
			paused := greatest(paused, (states[i]).paused);
			states[i].paused := NULL;
		END LOOP;
	END IF;
	counts := @schema@.rate_limit_spread(r, states, now, floor);
	ok := counts IS NOT NULL;
	IF ok THEN
		due := now;
		FOR i IN 1 .. cardinality(states) LOOP
			CONTINUE WHEN counts[i] = 0 AND i <> fullest;
			after := @schema@.rate_limit_less(d, states[i], now, counts[i], lowest);
			IF after.ts IS NULL THEN -- but for a rounding error
				after := @schema@.rate_limit_spent(d, @schema@.rate_limit_refilled(d, states[i], now), counts[i], 0);
			END IF;
			due := greatest(due, @schema@.rate_limit_due(d, after, now, r.count));
		END LOOP;
	ELSE
		due := @schema@.rate_limit_wait(r, states, now, floor);
	END IF;
	IF paused > now THEN
		ok := false;
		due := greatest(due, paused);
	END IF;
END
$body$;

-- The lowest value that a request may leave behind in one of its rows.
CREATE FUNCTION @schema@.rate_limit_lowest(r @schema@.rate_limit_request, floor float8) RETURNS float8 LANGUAGE sql IMMUTABLE AS $body$
	SELECT CASE WHEN r.shards > 1 THEN least(floor, 0) / r.shards ELSE floor END
$body$;

-- The row that a count of 0 is taken from; 0 for other counts.
CREATE FUNCTION @schema@.rate_limit_fullest(r @schema@.rate_limit_request, states @schema@.rate_limit_state[], now timestamptz) RETURNS integer LANGUAGE plpgsql STABLE AS $body$
BEGIN
	IF r.count > 0 OR cardinality(states) = 1 THEN
		RETURN CASE WHEN r.count > 0 THEN 0 ELSE 1 END;
	END IF;
	RETURN (SELECT u.i FROM unnest(states) WITH ORDINALITY AS u (value, ts, paused, slots, i)
		ORDER BY (@schema@.rate_limit_refilled(@schema@.rate_limit_shard(r), ROW(u.value, u.ts, u.paused, u.slots), now)).value DESC, u.i LIMIT 1);
END
$body$;

-- When a take counts that left the row s behind, and when it is due. It counts within the row's
-- tick, at ts if that is later. But one that must wait, or is made in a pause, counts at once.
CREATE FUNCTION @schema@.rate_limit_counted(d @schema@.rate_limit_request, s @schema@.rate_limit_state, n float8, INOUT at timestamptz, OUT due timestamptz) RETURNS record LANGUAGE plpgsql STABLE AS $body$
DECLARE
	now timestamptz := least(at, @schema@.rate_limit_reach(d, s.ts, 0) - interval '1 microsecond');
BEGIN
	at := greatest(now, s.ts);
	due := @schema@.rate_limit_due(d, @schema@.rate_limit_refilled(d, s, at), at, n);
	IF at > now AND (due > at OR s.paused > now) THEN
		at := now;
	END IF;
END
$body$;

-- Takes counts from rows, which it locks in their order; ok is false if one is short or paused by
-- then.
CREATE FUNCTION @schema@.rate_limit_taken(r @schema@.rate_limit_request, counts float8[], floor float8, reserve boolean, INOUT states @schema@.rate_limit_state[],
	OUT ok boolean, OUT at timestamptz, OUT due timestamptz) RETURNS record LANGUAGE plpgsql AS $body$
DECLARE
	d       @schema@.rate_limit_request := @schema@.rate_limit_shard(r);
	lowest  float8 := @schema@.rate_limit_lowest(r, floor);
	fullest integer := @schema@.rate_limit_fullest(r, states, clock_timestamp());
	l       record;
	after   @schema@.rate_limit_state;
	counted record;
BEGIN
	ok := false;
	FOR i IN 1 .. cardinality(states) LOOP
		CONTINUE WHEN counts[i] = 0 AND i <> fullest;
		l := @schema@.rate_limit_locked(d, i - 1);
		IF NOT reserve AND (l.s).paused > l.at THEN
			RETURN;
		END IF;
		after := @schema@.rate_limit_less(d, l.s, l.at, counts[i], lowest);
		IF after.ts IS NULL AND r.shards > 1 THEN -- several rows may miss a rounding error more than one
			after := @schema@.rate_limit_refilled(d, l.s, l.at);
			IF after.value - counts[i] < lowest - 2 * @schema@.rate_limit_slack(r.count, r.capacity, floor) THEN
				RETURN;
			END IF;
			after := @schema@.rate_limit_spent(d, after, counts[i], 0);
		ELSIF after.ts IS NULL THEN
			RETURN;
		END IF;
		PERFORM @schema@.rate_limit_put(d.name, d.key, i - 1, after.value, after.ts, after.paused, CASE WHEN d.slots IS NOT NULL THEN after.slots END);
		states[i] := after;
		counted := @schema@.rate_limit_counted(d, after, r.count, l.at);
		at := greatest(at, counted.at);
		due := greatest(due, counted.due);
	END LOOP;
	ok := true;
END
$body$;

-- What is wrong with a request; NULL when nothing is. NaN is greater than every other number.
CREATE FUNCTION @schema@.rate_limit_fault(r @schema@.rate_limit_request) RETURNS text LANGUAGE plpgsql STABLE AS $body$
DECLARE
	micros float8 := extract(epoch FROM r.period) * 1000000;
BEGIN
	RETURN CASE
		WHEN r.name IS NULL OR octet_length(r.name) NOT BETWEEN 1 AND 255 THEN 'name: must have from 1 to 255 bytes'
		WHEN r.key IS NULL OR octet_length(r.key) > 2048 THEN 'key: must not be NULL, and have at most 2048 bytes'
		WHEN r.kind IS NULL OR r.kind NOT IN ('token bucket', 'fixed window') AND r.slots IS NULL THEN format('kind %L: must be token bucket or fixed window', r.kind)
		WHEN r.rate IS NULL OR r.rate NOT BETWEEN 1e-15 AND 1e12 THEN format('rate %s: must be from 1e-15 to 1e12', r.rate)
		WHEN r.period IS NULL OR micros NOT BETWEEN 1 AND 3153600000000000 OR date_part('year', r.period) <> 0 OR date_part('month', r.period) <> 0
			THEN format('period %s: must be positive, without months, and at most 36500 days', r.period)
		WHEN r.capacity IS NULL AND r.rate < 1 THEN format('rate %s: can never grant a whole token while capacity is left out and so is the same: give a longer period with the rate of that, or a capacity of 1', r.rate)
		WHEN r.capacity <> 0 AND r.capacity NOT BETWEEN 1e-15 AND 1e12 THEN format('capacity %s: must be 0 for none, or from 1e-15 to 1e12', r.capacity)
		WHEN r.capacity / r.rate * micros > 3153600000000000 THEN format('capacity %s: must fill within 36500 days at this rate', r.capacity)
		WHEN r.max_reserved <> 0 AND r.max_reserved <> 'Infinity' AND r.max_reserved NOT BETWEEN 1e-15 AND 1e12
			THEN format('max_reserved %s: must be 0 for none, from 1e-15 to 1e12, or Infinity', r.max_reserved)
		WHEN r.start IS NOT NULL AND r.kind = 'token bucket' THEN 'start: a token bucket has none'
		WHEN r.start < '0001-01-01 00:00:00+00' OR r.start >= '10000-01-01 00:00:00+00' THEN 'start: must be in the years 1 to 9999'
		WHEN r.shards > CASE WHEN r.capacity = 0 THEN r.max_reserved ELSE coalesce(r.capacity, r.rate) END AND r.shards > 1
			THEN format('shards %s: must have a token each', r.shards)
		WHEN r.count IS NULL OR r.count NOT BETWEEN 0 AND 1e12 THEN format('count %s: must be from 0 to 1e12', r.count)
		WHEN r.above NOT BETWEEN 0 AND 1 THEN format('above %s: must be a share of the capacity, from 0 to 1', r.above)
	END;
END
$body$;

-- A request with its defaults filled in; an error if something is wrong with it for a verb.
CREATE FUNCTION @schema@.rate_limit_sound(verb text, r @schema@.rate_limit_request) RETURNS @schema@.rate_limit_request LANGUAGE plpgsql STABLE AS $body$
DECLARE
	fault text := @schema@.rate_limit_fault(r);
BEGIN
	r.above := coalesce(r.above, 0);
	IF fault IS NULL AND r.above > 0 AND verb IN ('reserve', 'check reserve') THEN
		fault := format('above %s: is not for a reservation, which may go into debt', r.above);
	END IF;
	IF fault IS NOT NULL THEN
		RAISE EXCEPTION 'rate limit %: %', quote_literal(left(r.name, 255)), fault USING ERRCODE = 'invalid_parameter_value';
	END IF;
	r.capacity := coalesce(r.capacity, r.rate);
	RETURN r;
END
$body$;

-- Takes, or looks, for one limit.
CREATE FUNCTION @schema@.rate_limit_call(verb text, r @schema@.rate_limit_request)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql AS $body$
DECLARE
	reserve boolean := verb IN ('reserve', 'check reserve');
	d       @schema@.rate_limit_request;
	floor   float8;
	most    float8;
	now     timestamptz;
	shard   integer;
	states  @schema@.rate_limit_state[];
	seen    record;
	found   record;
	took    record;
	counted record;
BEGIN
	r := @schema@.rate_limit_sound(verb, r);
	floor := r.above * r.capacity;
	IF reserve THEN
		floor := 0 - least(coalesce(r.max_reserved, 'Infinity'), r.rate * 3153600000000000 / @schema@.rate_limit_period(r));
	END IF;
	most := r.capacity - CASE WHEN r.slots IS NULL THEN floor ELSE greatest(floor, 0) END;
	IF r.count > most + @schema@.rate_limit_slack(r.count, most, 0) / 2 THEN
		IF r.mode = 'shadow' THEN
			now := clock_timestamp();
			RETURN ROW(false, interval '876000 hours', now + interval '876000 hours', 0, 0, r.capacity, interval '0', NULL, now, r.name, r.key, false)::@schema@.rate_limit_result;
		END IF;
		RAISE EXCEPTION 'rate limit %: % tokens can never be granted at once, at most % can', quote_literal(r.name), r.count, most
			USING ERRCODE = 'numeric_value_out_of_range';
	END IF;
	d := @schema@.rate_limit_shard(r);
	IF reserve AND r.shards > 1 AND r.count > d.rate AND d.slots IS NOT NULL THEN
		RAISE EXCEPTION 'rate limit %: count %: a reservation from several shards of a sliding window is left to the library in Go', quote_literal(r.name), r.count
			USING ERRCODE = 'feature_not_supported';
	END IF;

	-- First the row itself grants, or one of two shards. Otherwise all rows are read. They tell the
	-- refusal; or, if a row was not as its definition writes it, what to take.
	SELECT NULL::timestamptz AS ts INTO took;
	IF verb IN ('allow', 'reserve') AND (r.shards > 1) IS NOT TRUE THEN
		took := @schema@.rate_limit_try(d, 0, floor, reserve);
	ELSIF verb IN ('allow', 'reserve') AND floor <= 0 AND r.count BETWEEN 1e-15 AND d.capacity THEN
		shard := floor(random() * r.shards);
		took := @schema@.rate_limit_try_apart(d, shard, reserve);
		IF took.ts IS NULL THEN
			took := @schema@.rate_limit_try_apart(d, (shard + 1 + floor(random() * (r.shards - 1))::int) % r.shards, reserve);
		END IF;
	END IF;
	IF took.ts IS NOT NULL THEN
		states := array[ROW(took.value, took.ts, took.paused, took.slots)::@schema@.rate_limit_state];
		counted := @schema@.rate_limit_counted(d, states[1], r.count, took.at);
		-- To read the other shards would make transactions that are SERIALIZABLE fail.
		IF r.shards > 1 AND current_setting('transaction_isolation') <> 'serializable' THEN
			states := (@schema@.rate_limit_seen(d)).states;
		END IF;
		RETURN @schema@.rate_limit_told(r, true, states, counted.at, counted.due);
	END IF;
	FOR round IN 1 .. 8 LOOP
		seen := @schema@.rate_limit_seen(d);
		found := @schema@.rate_limit_found(r, seen.states, seen.at, floor, reserve);
		IF NOT found.ok OR verb IN ('check', 'check reserve') THEN
			RETURN @schema@.rate_limit_told(r, found.ok, seen.states, seen.at, found.due);
		ELSIF (r.shards > 1) IS NOT TRUE THEN
			took := @schema@.rate_limit_taken(r, found.counts, floor, reserve, seen.states);
		ELSE
			BEGIN
				took := @schema@.rate_limit_taken(r, found.counts, floor, reserve, seen.states);
				IF NOT took.ok THEN
					RAISE EXCEPTION USING ERRCODE = 'RL000';
				END IF;
			EXCEPTION WHEN SQLSTATE 'RL000' THEN
				took.ok := false; -- they are as they were
			END;
		END IF;
		IF took.ok THEN
			RETURN @schema@.rate_limit_told(r, true, took.states, took.at, took.due);
		END IF;
	END LOOP;
	-- Others were faster each time: it is worth asking again at once.
	RETURN @schema@.rate_limit_told(r, false, seen.states, seen.at, greatest(found.due, seen.at + interval '1 microsecond'));
END
$body$;

-- Gives unused tokens back, or takes those that were used beyond the count. A sliding window gives
-- them back to the slot of taken_at, or if that is NULL to the oldest slots.
CREATE FUNCTION @schema@.rate_limit_back(verb text, r @schema@.rate_limit_request, used float8, taken_at timestamptz)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql AS $body$
DECLARE
	credit boolean := verb = 'credit';
	give   float8 := r.count;
	spend  float8 := 0;
	d      @schema@.rate_limit_request;
	seen   record;
	held   float8[];
	l      record;
	s      @schema@.rate_limit_state;
	found  record;
BEGIN
	r := @schema@.rate_limit_sound(verb, r);
	IF NOT credit AND (used IS NULL OR used NOT BETWEEN 0 AND 1e12) THEN
		RAISE EXCEPTION 'rate limit %: used %: must be from 0 to 1e12', quote_literal(r.name), used USING ERRCODE = 'invalid_parameter_value';
	ELSIF NOT credit THEN
		give := greatest(r.count - used, 0);
		spend := greatest(used - r.count, 0);
	END IF;
	d := @schema@.rate_limit_shard(r);
	r.count := CASE WHEN spend > 0 THEN spend ELSE give END;
	SELECT array[r.count] AS counts INTO found;
	SELECT array[NULL::@schema@.rate_limit_state] AS states, clock_timestamp() AS at INTO seen;
	IF r.shards > 1 THEN
		seen := @schema@.rate_limit_seen(d);
		held := ARRAY(SELECT (@schema@.rate_limit_refilled(d, u, seen.at)).value FROM unnest(seen.states) AS u);
		IF spend = 0 THEN -- to the emptiest first
			held := ARRAY(SELECT d.capacity - v FROM unnest(held) AS v);
			r.count := least(r.count, (SELECT sum(greatest(v, 0)) FROM unnest(held) AS v));
			found.counts := coalesce(@schema@.rate_limit_drawn(r, held, @schema@.rate_limit_level(r, held, 0)), array_fill(0::float8, array[r.shards]));
		ELSE -- so that all are left with as much
			found.counts := ARRAY(SELECT greatest(0, v - @schema@.rate_limit_level(r, held, '-Infinity')) FROM unnest(held) AS v);
		END IF;
	END IF;
	FOR i IN 1 .. cardinality(seen.states) LOOP
		CONTINUE WHEN found.counts[i] = 0 AND r.shards > 1;
		IF spend > 0 OR d.slots IS NOT NULL THEN
			l := @schema@.rate_limit_locked(d, i - 1);
			s := @schema@.rate_limit_refilled(d, l.s, l.at);
			IF spend > 0 THEN
				s.value := greatest(s.value, (l.s).value); -- more than the capacity, of another definition, stays
				s := @schema@.rate_limit_spent(d, s, found.counts[i], 0);
			ELSE
				s := @schema@.rate_limit_unslotted(d, s, found.counts[i], l.ahead, l.at, CASE WHEN NOT credit THEN taken_at END);
			END IF;
			PERFORM @schema@.rate_limit_put(d.name, d.key, i - 1, s.value, s.ts, s.paused, CASE WHEN d.slots IS NOT NULL THEN s.slots END);
		ELSE
			IF d.kind = 'token bucket' THEN
				SELECT * INTO l FROM @schema@.rate_limit_bucket_give(d.name, d.key, i - 1, d.capacity, found.counts[i], NULL, d.rate, @schema@.rate_limit_period(d),
					CASE WHEN credit OR r.shards > 1 THEN d.capacity ELSE 1.7976931348623157e308 END, 0, NULL);
			ELSE
				SELECT * INTO l FROM @schema@.rate_limit_window_give(d.name, d.key, i - 1, d.capacity, found.counts[i], @schema@.rate_limit_period(d), NULL, @schema@.rate_limit_origin(d, clock_timestamp()),
					CASE WHEN credit OR r.shards > 1 THEN d.capacity ELSE 1.7976931348623157e308 END, 0, NULL);
			END IF;
			s := ROW(l.value, l.ts, l.paused, l.slots);
		END IF;
		seen.states[i] := s;
		seen.at := greatest(seen.at, l.at);
	END LOOP;
	r.count := 0;
	found := @schema@.rate_limit_found(r, seen.states, seen.at, 0, false);
	RETURN @schema@.rate_limit_told(r, NOT credit OR found.ok, seen.states, seen.at, found.due);
END
$body$;

-- A settled row of a sliding window after n tokens were removed from its slots.
CREATE FUNCTION @schema@.rate_limit_unslotted(d @schema@.rate_limit_request, s @schema@.rate_limit_state, n float8, ahead float8[], now timestamptz, taken_at timestamptz) RETURNS @schema@.rate_limit_state LANGUAGE plpgsql STABLE AS $body$
DECLARE
	last  integer := d.slots + 5;
	until timestamptz := '2000-01-01 00:00:00+00'::timestamptz + ahead[2] * interval '1 second';
	base  float8;
	slot  bigint;
BEGIN
	IF taken_at IS NOT NULL THEN
		slot := floor(date_part('epoch', taken_at - @schema@.rate_limit_slot(d, s, -d.slots, 0)) * 1000000 / s.slots[1]);
		IF slot BETWEEN 0 AND d.slots THEN
			n := least(n, s.slots[slot + 5] - s.slots[slot + 4]);
			FOR i IN slot + 5 .. last LOOP
				s.slots[i] := greatest(s.slots[i] - n, s.slots[i - 1]); -- rounding must not turn them around
			END LOOP;
		END IF;
		RETURN @schema@.rate_limit_valued(d, s);
	END IF;
	IF ahead[1] > 0 AND until > now THEN -- the slot in which what is out ends keeps as much
		slot := greatest(trunc(date_part('epoch', @schema@.rate_limit_slot(d, s, 1, 0) - until) * 1000000 / s.slots[1]), 0);
		n := least(n, greatest(0, s.slots[greatest(last - slot, 4)] - s.slots[4] - ahead[1]));
	END IF;
	base := least(s.slots[4] + n, s.slots[last]);
	FOR i IN 4 .. last LOOP
		s.slots[i] := greatest(s.slots[i], base);
	END LOOP;
	RETURN @schema@.rate_limit_valued(d, s);
END
$body$;

-- Whether a caller of two limits must know b rather than a.
CREATE FUNCTION @schema@.rate_limit_outweighs(a @schema@.rate_limit_result, b @schema@.rate_limit_result) RETURNS boolean LANGUAGE sql IMMUTABLE AS $body$
	SELECT CASE
		WHEN a.ok IS NULL OR a.ok <> b.ok THEN a.ok IS NULL OR a.ok
		WHEN (a.retry_after > interval '0' OR b.retry_after > interval '0') AND a.retry_at <> b.retry_at THEN b.retry_at > a.retry_at
		ELSE b.remaining < a.remaining
	END
$body$;

-- Requests in the order in which their rows are locked. Those of one limit and key are added up.
CREATE FUNCTION @schema@.rate_limit_merged(verb text, requests @schema@.rate_limit_request[]) RETURNS @schema@.rate_limit_request[] LANGUAGE plpgsql STABLE AS $body$
DECLARE
	asked @schema@.rate_limit_request[];
	r     @schema@.rate_limit_request;
BEGIN
	FOREACH r IN ARRAY requests LOOP
		asked := asked || @schema@.rate_limit_sound(verb, r);
	END LOOP;
	asked := ARRAY(
		SELECT ROW(a.name, a.key, sum(a.count), a.rate, a.period, a.capacity, a.max_reserved, a.kind, a.start, max(a.above), a.mode, a.refused_until,
			a.shards, a.slots, a.every, a.zone, a.anchor, a."time")::@schema@.rate_limit_request
		FROM unnest(asked) AS a GROUP BY a.name, a.key, a.rate, a.period, a.capacity, a.max_reserved, a.kind, a.start, a.mode, a.refused_until,
			a.shards, a.slots, a.every, a.zone, a.anchor, a."time"
		ORDER BY coalesce(a.shards, 1) > 1, a.name COLLATE "C", a.key COLLATE "C");
	FOR i IN 2 .. cardinality(asked) LOOP
		IF (asked[i]).name = (asked[i - 1]).name AND (asked[i]).key = (asked[i - 1]).key THEN
			RAISE EXCEPTION 'rate limit %: has two definitions in one call', quote_literal((asked[i]).name) USING ERRCODE = 'invalid_parameter_value';
		END IF;
	END LOOP;
	RETURN asked;
END
$body$;

-- Takes from limits, or looks at them. It ends at the first take that is refused; those in mode
-- shadow refuse nothing. Each row is locked and read before the take, so that it can be put back
-- without a savepoint, behind which others would fail under SERIALIZABLE. taken has those rows.
CREATE FUNCTION @schema@.rate_limit_each(verb text, asked @schema@.rate_limit_request[], OUT worst @schema@.rate_limit_result, OUT taken @schema@.rate_limits[]) RETURNS record LANGUAGE plpgsql AS $body$
DECLARE
	takes    boolean := verb IN ('allow', 'reserve');
	r        @schema@.rate_limit_request;
	answer   @schema@.rate_limit_result;
	shadow   @schema@.rate_limit_result; -- of those that cannot refuse
	shadowed boolean := false;
	l        @schema@.rate_limits;
	held     record;
BEGIN
	FOREACH r IN ARRAY asked LOOP
		IF takes AND cardinality(asked) > 1 AND (r.shards > 1) IS NOT TRUE THEN
			held := @schema@.rate_limit_locked(r, 0);
			SELECT r.name, r.key, 0, (held.s).* INTO l.name, l.key, l.shard, l.value, l.ts, l.paused, l.slots;
		END IF;
		answer := @schema@.rate_limit_call(verb, r);
		IF answer.ok AND takes AND (r.shards > 1) IS NOT TRUE THEN
			taken := taken || l;
		END IF;
		IF r.mode = 'shadow' THEN
			shadowed := shadowed OR NOT answer.ok OR answer.retry_after > interval '0';
			answer.ok := true;
			answer.retry_after := interval '0';
			answer.retry_at := answer.at;
			IF @schema@.rate_limit_outweighs(shadow, answer) THEN
				shadow := answer;
			END IF;
		ELSIF @schema@.rate_limit_outweighs(worst, answer) THEN
			worst := answer;
		END IF;
		EXIT WHEN takes AND worst.ok = false;
	END LOOP;
	IF worst.ok IS NULL THEN
		worst := shadow;
	END IF;
	worst.shadowed := shadowed;
END
$body$;

-- Several limits, of which all take or none does.
CREATE FUNCTION @schema@.rate_limit_calls(verb text, requests @schema@.rate_limit_request[])
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql AS $body$
DECLARE
	asked    @schema@.rate_limit_request[];
	r        @schema@.rate_limit_request;
	answer   @schema@.rate_limit_result;
	worst    @schema@.rate_limit_result;
	each     record;
	l        @schema@.rate_limits;
	now      timestamptz;
BEGIN
	IF requests IS NULL OR cardinality(requests) NOT BETWEEN 1 AND 64 THEN
		RAISE EXCEPTION 'rate limits: % of them: a call must have from 1 to 64', coalesce(cardinality(requests), 0) USING ERRCODE = 'invalid_parameter_value';
	END IF;
	asked := requests;
	IF cardinality(asked) > 1 THEN
		asked := @schema@.rate_limit_merged(verb, asked);
	END IF;
	-- If a mode refuses, no row is read.
	FOREACH r IN ARRAY asked LOOP
		IF r.mode = 'refuse' THEN
			r := @schema@.rate_limit_sound(verb, r);
			now := clock_timestamp();
			r.refused_until := CASE WHEN r.refused_until > now THEN r.refused_until ELSE now + interval '1 minute' END;
			answer := ROW(false, r.refused_until - now, r.refused_until, 0, 0, r.capacity, interval '0', NULL, now, r.name, r.key, false);
			IF @schema@.rate_limit_outweighs(worst, answer) THEN
				worst := answer;
			END IF;
		END IF;
	END LOOP;
	IF worst.ok IS NOT NULL THEN
		RETURN worst;
	ELSIF cardinality(asked) > 1 AND (asked[cardinality(asked)]).shards > 1 AND verb IN ('allow', 'reserve') THEN
		BEGIN
			each := @schema@.rate_limit_each(verb, asked);
			IF NOT (each.worst).ok THEN
				RAISE EXCEPTION USING ERRCODE = 'RL000';
			END IF;
		EXCEPTION WHEN SQLSTATE 'RL000' THEN
			each.taken := NULL; -- all is as it was
		END;
	ELSE
		each := @schema@.rate_limit_each(verb, asked);
	END IF;
	worst := each.worst;
	IF verb NOT IN ('allow', 'reserve') OR worst.ok OR cardinality(asked) = 1 THEN
		RETURN worst;
	END IF;
	FOREACH l IN ARRAY coalesce(each.taken, '{}') LOOP
		PERFORM @schema@.rate_limit_put(l.name, l.key, 0, l.value, l.ts, l.paused, l.slots);
	END LOOP;
	worst := @schema@.rate_limit_calls(CASE verb WHEN 'allow' THEN 'check' ELSE 'check reserve' END, asked);
	IF worst.ok THEN -- it is, by now
		worst.ok := false;
		worst.retry_after := greatest(worst.retry_after, interval '1 microsecond');
		worst.retry_at := worst.at + worst.retry_after;
	END IF;
	RETURN worst;
END
$body$;

-- An answer, or an error if it is a refusal.
CREATE FUNCTION @schema@.rate_limit_or_raise(answer @schema@.rate_limit_result, state text) RETURNS @schema@.rate_limit_result LANGUAGE plpgsql AS $body$
BEGIN
	IF answer.ok IS NOT TRUE THEN
		RAISE EXCEPTION 'rate limit % is exceeded', quote_literal(answer.name)
			USING ERRCODE = state, DETAIL = format('Try again in %s seconds.', ceil(extract(epoch FROM answer.retry_after)));
	END IF;
	RETURN answer;
END
$body$;

-- A request by what the catalog knows of a limit. Each field is that of the override for the key,
-- or else of the one for all keys, or else what a program has published. Overrides that would make
-- an invalid limit are not used.
CREATE FUNCTION @schema@.rate_limit_named(name text, key text, count float8, above float8 DEFAULT 0) RETURNS @schema@.rate_limit_request LANGUAGE plpgsql STABLE AS $body$
DECLARE
	now   timestamptz := clock_timestamp();
	d     record;
	made  @schema@.rate_limit_request;
	plain @schema@.rate_limit_request;
BEGIN
	SELECT p.kind, p.rate, p.period, p.capacity, p.max_reserved, p.start, p.shards, p.slots, p.every, p.zone, p.anchor, p."time",
		coalesce(o.slots, a.slots, p.slots) AS own_slots, CASE WHEN p.every IS NOT NULL THEN coalesce(o.period, a.period) END AS no_period,
		coalesce(o.rate, a.rate, p.rate) AS own_rate, coalesce(o.period, a.period, p.period) AS own_period,
		coalesce(o.capacity, a.capacity, p.capacity) AS own_capacity, coalesce(o.max_reserved, a.max_reserved, p.max_reserved) AS own_max_reserved,
		CASE WHEN a.id IS NOT NULL THEN to_jsonb(a) ->> 'mode' END AS mode, a.until AS refused_until,
		CASE WHEN o.id IS NOT NULL THEN to_jsonb(o) ->> 'mode' END AS own_mode, o.until AS own_until
	INTO d
	FROM @schema@.rate_limit_definitions AS p
	LEFT JOIN @schema@.rate_limit_definitions AS a ON a.name = p.name AND a.key IS NULL AND a.kind IS NULL
		AND a.enabled AND (a.until IS NULL OR a.until > now)
	LEFT JOIN @schema@.rate_limit_definitions AS o ON o.name = p.name AND o.key = $2
		AND o.enabled AND (o.until IS NULL OR o.until > now)
	WHERE p.name = $1 AND p.kind IS NOT NULL;
	IF d.kind IS NULL THEN
		RAISE EXCEPTION 'rate limit %: no program has published it', quote_literal(left($1, 255)) USING ERRCODE = 'undefined_object';
	END IF;
	IF d.kind = 'in flight' THEN
		RAISE EXCEPTION 'rate limit %: a limit of how many at once is for rate_limit_acquire', quote_literal($1) USING ERRCODE = 'feature_not_supported';
	END IF;
	IF d.own_mode IS NOT NULL THEN
		d.mode := d.own_mode;
		d.refused_until := d.own_until;
	END IF;
	IF d.every IS NOT NULL THEN
		BEGIN
			PERFORM now AT TIME ZONE d.zone;
		EXCEPTION WHEN invalid_parameter_value THEN
			RAISE EXCEPTION 'rate limit %: zone %: is not known to the server', quote_literal($1), quote_literal(d.zone) USING ERRCODE = 'invalid_parameter_value';
		END;
	END IF;
	plain := ROW($1, $2, $3, d.rate, d.period, d.capacity, d.max_reserved, d.kind, d.start, $4, d.mode, d.refused_until,
		d.shards, d.slots, d.every, d.zone, d.anchor, d."time");
	made := plain;
	made.rate := d.own_rate;
	made.period := d.own_period;
	made.capacity := d.own_capacity;
	made.max_reserved := d.own_max_reserved;
	made.slots := d.own_slots;
	RETURN CASE WHEN d.no_period IS NULL AND @schema@.rate_limit_fault(made) IS NULL THEN made ELSE plain END;
END
$body$;

-- What the catalog says of a key's permits: how many there are, their lease, and the mode with its
-- end.
CREATE FUNCTION @schema@.rate_limit_named_permits(name text, key text, OUT at_once integer, OUT lease interval, OUT mode text, OUT refused_until timestamptz) RETURNS record LANGUAGE plpgsql STABLE AS $body$
DECLARE
	now timestamptz := clock_timestamp();
BEGIN
	SELECT coalesce(o.at_once, a.at_once, p.at_once), coalesce(o.lease, a.lease, p.lease, interval '30 seconds'),
		coalesce(o.mode, a.mode), CASE WHEN o.mode IS NOT NULL THEN o.until ELSE a.until END
	INTO at_once, lease, mode, refused_until
	FROM @schema@.rate_limit_definitions AS p
	LEFT JOIN @schema@.rate_limit_definitions AS a ON a.name = p.name AND a.key IS NULL AND a.kind IS NULL
		AND a.enabled AND (a.until IS NULL OR a.until > now)
	LEFT JOIN @schema@.rate_limit_definitions AS o ON o.name = p.name AND o.key = $2
		AND o.enabled AND (o.until IS NULL OR o.until > now)
	WHERE p.name = $1 AND p.kind = 'in flight';
	IF at_once IS NULL THEN
		RAISE EXCEPTION 'rate limit %: no program has published it as one of how many at once', quote_literal(left($1, 255)) USING ERRCODE = 'undefined_object';
	END IF;
END
$body$;

-- Requests by name.
CREATE FUNCTION @schema@.rate_limit_requests(names text[], keys text[], counts float8[], above float8[]) RETURNS @schema@.rate_limit_request[] LANGUAGE plpgsql STABLE AS $body$
DECLARE
	requests @schema@.rate_limit_request[];
BEGIN
	IF cardinality(keys) IS DISTINCT FROM cardinality(names) OR cardinality(coalesce(counts, above)) <> cardinality(names) OR cardinality(coalesce(above, counts)) <> cardinality(names) THEN
		RAISE EXCEPTION 'rate limits: names, keys, counts and above must be as many' USING ERRCODE = 'invalid_parameter_value';
	END IF;
	FOR i IN 1 .. coalesce(cardinality(names), 0) LOOP
		requests := requests || @schema@.rate_limit_named(names[i], keys[i], CASE WHEN counts IS NULL THEN 1 ELSE counts[i] END, above[i]);
	END LOOP;
	RETURN requests;
END
$body$;

-- The ID of a permit's advisory lock. home is the schema that a store in Go names; '' if it names
-- none.
CREATE FUNCTION @schema@.rate_limit_lock(home text, name text, key text, number integer) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	bytes bytea := '';
	part bytea;
	n integer;
BEGIN
	FOREACH part IN ARRAY ARRAY[convert_to('rate_limits', 'UTF8'), convert_to(home, 'UTF8'), convert_to(name, 'UTF8'), convert_to(key, 'UTF8'), convert_to(number::text, 'UTF8')] LOOP
		n := length(part);
		IF n > 127 THEN
			bytes := bytes || set_byte(decode('00', 'hex'), 0, (n & 127) | 128);
			n := n >> 7;
		END IF;
		bytes := bytes || set_byte(decode('00', 'hex'), 0, n) || part;
	END LOOP;
	RETURN @schema@.rate_limit_signed(@schema@.rate_limit_hash(bytes));
END
$body$;

-- The verbs that are granted to roles. Their arguments have the definition, so the caller chooses
-- it.

CREATE FUNCTION @schema@.rate_limit_allow(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL, above float8 DEFAULT 0)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_call('allow', @schema@.rate_limit_request(name, key, rate, period, count, capacity, kind, start, NULL, above));
END
$body$;

CREATE FUNCTION @schema@.rate_limit_take(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL, state text DEFAULT 'PT429', above float8 DEFAULT 0)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_or_raise(@schema@.rate_limit_call('allow', @schema@.rate_limit_request(name, key, rate, period, count, capacity, kind, start, NULL, above)), state);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_reserve(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	max_reserved float8 DEFAULT NULL, kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_call('reserve', @schema@.rate_limit_request(name, key, rate, period, count, capacity, kind, start, max_reserved));
END
$body$;

CREATE FUNCTION @schema@.rate_limit_check(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL, reserve boolean DEFAULT false, max_reserved float8 DEFAULT NULL, above float8 DEFAULT 0)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_call(CASE WHEN reserve THEN 'check reserve' ELSE 'check' END, @schema@.rate_limit_request(name, key, rate, period, count, capacity, kind, start, max_reserved, above));
END
$body$;

CREATE FUNCTION @schema@.rate_limit_credit(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_back('credit', @schema@.rate_limit_request(name, key, rate, period, count, capacity, kind, start), NULL, NULL);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_settle(name text, key text, rate float8, period interval, taken float8, used float8, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_back('settle', @schema@.rate_limit_request(name, key, rate, period, taken, capacity, kind, start), used, NULL);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_request(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL, max_reserved float8 DEFAULT NULL, above float8 DEFAULT 0)
RETURNS @schema@.rate_limit_request LANGUAGE sql IMMUTABLE AS $body$
	SELECT ROW(name, key, count, rate, period, capacity, max_reserved, kind, start, above, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::@schema@.rate_limit_request
$body$;

CREATE FUNCTION @schema@.rate_limit_allow_all(requests @schema@.rate_limit_request[])
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls('allow', requests);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_take_all(requests @schema@.rate_limit_request[])
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_or_raise(@schema@.rate_limit_calls('allow', requests), 'PT429');
END
$body$;

CREATE FUNCTION @schema@.rate_limit_reserve_all(requests @schema@.rate_limit_request[])
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls('reserve', requests);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_check_all(requests @schema@.rate_limit_request[], reserve boolean DEFAULT false)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls(CASE WHEN reserve THEN 'check reserve' ELSE 'check' END, requests);
END
$body$;

-- Writes a row anew for another definition, and keeps what was used: see change.go of package
-- internal/bucket.
CREATE FUNCTION @schema@.rate_limit_change(before @schema@.rate_limit_request, after @schema@.rate_limit_request)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
	b     @schema@.rate_limit_request := @schema@.rate_limit_sound('change', before);
	a     @schema@.rate_limit_request := @schema@.rate_limit_sound('change', after);
	l     record;
	s     @schema@.rate_limit_state;
	total float8;
	until timestamptz;
	out   float8 := 0;
	found record;
BEGIN
	IF (a.name, a.key, a.kind) IS DISTINCT FROM (b.name, b.key, b.kind) THEN
		RAISE EXCEPTION 'rate limit %: name, key and kind must be the same before and after a change', quote_literal(b.name) USING ERRCODE = 'invalid_parameter_value';
	ELSIF b.shards > 1 OR a.shards > 1 OR a.slots <> b.slots OR a.slots IS NOT NULL AND a.period <> b.period THEN
		RAISE EXCEPTION 'rate limit %: a change of several shards, or of slots and period of a sliding window, is left to the library in Go', quote_literal(b.name)
			USING ERRCODE = 'feature_not_supported';
	END IF;
	a.count := 0;
	l := @schema@.rate_limit_locked(b, 0);
	IF l.made THEN -- full before, and after
		DELETE FROM @schema@.rate_limits AS r WHERE r.name = b.name AND r.key = b.key AND r.shard = 0;
		RETURN @schema@.rate_limit_told(a, true, array[@schema@.rate_limit_fresh(a, l.at)], l.at, l.at);
	END IF;
	s := @schema@.rate_limit_refilled(b, l.s, l.at);
	IF a.slots IS NOT NULL THEN
		s := @schema@.rate_limit_valued(a, s);
	ELSE
		IF l.ahead[1] > 0 THEN
			until := '2000-01-01 00:00:00+00'::timestamptz + l.ahead[2] * interval '1 second';
			out := CASE WHEN until > l.at THEN l.ahead[1] ELSE 0 END;
		END IF;
		total := s.value + out;
		s.value := least(least(a.capacity, greatest(total + a.capacity - b.capacity, least(total, 0))) - out,
			greatest(a.capacity - CASE WHEN a.kind <> 'token bucket' THEN out WHEN l.ahead[1] > 0
				THEN greatest(l.ahead[1] + a.rate * date_part('epoch', until - l.at) * 1000000 / @schema@.rate_limit_period(a), 0) ELSE 0 END, 0));
	END IF;
	IF a.kind = 'fixed window' AND (a.every, a.period) IS DISTINCT FROM (b.every, b.period) THEN -- no edge that is past refills
		s.ts := (@schema@.rate_limit_fresh(a, greatest(l.at, CASE WHEN out > 0 THEN until - interval '1 microsecond' END, CASE WHEN s.paused > l.at THEN NULL ELSE s.ts END))).ts;
		IF s.paused > l.at AND a.every IS NULL THEN
			s.ts := greatest(s.ts, s.paused - @schema@.rate_limit_period(a) * interval '1 microsecond');
		END IF;
	ELSIF a.every IS NOT NULL THEN
		s.ts := (@schema@.rate_limit_refilled(a, s, l.at)).ts;
	ELSIF a.kind = 'fixed window' AND a.start IS DISTINCT FROM b.start THEN -- and none that was moved comes sooner
		s.ts := (@schema@.rate_limit_fresh(a, s.ts + (@schema@.rate_limit_period(a) - 1) * interval '1 microsecond')).ts;
	END IF;
	PERFORM @schema@.rate_limit_put(a.name, a.key, 0, s.value, s.ts, CASE WHEN s.paused > l.at OR a.capacity = b.capacity THEN s.paused END, CASE WHEN a.slots IS NOT NULL THEN s.slots END);
	found := @schema@.rate_limit_found(a, array[s], l.at, 0, false);
	RETURN @schema@.rate_limit_told(a, found.ok, array[s], l.at, found.due);
END
$body$;

-- A permit is tried at random. If it is not free, free ones are looked for. A try in vain is rolled
-- back to a savepoint, or the permit's holder would wait for this transaction. Permits that other
-- transactions are about to take or release are passed over, by their advisory locks.
CREATE FUNCTION @schema@.rate_limit_acquire(name text, key text, at_once integer, lease interval DEFAULT '30 seconds')
RETURNS @schema@.rate_limit_permit LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
	micros float8 := extract(epoch FROM lease) * 1000000;
	permit   @schema@.rate_limit_permit;
	tries  integer[];
	looked boolean := false;
	alone  boolean := false;
	held   bigint;
	fault  text := CASE
		WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN 'name: must have from 1 to 255 bytes'
		WHEN key IS NULL OR octet_length(key) > 2048 THEN 'key: must not be NULL, and have at most 2048 bytes'
		WHEN at_once IS NULL OR at_once NOT BETWEEN 1 AND 10000 THEN format('at_once %s: must be from 1 to 10000', at_once)
		WHEN lease IS NULL OR micros NOT BETWEEN 1000 AND 3153600000000000 OR date_part('year', lease) <> 0 OR date_part('month', lease) <> 0
			THEN format('lease %s: must be at least a millisecond, without months, and at most 36500 days', lease)
	END;
BEGIN
	IF fault IS NOT NULL THEN
		RAISE EXCEPTION 'rate limit %: %', quote_literal(left(name, 255)), fault USING ERRCODE = 'invalid_parameter_value';
	END IF;
	tries := ARRAY[floor(random() * at_once)::integer];
	LOOP
		FOREACH permit.number IN ARRAY tries LOOP
			BEGIN
				IF pg_try_advisory_xact_lock(@schema@.rate_limit_lock('', name, key, permit.number)) OR alone THEN
					SELECT true, t.fence, t.until - lease, t.until INTO permit.ok, permit.fence, permit.at, permit.until
						FROM @schema@.rate_limit_permit_take(name, key, permit.number, micros, NULL, @schema@.rate_limit_lock((parse_ident($schema$@schema@$schema$))[1], name, key, permit.number), alone) AS t;
					IF permit.ok THEN
						RETURN permit;
					END IF;
				END IF;
				RAISE EXCEPTION USING ERRCODE = 'RL000';
			EXCEPTION WHEN SQLSTATE 'RL000' OR lock_not_available THEN
				NULL; -- it is as it was
			END;
		END LOOP;
		permit.at := clock_timestamp();
		EXIT WHEN alone OR looked AND tries = '{}';
		alone := looked; -- any role may have the locks
		looked := true;
		tries := ARRAY(
			SELECT n.i FROM generate_series(0, $3 - 1) AS n (i)
			LEFT JOIN @schema@.rate_limits AS l ON l.name = $1 AND l.key = $2 AND l.shard = n.i
			WHERE l.ts IS NULL OR l.ts <= permit.at ORDER BY random() LIMIT CASE WHEN alone THEN 8 END);
	END LOOP;
	SELECT count(*), min(l.ts) INTO held, permit.not_before
		FROM @schema@.rate_limits AS l WHERE l.name = $1 AND l.key = $2 AND l.shard < $3 AND l.ts > permit.at;
	IF held < at_once THEN -- somebody has one and has not committed
		permit.not_before := permit.at;
	END IF;
	RETURN ROW(false, NULL, NULL, permit.at, NULL, permit.not_before)::@schema@.rate_limit_permit;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_renew(name text, key text, number integer, fence bigint, lease interval)
RETURNS @schema@.rate_limit_permit LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
	micros float8 := extract(epoch FROM lease) * 1000000;
	permit   @schema@.rate_limit_permit;
BEGIN
	IF name IS NULL OR key IS NULL OR number IS NULL OR fence IS NULL OR fence < 1 THEN
		RAISE EXCEPTION 'rate limit %: a permit must be one that was acquired', quote_literal(left(name, 255)) USING ERRCODE = 'invalid_parameter_value';
	ELSIF lease IS NULL OR micros <> 0 AND micros NOT BETWEEN 1000 AND 3153600000000000 OR date_part('year', lease) <> 0 OR date_part('month', lease) <> 0 THEN
		RAISE EXCEPTION 'rate limit %: lease %: must be at least a millisecond, without months, and at most 36500 days', quote_literal(left(name, 255)), lease USING ERRCODE = 'invalid_parameter_value';
	END IF;
	-- The row of a token bucket or window has at most 1e12 tokens; a fence is an instant in
	-- microseconds, which is more. So who may release what is held fills no bucket.
	IF fence <= 1e12 THEN
		RETURN ROW(false, number, fence, clock_timestamp(), NULL, NULL)::@schema@.rate_limit_permit;
	END IF;
	PERFORM pg_try_advisory_xact_lock(@schema@.rate_limit_lock('', name, key, number));
	SELECT t.fence > 0, number, t.fence, t.until - lease, t.until INTO permit.ok, permit.number, permit.fence, permit.at, permit.until
		FROM @schema@.rate_limit_permit_keep(name, key, number, micros, NULL, fence, false, @schema@.rate_limit_lock((parse_ident($schema$@schema@$schema$))[1], name, key, number)) AS t;
	IF permit.ok THEN
		RETURN permit;
	ELSIF permit.fence = 0 THEN -- it was not there and has been made; of a bucket, it would be empty
		DELETE FROM @schema@.rate_limits AS l WHERE l.name = $1 AND l.key = $2 AND l.shard = $3 AND l.value = 0;
	END IF;
	RETURN ROW(false, number, fence, clock_timestamp(), NULL, NULL)::@schema@.rate_limit_permit;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_release(name text, key text, number integer, fence bigint)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN (@schema@.rate_limit_renew(name, key, number, fence, '0')).ok;
END
$body$;

-- Several permits, all or none. They are renewed and released in the order of their rows.
CREATE FUNCTION @schema@.rate_limit_acquire_n(name text, key text, n integer, at_once integer, lease interval DEFAULT '30 seconds')
RETURNS @schema@.rate_limit_permits LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
	permits @schema@.rate_limit_permits;
	permit  @schema@.rate_limit_permit;
BEGIN
	IF n IS NULL OR n NOT BETWEEN 1 AND 1000 THEN
		RAISE EXCEPTION 'rate limit %: n %: must be from 1 to 1000', quote_literal(left(name, 255)), n USING ERRCODE = 'invalid_parameter_value';
	ELSIF n > at_once THEN
		RAISE EXCEPTION 'rate limit %: % permits can never be acquired at once, at most % can', quote_literal(left(name, 255)), n, at_once USING ERRCODE = 'numeric_value_out_of_range';
	END IF;
	FOR i IN 1 .. n LOOP
		permit := @schema@.rate_limit_acquire(name, key, at_once, lease);
		IF NOT permit.ok THEN
			RAISE EXCEPTION USING ERRCODE = 'RL000';
		ELSIF i = 1 THEN
			permits := ROW(true, NULL, NULL, permit.at, permit.until, NULL);
		END IF;
		permits.numbers[i] := permit.number;
		permits.fences[i] := permit.fence;
	END LOOP;
	RETURN permits;
EXCEPTION WHEN SQLSTATE 'RL000' THEN -- what it had taken is free again: when as many leases have ended as are missing
	RETURN ROW(false, NULL, NULL, permit.at, NULL, coalesce((
		SELECT (array_agg(l.ts ORDER BY l.ts))[(count(*) + $3 - $4)::int4] FROM @schema@.rate_limits AS l
		WHERE l.name = $1 AND l.key = $2 AND l.shard < $4 AND l.ts > permit.at), permit.at))::@schema@.rate_limit_permits;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_renew_n(name text, key text, numbers integer[], fences bigint[], lease interval)
RETURNS @schema@.rate_limit_permits LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
	permits @schema@.rate_limit_permits := ROW(false, numbers, fences, NULL, NULL, NULL);
	permit  @schema@.rate_limit_permit;
	it      record;
BEGIN
	IF numbers IS NULL OR cardinality(numbers) NOT BETWEEN 1 AND 1000 OR cardinality(fences) IS DISTINCT FROM cardinality(numbers) THEN
		RAISE EXCEPTION 'rate limit %: numbers and fences must be of permits that were acquired together', quote_literal(left(name, 255)) USING ERRCODE = 'invalid_parameter_value';
	END IF;
	FOR it IN SELECT u.number, u.fence FROM unnest(numbers, fences) AS u (number, fence) ORDER BY u.number LOOP
		permit := @schema@.rate_limit_renew(name, key, it.number, it.fence, lease);
		IF NOT permit.ok THEN
			RAISE EXCEPTION USING ERRCODE = 'RL000';
		ELSIF NOT permits.ok THEN
			permits := ROW(true, numbers, fences, permit.at, permit.until, NULL);
		END IF;
	END LOOP;
	RETURN permits;
EXCEPTION WHEN SQLSTATE 'RL000' THEN
	RETURN ROW(false, numbers, fences, permit.at, NULL, NULL)::@schema@.rate_limit_permits;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_release_n(name text, key text, numbers integer[], fences bigint[])
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN (@schema@.rate_limit_renew_n(name, key, numbers, fences, '0')).ok;
END
$body$;

-- By name: the definition is that of the catalog.

CREATE FUNCTION @schema@.rate_limit_allow(name text, key text, count float8 DEFAULT 1)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls('allow', ARRAY[@schema@.rate_limit_named(name, key, count)]);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_take(name text, key text, count float8 DEFAULT 1)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_or_raise(@schema@.rate_limit_calls('allow', ARRAY[@schema@.rate_limit_named(name, key, count)]), 'PT429');
END
$body$;

CREATE FUNCTION @schema@.rate_limit_reserve(name text, key text, count float8 DEFAULT 1)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls('reserve', ARRAY[@schema@.rate_limit_named(name, key, count)]);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_check(name text, key text, count float8 DEFAULT 1)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls('check', ARRAY[@schema@.rate_limit_named(name, key, count)]);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_check_reserve(name text, key text, count float8 DEFAULT 1)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls('check reserve', ARRAY[@schema@.rate_limit_named(name, key, count)]);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_credit(name text, key text, count float8 DEFAULT 1)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_back('credit', @schema@.rate_limit_named(name, key, count), NULL, NULL);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_settle(name text, key text, taken float8, used float8, taken_at timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_back('settle', @schema@.rate_limit_named(name, key, taken), used, taken_at);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_acquire(name text, key text)
RETURNS @schema@.rate_limit_permit LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
	named record := @schema@.rate_limit_named_permits(name, key);
	permit  @schema@.rate_limit_permit;
BEGIN
	IF named.mode = 'refuse' THEN
		permit.at := clock_timestamp();
		RETURN ROW(false, NULL, NULL, permit.at, NULL, CASE WHEN named.refused_until > permit.at THEN named.refused_until ELSE permit.at + interval '1 minute' END)::@schema@.rate_limit_permit;
	END IF;
	RETURN @schema@.rate_limit_acquire(name, key, named.at_once, named.lease);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_renew(name text, key text, number integer, fence bigint)
RETURNS @schema@.rate_limit_permit LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_renew(name, key, number, fence, (@schema@.rate_limit_named_permits(name, key)).lease);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_acquire_n(name text, key text, n integer)
RETURNS @schema@.rate_limit_permits LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
	named  record := @schema@.rate_limit_named_permits(name, key);
	permit @schema@.rate_limit_permit;
BEGIN
	IF named.mode = 'refuse' THEN
		permit := @schema@.rate_limit_acquire(name, key);
		RETURN ROW(false, NULL, NULL, permit.at, NULL, permit.not_before)::@schema@.rate_limit_permits;
	END IF;
	RETURN @schema@.rate_limit_acquire_n(name, key, n, named.at_once, named.lease);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_renew_n(name text, key text, numbers integer[], fences bigint[])
RETURNS @schema@.rate_limit_permits LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_renew_n(name, key, numbers, fences, (@schema@.rate_limit_named_permits(name, key)).lease);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_allow_all(names text[], keys text[], counts float8[] DEFAULT NULL, above float8[] DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls('allow', @schema@.rate_limit_requests(names, keys, counts, above));
END
$body$;

CREATE FUNCTION @schema@.rate_limit_take_all(names text[], keys text[], counts float8[] DEFAULT NULL, above float8[] DEFAULT NULL, state text DEFAULT 'PT429')
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_or_raise(@schema@.rate_limit_calls('allow', @schema@.rate_limit_requests(names, keys, counts, above)), state);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_reserve_all(names text[], keys text[], counts float8[] DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls('reserve', @schema@.rate_limit_requests(names, keys, counts, NULL));
END
$body$;

CREATE FUNCTION @schema@.rate_limit_check_all(names text[], keys text[], counts float8[] DEFAULT NULL, above float8[] DEFAULT NULL, reserve boolean DEFAULT false)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls(CASE WHEN reserve THEN 'check reserve' ELSE 'check' END, @schema@.rate_limit_requests(names, keys, counts, above));
END
$body$;

$functions$, '@schema@', home);

	-- Only the owner may call a function until it is granted. Default privileges may have granted
	-- some, and PostgreSQL grants all to PUBLIC, as acldefault shows. Down finds the functions by
	-- their comments.
	FOR statement IN
		WITH made AS (SELECT * FROM pg_proc WHERE pronamespace = home::regnamespace AND proname ~ '^rate_limit_' AND NOT oid = ANY (before))
		SELECT format('REVOKE ALL ON FUNCTION %s FROM %s', m.oid::regprocedure, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
		FROM made AS m
		CROSS JOIN aclexplode(coalesce(m.proacl, acldefault('f', m.proowner))) AS a
		WHERE a.grantee <> m.proowner
		UNION ALL SELECT format('COMMENT ON FUNCTION %s IS %L', oid::regprocedure, 'rate_limits: set functions') FROM made
	LOOP
		EXECUTE statement;
	END LOOP;
END
$migration$;
-- +goose StatementEnd

-- +goose Down

-- +goose StatementBegin
DO $migration$
DECLARE
	home text := quote_ident(coalesce((SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass('rate_limits')), current_schema()));
	name regprocedure;
BEGIN
	FOR name IN SELECT oid FROM pg_proc WHERE pronamespace = to_regnamespace(home) AND obj_description(oid, 'pg_proc') = 'rate_limits: set functions' LOOP
		EXECUTE format('DROP FUNCTION %s', name);
	END LOOP;
	EXECUTE replace('DROP TYPE IF EXISTS @schema@.rate_limit_result, @schema@.rate_limit_request, @schema@.rate_limit_state, @schema@.rate_limit_permit, @schema@.rate_limit_permits',
		'@schema@', home);
END
$migration$;
-- +goose StatementEnd
