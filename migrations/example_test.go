package migrations_test

import (
	"fmt"
	"io/fs"

	"github.com/pgratelimit/ratelimit/migrations"
)

// The schema as plain SQL, for a migration tool other than goose. UpSQL, which
// builds it, is longer.
func ExampleDownSQL() {
	fmt.Print(migrations.DownSQL())
	// Output:
	// SET LOCAL lock_timeout = '1s';
	// ALTER TABLE rate_limits DROP COLUMN ahead;
	//
	// SET LOCAL lock_timeout = '1s';
	// ALTER TABLE rate_limits DROP COLUMN slots;
	//
	// SET LOCAL lock_timeout = '1s';
	// ALTER TABLE rate_limits DROP COLUMN paused;
	//
	// SET LOCAL lock_timeout = '1s';
	// DROP TABLE rate_limits;
}

// The files, as goose and other readers of an fs.FS see them.
func Example() {
	entries, err := fs.ReadDir(migrations.FS, ".")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(entries[0].Name(), "is noted in", migrations.VersionTable)
	// Output: 00001_rate_limits.sql is noted in rate_limits_version
}

// What takes a schema back to the first two versions. UpSQLFrom brings it there.
func ExampleDownSQLFrom() {
	text, err := migrations.DownSQLFrom(4)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Print(text)
	// Output:
	// SET LOCAL lock_timeout = '1s';
	// ALTER TABLE rate_limits DROP COLUMN ahead;
}
