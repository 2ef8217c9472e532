package escrow

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// moment is an instant on both clocks of the machine: the monotonic one stands still while
// it is asleep, the other can be set. They are numbers, since those are compared in a
// fraction of the time that a time.Time takes.
type moment struct{ mono, wall time.Duration }

// epoch is the instant that the monotonic clock is counted from.
var epoch = time.Now()

func momentOf(t time.Time) moment {
	return moment{t.Sub(epoch), time.Duration(t.UnixNano())}
}

// since returns for how long, at m, it has been since an earlier moment; never less than it
// has.
func (m moment) since(earlier moment) time.Duration {
	return max(m.mono-earlier.mono, m.wall-earlier.wall, 0)
}

// amount is a number of tokens that goroutines change without a lock.
type amount struct{ bits atomic.Uint64 }

func (a *amount) load() float64 { return math.Float64frombits(a.bits.Load()) }

func (a *amount) add(n float64) {
	for {
		bits := a.bits.Load()
		if a.bits.CompareAndSwap(bits, math.Float64bits(math.Float64frombits(bits)+n)) {
			return
		}
	}
}

// take takes n out of a, or all that there is if some will do. It returns how much it took,
// and how much is left.
func (a *amount) take(n float64, some bool) (took, left float64) {
	for {
		bits := a.bits.Load()
		had := math.Float64frombits(bits)
		took = n
		if !(n <= had) {
			if !some || had == 0 {
				return 0, had
			}
			took = had
		}
		if a.bits.CompareAndSwap(bits, math.Float64bits(had-took)) {
			return took, had - took
		}
	}
}

// lease is the rest of a Lease.
type lease struct {
	left  amount
	calls atomic.Int64 // that were handed out of it, and are not counted yet
	_     [48]byte     // a line of a processor's cache is not shared with fields that are only read

	out       amount       // taken by transactions that have not ended
	after     bucket.State // the row as the statement left it
	at        time.Time    // from which it counts, on the database's clock
	sent      moment
	lasts     time.Duration // from sent on
	epoch     int           // of its entry: an edit begins another
	ended     atomic.Bool   // it is not among its entry's leases any more
	accounted float64       // of left and out, when they were counted last; needs the entry's lock

	outUntil  time.Time // until then the row counts it as out,
	fullUntil time.Time // and until then it can be returned in full
}

// take takes n of the tokens left, or all of them if some will do. A transaction's tokens are
// counted as out before they are not left, so that no caller finds them spent.
func (l *lease) take(n float64, some, transaction bool) (took, left float64) {
	if !transaction {
		return l.left.take(n, some)
	}
	l.out.add(n)
	took, left = l.left.take(n, some)
	if took < n {
		l.out.add(took - n)
	}
	return took, left
}

// unspent returns how much is left of the lease or may come back to it.
func (l *lease) unspent() float64 { return l.left.load() + l.out.load() }

// over reports whether the rest of the lease can be used no more.
func (l *lease) over(now moment) bool { return now.since(l.sent) >= l.lasts }

// databaseAt returns the instant of now on the database's clock, as far as it is known.
func (l *lease) databaseAt(now moment) time.Time {
	return l.at.Add(now.since(l.sent).Truncate(time.Microsecond))
}
