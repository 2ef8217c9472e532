package escrow

import "time"

const (
	// enoughFor is of how many calls of a key lately, in up to twice the time that tokens last,
	// before anything is taken ahead, if they met nobody at the row. It costs a statement or two
	// for the key in that time, and one more to give back. Calls that it saves would have shared
	// theirs with calls for other keys, and cost little each.
	enoughFor = 32
	growth    = 8 // the most that is prefetched, as a multiple of the tokens handed out lately

	// metFor is for how long others count that were met at the row, at least: a call that meets
	// them there costs more than a statement that prefetches, and makes others wait for longer.
	metFor = time.Second
)

// demand is the number of tokens handed out lately: in this stretch of time, and in the one
// before it, which are as long as a lease lasts.
type demand struct {
	begun  time.Duration // on the monotonic clock
	count  float64
	calls  int
	before float64
	called int
	met    time.Duration // others, at the row: until then they count; 0 if none were met
	waits  bool          // all of them, for the row,
	still  time.Duration // since then
}

// longestStill is how long a wait for the row is left out at most.
const longestStill = 2 * time.Second

func (d *demand) over(now moment, lasts time.Duration) bool {
	return now.mono-d.begun >= 2*lasts
}

// at returns the instant up to which there was something to hand out.
func (d *demand) at(now moment) time.Duration {
	if d.waits && now.mono-d.still <= longestStill {
		return min(d.still, now.mono)
	}
	return now.mono
}

func (d *demand) roll(now moment, lasts time.Duration) {
	at := d.at(now)
	past := at - d.begun
	switch {
	case past < 0 || past >= 2*lasts:
		*d = demand{begun: at, met: d.met, waits: d.waits, still: d.still}
	case past >= lasts:
		*d = demand{
			begun: at, before: d.count * float64(lasts) / float64(past), called: d.calls,
			met: d.met, waits: d.waits, still: d.still,
		}
	}
}

func (d *demand) add(n float64, calls int, now moment, lasts time.Duration) {
	d.roll(now, lasts)
	d.count = max(0, d.count+n)
	d.calls += calls
}

// meet notes that a call met others at the row.
func (d *demand) meet(now moment, lasts time.Duration) {
	d.met = now.mono + max(metFor, 2*lasts)
}

// contended reports whether a call met others lately.
func (d *demand) contended(now moment) bool { return d.met != 0 && now.mono < d.met }

// enough reports whether it is worth to take ahead: others were met, or there were so many calls
// lately. Time that passes makes them fewer.
func (d *demand) enough(now moment) bool {
	return d.contended(now) || d.calls+d.called >= enoughFor
}

// stop notes that nothing is left to hand out, and that the row is about to be asked: all calls
// wait for it until goOn. The demand meanwhile is not known, and it is not zero, so that time
// is left out.
func (d *demand) stop(now moment) {
	if !d.waits {
		d.waits, d.still = true, now.mono
	}
}

func (d *demand) goOn(now moment) {
	d.begun = min(d.begun+now.mono-d.at(now), now.mono)
	d.waits = false
}

// want is how much would be needed while it lasts, if n more are handed out now.
func (d *demand) want(n float64, now moment, lasts time.Duration) float64 {
	d.roll(now, lasts)
	if !d.enough(now) {
		return 0
	}
	count := d.count + n
	past := float64(max(d.at(now)-d.begun, lasts/1000, 1)) / float64(lasts)
	if d.called > 0 {
		return count + d.before*(1-min(past, 1))
	}
	return min(count/past, growth*count)
}
