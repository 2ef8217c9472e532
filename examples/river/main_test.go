package main

import (
	"io"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The provider had nothing to complain about.
func TestRun(t *testing.T) {
	t.Setenv("DATABASE_URL", pgtest.URL(t))
	var out strings.Builder
	err := run(t.Context(), &out)
	t.Log(out.String())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"40 of 40 jobs completed",
		"10 are granted",
		"1 answer of 429, and 0 calls while it was in force",
		"0 jobs lost an attempt to a limit",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	if got := strings.Count(out.String(), "   ok: "); got != 5 {
		t.Errorf("%d promises checked, want 5", got)
	}
}

// A promise that does not hold fails the program.
func TestClaimFails(t *testing.T) {
	d := &demonstration{out: io.Discard}
	if err := d.claim(false, "%d is more", 1); err == nil || !strings.Contains(err.Error(), "1 is more") {
		t.Errorf("got %v", err)
	}
}
