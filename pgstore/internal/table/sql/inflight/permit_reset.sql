UPDATE %[1]s SET value = value + 1, ts = '1970-01-01 00:00:00+00'::timestamptz
WHERE name = $1::text AND key = $2::text
