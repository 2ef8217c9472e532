DELETE FROM %[1]s
WHERE name = $1::text AND ts <= $2::timestamptz AND value < round(tstzrange_subdiff($2::timestamptz, '1970-01-01 00:00:00+00'::timestamptz) * 1000000) AND $3::int8 > 0
