-- +goose Up

-- What programs publish of their limits, and what people have overridden of it. Nothing
-- that decides reads this table: a process reads it at its start, and later what changed.
CREATE TABLE rate_limit_definitions (
    -- No statement uses it. A table needs a key to be replicated; a sequence would stay behind.
    id           uuid             NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
    name         text             COLLATE "C" NOT NULL,
    key          text             COLLATE "C",
    kind         text,
    rate         double precision,
    period       interval,
    capacity     double precision,
    max_reserved double precision,
    shards       integer,
    start        timestamptz,
    slots        integer,
    every        text,
    zone         text,
    anchor       date,
    time         text,
    at_once      integer,
    lease        interval,
    mode         text,
    enabled      boolean          NOT NULL DEFAULT true,
    until        timestamptz,
    note         text,
    updated_at   timestamptz      NOT NULL DEFAULT clock_timestamp(),

    -- What Validate refuses. NaN is greater than every other number.
    CONSTRAINT "name must have from 1 to 255 bytes" CHECK (octet_length(name) BETWEEN 1 AND 255),
    CONSTRAINT "key must have at most 2048 bytes" CHECK (octet_length(key) <= 2048),
    CONSTRAINT "kind must be a kind of limit" CHECK (kind IN ('token bucket', 'fixed window', 'sliding window', 'in flight')),
    CONSTRAINT "rate must be from 1e-15 to 1e12" CHECK (rate BETWEEN 1e-15 AND 1e12),
    CONSTRAINT "period must be positive, without months, at most 36500 days" CHECK (
        period > interval '0' AND period <= interval '36500 days'
        AND date_part('year', period) = 0 AND date_part('month', period) = 0),
    CONSTRAINT "capacity must be 0 for none, or from 1e-15 to 1e12" CHECK (capacity = 0 OR capacity BETWEEN 1e-15 AND 1e12),
    CONSTRAINT "max_reserved must be 0, from 1e-15 to 1e12, or Infinity" CHECK (
        max_reserved = 0 OR max_reserved BETWEEN 1e-15 AND 1e12 OR max_reserved = 'Infinity'),
    CONSTRAINT "shards must be from 1 to 1024" CHECK (shards BETWEEN 1 AND 1024),
    CONSTRAINT "start must be in the years 1 to 9999" CHECK (
        start >= '0001-01-01 00:00:00+00' AND start < '10000-01-01 00:00:00+00'),
    CONSTRAINT "slots must be from 1 to 1000" CHECK (slots BETWEEN 1 AND 1000),
    CONSTRAINT "every must be day, week, month, year or several like '3 months'" CHECK (
        every ~ '^(day|week|month|year|[1-9][0-9]{0,4} (day|week|month|year)s?)$'),
    CONSTRAINT "every must be at most 36500 days" CHECK (
        coalesce(substring(every, '^[0-9]{1,5}')::int, 1) * CASE substring(every, '[a-z]') WHEN 'd' THEN 1 WHEN 'w' THEN 7 WHEN 'm' THEN 30.5 ELSE 366 END <= 36500),
    CONSTRAINT "time must be a time of day, such as 09:00" CHECK (time ~ '^([01][0-9]|2[0-3]):[0-5][0-9]$'),
    CONSTRAINT "anchor must be in the years 1 to 9999" CHECK (anchor BETWEEN '0001-01-01' AND '9999-12-31'),
    CONSTRAINT "zone and anchor are those of every, which has them" CHECK (
        (every IS NULL) = (zone IS NULL) AND (every IS NULL) = (anchor IS NULL)),
    CONSTRAINT "time is that of every" CHECK (every IS NOT NULL OR time IS NULL),
    CONSTRAINT "every is for a fixed window without a start" CHECK (
        every IS NULL OR kind IS NOT NULL AND kind = 'fixed window' AND start IS NULL),
    CONSTRAINT "at_once must be from 1 to 10000" CHECK (at_once BETWEEN 1 AND 10000),
    CONSTRAINT "lease must be from 1 ms to 36500 days, without months" CHECK (
        lease >= interval '1 millisecond' AND lease <= interval '36500 days'
        AND date_part('year', lease) = 0 AND date_part('month', lease) = 0),
    CONSTRAINT "mode must be enforce, shadow or refuse" CHECK (mode IN ('enforce', 'shadow', 'refuse')),
    CONSTRAINT "until must be an instant" CHECK (isfinite(until)),
    CONSTRAINT "note must have at most 2048 bytes" CHECK (octet_length(note) <= 2048),
    CONSTRAINT "capacity must fill within 36500 days at this rate" CHECK (
        coalesce(capacity, rate) / rate * date_part('epoch', period) <= 36500 * 86400.0),

    -- A row that has a kind is a program's, and whole. NULL as its capacity is its rate.
    CONSTRAINT "a program's row must be whole" CHECK (
        kind IS NULL OR key IS NULL AND enabled AND until IS NULL AND (kind = 'in flight'
            OR rate IS NOT NULL AND period IS NOT NULL AND max_reserved IS NOT NULL AND shards IS NOT NULL)),
    CONSTRAINT "at_once and lease are those of a limit of how many at once, which has nothing else" CHECK (
        kind IS NULL OR CASE WHEN kind = 'in flight' THEN at_once IS NOT NULL AND lease IS NOT NULL
                AND num_nonnulls(rate, period, capacity, max_reserved, shards, start, slots, every) = 0
            ELSE num_nonnulls(at_once, lease) = 0 END),
    CONSTRAINT "slots are those of a sliding window, which has them" CHECK (kind IS NULL OR (kind = 'sliding window') = (slots IS NOT NULL)),
    CONSTRAINT "capacity is not for a sliding window" CHECK (kind <> 'sliding window' OR capacity IS NULL),
    CONSTRAINT "start is not for a token bucket" CHECK (kind <> 'token bucket' OR start IS NULL),
    CONSTRAINT "a rate below 1 needs a capacity" CHECK (kind IS NULL OR rate >= 1 OR capacity IS NOT NULL),
    CONSTRAINT "shards must have a token each" CHECK (
        kind IS NULL OR shards = 1 OR shards <= CASE WHEN capacity = 0 THEN max_reserved ELSE coalesce(capacity, rate) END),

    -- Other shards would be full at once, and another start moves no row that is there.
    CONSTRAINT "shards and start are for a program's row only" CHECK (kind IS NOT NULL OR shards IS NULL AND start IS NULL),
    CONSTRAINT "mode is for an override only" CHECK (kind IS NULL OR mode IS NULL),
    CONSTRAINT "an override must replace a field" CHECK (
        kind IS NOT NULL OR num_nonnulls(rate, period, capacity, max_reserved, slots, at_once, lease, mode) > 0)
);

