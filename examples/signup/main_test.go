package main

import (
	"testing"

	"github.com/pgratelimit/ratelimit/examples/internal/demo/demotest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The crowd gets what it may have, to the account.
func TestRun(t *testing.T) {
	demotest.Run(t, run, 4,
		"60 accounts made",
		"2 of 3 left",
		"61 accounts, 61 of the service's sign-ups spent")
}
