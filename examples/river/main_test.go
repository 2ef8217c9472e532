package main

import (
	"testing"

	"github.com/pgratelimit/ratelimit/examples/internal/demo/demotest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The provider had nothing to complain about.
func TestRun(t *testing.T) {
	demotest.Long(t)
	demotest.Run(t, run, 5,
		"40 of 40 jobs completed",
		"10 are granted",
		"1 answer of 429, and 0 calls while it was in force",
		"0 jobs lost an attempt to a limit")
}
