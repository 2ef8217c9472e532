# Writes a template to stdout: a tar archive of a password, and of the data directory
# that initdb makes for it. It takes a second, and leaves nothing behind even if the
# process that wants it is gone meanwhile. The password is a random one, which need not be
# guarded by the 4096 hashes that SCRAM takes of it for each connection.
#
# Argument: the directory of the binaries.

printf '%s\n' "$password" >password
"$1/initdb" -D "$dir/data" --username=postgres --pwfile=password \
	--auth=md5 --encoding=UTF8 --locale=C --no-sync \
	>log 2>&1 </dev/null || finish 1
tar -cf - password data 2>>log
finish $?
