package table

import (
	"maps"
	"slices"
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
		every := func() []int64 { return slices.Collect(maps.Keys(l.until)) }
		if l.Note(-1, time.Second); !slices.Equal(l.Among(every), []int64{-1}) {
			t.Error("another one is remembered than the new one")
		}
		if got, want := len(l.until), mostLately-examined+1; got != want {
			t.Errorf("%d are left, want %d: a few were looked at, and not all", got, want)
		}
	})
}
