package escrow

import "time"

const (
	// enoughFor is of how many calls of a key lately, in up to twice the time that tokens last,
	// before anything is taken ahead, if they met nobody at the row. It costs a statement or two
	// for the key in that time, and one more to give back. Calls that it saves would have shared
	// theirs with calls for other keys, and cost little each.
	enoughFor = 32
	growth    = 8 // the most that is prefetched, as a multiple of the tokens handed out lately

	// contendedFor is for how long others count that were met at the row, at least: a call that meets
	// them there costs more than a statement that prefetches, and makes others wait for longer.
	contendedFor = time.Second
)

// demand is the number of tokens handed out lately: in this stretch of time, and in the one
// before it, which are as long as a lease lasts.
type demand struct {
	begun          time.Duration // on the monotonic clock
	count          float64
	calls          int
	countBefore    float64
	callsBefore    int
	contendedUntil time.Duration // others, at the row: until then they count; 0 if none were met
	blocked        bool          // all of them, for the row,
	blockedAt      time.Duration // since then
}

// longestBlock is how long a wait for the row is left out at most.
const longestBlock = 2 * time.Second

func (d *demand) over(now moment, lasts time.Duration) bool {
	return now.mono-d.begun >= 2*lasts
}

// at returns the instant up to which there was something to hand out.
func (d *demand) at(now moment) time.Duration {
	if d.blocked && now.mono-d.blockedAt <= longestBlock {
		return min(d.blockedAt, now.mono)
	}
	return now.mono
}

func (d *demand) roll(now moment, lasts time.Duration) {
	at := d.at(now)
	past := at - d.begun
	switch {
	case past < 0 || past >= 2*lasts:
		*d = demand{begun: at, contendedUntil: d.contendedUntil, blocked: d.blocked, blockedAt: d.blockedAt}
	case past >= lasts:
		*d = demand{
			begun: at, countBefore: d.count * float64(lasts) / float64(past), callsBefore: d.calls,
			contendedUntil: d.contendedUntil, blocked: d.blocked, blockedAt: d.blockedAt,
		}
	}
}

func (d *demand) add(n float64, calls int, now moment, lasts time.Duration) {
	d.roll(now, lasts)
	d.count = max(0, d.count+n)
	d.calls += calls
}

// contend notes that a call met others at the row.
func (d *demand) contend(now moment, lasts time.Duration) {
	d.contendedUntil = now.mono + max(contendedFor, 2*lasts)
}

// contended reports whether a call met others lately.
func (d *demand) contended(now moment) bool {
	return d.contendedUntil != 0 && now.mono < d.contendedUntil
}

// enough reports whether it is worth to take ahead: others were met, or there were so many calls
// lately. Time that passes makes them fewer.
func (d *demand) enough(now moment) bool {
	return d.contended(now) || d.calls+d.callsBefore >= enoughFor
}

// block notes that nothing is left to hand out, and that the row is about to be asked: all calls
// wait for it until unblock. The demand meanwhile is not known, and it is not zero, so that time
// is left out.
func (d *demand) block(now moment) {
	if !d.blocked {
		d.blocked, d.blockedAt = true, now.mono
	}
}

func (d *demand) unblock(now moment) {
	d.begun = min(d.begun+now.mono-d.at(now), now.mono)
	d.blocked = false
}

// want is how much would be needed while it lasts, if n more are handed out now.
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
