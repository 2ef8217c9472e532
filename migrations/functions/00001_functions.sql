-- +goose Up

-- The verbs of a limit as SQL functions, for programs that are not in Go, triggers and psql.
-- Made from the statements of pgstore/internal/table by go test ./pgstore/internal/table -run Functions -write.
--
-- Each runs with the rights of its owner, who needs SELECT, INSERT and UPDATE on rate_limits,
-- and SELECT on rate_limit_definitions for those by name; nobody else may call one until it is
-- granted. They name the schema in which rate_limits is found now; the catalog must be in the
-- same, and may be made later. A result only grows: read its fields by their names.

-- +goose StatementBegin
DO $migration$
DECLARE
	statement text;
	home      text := (SELECT quote_ident(n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = 'rate_limits'::regclass);
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
	refused_until timestamptz
);

COMMENT ON TYPE @schema@.rate_limit_request IS
	'A count of tokens of a limit, with its definition: see rate_limit_request().';

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

-- The statements, whose arguments are by number. In PL/pgSQL, since a session keeps their plans
-- then; those of functions in SQL are made for each call before PostgreSQL 18.

CREATE FUNCTION @schema@.rate_limit_bucket_take(text, text, int4, float8, float8, timestamptz, float8, float8, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, at timestamptz, xid text) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
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
RETURN QUERY INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
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

CREATE FUNCTION @schema@.rate_limit_bucket_give(text, text, int4, float8, float8, timestamptz, float8, float8, float8, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, slots float8[], ahead float8[], at timestamptz, made boolean) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
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
RETURN QUERY INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts, ahead)
VALUES ($1::text, $2::text, $3::int4, $4::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz),
	array[0, tstzrange_subdiff(coalesce($7::timestamptz, clock_timestamp()), '2000-01-01 00:00:00+00'::timestamptz)])
ON CONFLICT (name, key, shard) DO UPDATE
SET value = CASE WHEN r.ahead[2] > excluded.ahead[2]
		AND greatest(r.ahead[1] - CASE WHEN tstzrange_subdiff($11::timestamptz, '2000-01-01 00:00:00+00'::timestamptz) > greatest(tstzrange_subdiff(r.ts, '2000-01-01 00:00:00+00'::timestamptz), excluded.ahead[2]) THEN $10::float8 ELSE 0 END, 0) > 0
		THEN greatest(least(r.value, $4::float8), least(r.value + $5::float8, $4::float8
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
RETURN QUERY INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8,
	date_bin($5::float8 * interval '1 microsecond', coalesce($6::timestamptz, clock_timestamp()), $7::timestamptz), $8::float8[])
ON CONFLICT (name, key, shard) DO UPDATE SET value = r.value
RETURNING value, ts, paused, slots, ahead,
	clock_timestamp(), xmax = 0;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_permit_take(text, text, int4, float8, timestamptz, int8)
RETURNS TABLE (fence int8, until timestamptz, given boolean) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
SELECT $1::text, $2::text, $3::int4, round(date_part('epoch', coalesce($5::timestamptz, clock_timestamp())) * 1000000),
	coalesce($5::timestamptz, clock_timestamp()) + $4::float8 * interval '1 microsecond'
WHERE pg_try_advisory_xact_lock($6::int8)
ON CONFLICT (name, key, shard) DO UPDATE
SET value = greatest(r.value + 1, excluded.value), ts = excluded.ts, paused = NULL, ahead = NULL
WHERE round(tstzrange_subdiff(excluded.ts, r.ts) * 1000000) >= $4::float8
RETURNING value::int8, ts, false;
END
$body$;

CREATE FUNCTION @schema@.rate_limit_permit_keep(text, text, int4, float8, timestamptz, int8, boolean, int8)
RETURNS TABLE (fence int8, until timestamptz, given boolean) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
RETURN QUERY INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts, paused)
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

-- The algebra: see package internal/bucket.

-- The last tick of a row's clock.
CREATE FUNCTION @schema@.rate_limit_tick(ts timestamptz, now timestamptz, tick float8) RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $body$
	SELECT greatest(ts, date_bin(tick * interval '1 microsecond', now, ts))
$body$;

-- What is in a row at a tick.
CREATE FUNCTION @schema@.rate_limit_settled(value float8, ts timestamptz, tick timestamptz, capacity float8, rate float8, period float8) RETURNS float8 LANGUAGE sql IMMUTABLE AS $body$
	SELECT least(value + round(date_part('epoch', tick - ts) * 1000000) * rate / period, capacity)
$body$;

-- How far rounding may have moved a comparison.
CREATE FUNCTION @schema@.rate_limit_slack(a float8, b float8, c float8) RETURNS float8 LANGUAGE sql IMMUTABLE AS $body$
	SELECT greatest(abs(a), abs(b), abs(c)) * 1.4210854715202004e-14
$body$;

