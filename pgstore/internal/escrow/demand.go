package escrow

import "time"

const (
	// enoughFor is the number of recent calls for a key from which prefetching pays, if they met
	// no other process at the row. Prefetching costs a statement or two for the key in the time of
	// a lease, and one more to give back. Calls without it share their statements with calls for
	// other keys, and cost little each.
	enoughFor = 32

	growth = 8 // bounds what is prefetched, as a multiple of the tokens handed out lately

	// contendedFor is the least time for which a key counts as contended after a call met others
	// at its row. Such a call costs more than a statement that prefetches, and others wait longer.
	contendedFor = time.Second

	// longestBlock bounds the wait for a row that is left out of the demand's time.
	longestBlock = 2 * time.Second
)

// demand counts the tokens handed out lately: in the current stretch of time and in the one before
// it. Both are as long as a lease. A wait for the row is left out, since the demand during it is
// unknown rather than zero.
type demand struct {
	begun       time.Duration // of the current stretch, on the monotonic clock
	count       float64       // tokens
	calls       int
	countBefore float64 // of the stretch before
	callsBefore int

	contendedUntil time.Duration // 0 if no call has met others at the row
	blocked        bool          // all calls wait for the row
	blockedAt      time.Duration
}

// at returns now, or the instant at which calls began to wait for the row.
func (d *demand) at(now moment) time.Duration {
	if d.blocked && now.mono-d.blockedAt <= longestBlock {
		return min(d.blockedAt, now.mono)
	}
	return now.mono
}

// roll begins the next stretch if the current one is over.
func (d *demand) roll(now moment, lasts time.Duration) {
	at := d.at(now)
	past := at - d.begun
	if past >= 0 && past < lasts {
		return
	}
	d.countBefore, d.callsBefore = 0, 0
	if past >= lasts && past < 2*lasts {
		d.countBefore, d.callsBefore = d.count*float64(lasts)/float64(past), d.calls
	}
	d.begun, d.count, d.calls = at, 0, 0
}

// add adds n tokens handed out to calls.
func (d *demand) add(n float64, calls int, now moment, lasts time.Duration) {
	d.roll(now, lasts)
	d.count = max(0, d.count+n)
	d.calls += calls
}

// contended reports whether a call met others at the row lately.
func (d *demand) contended(now moment) bool {
	return d.contendedUntil != 0 && now.mono < d.contendedUntil
}

// enough reports whether prefetching pays: the key is contended, or had many calls lately. The
// counts must have been rolled to now.
func (d *demand) enough(now moment) bool {
	return d.contended(now) || d.calls+d.callsBefore >= enoughFor
}

// block notes that nothing is left to hand out: all calls wait for the row until unblock.
func (d *demand) block(now moment) {
	if !d.blocked {
		d.blocked, d.blockedAt = true, now.mono
	}
}

// unblock ends a block, and moves the current stretch by its length.
func (d *demand) unblock(now moment) {
	d.begun = min(d.begun+now.mono-d.at(now), now.mono)
	d.blocked = false
}

// want returns the tokens needed during a lease, if n more are handed out now; 0 if prefetching
// does not pay.
func (d *demand) want(n float64, now moment, lasts time.Duration) float64 {
	d.roll(now, lasts)
	if !d.enough(now) {
		return 0
	}
	count := d.count + n
	past := float64(max(d.at(now)-d.begun, lasts/1000, 1)) / float64(lasts)
	if d.callsBefore > 0 {
		return count + d.countBefore*(1-min(past, 1))
	}
	return min(count/past, growth*count)
}
