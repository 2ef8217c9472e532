WITH its AS MATERIALIZED (
	SELECT r.shard FROM %[1]s AS r
	WHERE r.name = $1::text AND r.key = $2::text AND CASE r.shard WHEN 10001 THEN r.value ELSE r.ahead[1] END = $3::int8::float8
), free AS MATERIALIZED (
	SELECT r.shard FROM %[1]s AS r
	WHERE r.name = $1::text AND r.key = $2::text AND CASE r.shard WHEN 10001 THEN r.value ELSE r.ahead[1] END = $3::int8::float8
	FOR UPDATE SKIP LOCKED
), freed AS (
	UPDATE %[1]s AS r SET ts = CASE WHEN r.paused IS NULL THEN '1970-01-01 00:00:00+00'::timestamptz ELSE r.ts END, paused = NULL, ahead = NULL
	FROM free WHERE r.name = $1::text AND r.key = $2::text AND r.shard = free.shard
)
SELECT (SELECT count(*) FROM its) - (SELECT count(*) FROM free)