-- When a row holds want tokens, of which count are to be taken.
CREATE FUNCTION @schema@.rate_limit_enough(value float8, ts timestamptz, want float8, count float8, capacity float8, rate float8, period float8, bucket boolean)
RETURNS timestamptz LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	missing float8 := want - value - @schema@.rate_limit_slack(value, count, capacity) / 2;
BEGIN
	RETURN CASE
		WHEN missing <= 0 THEN ts
		WHEN missing / rate * period > 12614400000000000 THEN ts + interval '3504000 hours'
		WHEN bucket THEN ts + ceil(missing * period / rate) * interval '1 microsecond'
		ELSE ts + ceil(missing / rate) * period * interval '1 microsecond'
	END;
END
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

-- A number of 64 bits, with a sign and without.
CREATE FUNCTION @schema@.rate_limit_signed(n numeric) RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
	SELECT (CASE WHEN n >= 9223372036854775808 THEN n - 18446744073709551616 ELSE n END)::bigint
$body$;

-- The phase of a fixed window without a start, in microseconds: a hash of name and key (with
-- the finalizer of MurmurHash3), modulo the period.
CREATE FUNCTION @schema@.rate_limit_phase(name text, key text, period float8) RETURNS float8 LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	hash numeric := @schema@.rate_limit_hash(convert_to(name, 'UTF8') || '\x00'::bytea || convert_to(key, 'UTF8'));
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

-- An edge of a fixed window's fresh row, before every instant that it is asked about.
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

-- A result: value and ts are settled.
CREATE FUNCTION @schema@.rate_limit_told(r @schema@.rate_limit_request, ok boolean, value float8, ts timestamptz, paused timestamptz, instant timestamptz, retry_at timestamptz, period float8, bucket boolean)
RETURNS @schema@.rate_limit_result LANGUAGE sql IMMUTABLE AS $body$
	SELECT ROW(
		ok, retry_at - instant, retry_at, value,
		greatest(floor(value + @schema@.rate_limit_slack(value, 1, r.capacity)), 0)::int8, r.capacity,
		greatest(greatest(@schema@.rate_limit_enough(value, ts, r.capacity, r.capacity, r.capacity, r.rate, period, bucket), paused) - instant, interval '0'),
		CASE WHEN paused > instant THEN paused END, instant, r.name, r.key, false)::@schema@.rate_limit_result
$body$;

-- What is wrong with a request; NULL when nothing is. NaN is greater than every other number.
CREATE FUNCTION @schema@.rate_limit_fault(r @schema@.rate_limit_request) RETURNS text LANGUAGE plpgsql STABLE AS $body$
DECLARE
	micros float8 := extract(epoch FROM r.period) * 1000000;
BEGIN
	RETURN CASE
		WHEN r.name IS NULL OR octet_length(r.name) NOT BETWEEN 1 AND 255 THEN 'name: must have from 1 to 255 bytes'
		WHEN r.key IS NULL OR octet_length(r.key) > 2048 THEN 'key: must have at most 2048 bytes'
		WHEN r.kind IS NULL OR r.kind NOT IN ('token bucket', 'fixed window') THEN format('kind %L: must be token bucket or fixed window', r.kind)
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
		WHEN r.count IS NULL OR r.count NOT BETWEEN 0 AND 1e12 THEN format('count %s: must be from 0 to 1e12', r.count)
		WHEN r.above NOT BETWEEN 0 AND 1 THEN format('above %s: must be a share of the capacity, from 0 to 1', r.above)
	END;
END
$body$;

-- A request with what it leaves out, if nothing is wrong with it for a verb.
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

-- All verbs, of one limit.
CREATE FUNCTION @schema@.rate_limit_call(verb text, r @schema@.rate_limit_request, used float8)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql AS $body$
DECLARE
	bucket  boolean := r.kind = 'token bucket';
	reserve boolean := verb IN ('reserve', 'check reserve');
	micros  float8 := extract(epoch FROM r.period) * 1000000;
	tick    float8 := CASE WHEN bucket THEN 1 ELSE micros END;
	lowest  float8;
	most    float8;
	give    float8 := 0;
	origin  timestamptz;
	over    timestamptz;
	now     timestamptz;
	instant timestamptz;
	due     timestamptz;
	settled float8;
	ts      timestamptz;
	ok      boolean;
	took    record;
	seen    record;
