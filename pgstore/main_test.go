package pgstore_test

import (
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(12) // they wait for the server most of the time
	pgtest.Main(m)
}
