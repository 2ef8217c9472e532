package conn

import (
	"slices"
	"testing"
	"time"
)

// A pool whose new connections are read-only as well is moved seldom in the end, and at once again
// after a time without.
func TestMoves(t *testing.T) {
	t.Parallel()
	var (
		m    moves
		got  []time.Duration
		zero = time.Now()
	)
	fail := func(from, to time.Duration) {
		for at := from; at < to; at += 10 * time.Millisecond {
			m.once(zero.Add(at), func() { got = append(got, at) })
		}
	}
	fail(0, 4*time.Second)
	fail(10*time.Second, 10*time.Second+150*time.Millisecond)
	want := []time.Duration{0, 100, 300, 700, 1500, 2500, 3500, 10000, 10100}
	for i := range want {
		want[i] *= time.Millisecond
	}
	if !slices.Equal(got, want) {
		t.Errorf("moved at %v, want %v", got, want)
	}
}
