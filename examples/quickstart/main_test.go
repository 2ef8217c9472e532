package main

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(4)
	pgtest.Main(m)
}

// wantClaims checks the numbers in the output, put together by the test and not by the
// program.
func wantClaims(t *testing.T, text string) {
	t.Helper()
	granted := number(t, text, `granted (\d+) orders`)
	seconds := number(t, text, `· ([\d.]+) s = `)
	if most := 50 + 20*(seconds+0.001); granted > most { // as printed, in whole milliseconds
		t.Errorf("granted %v in %v s, want at most %v", granted, seconds, most)
	}
	if granted < 1 || seconds < rushTime.Seconds() {
		t.Errorf("granted %v in %v s, want some in %v", granted, seconds, rushTime)
	}
	if orders := number(t, text, `(\d+) orders in the table`); orders != granted {
		t.Errorf("got %v orders, want one for each of the %v tokens", orders, granted)
	}
	if inside := number(t, text, `in the transaction: (\d+) of 50`); inside != 10 {
		t.Errorf("bob had %v tokens in his transaction, want 10", inside)
	}
	if after := number(t, text, `bob has (\d+) of 50 tokens, and 0 orders`); after != 50 {
		t.Errorf("bob had %v tokens after his transaction, want 50", after)
	}
	if value := number(t, text, `(?m)^   place_order \| alice \|     0 \| +(-?[\d.e-]+) \| \d{4}-`); value < 0 || value > 50 {
		t.Errorf("got a row with %v tokens, want from 0 to 50", value)
	}
}

// number is what the expression's group finds in text.
func number(t *testing.T, text, expression string) float64 {
	t.Helper()
	match := regexp.MustCompile(expression).FindStringSubmatch(text)
	if match == nil {
		t.Fatalf("no match for %s", expression)
	}
	n, err := strconv.ParseFloat(match[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
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
			before := tables(t, url)
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
			if schema == nil || exists(t, url, schema[1]) {
				t.Errorf("schema %q: want one, which is gone", schema)
			}
			if after := tables(t, url); !slices.Equal(after, before) {
				t.Errorf("tables before: %q, after: %q", before, after)
			}
			if test.wantErr == nil {
				wantClaims(t, text)
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

func exists(t *testing.T, url, schema string) (found bool) {
	t.Helper()
	query(t, url, func(conn *pgx.Conn) error {
		return conn.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", schema).Scan(&found)
	})
	return found
}

// tables are those outside of the schemas that tests and examples make, for
// others of them may be running on the same server.
func tables(t *testing.T, url string) (names []string) {
	t.Helper()
	query(t, url, func(conn *pgx.Conn) error {
		return conn.QueryRow(t.Context(), `
			SELECT coalesce(array_agg(relid::regclass::text ORDER BY relid), '{}')
			FROM pg_stat_user_tables
			WHERE schemaname !~ '^(example|ratelimit_test)_'`).Scan(&names)
	})
	return names
}

func query(t *testing.T, url string, do func(*pgx.Conn) error) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if err := do(conn); err != nil {
		t.Fatal(err)
	}
}
