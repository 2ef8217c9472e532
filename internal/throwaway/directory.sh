# The beginning of supervisor.sh and template.sh: a directory of the script's own, and
# its removal.
#
# The process that wants the server holds the other end of stdin and writes only the
# password, as one line.

umask 077
# Nobody may be left to read stderr. That must not end the shell before its time.
trap '' PIPE
IFS= read -r password

# Which directory the user of the server may write to is for the kernel to say.
for base in "$TMPDIR" /tmp /var/tmp; do
	dir=$(mktemp -d "$base/ratelimit-postgres.XXXXXX" 2>/dev/null) && break
done
if [ -z "$dir" ]; then
	echo "no directory to write to: tried $TMPDIR, /tmp and /var/tmp" >&2
	exit 1
fi

# Called with the exit status, at the end. The log's last lines are the reason.
finish() {
	tail -n 20 "$dir/log" >&2
	cd / && rm -rf "$dir" || exit 1
	exit "$1"
}

cd "$dir" || finish 1
