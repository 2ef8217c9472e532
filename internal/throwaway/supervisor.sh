# Runs one PostgreSQL server until its own stdin ends, then removes every trace.
#
# The kernel closes stdin when the process that wants the server is gone, whichever way
# it went, so the server cannot outlive it. Descriptor 3 is a template of its data.
#
# Arguments: the directory of the binaries, 1 if a server that has ended is to be
# started again on its data, the URL of the server that it is a standby of (without the
# password, which is the same) or nothing, then the arguments of postgres. When the server ends, or cannot start, the reason is on
# stderr.

bin=$1 again=$2 primary=$3
shift 3
if [ -n "$primary" ]; then
	PGPASSWORD=$password "$bin/pg_basebackup" -D "$dir/data" -d "$primary" \
		--write-recovery-conf --wal-method=stream --checkpoint=fast --no-sync \
		>log 2>&1 </dev/null || finish 1
else
	tar -xmf - <&3 >log 2>&1 || finish 1
fi

# The shell gives background commands an empty stdin and ignores SIGQUIT in
# them, hence the copy of stdin and the SIGTERM: it reaches a server that has
# no signal handlers yet. SIGQUIT makes a running one stop without writing its
# data, which nobody will read, nor waiting for its clients.
exec 3<&0
while :; do
	"$bin/postgres" -D "$dir/data" "$@" >>log 2>&1 </dev/null 3<&- &
	server=$!
	{
		read -r _ <&3
		: >stop
		kill -TERM "$server"
		kill -QUIT "$server"
	} 2>/dev/null &
	watcher=$!

	wait "$server"
	status=$?
	kill "$watcher" 2>/dev/null
	if [ "$again" = 0 ] || [ -e stop ] || ! grep -q 'ready to accept connections' log; then
		finish "$status"
	fi
	sleep 0.1 # after kill -9 others of its processes may still be ending
done
