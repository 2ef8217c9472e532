package sqltx_test

import (
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
