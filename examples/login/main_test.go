package main

import (
	"testing"

	"github.com/pgratelimit/ratelimit/examples/internal/demo/demotest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Nobody gets more guesses than the limit grants.
func TestRun(t *testing.T) {
	demotest.Run(t, run, 4,
		"3 of 5 left",
		"5 of 5 left",
		"5 passwords were looked at, 95 guesses refused",
		"the right password is refused too")
}
