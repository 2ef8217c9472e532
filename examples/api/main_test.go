package main

import (
	"testing"

	"github.com/pgratelimit/ratelimit/examples/internal/demo/demotest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The service keeps its promises, and says so.
func TestRun(t *testing.T) {
	demotest.Long(t)
	demotest.Run(t, run, 7,
		"she gets [200 200 200 429], and Retry-After: ",
		"somebody with a key that he made up gets [401]",
		" s later she gets [200]",
		"he gets [200 429 422 400]",
		"five orders, five tokens",
		"only failures count")
}
