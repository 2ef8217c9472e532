package pgstore

import (
	"testing"
	"testing/synctest"
	"time"
)

// A process that meets others at ever new rows remembers some of these, and only for a while.
func TestMeetingsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m meetings
		lately := func(lock int64) bool { return len(m.lately(func() []int64 { return []int64{lock} })) == 1 }
		for lock := range int64(mostMeetings) {
			m.met(lock)
		}
		if m.met(-1); lately(-1) || !lately(0) {
			t.Error("one more is remembered, or another is not")
		}
		time.Sleep(contended + 1)
		if m.met(-1); !lately(-1) || lately(0) || len(m.last) != 1 {
			t.Errorf("%d are remembered, want one, which is new", len(m.last))
		}
	})
}
