package demo_test

import (
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/examples/internal/demo"
)

// A promise that does not hold fails the program, which does not call it ok.
func TestClaimFails(t *testing.T) {
	var out strings.Builder
	err := demo.Claim(&out, false, "%d is more", 1)
	if err == nil || !strings.Contains(err.Error(), "1 is more") {
		t.Errorf("got %v, want an error that says what does not hold", err)
	}
	if out.Len() > 0 {
		t.Errorf("it printed %q", &out)
	}
}
