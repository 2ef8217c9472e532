-- +goose Up

-- What processes hold in memory of a limit (Config.Escrow), so that the row knows how
-- much may still come back to it. NULL, as in every row from which
-- nobody prefetches; but with more than eight columns a row that is written from now on is
-- 8 bytes larger. Adding the columns rewrites nothing, and programs of the version before
-- do not name them.
ALTER TABLE rate_limits
    ADD COLUMN ahead double precision,
    ADD COLUMN until timestamptz;

COMMENT ON COLUMN rate_limits.ahead IS
    'Tokens that are out: taken from the row, in memories of processes, and not known to be used. Counts until the instant in until.';
COMMENT ON COLUMN rate_limits.until IS
    'The latest instant until which what is out can be used. NULL, or in the past, when nothing is out.';

-- +goose Down
ALTER TABLE rate_limits
    DROP COLUMN until,
    DROP COLUMN ahead;
