package migrations

import (
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"
)

func files(set Set) []string {
	names, _ := fs.Glob(set.FS(), "*.sql")
	return names
}

// The order of files and goose's order are the same only while the names keep to
// one width and have no gaps.
func TestNames(t *testing.T) {
	name := regexp.MustCompile(`^(\d{5})_[a-z0-9_]+\.sql$`)
	for _, set := range Sets() {
		for i, file := range files(set) {
			match := name.FindStringSubmatch(file)
			if match == nil {
				t.Errorf("%s: want a name like 00001_words.sql", file)
				continue
			}
			if want := fmt.Sprintf("%05d", i+1); match[1] != want {
				t.Errorf("%s: got version %s, want %s", file, match[1], want)
			}
		}
	}
}

// Whoever runs a migration, and by whatever reads a file system, has it wait for no lock longer
// than lockTimeout, from its first statement on.
func TestEveryPartWaitsForNoLock(t *testing.T) {
	for _, set := range Sets() {
		for _, file := range files(set) {
			text, err := fs.ReadFile(set.FS(), file)
			if err != nil {
				t.Fatal(err)
			}
			for _, way := range []direction{up, down} {
				if got := part(string(text), way); !strings.HasPrefix(got, lockTimeout+"\n") || strings.Count(got, lockTimeout) != 1 {
					t.Errorf("%s, %s: begins with %.60q, want %q", file, way, got, lockTimeout)
				} else if strings.TrimSpace(strings.TrimPrefix(got, lockTimeout)) == "" {
					t.Errorf("%s: no %s part", file, way)
				}
			}
			if strings.Contains(string(text), "NO TRANSACTION") {
				t.Errorf("%s: outside of a transaction SET LOCAL is without effect", file)
			}
		}
		if err := fstest.TestFS(set.FS(), files(set)...); err != nil {
			t.Errorf("%q: %v", set, err)
		}
	}
}

func TestSQLFrom(t *testing.T) {
	newest := len(files(""))
	for version := 1; version <= newest; version++ {
		upFrom, upErr := UpSQLFrom(version)
		downFrom, downErr := DownSQLFrom(version)
		if upErr != nil || downErr != nil || !strings.HasSuffix(UpSQL(), upFrom) || !strings.HasPrefix(DownSQL(), downFrom) {
			t.Errorf("from %d: got %v, %v and\n%s%s", version, upErr, downErr, upFrom, downFrom)
		}
		if whole := len(upFrom) == len(UpSQL()) && len(downFrom) == len(DownSQL()); whole != (version == 1) || upFrom == "" || downFrom == "" {
			t.Errorf("from %d:\n%s%s", version, upFrom, downFrom)
		}
	}
	for _, version := range []int{-1, 0, newest + 1} {
		upFrom, upErr := UpSQLFrom(version)
		downFrom, downErr := DownSQLFrom(version)
		if upErr == nil || downErr == nil || upFrom != "" || downFrom != "" {
			t.Errorf("from %d: got %q, %v and %q, %v, want errors", version, upFrom, upErr, downFrom, downErr)
		}
	}
}

func TestPart(t *testing.T) {
	const text = `-- about this file
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE a ();
-- +goose StatementBegin
CREATE FUNCTION f() RETURNS void LANGUAGE sql AS $$
  SELECT; -- a comment of its own
$$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION f;
DROP TABLE a;
`
	tests := []struct {
		way  direction
		want string
	}{
		{up, "CREATE TABLE a ();\n" +
			"CREATE FUNCTION f() RETURNS void LANGUAGE sql AS $$\n" +
			"  SELECT; -- a comment of its own\n$$;\n"},
		{down, "DROP FUNCTION f;\nDROP TABLE a;\n"},
	}
	for _, test := range tests {
		if got := part(text, test.way); got != test.want {
			t.Errorf("%s: got %q, want %q", test.way, got, test.want)
		}
	}
}

// Sets have files and version tables of their own, and what is none has nothing.
func TestSets(t *testing.T) {
	tables := map[string]bool{}
	for _, set := range Sets() {
		if len(files(set)) == 0 || !strings.Contains(set.UpSQL(), "CREATE ") || tables[set.VersionTable()] {
			t.Errorf("%q: got files %v, version table %s", set, files(set), set.VersionTable())
		}
		tables[set.VersionTable()] = true
	}
	none := Set("none")
	if _, err := none.UpSQLFrom(1); none.UpSQL() != "" || err == nil || !strings.Contains(err.Error(), `no set "none"`) {
		t.Errorf("a set that there is not: got %q, %v", none.UpSQL(), err)
	}
}
