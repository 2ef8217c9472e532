package bucket

import "math"

// A token bucket's clock moves with every microsecond: it refills continuously.

// bucketTick is the last instant, up to now, at which the bucket was refilled.
func bucketTick(now int64) int64 { return now }

// bucketWait is how long, in microseconds, the bucket needs for tokens.
func (d *Definition) bucketWait(tokens float64) int64 {
	return int64(math.Ceil(tokens * d.periodMicros() / d.Rate))
}
