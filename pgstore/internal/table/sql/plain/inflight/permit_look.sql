SELECT r.shard, r.value::int8, r.ts,
	NOT (r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
FROM %[1]s AS r WHERE r.name = $1::text AND r.key = $2::text AND r.shard < 10000
ORDER BY r.shard