CREATE UNIQUE INDEX rate_limit_definitions_published ON rate_limit_definitions (name) WHERE kind IS NOT NULL;
CREATE UNIQUE INDEX rate_limit_definitions_all ON rate_limit_definitions (name) WHERE kind IS NULL AND key IS NULL;
CREATE UNIQUE INDEX rate_limit_definitions_key ON rate_limit_definitions (name, key) WHERE key IS NOT NULL;

COMMENT ON TABLE rate_limit_definitions IS
    'What a limit is: one row that a program has published, which has a kind, and overrides, which have none. An override replaces what it is not NULL in: first the one for all keys, then that of the key.';
COMMENT ON COLUMN rate_limit_definitions.key IS
    'Whose override it is; NULL for all keys.';
COMMENT ON COLUMN rate_limit_definitions.kind IS
    'token bucket, fixed window, sliding window or in flight, in the row that a program has published; leave it NULL in an override.';
COMMENT ON COLUMN rate_limit_definitions.rate IS
    'Tokens that are refilled in each period.';
COMMENT ON COLUMN rate_limit_definitions.every IS
    'Of a quota by the calendar, the unit or units by which it is refilled; period is the longest that lasts. Its windows begin with days of zone, from anchor on.';
COMMENT ON COLUMN rate_limit_definitions.time IS
    'Of a quota by the calendar, the time of day at which its windows begin by the clocks of zone, such as 09:00; NULL for midnight.';
