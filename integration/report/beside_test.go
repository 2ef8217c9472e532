package main

import (
	"math"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
)

func TestShareOf(t *testing.T) {
	bucket := ratelimit.TokenBucket{Name: "b", Rate: 100, Period: time.Second, MaxReserved: ratelimit.None}
	window := ratelimit.FixedWindow{Name: "w", Rate: 100, Period: time.Second, Start: midnight}
	sliding := ratelimit.SlidingWindow{Name: "s", Rate: 100, Period: time.Second}
	ms := func(n int64) int64 { return midnight.UnixMicro() + n*1000 }
	granted := func(at int64) besideEvent { return besideEvent{Count: 100, From: ms(at), To: ms(at)} }
	waited := func(at, by int64) besideEvent { return besideEvent{Count: 100, From: ms(at), To: ms(by)} }
	back := func(n float64, from, to int64) besideEvent { return besideEvent{Count: -n, From: ms(from), To: ms(to)} }
	for name, test := range map[string]struct {
		limit  ratelimit.Limit
		events []besideEvent
		want   float64
	}{
		"twice at once":                     {bucket, []besideEvent{granted(0), granted(0)}, 2},
		"refilled":                          {bucket, []besideEvent{granted(0), granted(1000)}, 1},
		"half refilled":                     {bucket, []besideEvent{granted(0), granted(500)}, 1.5},
		"given back between":                {bucket, []besideEvent{granted(0), back(100, 1, 2), granted(3)}, 1},
		"given back while it was full":      {bucket, []besideEvent{back(100, 1, 2), granted(10), granted(10)}, 2},
		"given back after that":             {bucket, []besideEvent{granted(10), granted(10), back(100, 20, 30)}, 2},
		"given back beside it":              {bucket, []besideEvent{granted(10), granted(10), back(100, 5, 15)}, 1},
		"given back while one waited":       {bucket, []besideEvent{granted(0), waited(1, 30), back(100, 20, 25)}, 1},
		"given back when one had waited":    {bucket, []besideEvent{granted(0), waited(1, 19), back(100, 20, 25)}, 1.999},
		"half given back while one waited":  {bucket, []besideEvent{granted(0), waited(1, 30), back(50, 20, 25)}, 1.499},
		"given back, and before one waited": {bucket, []besideEvent{granted(0), granted(5), waited(10, 30), back(100, 20, 25)}, 1.995},
		"reset":                             {bucket, []besideEvent{granted(10), back(filled, 11, 12), granted(13)}, 1},
		"two in a window":                   {window, []besideEvent{granted(0), granted(999)}, 2},
		"two in two windows":                {window, []besideEvent{granted(999), granted(1000)}, 1},
		"two in a period":                   {sliding, []besideEvent{granted(500), granted(1499)}, 2},
		"two in more than a period":         {sliding, []besideEvent{granted(500), granted(1500)}, 1},
		"two in a period, of one half back": {sliding, []besideEvent{granted(500), back(50, 600, 700), granted(1499)}, 1.5},
	} {
		if got := shareOf(besieged{limit: test.limit}, test.events); math.Abs(got-test.want) > 1e-6 {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}