BEGIN
	r := @schema@.rate_limit_sound(verb, r);
	IF verb = 'settle' AND (used IS NULL OR used NOT BETWEEN 0 AND 1e12) THEN
		RAISE EXCEPTION 'rate limit %: used %: must be from 0 to 1e12', quote_literal(r.name), used USING ERRCODE = 'invalid_parameter_value';
	END IF;
	lowest := r.above * r.capacity;
	IF reserve THEN
		lowest := 0 - least(coalesce(r.max_reserved, 'Infinity'), r.rate * 3153600000000000 / micros);
	END IF;
	most := r.capacity - lowest;
	IF verb IN ('allow', 'reserve', 'check', 'check reserve') AND r.count > most + @schema@.rate_limit_slack(r.count, most, 0) / 2 THEN
		IF r.mode = 'shadow' THEN
			now := clock_timestamp();
			RETURN ROW(false, interval '876000 hours', now + interval '876000 hours', 0, 0, r.capacity, interval '0', NULL, now, r.name, r.key, false)::@schema@.rate_limit_result;
		END IF;
		RAISE EXCEPTION 'rate limit %: % tokens can never be granted at once, at most % can', quote_literal(r.name), r.count, most
			USING ERRCODE = 'numeric_value_out_of_range';
	END IF;
	IF NOT bucket THEN
		origin := @schema@.rate_limit_origin(r.name, r.key, micros, r.start);
	END IF;

	IF verb IN ('credit', 'settle') THEN
		give := CASE WHEN verb = 'credit' THEN r.count ELSE greatest(r.count - used, 0) END;
		most := CASE WHEN verb = 'credit' THEN r.capacity ELSE 1.7976931348623157e308 END;
		IF bucket THEN
			SELECT * INTO took FROM @schema@.rate_limit_bucket_give(r.name, r.key, 0, r.capacity, give, NULL, r.rate, micros, most, 0, NULL);
		ELSE
			SELECT * INTO took FROM @schema@.rate_limit_window_give(r.name, r.key, 0, r.capacity, give, micros, NULL, origin, most, 0, NULL);
		END IF;
		ts := @schema@.rate_limit_tick(took.ts, took.at, tick);
		settled := @schema@.rate_limit_settled(took.value, took.ts, ts, r.capacity, r.rate, micros);
		IF verb = 'settle' AND used > r.count THEN
			settled := greatest(settled, took.value) - (used - r.count); -- more than the capacity, of another definition, stays
			PERFORM @schema@.rate_limit_put(r.name, r.key, 0, settled, ts, took.paused, NULL);
			settled := least(settled, r.capacity);
		END IF;
		ok := settled >= 0 - @schema@.rate_limit_slack(settled, 0, r.capacity);
		due := CASE WHEN ok THEN took.at ELSE @schema@.rate_limit_enough(settled, ts, 0, 0, r.capacity, r.rate, micros, bucket) END;
		RETURN @schema@.rate_limit_told(r, verb = 'settle' OR ok AND (took.paused > took.at) IS NOT TRUE, settled, ts, took.paused, took.at,
			CASE WHEN took.paused > took.at THEN greatest(due, took.paused) ELSE due END, micros, bucket);
	END IF;

	-- The row itself grants. When it does not it is looked at, and tells what to answer or,
	-- since it is locked by now, what to take: its edges may be its own, or a pause is over.
	FOR round IN 1 .. 8 LOOP
		IF verb IN ('allow', 'reserve') THEN
			IF bucket THEN
				SELECT * INTO took FROM @schema@.rate_limit_bucket_take(r.name, r.key, 0, r.capacity, r.count, NULL, r.rate, micros, lowest,
					CASE WHEN reserve THEN 'infinity' ELSE over END);
			ELSE
				SELECT * INTO took FROM @schema@.rate_limit_window_take(r.name, r.key, 0, r.capacity, r.count, micros, NULL, origin, r.rate, lowest,
					CASE WHEN reserve THEN 'infinity' ELSE over END);
			END IF;
			IF FOUND THEN
				now := least(took.at, took.ts + (tick - 1) * interval '1 microsecond');
				instant := greatest(now, took.ts);
				due := greatest(instant, took.paused);
				IF took.value < 0 - @schema@.rate_limit_slack(took.value, r.count, r.capacity) THEN
					due := greatest(due, @schema@.rate_limit_enough(took.value, took.ts, 0, 0, r.capacity, r.rate, micros, bucket));
				END IF;
				IF instant > now AND (due > instant OR took.paused > now) THEN
					instant := now;
				END IF;
				ts := @schema@.rate_limit_tick(took.ts, instant, tick);
				RETURN @schema@.rate_limit_told(r, true, @schema@.rate_limit_settled(took.value, took.ts, ts, r.capacity, r.rate, micros), ts, took.paused, instant, due, micros, bucket);
			END IF;
		END IF;
		SELECT l.value, l.ts, l.paused, clock_timestamp() AS at INTO seen FROM @schema@.rate_limits AS l WHERE l.name = r.name AND l.key = r.key AND l.shard = 0;
		IF NOT FOUND THEN
			now := clock_timestamp();
			SELECT r.capacity AS value, CASE WHEN bucket THEN now ELSE date_bin(tick * interval '1 microsecond', now, origin) END AS ts,
				NULL::timestamptz AS paused, now AS at INTO seen;
		END IF;
		now := seen.at;
		ts := @schema@.rate_limit_tick(seen.ts, now, tick);
		settled := @schema@.rate_limit_settled(seen.value, seen.ts, ts, r.capacity, r.rate, micros);
		ok := settled - r.count >= lowest - @schema@.rate_limit_slack(seen.value, r.count, r.capacity);
		IF ok THEN
			due := now;
			IF reserve THEN
				due := greatest(due, seen.paused);
			END IF;
			IF settled - r.count < 0 - @schema@.rate_limit_slack(settled - r.count, r.count, r.capacity) THEN
				due := greatest(due, @schema@.rate_limit_enough(settled - r.count, ts, 0, 0, r.capacity, r.rate, micros, bucket));
			END IF;
		ELSE
			due := @schema@.rate_limit_enough(settled, ts, r.count + lowest, r.count, r.capacity, r.rate, micros, bucket);
		END IF;
		IF NOT reserve AND seen.paused > now THEN
			ok := false;
			due := greatest(due, seen.paused);
		END IF;
		EXIT WHEN NOT ok OR verb IN ('check', 'check reserve');
		over := now;
		origin := seen.ts;
	END LOOP;
	IF verb IN ('allow', 'reserve') THEN -- when others were faster each time, it is worth asking again at once
		due := CASE WHEN ok THEN greatest(due, now + interval '1 microsecond') ELSE due END;
		ok := false;
	END IF;
	RETURN @schema@.rate_limit_told(r, ok, settled, ts, seen.paused, now, due, micros, bucket);
