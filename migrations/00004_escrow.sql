-- +goose Up

-- What processes hold in memory of a limit (Config.Escrow), so that the row knows how much
-- may still come back to it. NULL, as in every row from which nobody prefetches, takes no
-- room; two columns would, since with more than eight of them rows have a larger header.
-- Adding the column rewrites nothing, and programs of the version before do not name it.
ALTER TABLE rate_limits ADD COLUMN ahead double precision[];

COMMENT ON COLUMN rate_limits.ahead IS
    'Tokens that are out: taken from the row, in memories of processes, and not known to be used; and the latest instant until which they can be, in seconds since 2000-01-01 UTC. NULL, or in the past, when nothing is out.';

-- +goose Down
ALTER TABLE rate_limits DROP COLUMN ahead;
