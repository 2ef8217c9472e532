package mask_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/mask"
)

func TestError(t *testing.T) {
	requests := []ratelimit.Request{{Key: `al"ice`}, {}, {Key: "api"}}
	err := fmt.Errorf("limit %q, key %q: api: %w", "llm", `al"ice`, errors.New(`"api"`))
	if got, want := mask.Error(err, requests), `limit "llm", key "…": api: "…"`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got := mask.Error(nil, requests); got != "" {
		t.Errorf("got %q of no error", got)
	}
}
