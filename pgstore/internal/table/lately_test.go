package table

import (
	"testing"
	"testing/synctest"
	"time"
)

// A process that notes ever new rows remembers some of these, and only for a while.
func TestLatelyForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Lately
		for lock := range int64(mostLately) {
			l.Note(lock, time.Second)
		}
		if l.Note(-1, time.Second); l.Has(-1) || !l.Has(0) {
			t.Error("one more is remembered, or another is not")
		}
		time.Sleep(time.Second + 1)
		if l.Note(-1, time.Second); !l.Has(-1) || l.Has(0) || l.Len() != 1 {
			t.Errorf("%d are remembered, want one, which is new", l.Len())
		}
		if got, want := len(l.until), mostLately-examined+1; got != want {
			t.Errorf("%d are left, want %d: a few were looked at, and not all", got, want)
		}
	})
}
