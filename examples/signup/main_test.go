package main

import (
	"io"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The crowd gets what it may have, to the account.
func TestRun(t *testing.T) {
	t.Setenv("DATABASE_URL", pgtest.URL(t))
	var out strings.Builder
	err := run(t.Context(), &out)
	t.Log(out.String())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"60 accounts made",
		"2 of 3 left",
		"61 accounts, 61 of the service's sign-ups spent",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	if got := strings.Count(out.String(), "   ok: "); got != 4 {
		t.Errorf("%d promises checked, want 4", got)
	}
}

// A promise that does not hold fails the program.
func TestClaimFails(t *testing.T) {
	d := service{out: io.Discard}
	if err := d.claim(false, "%d is more", 1); err == nil || !strings.Contains(err.Error(), "1 is more") {
		t.Errorf("got %v", err)
	}
}
