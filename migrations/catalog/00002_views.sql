-- +goose Up

-- The instant at which the n-th window of a quota by the calendar begins, from that of its anchor
-- on; in UTC if the server does not know the zone. A day that a zone never had counts.
-- +goose StatementBegin
CREATE FUNCTION rate_limits_edge(every text, zone text, anchor date, "time" text, n bigint) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    clock  timestamp := anchor + n * (CASE WHEN every ~ '^[0-9]' THEN every ELSE '1 ' || every END)::interval + coalesce("time", '00:00')::interval;
    first  timestamptz;
    early  timestamptz;
    middle timestamptz;
BEGIN
    BEGIN
        first := clock AT TIME ZONE zone;
    EXCEPTION WHEN invalid_parameter_value THEN
        RETURN extract(epoch FROM clock) * 1000000;
    END;
    -- Of a time that clocks show twice, since they are set back, PostgreSQL takes the second.
    early := (clock - ((first - interval '3 hours') AT TIME ZONE zone - (first - interval '3 hours') AT TIME ZONE 'UTC')) AT TIME ZONE 'UTC';
    IF early < first AND early AT TIME ZONE zone >= clock THEN
        first := early;
    END IF;
    -- Of one that they pass over, since they are set forward, it is when they are. PostgreSQL goes on by
    -- the clock of before.
    early := first - (first AT TIME ZONE zone - clock);
    WHILE first - early > interval '1 second' LOOP
        middle := date_trunc('second', early + (first - early) / 2);
        IF middle AT TIME ZONE zone >= clock THEN
            first := middle;
        ELSE
            early := middle;
        END IF;
    END LOOP;
    RETURN extract(epoch FROM first) * 1000000;
END
$$;
-- +goose StatementEnd

-- The number of the last of them up to an instant. It is near that by the days of UTC.
-- +goose StatementBegin
CREATE FUNCTION rate_limits_edges(every text, zone text, anchor date, "time" text, instant bigint) RETURNS bigint LANGUAGE sql IMMUTABLE
BEGIN ATOMIC
SELECT n
FROM (
    SELECT to_timestamp(instant / 1000000.0) AT TIME ZONE 'UTC' AS day, coalesce(substring(every, '^[0-9]+')::int, 1)
        * CASE substring(every, '[a-z]') WHEN 'w' THEN 7 WHEN 'y' THEN 12 ELSE 1 END AS units
    OFFSET 0
) AS u
CROSS JOIN LATERAL (
    SELECT floor(CASE WHEN every ~ 'day|week' THEN u.day::date - anchor
        ELSE 12 * (extract(year FROM u.day) - extract(year FROM anchor)) + extract(month FROM u.day) - extract(month FROM anchor)
        END::float8 / u.units)::bigint AS near
    OFFSET 0
) AS g
CROSS JOIN LATERAL generate_series(g.near + 2, g.near - 2, -1) AS n
WHERE rate_limits_edge(every, zone, anchor, "time", n) <= instant
LIMIT 1;
END;
-- +goose StatementEnd

-- The number of the edge that a row with that instant has had: the last one up to it, or if it does
-- not stand on that, the first one after it, which does not count. It stands on one for as long after
-- it as time zones are apart, and below a week for summer time.
-- +goose StatementBegin
CREATE FUNCTION rate_limits_had(every text, zone text, anchor date, "time" text, instant bigint) RETURNS bigint LANGUAGE sql IMMUTABLE
BEGIN ATOMIC
SELECT n + CASE WHEN instant - rate_limits_edge(every, zone, anchor, "time", n) > CASE WHEN every ~ '^([1-6] )?days?$' THEN 10800000000 ELSE 93600000000 END
    THEN 1 ELSE 0 END
FROM rate_limits_edges(every, zone, anchor, "time", instant) AS n;
END;
-- +goose StatementEnd

