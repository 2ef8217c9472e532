-- +goose Up

-- The verbs of a limit as SQL functions, for programs that are not in Go, triggers and psql.
-- Made from the statements of internal/table by go test ./internal/table -run Functions -write.
--
-- Each runs with the rights of its owner, who needs SELECT, INSERT and UPDATE on rate_limits;
-- nobody else may call one until it is granted. They name the schema in which rate_limits is
-- found now. A result only grows: read its fields by their names.

-- +goose StatementBegin
DO $migration$
DECLARE
	home text := (SELECT quote_ident(n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = 'rate_limits'::regclass);
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
	at           timestamptz
);

COMMENT ON TYPE @schema@.rate_limit_result IS
	'What a limit answers: whether it took; when the same call would be accepted, or a reservation may run; how many tokens there are, in all and in whole ones; the capacity; how long until that is there; the end of a pause; and the instant of the decision.';

-- The statements, whose arguments are by number.

CREATE FUNCTION @schema@.rate_limit_bucket_take(text, text, int4, float8, float8, timestamptz, float8, float8, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, at timestamptz, xid text) LANGUAGE sql AS $body$
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8, coalesce($6::timestamptz, clock_timestamp()))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8) - $5::float8,
	ts = greatest(r.ts, excluded.ts)
WHERE least(r.value + greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) * $7::float8 / $8::float8, $4::float8) - $5::float8
		>= $9::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $10::timestamptz))
RETURNING value, ts, paused,
	clock_timestamp(), xmin::text
$body$;

CREATE FUNCTION @schema@.rate_limit_window_take(text, text, int4, float8, float8, float8, timestamptz, timestamptz, float8, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, at timestamptz, xid text) LANGUAGE sql AS $body$
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8 - $5::float8,
	date_bin($6::float8 * interval '1 microsecond', coalesce($7::timestamptz, clock_timestamp()), $8::timestamptz))
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(r.value + greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) * $9::float8 / $6::float8, $4::float8) - $5::float8,
	ts = greatest(r.ts, excluded.ts)
WHERE least(r.value + greatest(round(date_part('epoch', excluded.ts - r.ts) * 1000000), 0) * $9::float8 / $6::float8, $4::float8) - $5::float8
		>= $10::float8 - greatest(abs(r.value), $5::float8, $4::float8) * 1.4210854715202004e-14
	AND date_bin($6::float8 * interval '1 microsecond', r.ts, $8::timestamptz) = r.ts
	AND (r.paused IS NULL OR r.paused <= greatest(excluded.ts, $11::timestamptz))
RETURNING value, ts, paused,
	clock_timestamp(), xmin::text
$body$;

CREATE FUNCTION @schema@.rate_limit_bucket_give(text, text, int4, float8, float8, timestamptz, float8, float8, float8, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, slots float8[], ahead float8[], at timestamptz, made boolean) LANGUAGE sql AS $body$
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
	clock_timestamp(), xmax = 0
$body$;

CREATE FUNCTION @schema@.rate_limit_window_give(text, text, int4, float8, float8, float8, timestamptz, timestamptz, float8, float8, timestamptz)
RETURNS TABLE (value float8, ts timestamptz, paused timestamptz, slots float8[], ahead float8[], at timestamptz, made boolean) LANGUAGE sql AS $body$
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts, ahead)
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
	clock_timestamp(), xmax = 0
$body$;

CREATE FUNCTION @schema@.rate_limit_put(text, text, int4, float8, timestamptz, timestamptz, float8[])
RETURNS void LANGUAGE sql AS $body$
INSERT INTO @schema@.rate_limits AS r (name, key, shard, value, ts, paused, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8, $5::timestamptz, $6::timestamptz, $7::float8[])
ON CONFLICT (name, key, shard) DO UPDATE
SET value = excluded.value, ts = excluded.ts, paused = excluded.paused, slots = coalesce(excluded.slots, r.slots)
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

-- The phase of a fixed window without a start, in microseconds: a hash of name and key (FNV-1a
-- of 64 bits, and the finalizer of MurmurHash3), modulo the period.
CREATE FUNCTION @schema@.rate_limit_phase(name text, key text, period float8) RETURNS float8 LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
	bytes bytea := convert_to(name, 'UTF8') || '\x00'::bytea || convert_to(key, 'UTF8');
	hash numeric := 14695981039346656037;
	low integer;
	signed bigint;
	factor numeric;
