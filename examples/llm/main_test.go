package main

import (
	"testing"

	"github.com/pgratelimit/ratelimit/examples/internal/demo/demotest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Estimates are settled, and a 429 is heeded.
func TestRun(t *testing.T) {
	demotest.Long(t)
	demotest.Run(t, run, 4, "60 of 60 prompts answered", "1 answer of 429, and 0 calls while the pause was known")
}
