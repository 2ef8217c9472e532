package conn

import (
	"io"
	"testing"
	"time"
)

// A pool that the application uses up puts the end of a silence off for a while only.
func TestProbes(t *testing.T) {
	t.Parallel()
	var p probes
	zero := time.Now()
	for _, c := range []struct {
		at          time.Duration
		full        bool
		err         error
		reset, lost bool
	}{
		{0, false, nil, false, false},
		{1, false, io.EOF, false, true},
		{2, true, nil, false, true},
		{3, false, nil, true, true},
		{held, false, nil, false, true},
		{held + 1, false, nil, false, false},
		{held + 2, false, io.EOF, false, true},
		{2*held + 3, false, nil, true, false},
	} {
		if reset, lost := p.ended(zero.Add(c.at), c.full, c.err); reset != c.reset || lost != c.lost {
			t.Errorf("after %v, with error %v: reset %v, lost %v, want %v, %v", c.at, c.err, reset, lost, c.reset, c.lost)
		}
	}
}
