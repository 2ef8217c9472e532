UPDATE %[1]s SET value = $4::float8, ts = $5::timestamptz, slots = $6::float8[]
WHERE name = $1::text AND key = $2::text AND shard = $3::int4 AND ts = $7::timestamptz AND abs(value - $8::float8) <= abs(value) * 1e-14
	AND ($9::float8 IS NULL OR abs(slots[cardinality(slots)] - $9::float8) <= $9::float8 * 1e-15)
