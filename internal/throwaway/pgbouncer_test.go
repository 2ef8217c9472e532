package throwaway

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// PgBouncer is told of a password if there is one: it takes an empty one for a fault.
func TestBouncerConfig(t *testing.T) {
	for url, want := range map[string]string{
		"postgres://u@h:1/d":      "* = host=h port=1 user='u' \n",
		"postgres://u:p@h:1/d":    "* = host=h port=1 user='u' password='p'\n",
		"postgres://u:p%27@h:1/d": "* = host=h port=1 user='u' password='p'''\n",
	} {
		t.Setenv("PGPASSWORD", "")
		server, err := pgx.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		if got := string(bouncerConfig(server, "2", 3)); !strings.Contains(got, want) {
			t.Errorf("%s: no %q in\n%s", url, want, got)
		}
	}
}
