-- +goose Up

-- What a sliding window has given in each of its newest slots. NULL, as in every row
-- of the other kinds, takes no room. Adding the column rewrites nothing, and programs
-- of the version before do not name it.
ALTER TABLE rate_limits ADD COLUMN slots double precision[];

COMMENT ON COLUMN rate_limits.slots IS
    'Of a sliding window: the length of a slot in microseconds; how many slots the newest one is after that of ts; value; and running totals of what was given before the oldest slot, before the next, and so on to after the newest. NULL for other kinds.';

-- +goose Down
ALTER TABLE rate_limits DROP COLUMN slots;
