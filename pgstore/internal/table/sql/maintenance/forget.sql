DELETE FROM %[1]s WHERE name = $1::text