COMMENT ON COLUMN rate_limit_definitions.capacity IS
    'The most tokens that a key holds: 0 for none. A program''s is NULL when it is the rate, and follows an override of that.';
COMMENT ON COLUMN rate_limit_definitions.max_reserved IS
    'The deepest debt, in tokens: 0 for none, Infinity for no bound.';
COMMENT ON COLUMN rate_limit_definitions.at_once IS
    'Of a limit of how many at once, the permits of each key; lease is for how long one is held that nobody renews.';
COMMENT ON COLUMN rate_limit_definitions.mode IS
    'refuse refuses every call; shadow decides and takes, and refuses none; enforce does both, and goes before what the override for all keys says.';
COMMENT ON COLUMN rate_limit_definitions.enabled IS
    'Whether an override is in use.';
COMMENT ON COLUMN rate_limit_definitions.until IS
    'When an override ends; NULL for never.';

-- Every change of a definition, in the order of their commits: by it a process finds what
-- has changed since it looked last.
CREATE TABLE rate_limit_history (
    version bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    role    text        NOT NULL DEFAULT session_user,
    who     text        DEFAULT nullif(current_setting('ratelimit.who', true), ''),
    name    text        COLLATE "C",
    key     text        COLLATE "C",
    was     jsonb,
    became  jsonb
);

CREATE INDEX rate_limit_history_name ON rate_limit_history (name, version);

COMMENT ON TABLE rate_limit_history IS
    'Changes of rate_limit_definitions: who changed what, when, from what and to what. Delete old rows as you like, but never the newest.';
COMMENT ON COLUMN rate_limit_history.who IS
    'Who made the change, as its program says by the setting ratelimit.who; NULL if it does not. role is PostgreSQL''s.';
COMMENT ON COLUMN rate_limit_history.name IS
    'The limit''s name; NULL when the table was truncated.';

-- Rows of limits that are not measured by what holds yet: those with a mark. When it is due, and all
-- processes have read the edit, any of them has these rows have what it gives them.
CREATE TABLE rate_limit_pending (
    id       uuid        NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
    name     text        COLLATE "C" NOT NULL,
    key      text        COLLATE "C",
    mark     timestamptz NOT NULL,
    measured jsonb       NOT NULL,
    due      timestamptz NOT NULL,
    done     text        COLLATE "C"
);

COMMENT ON TABLE rate_limit_pending IS
    'Edits that are under way: rows of the limit, or of its key, whose paused is a hundred years (36500 days) before mark are measured by the first of measured until due, or by the capacity of the second if it is two hundred, and have been taken from by all of these. Those of keys up to done are completed.';

