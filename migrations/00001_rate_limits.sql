-- +goose Up

-- Names are unqualified: the table lands in the first schema of the
-- search_path, as the queries look for it there.
CREATE TABLE rate_limits (
    -- COLLATE "C" compares bytes: the order in which Go sorts strings and rows
    -- are locked, and an index that an upgrade of the system's locales cannot
    -- silently corrupt.
    name  text             COLLATE "C" NOT NULL,
    key   text             COLLATE "C" NOT NULL,
    shard integer          NOT NULL,
    value double precision NOT NULL,
    ts    timestamptz      NOT NULL,
    -- The only index. Do not add one on value or ts: an update that changes an
    -- indexed column cannot be HOT (heap-only tuple). It then writes to every
    -- index and leaves a dead row behind for VACUUM. Measured with such an
    -- index: HOT updates fell from 100 % to 0 %, and the table grew fifty-fold
    -- in nine seconds of traffic on one row.
    PRIMARY KEY (name, key, shard)
) WITH (
    -- Half of every page stays free, so that the new version of a row finds
    -- room beside the old one: this is what makes updates HOT, and PostgreSQL
    -- clear dead versions away in passing, without VACUUM.
    fillfactor = 50,

    -- For what clearing in passing cannot reach: rows that were pruned, and the
    -- versions that pile up behind a long transaction or a backup. Go to work
    -- after 50 dead rows and 5 % of the table, not the usual 20 %, while there
    -- are still few pages to read.
    autovacuum_vacuum_threshold = 50,
    autovacuum_vacuum_scale_factor = 0.05,

    -- No pauses to spare the disks: the table is small and in memory, and every
    -- decision waits for it. A vacuum that is over soon costs less.
    autovacuum_vacuum_cost_delay = 0,

    -- Giving empty pages at the end of the file back to the system takes an
    -- ACCESS EXCLUSIVE lock, for which every decision would wait. The pages are
    -- used again anyway.
    vacuum_truncate = false
);

COMMENT ON TABLE rate_limits IS
    'Rate limits in use: one row per limit, key and shard. A row that is missing means a full limit, so deleting a row resets it. Rate, period and capacity are not stored: they are in the application''s code.';
COMMENT ON COLUMN rate_limits.name IS
    'Name of the limit''s definition in the application''s code.';
COMMENT ON COLUMN rate_limits.key IS
    'Whom or what the limit is counted for, such as a user; empty for a limit that all share.';
COMMENT ON COLUMN rate_limits.shard IS
    'Number of the part, from 0, when a busy limit is split over several rows; otherwise 0.';
COMMENT ON COLUMN rate_limits.value IS
    'Tokens that were left at ts. Negative when more were reserved than there were: the debt is paid off as time passes. Nothing updates this as time passes: add what has come in since ts.';
COMMENT ON COLUMN rate_limits.ts IS
    'The instant at which value was true. In a fixed window: the start of the window that value belongs to. Can be in the future while the limit is paused: nothing comes in before then.';

-- +goose Down
DROP TABLE rate_limits;