END
$body$;

-- The limit of which a caller of two must know: whether that is the second.
CREATE FUNCTION @schema@.rate_limit_outweighs(a @schema@.rate_limit_result, b @schema@.rate_limit_result) RETURNS boolean LANGUAGE sql IMMUTABLE AS $body$
	SELECT CASE
		WHEN a.ok IS NULL OR a.ok <> b.ok THEN a.ok IS NULL OR a.ok
		WHEN (a.retry_after > interval '0' OR b.retry_after > interval '0') AND a.retry_at <> b.retry_at THEN b.retry_at > a.retry_at
		ELSE b.remaining < a.remaining
	END
$body$;

-- Requests of which those of one limit and key are one, in the order in which rows are locked.
CREATE FUNCTION @schema@.rate_limit_merged(verb text, requests @schema@.rate_limit_request[]) RETURNS @schema@.rate_limit_request[] LANGUAGE plpgsql STABLE AS $body$
DECLARE
	asked @schema@.rate_limit_request[];
	r     @schema@.rate_limit_request;
BEGIN
	FOREACH r IN ARRAY requests LOOP
		asked := asked || @schema@.rate_limit_sound(verb, r);
	END LOOP;
	asked := ARRAY(
		SELECT ROW(a.name, a.key, sum(a.count), a.rate, a.period, a.capacity, a.max_reserved, a.kind, a.start, max(a.above), a.mode, a.refused_until)::@schema@.rate_limit_request
		FROM unnest(asked) AS a GROUP BY a.name, a.key, a.rate, a.period, a.capacity, a.max_reserved, a.kind, a.start, a.mode, a.refused_until
		ORDER BY a.name COLLATE "C", a.key COLLATE "C");
	FOR i IN 2 .. cardinality(asked) LOOP
		IF (asked[i]).name = (asked[i - 1]).name AND (asked[i]).key = (asked[i - 1]).key THEN
			RAISE EXCEPTION 'rate limit %: has two definitions in one call', quote_literal((asked[i]).name) USING ERRCODE = 'invalid_parameter_value';
		END IF;
	END LOOP;
	RETURN asked;
END
$body$;

-- Several limits, of which all take or none does. Each row is read as it is locked, so that
-- what was taken in vain can be put back as it was, without a savepoint, behind which
-- strangers would fail under SERIALIZABLE. Those in mode shadow refuse nothing.
CREATE FUNCTION @schema@.rate_limit_calls(verb text, requests @schema@.rate_limit_request[])
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql AS $body$
DECLARE
	takes    boolean := verb IN ('allow', 'reserve');
	asked    @schema@.rate_limit_request[];
	r        @schema@.rate_limit_request;
	answer   @schema@.rate_limit_result;
	worst    @schema@.rate_limit_result; -- of those that can refuse
	shadow   @schema@.rate_limit_result; -- of the others
	shadowed boolean := false;
	taken    @schema@.rate_limits[];
	l        @schema@.rate_limits;
	now      timestamptz;
	tick     float8;
BEGIN
	IF requests IS NULL OR cardinality(requests) NOT BETWEEN 1 AND 64 THEN
		RAISE EXCEPTION 'rate limits: % of them: a call must have from 1 to 64', coalesce(cardinality(requests), 0) USING ERRCODE = 'invalid_parameter_value';
	END IF;
	asked := requests;
	IF cardinality(asked) > 1 THEN
		asked := @schema@.rate_limit_merged(verb, asked);
	END IF;
	-- What is refused by its mode is not looked at.
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
	END IF;
	FOREACH r IN ARRAY asked LOOP
		IF takes AND cardinality(asked) > 1 THEN
			tick := CASE WHEN r.kind = 'token bucket' THEN 1 ELSE extract(epoch FROM r.period) * 1000000 END;
			SELECT r.name, r.key, 0, t.value, t.ts, t.paused INTO l.name, l.key, l.shard, l.value, l.ts, l.paused
				FROM @schema@.rate_limit_touch(r.name, r.key, 0, r.capacity, tick, NULL,
					CASE WHEN tick > 1 THEN @schema@.rate_limit_origin(r.name, r.key, tick, r.start) ELSE '2000-01-01 00:00:00+00' END, NULL) AS t;
		END IF;
		answer := @schema@.rate_limit_call(verb, r, NULL);
		IF answer.ok AND takes THEN
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
	IF NOT takes OR worst.ok OR cardinality(asked) = 1 THEN
		worst.shadowed := shadowed;
		RETURN worst;
	END IF;
	FOREACH l IN ARRAY coalesce(taken, '{}') LOOP
		PERFORM @schema@.rate_limit_put(l.name, l.key, 0, l.value, l.ts, l.paused, NULL);
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