-- A restore brings overrides before what they override, so all rows of a statement are there first.
-- +goose StatementBegin
CREATE FUNCTION rate_limit_definitions_check() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    o record;
BEGIN
    IF TG_WHEN = 'BEFORE' THEN
        NEW.updated_at := clock_timestamp();
        RETURN NEW;
    END IF;
    FOR o IN EXECUTE format($q$
        SELECT DISTINCT d.name, p.kind AS published, d.capacity IS NOT NULL AS capacity, d.slots IS NOT NULL AS slots,
            num_nonnulls(d.rate, d.period, d.capacity, d.max_reserved, d.slots) > 0 AS rated,
            num_nonnulls(d.at_once, d.lease) > 0 AS counted, coalesce(d.mode = 'shadow', false) AS shadow
        FROM rate_limit_new AS d LEFT JOIN %I.rate_limit_definitions AS p ON p.name = d.name AND p.kind IS NOT NULL
        WHERE d.kind IS NULL$q$, TG_TABLE_SCHEMA)
    LOOP
        IF o.published IS NULL THEN
            RAISE EXCEPTION 'no program has published a limit "%"', o.name USING ERRCODE = 'foreign_key_violation';
        ELSIF o.published = 'sliding window' AND o.capacity THEN
            RAISE EXCEPTION 'limit "%" is a sliding window, whose capacity is its rate', o.name USING ERRCODE = 'check_violation';
        ELSIF o.published = 'in flight' AND o.rated THEN
            RAISE EXCEPTION 'limit "%" is one of how many at once, of which at_once, lease and mode can be overridden', o.name USING ERRCODE = 'check_violation';
        ELSIF o.published = 'in flight' AND o.shadow THEN
            RAISE EXCEPTION 'limit "%" is one of how many at once, of which none is in mode shadow', o.name USING ERRCODE = 'check_violation';
        ELSIF o.published <> 'in flight' AND o.counted THEN
            RAISE EXCEPTION 'limit "%" is a %, which has no at_once and no lease', o.name, o.published USING ERRCODE = 'check_violation';
        ELSIF o.published <> 'sliding window' AND o.slots THEN
            RAISE EXCEPTION 'limit "%" is a %, which has no slots', o.name, o.published USING ERRCODE = 'check_violation';
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- Makes the order of versions that of commits. A writer takes this lock before any row, and keeps
-- it until it commits: behind a row's lock two programs that publish would wait for each other.
-- +goose StatementBegin
CREATE FUNCTION rate_limit_definitions_turn() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('rate_limit_definitions', TG_RELID::bigint));
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- Logs all rows of a statement at once, since 100,000 rows one by one take minutes. What goes is
-- logged before what comes: of two overrides one may get the other's key.
-- +goose StatementBegin
CREATE FUNCTION rate_limit_definitions_log() RETURNS trigger LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET intervalstyle = 'postgres' AS $$
DECLARE
    log   text := format('INSERT INTO %I.rate_limit_history (name, key, was, became) ', TG_TABLE_SCHEMA);
    side  text := $q$SELECT id, name, key, jsonb_strip_nulls(to_jsonb(d) - '{id,name,key,updated_at}'::text[]) AS def FROM %I AS d%s OFFSET 0$q$;
    none  text := ' WHERE false';
    pairs text := format($q$WITH pairs AS (
        SELECT o.name AS had, o.key AS had_key, o.def AS was, n.name, n.key, n.def AS became, coalesce((o.name, o.key) IS DISTINCT FROM (n.name, n.key) AND o.id = n.id, false) AS moved
        FROM (%s) AS o FULL JOIN (%s) AS n USING (id)
        WHERE (o.name, o.key, o.def) IS DISTINCT FROM (n.name, n.key, n.def)) $q$,
        CASE TG_OP WHEN 'INSERT' THEN format(side, 'rate_limit_new', none) ELSE format(side, 'rate_limit_old', '') END,
        CASE TG_OP WHEN 'DELETE' THEN format(side, 'rate_limit_old', none) ELSE format(side, 'rate_limit_new', '') END);
    told  integer := 0;
    o     record;
BEGIN
    -- Logical replication and some restores bring rows and leave the sequence behind.
    EXECUTE format($q$SELECT setval(s.name, h.newest) FROM pg_get_serial_sequence(%1$L, 'version') AS s(name), (SELECT max(version) FROM %1$s) AS h(newest)
        WHERE h.newest > coalesce(pg_sequence_last_value(s.name::regclass), 0)$q$,
        format('%I.rate_limit_history', TG_TABLE_SCHEMA));
    IF TG_OP = 'TRUNCATE' THEN
        EXECUTE log || 'VALUES (NULL, NULL, NULL, NULL)';
        RETURN NULL;
    END IF;
    -- In one statement, since making the pairs costs most. People are told as well, who can still roll
    -- back: without the key, which may be a customer's name.
    FOR o IN EXECUTE pairs || ', logged AS (' || log || $q$SELECT name, key, was, became FROM (
            SELECT had AS name, had_key AS key, was, NULL::jsonb AS became FROM pairs WHERE name IS NULL OR moved
            UNION ALL SELECT name, key, CASE WHEN NOT moved THEN was END, became FROM pairs WHERE name IS NOT NULL
        ) AS c ORDER BY became IS NOT NULL)
        SELECT * FROM pairs WHERE NOT coalesce(became, was) ? 'kind' LIMIT 11$q$
    LOOP
        told := told + 1;
        IF told > 10 THEN
            RAISE NOTICE 'and further overrides';
        ELSE
            RAISE NOTICE 'override of limit "%": was %, becomes %', coalesce(o.had, o.name), coalesce(o.was::text, 'none'), coalesce(o.became::text, 'none')
                || CASE WHEN o.moved THEN format(' for %s of limit "%s"', CASE WHEN o.key IS NULL THEN 'all keys' ELSE 'a key' END, o.name) ELSE '' END;
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- What a restore brings goes before what the log has written of its definitions.
-- +goose StatementBegin
CREATE FUNCTION rate_limit_history_replace() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    EXECUTE format('DELETE FROM %I.rate_limit_history WHERE version = $1', TG_TABLE_SCHEMA) USING NEW.version;
    RETURN NEW;
