package table

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Return is tokens that come back to their row from memory.
type Return struct {
	Row        decide.Row
	Definition bucket.Definition // of the shard
	Count      float64           // tokens; may be 0, to report only spent tokens
	Taken      time.Time         // ts of the row when they were taken
	End        time.Time         // of the lease that they are left of; zero for tokens that somebody was told of
	Known      time.Time         // an instant that is past, by the clock of the process; zero if it knows none
	Spent
}

// Spent is the tokens of leases that a process has used since its last report. They are not out
// any more.
type Spent struct {
	Spent    float64
	SpentEnd time.Time // of the lease of these that ends first
}

// counted returns the instant until which spent tokens are certainly counted in a row's ahead.
func (s *Spent) counted(d *bucket.Definition) *time.Time { return orNull(counted(d, s.SpentEnd)) }

// counted is until when a lease is counted in a row's ahead for sure, that ends at an instant;
// zero if there is none.
func counted(d *bucket.Definition, end time.Time) time.Time {
	if end.IsZero() || d.Stands() {
		return end
	}
	return end.Add(bucket.Grace)
}