-- A request by what the catalog knows of a limit: as a program has published it, with what the
-- override for the key has, or else that for all keys. Overrides of which no limit can be made
-- are not used.
CREATE FUNCTION @schema@.rate_limit_named(name text, key text, count float8, above float8 DEFAULT 0) RETURNS @schema@.rate_limit_request LANGUAGE plpgsql STABLE AS $body$
DECLARE
	now   timestamptz := clock_timestamp();
	d     record;
	made  @schema@.rate_limit_request;
	plain @schema@.rate_limit_request;
BEGIN
	SELECT p.kind, p.rate, p.period, p.capacity, p.max_reserved, p.start, p.shards, p.every,
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
	IF d.kind NOT IN ('token bucket', 'fixed window') OR d.every IS NOT NULL OR d.shards > 1 THEN
		RAISE EXCEPTION 'rate limit %: a % is not for SQL functions', quote_literal($1),
			CASE WHEN d.shards > 1 THEN 'limit with shards' WHEN d.every IS NOT NULL THEN 'quota by the calendar' ELSE format('limit of kind %L', d.kind) END
			USING ERRCODE = 'feature_not_supported', HINT = 'Use the library in Go.';
	END IF;
	IF d.own_mode IS NOT NULL THEN
		d.mode := d.own_mode;
		d.refused_until := d.own_until;
	END IF;
	plain := ROW($1, $2, $3, d.rate, d.period, d.capacity, d.max_reserved, d.kind, d.start, $4, d.mode, d.refused_until);
	made := ROW($1, $2, $3, d.own_rate, d.own_period, d.own_capacity, d.own_max_reserved, d.kind, d.start, $4, d.mode, d.refused_until);
	RETURN CASE WHEN @schema@.rate_limit_fault(made) IS NULL THEN made ELSE plain END;
END
$body$;

-- How many permits the catalog says that a key has, for how long one is held, and in which mode.
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
CREATE FUNCTION @schema@.rate_limit_each(names text[], keys text[], counts float8[], above float8[]) RETURNS @schema@.rate_limit_request[] LANGUAGE plpgsql STABLE AS $body$
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

-- The ID of the advisory lock of a permit, for a store of Go that names a schema, or none.
CREATE FUNCTION @schema@.rate_limit_lock(home text, name text, key text, number integer) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	bytes bytea := '';
	part bytea;
	n integer;
BEGIN
	FOREACH part IN ARRAY ARRAY[convert_to('rate_limits', 'UTF8'), convert_to(home, 'UTF8'), convert_to(name, 'UTF8'), convert_to(key, 'UTF8'), convert_to(number::text, 'UTF8')] LOOP
		n := length(part);
		IF n > 127 THEN
			bytes := bytes || set_byte('\x00', 0, (n & 127) | 128);
			n := n >> 7;
		END IF;
		bytes := bytes || set_byte('\x00', 0, n) || part;
	END LOOP;
	RETURN @schema@.rate_limit_signed(@schema@.rate_limit_hash(bytes));
END
$body$;

-- What is granted to roles, with the definition as arguments: who may call these chooses it.

