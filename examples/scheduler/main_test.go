package main

import (
	"io"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The scheduler keeps its promises, and says so.
func TestRun(t *testing.T) {
	t.Setenv("DATABASE_URL", pgtest.URL(t))
	var out strings.Builder
	err := run(t.Context(), &out)
	t.Log(out.String())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"no job, no debt: 0 jobs, 5 of 5 tokens",
		"nothing is lost: 60 jobs, 60 done",
		"never over: 0 calls beyond 5 + 20 a second",
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
	d := demonstration{out: io.Discard}
	if err := d.claimThat(false, "%d is more", 1); err == nil || !strings.Contains(err.Error(), "1 is more") {
		t.Errorf("got %v", err)
	}
}
