package main

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(4)
	pgtest.Main(m)
}

// It does what it says, and leaves nothing behind: DATABASE_URL may name a database that
// somebody needs.
func TestRun(t *testing.T) {
	tests := []struct {
		name    string
		stopAt  string // a part of the output at which it is interrupted
		wantErr error
		long    bool
	}{
		{"at the end", "there is no such part", nil, true},
		{"after Ctrl-C in the rush", "2. 32 goroutines", context.Canceled, false},
		{"after Ctrl-C between the steps", "granted", context.Canceled, true},
	}
	url := pgtest.URL(t)
	t.Setenv("DATABASE_URL", url)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			if test.long && testing.Short() {
				t.Skip("it shows limits at work, which takes seconds")
			}
			before := tables(t, url, "")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out := &interrupter{stopAt: test.stopAt, stop: cancel}
			if err := run(ctx, out); !errors.Is(err, test.wantErr) {
				t.Errorf("got error %v, want %v", err, test.wantErr)
			}
			text := out.String()
			if !strings.Contains(text, "server: DATABASE_URL\n") {
				t.Errorf("it did not use DATABASE_URL:\n%s", text)
			}
			schema := regexp.MustCompile(`schema: (example_\w+)`).FindStringSubmatch(text)
			if schema == nil {
				t.Fatalf("no schema in\n%s", text)
			}
			if after := tables(t, url, schema[1]); !slices.Equal(after, before) {
				t.Errorf("tables before: %q, after: %q", before, after)
			}
			if got := strings.Count(text, "   ok: "); test.wantErr == nil && got != 4 {
				t.Errorf("%d promises checked, want 4", got)
			}
		})
	}
}

// interrupter is output that stops the program as it prints stopAt.
type interrupter struct {
	strings.Builder
	stopAt string
	stop   func()
}

func (w *interrupter) Write(p []byte) (int, error) {
	if strings.Contains(string(p), w.stopAt) {
		w.stop()
	}
	return w.Builder.Write(p)
}

// tables are those of a schema, and those outside of the schemas that tests and examples make, for
// others of them may be running on the same server.
func tables(t *testing.T, url, schema string) (names []string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	err = conn.QueryRow(t.Context(), `
		SELECT coalesce(array_agg(relid::regclass::text ORDER BY relid), '{}')
		FROM pg_stat_user_tables
		WHERE schemaname = $1 OR schemaname !~ '^(example|ratelimit_test)_'`, schema).Scan(&names)
	if err != nil {
		t.Fatal(err)
	}
	return names
}
