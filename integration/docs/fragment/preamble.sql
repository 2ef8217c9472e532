-- What the pages take for granted: the tables of a reader's program, and its roles.
CREATE TABLE messages (sender text NOT NULL, body text NOT NULL);
CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL);
CREATE TABLE customers (name text PRIMARY KEY, plan text NOT NULL);
CREATE TABLE jobs (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, run_at timestamptz NOT NULL);
CREATE TABLE prompts (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    prompt  text        NOT NULL,
    run_at  timestamptz NOT NULL,
    receipt text        NOT NULL,
    done    boolean     NOT NULL DEFAULT false
);
CREATE ROLE app;
CREATE ROLE web;
