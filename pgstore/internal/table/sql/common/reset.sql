DELETE FROM %[1]s WHERE name = $1::text AND key = $2::text AND (ahead[1] > 0) IS NOT TRUE
