package table

import (
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(8) // those that take time wait for locked rows
	pgtest.Main(m)
}