END
$$;
-- +goose StatementEnd

-- A trigger of one's own that calls rate_limit_definitions_log would write with its owner's rights.
-- Default privileges may have granted it, besides PostgreSQL to PUBLIC, of which acldefault tells.
-- +goose StatementBegin
DO $$
DECLARE
    statement text;
BEGIN
    FOR statement IN
        SELECT format('REVOKE ALL ON FUNCTION %s FROM %s', p.oid::regprocedure, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
        FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
        WHERE p.oid = 'rate_limit_definitions_log()'::regprocedure AND a.grantee <> p.proowner
    LOOP
        EXECUTE statement;
    END LOOP;
END
$$;
-- +goose StatementEnd

CREATE TRIGGER rate_limit_definitions_turn BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON rate_limit_definitions
    FOR EACH STATEMENT EXECUTE FUNCTION rate_limit_definitions_turn();
CREATE TRIGGER rate_limit_definitions_updated BEFORE UPDATE ON rate_limit_definitions
    FOR EACH ROW EXECUTE FUNCTION rate_limit_definitions_check();
CREATE TRIGGER rate_limit_definitions_check_insert AFTER INSERT ON rate_limit_definitions
    REFERENCING NEW TABLE AS rate_limit_new FOR EACH STATEMENT EXECUTE FUNCTION rate_limit_definitions_check();
CREATE TRIGGER rate_limit_definitions_check_update AFTER UPDATE ON rate_limit_definitions
    REFERENCING NEW TABLE AS rate_limit_new FOR EACH STATEMENT EXECUTE FUNCTION rate_limit_definitions_check();
CREATE TRIGGER rate_limit_definitions_log_insert AFTER INSERT ON rate_limit_definitions
    REFERENCING NEW TABLE AS rate_limit_new FOR EACH STATEMENT EXECUTE FUNCTION rate_limit_definitions_log();
CREATE TRIGGER rate_limit_definitions_log_update AFTER UPDATE ON rate_limit_definitions
    REFERENCING OLD TABLE AS rate_limit_old NEW TABLE AS rate_limit_new FOR EACH STATEMENT EXECUTE FUNCTION rate_limit_definitions_log();
CREATE TRIGGER rate_limit_definitions_log_delete AFTER DELETE ON rate_limit_definitions
    REFERENCING OLD TABLE AS rate_limit_old FOR EACH STATEMENT EXECUTE FUNCTION rate_limit_definitions_log();
CREATE TRIGGER rate_limit_definitions_truncate AFTER TRUNCATE ON rate_limit_definitions
    FOR EACH STATEMENT EXECUTE FUNCTION rate_limit_definitions_log();
CREATE TRIGGER rate_limit_history_replace BEFORE INSERT ON rate_limit_history
    FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION rate_limit_history_replace();

-- +goose Down
DROP TABLE IF EXISTS rate_limit_definitions;
DROP TABLE IF EXISTS rate_limit_history;
DROP TABLE IF EXISTS rate_limit_pending;
DROP FUNCTION IF EXISTS rate_limit_definitions_check();
DROP FUNCTION IF EXISTS rate_limit_definitions_log();
DROP FUNCTION IF EXISTS rate_limit_definitions_turn();
DROP FUNCTION IF EXISTS rate_limit_history_replace();
