-- +goose Up

-- Jobs of River that wait in line for a permit, by key. A job that ends wakes the next of its key, in
-- the transaction that releases its permit.
CREATE TABLE rate_limit_parked (
    river    text        COLLATE "C" NOT NULL,           -- the schema of River's tables; '' for the search_path
    name     text        COLLATE "C" NOT NULL,           -- of the limit that has refused the job
    key      text        COLLATE "C" NOT NULL,
    priority smallint    NOT NULL,                       -- the job's: the order of a line is that of River
    job      bigint      NOT NULL,
    weight   integer     NOT NULL,                       -- the permits that it wants
    since    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (river, job)
);
CREATE INDEX rate_limit_parked_line ON rate_limit_parked (river, name, key, priority, job);

-- +goose Down
DROP TABLE IF EXISTS rate_limit_parked;
