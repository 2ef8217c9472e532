-- name: SendMessage :exec
INSERT INTO messages (sender) VALUES ($1);

-- name: CountMessages :one
SELECT count(*) FROM messages;
