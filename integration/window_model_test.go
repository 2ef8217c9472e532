package integration

import (
	"math"
	"math/big"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// slidingModel is the exact model of a sliding window: what was given in each slot by
// its number, in rational numbers, and every sum added up anew. It keeps all slots for
// ever, and knows nothing of running totals.
type slidingModel struct {
	rate   *big.Rat
	period int64
	slots  int64
	width  int64
	most   *big.Rat // that a reservation may be ahead, as tokens

	origin int64
	given  map[int64]*big.Rat
	head   int64 // the newest slot that was given anything
	last   int64 // the slot of the latest instant that wrote
	paused int64
}

func newSlidingModel(d bucket.Definition, origin int64) *slidingModel {
	period, n := d.Period.Microseconds(), int64(d.Slots)
	floor := newLimit(d).floor
	return &slidingModel{
		rate: rat(d.Rate), period: period, slots: n, width: (period + n - 1) / n, most: floor.Neg(floor),
		origin: origin, given: map[int64]*big.Rat{}, head: -1 << 62, last: -1 << 62,
	}
}

func (m *slidingModel) slotOf(at int64) int64 {
	past := at - m.origin
	if past < 0 {
		return -((-past + m.width - 1) / m.width)
	}
	return past / m.width
}

func (m *slidingModel) start(slot int64) int64 { return m.origin + slot*m.width }

// at is the slot of an instant, and the newest one as of then.
func (m *slidingModel) at(now int64) (slot, head int64) {
	slot = max(m.slotOf(now), m.last)
	return slot, max(m.head, slot)
}

// held is what the newest slots hold, up to one.
func (m *slidingModel) held(newest int64) *big.Rat {
	sum := new(big.Rat)
	for slot := newest - m.slots; slot <= newest; slot++ {
		if n := m.given[slot]; n != nil {
			sum.Add(sum, n)
		}
	}
	return sum
}

// first is the first slot, from one on, in which n fits.
func (m *slidingModel) first(from int64, n *big.Rat) int64 {
	for slot := from; ; slot++ {
		if sum := m.held(slot); sum.Add(sum, n).Cmp(m.rate) <= 0 {
			return slot
		}
	}
}

// answer is what a call is told.
type answer struct {
	ok      bool
	retryAt int64
}

// ask is the answer to a call and the slot that it is given. A reservation has one that
// begins when a pause is over.
func (m *slidingModel) ask(reserve bool, now int64, n float64) (a answer, slot int64) {
	now0, head := m.at(now)
	count, paused := rat(n), ongoing(m.paused, now)
	if !reserve {
		slot = m.first(head, count)
		switch {
		case slot > now0:
			return answer{false, max(m.start(slot), paused)}, slot
		case paused != 0:
			return answer{false, paused}, slot
		}
		return answer{true, now}, slot
	}
	slot = m.first(m.reservable(head, paused), count)
	if slot == now0 || m.mayWait(m.start(slot)-now) {
		retry := max(now, paused)
		if slot > now0 {
			retry = max(retry, m.start(slot))
		}
		return answer{true, retry}, slot
	}
	// The earliest instant is looked for where the wait becomes short enough: before the
	// pause is over, or after it.
	retry := m.soonEnough(m.start(slot))
	if paused != 0 && retry > paused {
		retry = max(paused, m.soonEnough(m.start(m.first(head, count))))
	}
	return answer{false, retry}, slot
}

// told is the answer to a call that takes what it is granted, which counts in its slot,
// also if the clock is behind that.
func (m *slidingModel) told(a answer, slot int64) answer {
	if a.ok {
		a.retryAt = max(a.retryAt, m.start(slot))
	}
	return a
}

// askAtMost is the answer to a call that takes what there is, up to n, its slot and how
// much that is.
func (m *slidingModel) askAtMost(now int64, n float64) (a answer, slot int64, some float64) {
	whole := new(big.Int)
	if there := m.value(now); there.Sign() > 0 {
		whole.Quo(there.Num(), there.Denom())
	}
	there, _ := new(big.Float).SetInt(whole).Float64()
	some = max(1, min(math.Floor(n), there))
	a, slot = m.ask(false, now, some)
	return a, slot, some
}

// reservable is the first slot from head on that begins when a pause is over.
func (m *slidingModel) reservable(head, paused int64) int64 {
	for paused != 0 && m.start(head) < paused {
		head++
	}
	return head
}

func (m *slidingModel) tokens(micros int64) *big.Rat {
	return new(big.Rat).Mul(big.NewRat(micros, m.period), m.rate)
}

func (m *slidingModel) mayWait(micros int64) bool { return m.tokens(micros).Cmp(m.most) <= 0 }

// soonEnough is the first instant from which on an instant may be waited for.
func (m *slidingModel) soonEnough(at int64) int64 {
	wait := new(big.Rat).Mul(m.most, big.NewRat(m.period, 1))
	wait.Quo(wait, m.rate)
	return at - new(big.Int).Quo(wait.Num(), wait.Denom()).Int64()
}

// write brings the newest slot to now.
func (m *slidingModel) write(now int64) { m.last, m.head = m.at(now) }

// take gives n in a slot.
func (m *slidingModel) take(now, slot int64, n float64) {
	m.write(now)
	m.head = slot
	m.add(slot, rat(n))
}

func (m *slidingModel) add(slot int64, n *big.Rat) {
	if m.given[slot] == nil {
		m.given[slot] = new(big.Rat)
	}
	m.given[slot].Add(m.given[slot], n)
}

// credit takes n out of the newest slots, from the oldest first.
func (m *slidingModel) credit(now int64, n float64) {
	m.write(now)
	left := rat(n)
	for slot := m.head - m.slots; slot <= m.head; slot++ {
		left.Sub(left, m.refund(now, slot, left))
	}
}

// refund takes n out of a slot, or what is there, and returns how much.
func (m *slidingModel) refund(now, slot int64, n *big.Rat) *big.Rat {
	m.write(now)
	if slot < m.head-m.slots || slot > m.head || m.given[slot] == nil {
		return new(big.Rat)
	}
	out := new(big.Rat).Set(least(n, m.given[slot]))
	m.add(slot, new(big.Rat).Neg(out))
	return out
}

// charge counts n in the newest slot, whatever there is.
func (m *slidingModel) charge(now int64, n *big.Rat) {
	m.write(now)
	m.add(m.head, n)
}

func (m *slidingModel) pause(now, until int64) {
	m.write(now)
	m.paused = max(m.paused, until)
}

func (m *slidingModel) resume(now int64) {
	m.write(now)
	if ongoing(m.paused, now) != 0 {
		m.paused = 0
	}
}

// value is what there is at now.
func (m *slidingModel) value(now int64) *big.Rat {
	slot, head := m.at(now)
	if head > slot {
		return m.tokens(m.start(head) - now).Neg(m.tokens(m.start(head) - now))
	}
	return new(big.Rat).Sub(m.rate, m.held(head))
}