-- What there is of each key that has a row, brought to an instant by what holds for it: the
-- algebra of package bucket, for people to read. Instants within are microseconds since 1970.
-- It is one SELECT, which PostgreSQL puts into the query that asks, so that a name and a
-- prefix of keys are looked up in the index. Where it says OFFSET 0, PostgreSQL would else put
-- expressions into each other until they are too long to plan.
-- +goose StatementBegin
CREATE FUNCTION rate_limits_at(instant timestamptz) RETURNS TABLE (
    name text, key text, kind text, value double precision, capacity double precision, share double precision,
    debt double precision, ahead double precision, paused_until timestamptz, full_at timestamptz, overridden boolean, mode text
) LANGUAGE sql STABLE
BEGIN ATOMIC
SELECT k.name, k.key, k.kind, k.value, k.capacity,
    CASE WHEN k.capacity > 0 THEN k.value / k.capacity ELSE 0 END,
    greatest(-k.value, 0), k.ahead,
    CASE WHEN k.paused > instant THEN k.paused END,
    greatest(k.full_at, k.paused, instant),
    k.overridden, k.mode
FROM (
    -- Shards that have no row are full.
    SELECT r.name, r.key, d.kind, d.capacity, d.overridden, d.mode,
        sum(s.value) + (d.shards - count(*)) * d.capacity / d.shards AS value,
        max(r.paused) AS paused,
        max('1970-01-01 00:00:00+00'::timestamptz + s.full_at * interval '1 microsecond') AS full_at,
        sum(CASE WHEN r.ahead[2] > date_part('epoch', instant - '2000-01-01 00:00:00+00'::timestamptz) THEN r.ahead[1] ELSE 0 END) AS ahead
    FROM rate_limits AS r
    JOIN rate_limit_definitions AS p ON p.name = r.name AND p.kind IS NOT NULL AND r.shard < p.shards
    LEFT JOIN rate_limit_definitions AS a ON a.name = r.name AND a.key IS NULL AND a.kind IS NULL
        AND a.enabled AND (a.until IS NULL OR a.until > instant)
    LEFT JOIN rate_limit_definitions AS o ON o.name = r.name AND o.key = r.key
        AND o.enabled AND (o.until IS NULL OR o.until > instant)
    -- What holds for the key.
    CROSS JOIN LATERAL (
        SELECT p.kind, p.shards, p.start, (a.id IS NOT NULL OR o.id IS NOT NULL) AS overridden,
            coalesce(o.mode, a.mode, 'enforce') AS mode,
            CASE WHEN p.kind = 'sliding window' THEN coalesce(o.rate, a.rate, p.rate)
                ELSE coalesce(o.capacity, a.capacity, p.capacity, o.rate, a.rate, p.rate) END AS capacity,
            coalesce(o.rate, a.rate, p.rate) / p.shards AS rate,
            (extract(epoch FROM coalesce(o.period, a.period, p.period)) * 1000000)::int8 AS period,
            coalesce(o.slots, a.slots, p.slots) AS slots,
            (extract(epoch FROM r.ts) * 1000000)::int8 AS ts,
            (extract(epoch FROM instant) * 1000000)::int8 AS now
        OFFSET 0
    ) AS d
    -- The last edge of a quota by the calendar, and the one that the row has had.
    LEFT JOIN LATERAL (
        SELECT rate_limits_edges(p.every, p.zone, p.anchor, p.time, d.now) AS last,
            rate_limits_had(p.every, p.zone, p.anchor, p.time, d.ts) AS had
        WHERE p.every IS NOT NULL
        OFFSET 0
    ) AS c ON true
    -- A token bucket ticks with every microsecond, a fixed window with every period or edge.
    CROSS JOIN LATERAL (
        SELECT CASE WHEN d.kind = 'token bucket' THEN greatest(d.ts, d.now)
            WHEN c.last > c.had THEN rate_limits_edge(p.every, p.zone, p.anchor, p.time, c.last)
            WHEN p.every IS NOT NULL THEN d.ts
            ELSE greatest(d.ts, d.now - (d.now - d.ts) % d.period) END AS tick
        OFFSET 0
    ) AS t
    CROSS JOIN LATERAL (
        SELECT l.value, CASE WHEN l.missing > 0 AND p.every IS NOT NULL
            THEN rate_limits_edge(p.every, p.zone, p.anchor, p.time, greatest(c.last, c.had) + ceil(least(l.missing / d.rate, 1.2e16 / d.period))::int8)
            ELSE t.tick + CASE WHEN l.missing <= 0 THEN 0
            ELSE least(CASE WHEN d.kind = 'token bucket' THEN ceil(l.missing * d.period / d.rate)
                ELSE ceil(l.missing / d.rate) * d.period END, 1.2e16)::int8 END END AS full_at
        FROM (
            SELECT v.value, d.capacity / d.shards - v.value - greatest(abs(v.value), d.capacity / d.shards) * 7.105427357601002e-15 AS missing
            FROM (
                SELECT least(r.value + CASE WHEN p.every IS NOT NULL THEN greatest(c.last - c.had, 0)::float8 * d.rate
                    ELSE (t.tick - d.ts)::float8 * d.rate / d.period END, d.capacity / d.shards) AS value
                OFFSET 0
            ) AS v
            OFFSET 0
        ) AS l
        WHERE d.kind <> 'sliding window'
        UNION ALL
        -- A sliding window's row has its slots, of its own width or of another definition's;
        -- or a value that another kind of limit has left.
        SELECT CASE WHEN w.ahead > w.passed THEN -(w.tick + (w.ahead - w.passed) * w.width - d.now) * d.rate / d.period
                ELSE d.rate - h.held END,
            w.tick + (greatest(w.ahead - w.passed, 0) + coalesce(h.last - w.later + 1, 0)) * w.width
        FROM (
            SELECT f.*, greatest(f.passed - f.ahead, 0) AS later FROM (
                SELECT e.*, greatest(e.first, e.first + (d.now - e.first) / e.width * e.width) AS tick,
                    greatest((d.now - e.first) / e.width, 0) AS passed,
                    CASE WHEN e.own THEN r.slots[2]::int8
                        WHEN e.slotted THEN floor((d.ts + ((r.slots[2] + 1) * r.slots[1])::int8 - 1 - e.first)::numeric / e.width)::int8
                        ELSE floor((d.ts + least(ceil(greatest(-r.value, 0) * d.period / d.rate), 1.2e16)::int8 - e.first)::numeric / e.width)::int8 END AS ahead
                FROM (
                    SELECT c.*, c.slotted AND r.slots[1] = c.width AND cardinality(r.slots) = d.slots + 5 AS own,
                        -- Where the slot of ts begins.
                        CASE WHEN c.slotted AND r.slots[1] = c.width AND cardinality(r.slots) = d.slots + 5 OR d.start IS NULL THEN d.ts
                            ELSE d.ts - ((d.ts - (extract(epoch FROM d.start) * 1000000)::int8) % c.width + c.width) % c.width END AS first
                    FROM (
                        SELECT (d.period + d.slots - 1) / d.slots AS width,
                            coalesce(cardinality(r.slots) >= 6 AND abs(r.slots[3] - r.value) <= abs(r.value) * 1e-14 AND r.slots[1] >= 1, false) AS slotted
                        OFFSET 0
                    ) AS c OFFSET 0
                ) AS e OFFSET 0
            ) AS f OFFSET 0
        ) AS w
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(i.held), 0) AS held,
                max(i.slot) FILTER (WHERE i.held > d.rate * 1e-13) AS last
            FROM (
                SELECT r.slots[n + 4] - r.slots[n + 3] AS held,
                    CASE WHEN w.own THEN n - 1
                        ELSE floor((d.ts + ((r.slots[2] + n + 5 - cardinality(r.slots)) * r.slots[1])::int8 - 1 - w.first)::numeric / w.width)::int8 - w.ahead + d.slots END AS slot
                FROM generate_series(1, cardinality(r.slots) - 4) AS n
                WHERE w.slotted
                UNION ALL
                SELECT least(greatest(d.rate - r.value, 0), d.rate), d.slots WHERE NOT w.slotted
                OFFSET 0
            ) AS i
            WHERE i.slot >= w.later
        ) AS h
        WHERE d.kind = 'sliding window'
    ) AS s
    GROUP BY r.name, r.key, d.kind, d.capacity, d.shards, d.overridden, d.mode
) AS k;
END;
-- +goose StatementEnd

