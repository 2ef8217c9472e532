package integration

import (
	"math"
	"math/big"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// limit is the exact model of a limit: the formulas of the package in
// rational numbers, with instants in microseconds. It knows nothing of
// rounding, and so says what the package's answers are measured by.
type limit struct {
	window         bool
	rate, capacity *big.Rat
	period         int64
	floor          *big.Rat // of a reservation
	edges          []int64  // of a quota by the calendar, growing
	slack          int64    // for how long after one of them a row stands on it
}

// row is the exact model of a limit's two numbers and its pause.
type row struct {
	value  *big.Rat
	ts     int64
	paused int64 // the end of the last pause, 0 for none
}

func newLimit(d bucket.Definition) limit {
	l := limit{
		window:   d.Kind == ratelimit.KindFixedWindow,
		rate:     rat(d.Rate),
		capacity: rat(d.Capacity),
		period:   d.Period.Microseconds(),
	}
	if d.Every != 0 {
		l.edges, l.slack = edgesByDay(d), (26 * time.Hour).Microseconds()
		if d.Every < ratelimit.Week {
			l.slack = (3 * time.Hour).Microseconds()
		}
	}
	span := new(big.Rat).Mul(l.rate, big.NewRat(ratelimit.MaxSpan.Microseconds(), l.period))
	l.floor = span.Neg(span)
	if !math.IsInf(d.MaxReserved, 1) {
		if own := new(big.Rat).Neg(rat(d.MaxReserved)); own.Cmp(l.floor) > 0 {
			l.floor = own
		}
	}
	return l
}

func rat(f float64) *big.Rat { return new(big.Rat).SetFloat64(f) }

// settle brings r to now.
func (l limit) settle(r row, now int64) row {
	came, ts := new(big.Rat), r.ts
	if l.edges != nil {
		if had, last := l.hadBy(r.ts), l.edgesUpTo(now); last > had {
			came.Mul(l.rate, big.NewRat(int64(last-had), 1))
			ts = l.edges[last-1]
		}
	} else if past := now - r.ts; past > 0 && l.window {
		came.Mul(l.rate, big.NewRat(past/l.period, 1))
		ts += past / l.period * l.period
	} else if past > 0 {
		came.Mul(l.rate, big.NewRat(past, l.period))
		ts = now
	}
	return row{least(came.Add(r.value, came), l.capacity), ts, r.paused}
}

// take is what is left of r when n tokens were taken at now, whether or not
// they may be.
func (l limit) take(r row, now int64, n float64) row {
	settled := l.settle(r, now)
	return row{new(big.Rat).Sub(settled.value, rat(n)), settled.ts, settled.paused}
}

// credit gives n back at the instant of the row, which is the same as now.
func (l limit) credit(r row, n float64) row {
	return row{least(new(big.Rat).Add(r.value, rat(n)), l.capacity), r.ts, r.paused}
}

func (l limit) pause(r row, now, until int64) row {
	settled := l.settle(r, now)
	if until <= now {
		return settled
	}
	if l.edges != nil { // what was sold stays
		return row{settled.value, settled.ts, max(settled.paused, until)}
	}
	from := until
	if l.window {
		from -= l.period
	}
	value := least(settled.value, new(big.Rat))
	if ongoing(r.paused, now) == 0 {
		value.Sub(value, l.ahead(settled.ts, now))
	}
	return row{value, max(settled.ts, from), max(settled.paused, until)}
}

// ahead is what would come in between now and a ts that a clock that went back has left
// behind. A pause takes it off, since a resume would have it come in twice.
func (l limit) ahead(ts, now int64) *big.Rat {
	if ts <= now {
		return new(big.Rat)
	}
	if l.window {
		windows := (ts - now + l.period - 1) / l.period
		return new(big.Rat).Mul(l.rate, new(big.Rat).SetInt64(windows))
	}
	return new(big.Rat).Mul(l.rate, big.NewRat(ts-now, l.period))
}

// resume ends a pause; tick is the last instant, up to now, at which tokens come
// in to a row that was never paused.
func (l limit) resume(r row, now, tick int64) row {
	settled := l.settle(r, now)
	if ongoing(r.paused, now) == 0 {
		return settled
	}
	if l.edges != nil {
		tick = settled.ts
	}
	return row{settled.value, tick, 0}
}

// ongoing is the end of a pause that is not over by now, else 0, which is long
// ago.
func ongoing(paused, now int64) int64 {
	if paused > now {
		return paused
	}
	return 0
}

// when is the first instant at which missing more tokens have come in to a
// settled row.
func (l limit) when(r row, missing *big.Rat) int64 {
	if missing.Sign() <= 0 {
		return r.ts
	}
	wait := new(big.Rat).Quo(missing, l.rate)
	if l.edges != nil {
		return l.edges[l.hadBy(r.ts)-1+int(ceil(wait))]
	}
	if l.window {
		return r.ts + ceil(wait)*l.period
	}
	return r.ts + ceil(wait.Mul(wait, big.NewRat(l.period, 1)))
}

// hadBy returns how many edges do not count for a row: those up to its ts, and if it stands on
// none, one more.
func (l limit) hadBy(ts int64) int {
	n := l.edgesUpTo(ts)
	if ts-l.edges[n-1] > l.slack {
		n++
	}
	return n
}

// edgesUpTo returns how many edges there are up to an instant.
func (l limit) edgesUpTo(instant int64) int {
	n, found := slices.BinarySearch(l.edges, instant)
	if found {
		n++
	}
	return n
}

func ceil(r *big.Rat) int64 {
	up := new(big.Int).Add(r.Num(), r.Denom())
	return up.Sub(up, big.NewInt(1)).Quo(up, r.Denom()).Int64() // r is positive
}

func least(a, b *big.Rat) *big.Rat {
	if a.Cmp(b) <= 0 {
		return a
	}
	return b
}

func instant(micros int64) time.Time { return time.UnixMicro(micros).UTC() }
