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

// epoch is what the monotonic clock is counted from.
var epoch = time.Now()

func momentOf(t time.Time) moment {
	return moment{t.Sub(epoch), time.Duration(t.UnixNano())}
}

// since is for how long, at m, it has been since an earlier moment; never less than it has.
func (m moment) since(earlier moment) time.Duration {
	return max(m.mono-earlier.mono, m.wall-earlier.wall, 0)
}

// lot is what is left of a Lot.
type lot struct {
	left  atomic.Uint64 // the bits of a float64
	calls atomic.Int64  // that were handed out of it, and are not counted yet
	_     [48]byte      // a line of a processor's cache is not shared with what is only read

	after bucket.State // the row as the statement left it
	at    time.Time    // from which it counts, on the database's clock
	sent  moment
	lasts time.Duration
	epoch int     // of its holder, whose drops end it
	seen  float64 // of left, when that was counted last; needs the holder's lock
}

func (l *lot) count() float64 { return math.Float64frombits(l.left.Load()) }

// take takes n out of the lot, if there is so much, or what there is if some will do. It says
// what it took, and what is left.
func (l *lot) take(n float64, some bool) (took, left float64) {
	for {
		bits := l.left.Load()
		had := math.Float64frombits(bits)
		took = n
		if !(n <= had) {
			if !some || had == 0 {
				return 0, had
			}
			took = had
		}
		if l.left.CompareAndSwap(bits, math.Float64bits(had-took)) {
			return took, had - took
		}
	}
}

// put puts n back.
func (l *lot) put(n float64) {
	for {
		bits := l.left.Load()
		if l.left.CompareAndSwap(bits, math.Float64bits(math.Float64frombits(bits)+n)) {
			return
		}
	}
}

// over reports whether what is left of the lot can be used no more.
func (l *lot) over(now moment) bool { return now.since(l.sent) >= l.lasts }

// databaseAt is the instant of now on the database's clock, as far as it is known.
func (l *lot) databaseAt(now moment) time.Time {
	return l.at.Add(now.since(l.sent).Truncate(time.Microsecond))
}