COMMENT ON FUNCTION rate_limits_at(timestamptz) IS
    'rate_limits_now as it is at an instant, if nothing is taken until then.';

-- A function's columns have no collation; the index has.
CREATE VIEW rate_limits_now AS
SELECT name COLLATE "C" AS name, key COLLATE "C" AS key, kind, value, capacity, share, debt, ahead, paused_until, full_at, overridden, mode
FROM rate_limits_at(statement_timestamp());

COMMENT ON VIEW rate_limits_now IS
    'What there is of each key that has a row; one that has none is full. value is in tokens, below 0 in debt; ahead is tokens besides that processes hold in memory; mode is what holds for its calls. Limits that no program has published are not there.';

CREATE VIEW rate_limits_short AS SELECT * FROM rate_limits_now WHERE value < 1 OR paused_until IS NOT NULL OR mode = 'refuse';

COMMENT ON VIEW rate_limits_short IS
    'Who is limited now: keys that are paused, have less than one token, or are refused by their mode. Those in mode shadow would be.';

-- A permit is a row, whose ts is the end of its lease. rate_limits_at has none of them, as what is
-- published of them has no shards.
CREATE VIEW rate_limits_in_flight AS
SELECT r.name, r.key, coalesce(o.at_once, a.at_once, p.at_once) AS at_once, count(*) AS held,
    min(r.ts) AS not_before, max(r.ts) AS until, a.id IS NOT NULL OR o.id IS NOT NULL AS overridden,
    coalesce(nullif(coalesce(o.mode, a.mode), 'shadow'), 'enforce') AS mode -- of when it was of another kind
