package escrow

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// refusal is a row that had too little. Until the refill covers a call, only other processes
// can make it succeed; this process's own changes are known.
//
// It is right about time without trusting this machine's clocks: to the database's, it adds
// the time that has passed here since before the statement was sent that read the row, so
// it never takes that to be behind where it is.
type refusal struct {
	state bucket.State
	at    time.Time // on the database's clock
	sent  moment
}

// over reports whether the row must be asked again: also when a clock, that was injected,
// went back.
func (r *refusal) over(now moment, lasts time.Duration) bool {
	return now.since(r.sent) >= lasts || now.mono < r.sent.mono
}
