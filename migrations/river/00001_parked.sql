-- +goose Up

-- Jobs of River that wait in line for a permit, by key. A job that ends wakes the next of its key, in
-- the transaction that releases its permit.
CREATE TABLE rate_limit_parked (
    river    text        COLLATE "C" NOT NULL,           -- the schema of River's tables; '' for the search_path
    name     text        COLLATE "C" NOT NULL,           -- of the limit that has refused the job
    key      text        COLLATE "C" NOT NULL,
    priority smallint    NOT NULL,                       -- the job's
    job      bigint      NOT NULL,
    weight   integer     NOT NULL,                       -- the permits that it wants
    since    timestamptz NOT NULL DEFAULT clock_timestamp(),
    place    timestamptz NOT NULL DEFAULT clock_timestamp(), -- when the job was created; in the line of a further limit, when it came there
    PRIMARY KEY (river, job)
);
CREATE INDEX rate_limit_parked_line ON rate_limit_parked (river, name, key, priority, place, job);

-- +goose Down
DROP TABLE IF EXISTS rate_limit_parked;
