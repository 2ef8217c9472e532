-- +goose Up

-- Which keys were refused most, of all processes: minute by minute, for an hour. A refusal
-- writes nothing; processes add what they have counted, every few seconds.
CREATE TABLE rate_limit_refusals (
    name      text             COLLATE "C" NOT NULL,
    key       text             COLLATE "C" NOT NULL,
    minute    timestamptz      NOT NULL,
    times     bigint           NOT NULL, -- refused
    uncertain bigint           NOT NULL, -- of these, at most so many were other keys
    last      timestamptz      NOT NULL, -- when it was refused last
    retry_at  timestamptz,               -- what it was told then; NULL for a permit
    PRIMARY KEY (name, key, minute)
);
CREATE INDEX rate_limit_refusals_minute_idx ON rate_limit_refusals (minute);

-- +goose Down
DROP TABLE IF EXISTS rate_limit_refusals;
