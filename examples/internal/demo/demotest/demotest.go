// Package demotest runs an example as its test.
package demotest

import (
	"context"
	"io"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Long skips the test of an example that takes seconds when there is no time for that.
func Long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("it shows limits at work, which takes seconds")
	}
}

// Run runs an example on the server of the tests. It must succeed, check as many
// claims as are expected, and print each of wants. The count is there because a
// claim that is no longer checked fails nothing by itself.
func Run(t *testing.T, run func(ctx context.Context, out io.Writer) error, claims int, wants ...string) {
	t.Helper()
	t.Setenv("DATABASE_URL", pgtest.URL(t))
	var out strings.Builder
	err := run(t.Context(), &out)
	t.Log(out.String())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range wants {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	if got := strings.Count(out.String(), "   ok: "); got != claims {
		t.Errorf("%d promises checked, want %d", got, claims)
	}
}