CREATE FUNCTION @schema@.rate_limit_allow(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL, above float8 DEFAULT 0)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_call('allow', ROW(name, key, count, rate, period, capacity, NULL, kind, start, above, NULL, NULL), NULL);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_take(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL, state text DEFAULT 'PT429', above float8 DEFAULT 0)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_or_raise(@schema@.rate_limit_call('allow', ROW(name, key, count, rate, period, capacity, NULL, kind, start, above, NULL, NULL), NULL), state);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_reserve(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	max_reserved float8 DEFAULT NULL, kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_call('reserve', ROW(name, key, count, rate, period, capacity, max_reserved, kind, start, 0, NULL, NULL), NULL);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_check(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL, reserve boolean DEFAULT false, max_reserved float8 DEFAULT NULL, above float8 DEFAULT 0)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_call(CASE WHEN reserve THEN 'check reserve' ELSE 'check' END, ROW(name, key, count, rate, period, capacity, max_reserved, kind, start, above, NULL, NULL), NULL);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_credit(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_call('credit', ROW(name, key, count, rate, period, capacity, NULL, kind, start, 0, NULL, NULL), NULL);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_settle(name text, key text, rate float8, period interval, taken float8, used float8, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_call('settle', ROW(name, key, taken, rate, period, capacity, NULL, kind, start, 0, NULL, NULL), used);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_request(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL, max_reserved float8 DEFAULT NULL, above float8 DEFAULT 0)
RETURNS @schema@.rate_limit_request LANGUAGE sql IMMUTABLE AS $body$
	SELECT ROW(name, key, count, rate, period, capacity, max_reserved, kind, start, above, NULL, NULL)::@schema@.rate_limit_request
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

-- A permit is chosen at random, and only if that is not free looked for. What is tried in vain
-- stands behind a savepoint, or its holder would wait for this transaction; and what another
-- transaction is about to take or to release is passed over, by the locks that it has.
CREATE FUNCTION @schema@.rate_limit_acquire(name text, key text, at_once integer, lease interval DEFAULT '30 seconds')
RETURNS @schema@.rate_limit_permit LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
	micros float8 := extract(epoch FROM lease) * 1000000;
	permit   @schema@.rate_limit_permit;
	tries  integer[];
	looked boolean := false;
	held   bigint;
	fault  text := CASE
		WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN 'name: must have from 1 to 255 bytes'
		WHEN key IS NULL OR octet_length(key) > 2048 THEN 'key: must have at most 2048 bytes'
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
				IF pg_try_advisory_xact_lock(@schema@.rate_limit_lock('', name, key, permit.number)) THEN
					SELECT true, t.fence, t.until - lease, t.until INTO permit.ok, permit.fence, permit.at, permit.until
						FROM @schema@.rate_limit_permit_take(name, key, permit.number, micros, NULL, @schema@.rate_limit_lock((parse_ident($schema$@schema@$schema$))[1], name, key, permit.number)) AS t;
					IF permit.ok THEN
						RETURN permit;
					END IF;
				END IF;
				RAISE EXCEPTION USING ERRCODE = 'RL000';
			EXCEPTION WHEN SQLSTATE 'RL000' THEN
				NULL; -- it is as it was
			END;
		END LOOP;
		permit.at := clock_timestamp();
		EXIT WHEN looked;
		looked := true;
		tries := ARRAY(
			SELECT n.i FROM generate_series(0, $3 - 1) AS n (i)
			LEFT JOIN @schema@.rate_limits AS l ON l.name = $1 AND l.key = $2 AND l.shard = n.i
			WHERE l.ts IS NULL OR l.ts <= permit.at ORDER BY random());
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
EXCEPTION WHEN SQLSTATE 'RL000' THEN
	RETURN ROW(false, NULL, NULL, permit.at, NULL, permit.not_before)::@schema@.rate_limit_permits;
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
	RETURN @schema@.rate_limit_call('credit', @schema@.rate_limit_named(name, key, count), NULL);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_settle(name text, key text, taken float8, used float8)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_call('settle', @schema@.rate_limit_named(name, key, taken), used);
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
DECLARE
	named record := @schema@.rate_limit_named_permits(name, key);
BEGIN
	RETURN @schema@.rate_limit_renew(name, key, number, fence, named.lease);
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
DECLARE
	named record := @schema@.rate_limit_named_permits(name, key);
BEGIN
	RETURN @schema@.rate_limit_renew_n(name, key, numbers, fences, named.lease);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_allow_all(names text[], keys text[], counts float8[] DEFAULT NULL, above float8[] DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls('allow', @schema@.rate_limit_each(names, keys, counts, above));
END
$body$;

CREATE FUNCTION @schema@.rate_limit_take_all(names text[], keys text[], counts float8[] DEFAULT NULL, above float8[] DEFAULT NULL, state text DEFAULT 'PT429')
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_or_raise(@schema@.rate_limit_calls('allow', @schema@.rate_limit_each(names, keys, counts, above)), state);
END
$body$;

CREATE FUNCTION @schema@.rate_limit_reserve_all(names text[], keys text[], counts float8[] DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls('reserve', @schema@.rate_limit_each(names, keys, counts, NULL));
END
$body$;

CREATE FUNCTION @schema@.rate_limit_check_all(names text[], keys text[], counts float8[] DEFAULT NULL, above float8[] DEFAULT NULL, reserve boolean DEFAULT false)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
	RETURN @schema@.rate_limit_calls(CASE WHEN reserve THEN 'check reserve' ELSE 'check' END, @schema@.rate_limit_each(names, keys, counts, above));
END
$body$;

$functions$, '@schema@', home);

	-- Nobody but the owner may call one until it is granted. Default privileges may have granted
	-- them, besides PostgreSQL to PUBLIC, of which acldefault tells.
	FOR statement IN
		SELECT format('REVOKE ALL ON FUNCTION %s FROM %s', p.oid::regprocedure, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
		FROM unnest(string_to_array(replace($functions$
	@schema@.rate_limit_bucket_take(text, text, int4, float8, float8, timestamptz, float8, float8, float8, timestamptz),
	@schema@.rate_limit_window_take(text, text, int4, float8, float8, float8, timestamptz, timestamptz, float8, float8, timestamptz),
	@schema@.rate_limit_bucket_give(text, text, int4, float8, float8, timestamptz, float8, float8, float8, float8, timestamptz),
	@schema@.rate_limit_window_give(text, text, int4, float8, float8, float8, timestamptz, timestamptz, float8, float8, timestamptz),
	@schema@.rate_limit_put(text, text, int4, float8, timestamptz, timestamptz, float8[]),
	@schema@.rate_limit_touch(text, text, int4, float8, float8, timestamptz, timestamptz, float8[]),
	@schema@.rate_limit_permit_take(text, text, int4, float8, timestamptz, int8),
	@schema@.rate_limit_permit_keep(text, text, int4, float8, timestamptz, int8, boolean, int8),
	@schema@.rate_limit_tick(timestamptz, timestamptz, float8),
	@schema@.rate_limit_settled(float8, timestamptz, timestamptz, float8, float8, float8),
	@schema@.rate_limit_slack(float8, float8, float8),
	@schema@.rate_limit_enough(float8, timestamptz, float8, float8, float8, float8, float8, boolean),
	@schema@.rate_limit_hash(bytea),
	@schema@.rate_limit_signed(numeric),
	@schema@.rate_limit_phase(text, text, float8),
	@schema@.rate_limit_origin(text, text, float8, timestamptz),
	@schema@.rate_limit_told(@schema@.rate_limit_request, boolean, float8, timestamptz, timestamptz, timestamptz, timestamptz, float8, boolean),
	@schema@.rate_limit_fault(@schema@.rate_limit_request),
	@schema@.rate_limit_sound(text, @schema@.rate_limit_request),
	@schema@.rate_limit_call(text, @schema@.rate_limit_request, float8),
	@schema@.rate_limit_outweighs(@schema@.rate_limit_result, @schema@.rate_limit_result),
	@schema@.rate_limit_merged(text, @schema@.rate_limit_request[]),
	@schema@.rate_limit_calls(text, @schema@.rate_limit_request[]),
	@schema@.rate_limit_or_raise(@schema@.rate_limit_result, text),
	@schema@.rate_limit_named(text, text, float8, float8),
	@schema@.rate_limit_named_permits(text, text),
	@schema@.rate_limit_each(text[], text[], float8[], float8[]),
	@schema@.rate_limit_lock(text, text, text, integer),
	@schema@.rate_limit_allow(text, text, float8, interval, float8, float8, text, timestamptz, float8),
	@schema@.rate_limit_take(text, text, float8, interval, float8, float8, text, timestamptz, text, float8),
	@schema@.rate_limit_reserve(text, text, float8, interval, float8, float8, float8, text, timestamptz),
	@schema@.rate_limit_check(text, text, float8, interval, float8, float8, text, timestamptz, boolean, float8, float8),
	@schema@.rate_limit_credit(text, text, float8, interval, float8, float8, text, timestamptz),
	@schema@.rate_limit_settle(text, text, float8, interval, float8, float8, float8, text, timestamptz),
	@schema@.rate_limit_request(text, text, float8, interval, float8, float8, text, timestamptz, float8, float8),
	@schema@.rate_limit_allow_all(@schema@.rate_limit_request[]),
	@schema@.rate_limit_take_all(@schema@.rate_limit_request[]),
	@schema@.rate_limit_reserve_all(@schema@.rate_limit_request[]),
	@schema@.rate_limit_check_all(@schema@.rate_limit_request[], boolean),
	@schema@.rate_limit_acquire(text, text, integer, interval),
	@schema@.rate_limit_renew(text, text, integer, bigint, interval),
	@schema@.rate_limit_release(text, text, integer, bigint),
	@schema@.rate_limit_acquire_n(text, text, integer, integer, interval),
	@schema@.rate_limit_renew_n(text, text, integer[], bigint[], interval),
	@schema@.rate_limit_release_n(text, text, integer[], bigint[]),
	@schema@.rate_limit_allow(text, text, float8),
	@schema@.rate_limit_take(text, text, float8),
	@schema@.rate_limit_reserve(text, text, float8),
	@schema@.rate_limit_check(text, text, float8),
	@schema@.rate_limit_check_reserve(text, text, float8),
	@schema@.rate_limit_credit(text, text, float8),
	@schema@.rate_limit_settle(text, text, float8, float8),
	@schema@.rate_limit_acquire(text, text),
	@schema@.rate_limit_renew(text, text, integer, bigint),
	@schema@.rate_limit_acquire_n(text, text, integer),
	@schema@.rate_limit_renew_n(text, text, integer[], bigint[]),
	@schema@.rate_limit_allow_all(text[], text[], float8[], float8[]),
	@schema@.rate_limit_take_all(text[], text[], float8[], float8[], text),
	@schema@.rate_limit_reserve_all(text[], text[], float8[]),
	@schema@.rate_limit_check_all(text[], text[], float8[], float8[], boolean)$functions$, '@schema@', home), E',\n')::regprocedure[]) AS f
		JOIN pg_proc AS p ON p.oid = f
		CROSS JOIN aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
		WHERE a.grantee <> p.proowner
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
	home text := (SELECT quote_ident(n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = 'rate_limits'::regclass);
BEGIN
	EXECUTE replace($functions$
DROP FUNCTION
	@schema@.rate_limit_bucket_take(text, text, int4, float8, float8, timestamptz, float8, float8, float8, timestamptz),
	@schema@.rate_limit_window_take(text, text, int4, float8, float8, float8, timestamptz, timestamptz, float8, float8, timestamptz),
	@schema@.rate_limit_bucket_give(text, text, int4, float8, float8, timestamptz, float8, float8, float8, float8, timestamptz),
	@schema@.rate_limit_window_give(text, text, int4, float8, float8, float8, timestamptz, timestamptz, float8, float8, timestamptz),
	@schema@.rate_limit_put(text, text, int4, float8, timestamptz, timestamptz, float8[]),
	@schema@.rate_limit_touch(text, text, int4, float8, float8, timestamptz, timestamptz, float8[]),
	@schema@.rate_limit_permit_take(text, text, int4, float8, timestamptz, int8),
	@schema@.rate_limit_permit_keep(text, text, int4, float8, timestamptz, int8, boolean, int8),
	@schema@.rate_limit_tick(timestamptz, timestamptz, float8),
	@schema@.rate_limit_settled(float8, timestamptz, timestamptz, float8, float8, float8),
	@schema@.rate_limit_slack(float8, float8, float8),
	@schema@.rate_limit_enough(float8, timestamptz, float8, float8, float8, float8, float8, boolean),
	@schema@.rate_limit_hash(bytea),
	@schema@.rate_limit_signed(numeric),
	@schema@.rate_limit_phase(text, text, float8),
	@schema@.rate_limit_origin(text, text, float8, timestamptz),
	@schema@.rate_limit_told(@schema@.rate_limit_request, boolean, float8, timestamptz, timestamptz, timestamptz, timestamptz, float8, boolean),
	@schema@.rate_limit_fault(@schema@.rate_limit_request),
	@schema@.rate_limit_sound(text, @schema@.rate_limit_request),
	@schema@.rate_limit_call(text, @schema@.rate_limit_request, float8),
	@schema@.rate_limit_outweighs(@schema@.rate_limit_result, @schema@.rate_limit_result),
	@schema@.rate_limit_merged(text, @schema@.rate_limit_request[]),
	@schema@.rate_limit_calls(text, @schema@.rate_limit_request[]),
	@schema@.rate_limit_or_raise(@schema@.rate_limit_result, text),
	@schema@.rate_limit_named(text, text, float8, float8),
	@schema@.rate_limit_named_permits(text, text),
	@schema@.rate_limit_each(text[], text[], float8[], float8[]),
	@schema@.rate_limit_lock(text, text, text, integer),
	@schema@.rate_limit_allow(text, text, float8, interval, float8, float8, text, timestamptz, float8),
	@schema@.rate_limit_take(text, text, float8, interval, float8, float8, text, timestamptz, text, float8),
	@schema@.rate_limit_reserve(text, text, float8, interval, float8, float8, float8, text, timestamptz),
	@schema@.rate_limit_check(text, text, float8, interval, float8, float8, text, timestamptz, boolean, float8, float8),
	@schema@.rate_limit_credit(text, text, float8, interval, float8, float8, text, timestamptz),
	@schema@.rate_limit_settle(text, text, float8, interval, float8, float8, float8, text, timestamptz),
	@schema@.rate_limit_request(text, text, float8, interval, float8, float8, text, timestamptz, float8, float8),
	@schema@.rate_limit_allow_all(@schema@.rate_limit_request[]),
	@schema@.rate_limit_take_all(@schema@.rate_limit_request[]),
	@schema@.rate_limit_reserve_all(@schema@.rate_limit_request[]),
	@schema@.rate_limit_check_all(@schema@.rate_limit_request[], boolean),
	@schema@.rate_limit_acquire(text, text, integer, interval),
	@schema@.rate_limit_renew(text, text, integer, bigint, interval),
	@schema@.rate_limit_release(text, text, integer, bigint),
	@schema@.rate_limit_acquire_n(text, text, integer, integer, interval),
	@schema@.rate_limit_renew_n(text, text, integer[], bigint[], interval),
	@schema@.rate_limit_release_n(text, text, integer[], bigint[]),
	@schema@.rate_limit_allow(text, text, float8),
	@schema@.rate_limit_take(text, text, float8),
	@schema@.rate_limit_reserve(text, text, float8),
	@schema@.rate_limit_check(text, text, float8),
	@schema@.rate_limit_check_reserve(text, text, float8),
	@schema@.rate_limit_credit(text, text, float8),
	@schema@.rate_limit_settle(text, text, float8, float8),
	@schema@.rate_limit_acquire(text, text),
	@schema@.rate_limit_renew(text, text, integer, bigint),
	@schema@.rate_limit_acquire_n(text, text, integer),
	@schema@.rate_limit_renew_n(text, text, integer[], bigint[]),
	@schema@.rate_limit_allow_all(text[], text[], float8[], float8[]),
	@schema@.rate_limit_take_all(text[], text[], float8[], float8[], text),
	@schema@.rate_limit_reserve_all(text[], text[], float8[]),
	@schema@.rate_limit_check_all(text[], text[], float8[], float8[], boolean);
DROP TYPE @schema@.rate_limit_result, @schema@.rate_limit_request, @schema@.rate_limit_permit, @schema@.rate_limit_permits;
$functions$, '@schema@', home);
END
$migration$;
-- +goose StatementEnd
