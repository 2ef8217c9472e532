DELETE FROM %[1]s
WHERE name = $1::text AND ts <= $2::timestamptz AND value < round(date_part('epoch', $2::timestamptz) * 1000000) AND $3::int8 > 0
