SELECT value, ts, paused, slots, ahead FROM %[1]s WHERE name = $1::text AND key = $2::text AND shard = $3::int4
	AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') FOR UPDATE
