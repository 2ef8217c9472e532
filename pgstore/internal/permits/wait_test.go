package permits

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// A waiter that collects looks soon, so it waits in a short line for little longer than the permits take.
func TestCollectorLooksSoon(t *testing.T) {
	now := time.Now()
	for collected, want := range map[time.Duration]time.Duration{
		0:                     conn.Poll,
		40 * time.Millisecond: 20 * time.Millisecond,
	} {
		c := collector{turn: 1, since: now.Add(-collected)}
		if got := c.pause(now); got != want {
			t.Errorf("after %v it looks again in %v, want %v", collected, got, want)
		}
	}
	for name, c := range map[string]collector{"without the turn": {}, "after an hour": {turn: 1, since: now.Add(-time.Hour)}} {
		if got := c.pause(now); got < lookAgain/2 || got >= 2*lookAgain {
			t.Errorf("%s it looks again in %v, want about %v", name, got, lookAgain)
		}
	}
}
