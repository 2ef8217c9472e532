package main

import (
	"testing"

	"github.com/pgratelimit/ratelimit/examples/internal/demo/demotest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Both promises hold, and killed workers cost nothing but a lease.
func TestRun(t *testing.T) {
	demotest.Long(t)
	demotest.Run(t, run, 4, "120 of 120 prompts answered, 0 twice, although")
}
