package pgstore_test

import (
	"flag"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Most tests wait for the server most of the time, so several of them at once keep two
// processors busy. More than a few would want more connections than the server has.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "4"); err != nil { // -parallel has the last word
		panic(err)
	}
	pgtest.Main(m)
}