BEGIN
	FOR i IN 0 .. length(bytes) - 1 LOOP
		low := mod(hash, 256);
		hash := mod((hash - low + (low # get_byte(bytes, i))) * 1099511628211, 18446744073709551616);
	END LOOP;
	FOREACH factor IN ARRAY ARRAY[18397679294719823053, 14181476777654086739, 1] LOOP
		signed := CASE WHEN hash >= 9223372036854775808 THEN hash - 18446744073709551616 ELSE hash END;
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
CREATE FUNCTION @schema@.rate_limit_told(ok boolean, value float8, ts timestamptz, paused timestamptz, instant timestamptz, retry_at timestamptz, capacity float8, rate float8, period float8, bucket boolean)
RETURNS @schema@.rate_limit_result LANGUAGE sql IMMUTABLE AS $body$
	SELECT ROW(
		ok, retry_at - instant, retry_at, value,
		greatest(floor(value + @schema@.rate_limit_slack(value, 1, capacity)), 0)::int8, capacity,
		greatest(greatest(@schema@.rate_limit_enough(value, ts, capacity, capacity, capacity, rate, period, bucket), paused) - instant, interval '0'),
		CASE WHEN paused > instant THEN paused END, instant)::@schema@.rate_limit_result
$body$;

-- All verbs.
CREATE FUNCTION @schema@.rate_limit_call(verb text, name text, key text, count float8, rate float8, period interval, capacity float8, max_reserved float8, kind text, start timestamptz, used float8)
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql AS $body$
DECLARE
	bucket  boolean := kind = 'token bucket';
	reserve boolean := verb IN ('reserve', 'check reserve');
	micros  float8 := extract(epoch FROM period) * 1000000;
	tick    float8 := CASE WHEN bucket THEN 1 ELSE micros END;
	lowest  float8 := 0;
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
	fault   text;
	took    record;
	seen    record;
BEGIN
	-- NaN is greater than every other number.
	fault := CASE
		WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN 'name: must have from 1 to 255 bytes'
		WHEN key IS NULL OR octet_length(key) > 2048 THEN 'key: must have at most 2048 bytes'
		WHEN kind IS NULL OR kind NOT IN ('token bucket', 'fixed window') THEN format('kind %L: must be token bucket or fixed window', kind)
		WHEN rate IS NULL OR rate NOT BETWEEN 1e-15 AND 1e12 THEN format('rate %s: must be from 1e-15 to 1e12', rate)
		WHEN period IS NULL OR micros NOT BETWEEN 1 AND 3153600000000000 OR date_part('year', period) <> 0 OR date_part('month', period) <> 0
			THEN format('period %s: must be positive, without months, and at most 36500 days', period)
		WHEN capacity IS NULL AND rate < 1 THEN format('rate %s: can never grant a whole token while capacity is left out and so is the same: give a longer period with the rate of that, or a capacity of 1', rate)
		WHEN capacity <> 0 AND capacity NOT BETWEEN 1e-15 AND 1e12 THEN format('capacity %s: must be 0 for none, or from 1e-15 to 1e12', capacity)
		WHEN capacity / rate * micros > 3153600000000000 THEN format('capacity %s: must fill within 36500 days at this rate', capacity)
		WHEN max_reserved <> 0 AND max_reserved <> 'Infinity' AND max_reserved NOT BETWEEN 1e-15 AND 1e12
			THEN format('max_reserved %s: must be 0 for none, from 1e-15 to 1e12, or Infinity', max_reserved)
		WHEN start IS NOT NULL AND bucket THEN 'start: a token bucket has none'
		WHEN start < '0001-01-01 00:00:00+00' OR start >= '10000-01-01 00:00:00+00' THEN 'start: must be in the years 1 to 9999'
		WHEN count IS NULL OR count NOT BETWEEN 0 AND 1e12 THEN format('count %s: must be from 0 to 1e12', count)
		WHEN verb = 'settle' AND (used IS NULL OR used NOT BETWEEN 0 AND 1e12) THEN format('used %s: must be from 0 to 1e12', used)
	END;
	IF fault IS NOT NULL THEN
		RAISE EXCEPTION 'rate limit %: %', quote_literal(left(name, 255)), fault USING ERRCODE = 'invalid_parameter_value';
	END IF;
	capacity := coalesce(capacity, rate);
	IF reserve THEN
		lowest := 0 - least(coalesce(max_reserved, 'Infinity'), rate * 3153600000000000 / micros);
	END IF;
	most := capacity - lowest;
	IF verb IN ('allow', 'reserve', 'check', 'check reserve') AND count > most + @schema@.rate_limit_slack(count, most, 0) / 2 THEN
		RAISE EXCEPTION 'rate limit %: % tokens can never be granted at once, at most % can', quote_literal(name), count, most
			USING ERRCODE = 'numeric_value_out_of_range';
	END IF;
	IF NOT bucket THEN
		origin := @schema@.rate_limit_origin(name, key, micros, start);
	END IF;

	IF verb IN ('credit', 'settle') THEN
		give := CASE WHEN verb = 'credit' THEN count ELSE greatest(count - used, 0) END;
		most := CASE WHEN verb = 'credit' THEN capacity ELSE 1.7976931348623157e308 END;
		IF bucket THEN
			SELECT * INTO took FROM @schema@.rate_limit_bucket_give(name, key, 0, capacity, give, NULL, rate, micros, most, 0, NULL);
		ELSE
			SELECT * INTO took FROM @schema@.rate_limit_window_give(name, key, 0, capacity, give, micros, NULL, origin, most, 0, NULL);
		END IF;
		ts := @schema@.rate_limit_tick(took.ts, took.at, tick);
		settled := @schema@.rate_limit_settled(took.value, took.ts, ts, capacity, rate, micros);
		IF verb = 'settle' AND used > count THEN
			settled := greatest(settled, took.value) - (used - count); -- more than capacity, of another definition, stays
			PERFORM @schema@.rate_limit_put(name, key, 0, settled, ts, took.paused, NULL);
			settled := least(settled, capacity);
		END IF;
		ok := settled >= 0 - @schema@.rate_limit_slack(settled, 0, capacity);
		due := CASE WHEN ok THEN took.at ELSE @schema@.rate_limit_enough(settled, ts, 0, 0, capacity, rate, micros, bucket) END;
		RETURN @schema@.rate_limit_told(verb = 'settle' OR ok AND (took.paused > took.at) IS NOT TRUE, settled, ts, took.paused, took.at,
			CASE WHEN took.paused > took.at THEN greatest(due, took.paused) ELSE due END, capacity, rate, micros, bucket);
	END IF;

	-- The row itself grants. When it does not it is looked at, and tells what to answer or,
	-- since it is locked by now, what to take: its edges may be its own, or a pause is over.
	FOR round IN 1 .. 8 LOOP
		IF verb IN ('allow', 'reserve') THEN
			IF bucket THEN
				SELECT * INTO took FROM @schema@.rate_limit_bucket_take(name, key, 0, capacity, count, NULL, rate, micros, lowest,
					CASE WHEN reserve THEN 'infinity' ELSE over END);
			ELSE
				SELECT * INTO took FROM @schema@.rate_limit_window_take(name, key, 0, capacity, count, micros, NULL, origin, rate, lowest,
					CASE WHEN reserve THEN 'infinity' ELSE over END);
			END IF;
			IF FOUND THEN
				now := least(took.at, took.ts + (tick - 1) * interval '1 microsecond');
				instant := greatest(now, took.ts);
				due := greatest(instant, took.paused);
				IF took.value < 0 - @schema@.rate_limit_slack(took.value, count, capacity) THEN
					due := greatest(due, @schema@.rate_limit_enough(took.value, took.ts, 0, 0, capacity, rate, micros, bucket));
				END IF;
				IF instant > now AND (due > instant OR took.paused > now) THEN
					instant := now;
				END IF;
				ts := @schema@.rate_limit_tick(took.ts, instant, tick);
				RETURN @schema@.rate_limit_told(true, @schema@.rate_limit_settled(took.value, took.ts, ts, capacity, rate, micros), ts, took.paused, instant, due, capacity, rate, micros, bucket);
			END IF;
		END IF;
		SELECT r.value, r.ts, r.paused, clock_timestamp() AS at INTO seen FROM @schema@.rate_limits AS r WHERE r.name = $2 AND r.key = $3 AND r.shard = 0;
		IF NOT FOUND THEN
			now := clock_timestamp();
			SELECT capacity AS value, CASE WHEN bucket THEN now ELSE date_bin(tick * interval '1 microsecond', now, origin) END AS ts,
				NULL::timestamptz AS paused, now AS at INTO seen;
		END IF;
		now := seen.at;
		ts := @schema@.rate_limit_tick(seen.ts, now, tick);
		settled := @schema@.rate_limit_settled(seen.value, seen.ts, ts, capacity, rate, micros);
		ok := settled - count >= lowest - @schema@.rate_limit_slack(seen.value, count, capacity);
		IF ok THEN
			due := now;
			IF reserve THEN
				due := greatest(due, seen.paused);
			END IF;
			IF settled - count < 0 - @schema@.rate_limit_slack(settled - count, count, capacity) THEN
				due := greatest(due, @schema@.rate_limit_enough(settled - count, ts, 0, 0, capacity, rate, micros, bucket));
			END IF;
		ELSE
			due := @schema@.rate_limit_enough(settled, ts, count + lowest, count, capacity, rate, micros, bucket);
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
	RETURN @schema@.rate_limit_told(ok, settled, ts, seen.paused, now, due, capacity, rate, micros, bucket);
END
$body$;

-- What is granted to roles.

CREATE FUNCTION @schema@.rate_limit_allow(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
	SELECT @schema@.rate_limit_call('allow', name, key, count, rate, period, capacity, NULL, kind, start, NULL)
$body$;

CREATE FUNCTION @schema@.rate_limit_reserve(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	max_reserved float8 DEFAULT NULL, kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
	SELECT @schema@.rate_limit_call('reserve', name, key, count, rate, period, capacity, max_reserved, kind, start, NULL)
$body$;

CREATE FUNCTION @schema@.rate_limit_check(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL, reserve boolean DEFAULT false, max_reserved float8 DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
	SELECT @schema@.rate_limit_call(CASE WHEN reserve THEN 'check reserve' ELSE 'check' END, name, key, count, rate, period, capacity, max_reserved, kind, start, NULL)
$body$;

CREATE FUNCTION @schema@.rate_limit_credit(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
	SELECT @schema@.rate_limit_call('credit', name, key, count, rate, period, capacity, NULL, kind, start, NULL)
$body$;

CREATE FUNCTION @schema@.rate_limit_settle(name text, key text, rate float8, period interval, taken float8, used float8, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL)
RETURNS @schema@.rate_limit_result LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
	SELECT @schema@.rate_limit_call('settle', name, key, taken, rate, period, capacity, NULL, kind, start, used)
$body$;

CREATE FUNCTION @schema@.rate_limit_take(name text, key text, rate float8, period interval, count float8 DEFAULT 1, capacity float8 DEFAULT NULL,
	kind text DEFAULT 'token bucket', start timestamptz DEFAULT NULL, state text DEFAULT 'PT429')
RETURNS @schema@.rate_limit_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
	answer @schema@.rate_limit_result := @schema@.rate_limit_call('allow', name, key, count, rate, period, capacity, NULL, kind, start, NULL);
BEGIN
	IF NOT answer.ok THEN
		RAISE EXCEPTION 'rate limit % is exceeded', quote_literal(name)
			USING ERRCODE = state, DETAIL = format('Try again in %s seconds.', ceil(extract(epoch FROM answer.retry_after)));
	END IF;
	RETURN answer;
END
$body$;

REVOKE EXECUTE ON FUNCTION @schema@.rate_limit_allow, @schema@.rate_limit_bucket_give, @schema@.rate_limit_bucket_take, @schema@.rate_limit_call, @schema@.rate_limit_check, @schema@.rate_limit_credit, @schema@.rate_limit_enough, @schema@.rate_limit_origin, @schema@.rate_limit_phase, @schema@.rate_limit_put, @schema@.rate_limit_reserve, @schema@.rate_limit_settle, @schema@.rate_limit_settled, @schema@.rate_limit_slack, @schema@.rate_limit_take, @schema@.rate_limit_tick, @schema@.rate_limit_told, @schema@.rate_limit_window_give, @schema@.rate_limit_window_take FROM PUBLIC;

$functions$, '@schema@', home);
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
DROP FUNCTION @schema@.rate_limit_allow, @schema@.rate_limit_bucket_give, @schema@.rate_limit_bucket_take, @schema@.rate_limit_call, @schema@.rate_limit_check, @schema@.rate_limit_credit, @schema@.rate_limit_enough, @schema@.rate_limit_origin, @schema@.rate_limit_phase, @schema@.rate_limit_put, @schema@.rate_limit_reserve, @schema@.rate_limit_settle, @schema@.rate_limit_settled, @schema@.rate_limit_slack, @schema@.rate_limit_take, @schema@.rate_limit_tick, @schema@.rate_limit_told, @schema@.rate_limit_window_give, @schema@.rate_limit_window_take;
DROP TYPE @schema@.rate_limit_result;
$functions$, '@schema@', home);
END
$migration$;
-- +goose StatementEnd
