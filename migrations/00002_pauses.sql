-- +goose Up

-- A pause that holds needs more than value and ts: what is given back meanwhile
-- must wait for its end, and a ts in the future alone may be a clock that went back.
-- NULL, as in every row that was never paused, takes no room. Adding the column
-- rewrites nothing, and programs of the version before do not name it.
ALTER TABLE rate_limits ADD COLUMN paused timestamptz;

COMMENT ON COLUMN rate_limits.paused IS
    'The end of a pause: nothing is allowed before. NULL, or in the past, when there is none.';

-- +goose Down
ALTER TABLE rate_limits DROP COLUMN paused;
