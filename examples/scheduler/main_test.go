package main

import (
	"testing"

	"github.com/pgratelimit/ratelimit/examples/internal/demo/demotest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The scheduler keeps its promises, and says so.
func TestRun(t *testing.T) {
	demotest.Long(t)
	demotest.Run(t, run, 5,
		"no job, no debt: 0 jobs, 5 of 5 tokens",
		"nothing is lost: 60 jobs, 60 done",
		"never over: 0 calls beyond 5 + 20 a second",
		"nor for the mail server: 0 calls beyond 6 + 30 a second")
}
