package tx

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
)

// A process that meets others at ever new rows remembers some of these, and only for a while.
func TestContentionIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m contention
		recent := func(lock int64) bool { return len(m.recent(func() []int64 { return []int64{lock} })) == 1 }
		for lock := range int64(mostContended) {
			m.met(lock)
		}
		if m.met(-1); recent(-1) || !recent(0) {
			t.Error("one more is remembered, or another is not")
		}
		time.Sleep(engine.Contended + 1)
		if m.met(-1); !recent(-1) || recent(0) || len(m.last) != 1 {
			t.Errorf("%d are remembered, want one, which is new", len(m.last))
		}
	})
}