FROM rate_limits AS r
JOIN rate_limit_definitions AS p ON p.name = r.name AND p.kind = 'in flight'
LEFT JOIN rate_limit_definitions AS a ON a.name = r.name AND a.key IS NULL AND a.kind IS NULL
    AND a.enabled AND (a.until IS NULL OR a.until > statement_timestamp())
LEFT JOIN rate_limit_definitions AS o ON o.name = r.name AND o.key = r.key
    AND o.enabled AND (o.until IS NULL OR o.until > statement_timestamp())
WHERE r.ts > statement_timestamp() AND r.shard < 10000
GROUP BY r.name, r.key, p.id, a.id, o.id, p.at_once, a.at_once, o.at_once, a.mode, o.mode; -- all of them for Citus

COMMENT ON VIEW rate_limits_in_flight IS
    'What is under way now: keys of which permits are held, how many, and of how many; not_before is the first end of a lease, until the last; mode is what holds for those who ask.';

-- Views read as their caller where the server can, so that rights and row-level security of the
-- tables hold for those who read them.
-- +goose StatementBegin
DO $$
BEGIN
    IF current_setting('server_version_num')::int >= 150000 THEN
        ALTER VIEW rate_limits_now SET (security_invoker = true);
        ALTER VIEW rate_limits_short SET (security_invoker = true);
        ALTER VIEW rate_limits_in_flight SET (security_invoker = true);
    END IF;
END
$$;
-- +goose StatementEnd

-- +goose Down
DROP VIEW IF EXISTS rate_limits_in_flight;
DROP VIEW IF EXISTS rate_limits_short;
DROP VIEW IF EXISTS rate_limits_now;
DROP FUNCTION IF EXISTS rate_limits_at(timestamptz);
DROP FUNCTION IF EXISTS rate_limits_had(text, text, date, text, bigint);
DROP FUNCTION IF EXISTS rate_limits_edges(text, text, date, text, bigint);
DROP FUNCTION IF EXISTS rate_limits_edge(text, text, date, text, bigint);
