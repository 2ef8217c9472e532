package escrow

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/exact"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// Holder is what a process knows of one key.
type Holder struct {
	memory  *Memory
	ask     decide.Ask      // an allow of nothing; sound, so that a request that is like it need not be checked
	paid    *receipt.Limit  // the ask's in receipts
	limit   ratelimit.Limit // of the ask, to compare; nil if that can change
	lowered float64         // capacity; 0 if nothing can be taken ahead
	least   float64         // count that is handed out

	stock     atomic.Pointer[stock]   // nil if nothing is held
	refusal   atomic.Pointer[refusal] // nil if none is known
	refilling atomic.Bool             // somebody is taking ahead
	scarce    atomic.Int64            // until then, on the monotonic clock, taking ahead without being asked is not worth it

	mu      sync.Mutex
	lots    []*lot // oldest first
	demand  demand
	wanted  float64  // when something was taken ahead last
	dropped int      // how often what is held was thrown away
	changes int      // how often a statement is known to have changed the row
	used    float64  // since the timer rang
	ended   []Return // what was left of lots that were over, and can be given back all the same
	timer   *time.Timer
	ticking bool
}

// stock is what is handed out without a lock. It is never changed, but for what is left of
// its lot; a new one takes its place.
type stock struct {
	*lot
	others float64       // in the lots after it
	low    float64       // it is time to take ahead when less is left in all,
	fresh  time.Duration // or the last lot is as old
	last   *lot
}

// leastOf is the least count that is handed out: less cannot be told from nothing.
func leastOf(d *bucket.Definition) float64 {
	return max(exact.Tolerance(d.Capacity, 0, 0), 1e-300)
}

// Ask is an ask of the holder's key, that of an allow of nothing.
func (h *Holder) Ask() *decide.Ask { return &h.ask }

// Holds reports whether something can be taken ahead.
func (h *Holder) Holds() bool { return h != nil && h.lowered > 0 }

// Tokens are tokens that were taken from memory.
type Tokens struct {
	Holder *Holder
	Count  float64
	At     time.Time    // on the database's clock, as far as it is known
	After  bucket.State // what there is then: in the row, as far as it is known, and in this memory

	part part
	more []part // if it was not all of one lot
}

// part is tokens of a lot. Each goes back to its own, since they end when they do.
type part struct {
	lot   *lot
	count float64
}

// Take takes n tokens, if so many are held, into t. It reports whether it did.
func (h *Holder) Take(n float64, t *Tokens) bool {
	if h == nil || !(n >= h.least) { // a count of 0 asks the row whether there is debt
		return false
	}
	s := h.stock.Load()
	if s == nil {
		return false
	}
	now := h.memory.moment()
	if !s.over(now) {
		took, left := s.take(n, false)
		if left += s.others; took == 0 && !(n <= left) {
			return false
		}
		if took > 0 {
			s.calls.Add(1)
			t.part = part{s.lot, n}
			h.tell(t, n, s.lot, s, left, now)
			return true
		}
	}
	return h.takeOfSeveral(n, now, t)
}

// tell completes tokens that were taken from a lot, the last of them, and has more taken
// ahead if it is time.
func (h *Holder) tell(t *Tokens, n float64, from *lot, s *stock, left float64, now moment) {
	t.Holder, t.Count, t.At = h, n, from.databaseAt(now)
	t.After = h.ask.Definition.Settle(s.last.after, t.At)
	t.After.Value += left
	if (left < s.low || now.since(s.last.sent) > s.fresh) && now.mono >= time.Duration(h.scarce.Load()) {
		h.refill()
	}
}

// refill has somebody take ahead, if nobody does.
func (h *Holder) refill() {
	if !h.refilling.Load() && h.refilling.CompareAndSwap(false, true) {
		h.memory.refill(h)
	}
}

func (h *Holder) takeOfSeveral(n float64, now moment, t *Tokens) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !(n <= h.live(now)) {
		return false
	}
	rest := n
	var parts []part
	for _, l := range h.together(n) {
		if took, _ := l.take(rest, true); took > 0 {
			parts = append(parts, part{l, took})
			rest -= took
		}
		if rest <= 0 {
			break
		}
	}
	h.restock()
	s := h.stock.Load()
	if rest > 0 { // others were faster
		for _, p := range parts {
			p.lot.put(p.count)
		}
		return false
	}
	last := parts[len(parts)-1].lot
	last.calls.Add(1)
	t.part, t.more = parts[0], parts[1:]
	h.tell(t, n, last, s, s.count()+s.others, now)
	return true
}

// together is the lots that n tokens can be taken from: all, or those that count in one
// window or slot, since that is when a call is told that it takes. It needs mu.
func (h *Holder) together(n float64) []*lot {
	if stands(&h.ask.Definition) == 0 {
		return h.lots
	}
	for _, first := range h.lots {
		var same []*lot
		left := 0.0
		for _, l := range h.lots {
			if l.after.TS.Equal(first.after.TS) {
				same, left = append(same, l), left+l.count()
			}
		}
		if left >= n {
			return same
		}
	}
	return nil
}

// live throws away the lots that are over, counts what was handed out of all, and says how
// much there is in the others. It needs mu.
func (h *Holder) live(now moment) (left float64) {
	n, calls, used := 0, 0, 0.0
	for _, l := range h.lots {
		calls += int(l.calls.Swap(0))
		used += l.seen - l.count()
		if l.seen = l.count(); l.over(now) {
			h.end(l)
			continue
		}
		left += l.seen
		h.lots[n] = l
		n++
	}
	h.used += used
	h.demand.add(used, calls, now, h.memory.lasts)
	if n < len(h.lots) {
		clear(h.lots[n:])
		h.lots = h.lots[:n]
		h.restock()
	}
	return left
}

// end keeps what is left of a lot that is over, if it can be given back still. It needs mu.
func (h *Holder) end(l *lot) {
	if !outlasts(&h.ask.Definition) {
		return
	}
	if n, _ := l.take(l.count(), true); n > 0 {
		h.ended = append(h.ended, h.returnOf(l, n))
	}
}

func (h *Holder) returnOf(l *lot, n float64) Return {
	d := &h.ask.Definition
	return Return{
		Row: decide.Row{Key: h.ask.Of()}, Definition: *d, Count: n,
		Taken: l.after.TS, End: end(d, l.after.TS, h.memory.lasts),
	}
}

// restock has what is held handed out from the first lot of which there is any. It needs mu.
func (h *Holder) restock() {
	if len(h.lots) == 0 {
		h.stock.Store(nil)
		return
	}
	first, last := 0, h.lots[len(h.lots)-1]
	for h.lots[first] != last && h.lots[first].count() == 0 {
		first++
	}
	s := &stock{lot: h.lots[first], low: h.wanted / 2, fresh: last.lasts - h.memory.lasts/4, last: last}
	for _, l := range h.lots[first+1:] {
		s.others += l.count()
	}
	h.stock.Store(s)
}

// PutBack puts tokens back that were taken and not used, unless their time is over.
func (t *Tokens) PutBack() {
	h := t.Holder
	now := h.memory.moment()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.live(now)
	h.putBack(t.part, now)
	for _, p := range t.more {
		h.putBack(p, now)
	}
	h.restock()
	h.tick()
}

func (h *Holder) putBack(p part, now moment) {
	if p.lot.epoch != h.dropped {
		return
	}
	p.lot.put(p.count)
	if p.lot.over(now) {
		h.end(p.lot)
	} else {
		h.insert(p.lot)
	}
}

// insert puts a lot in its place among the others, if it is not there. It needs mu.
func (h *Holder) insert(l *lot) {
	if slices.Contains(h.lots, l) {
		return
	}
	i := 0
	for i < len(h.lots) && h.lots[i].sent.mono <= l.sent.mono {
		i++
	}
	h.lots = slices.Insert(h.lots, i, l)
}

// Result tells the result of the call that got the tokens.
func (t *Tokens) Result(reserve bool, result *ratelimit.Result) {
	t.Holder.ask.Held(t.Holder.paid, t.Count, reserve, &t.After, t.At, result)
}

// Stand is how the limit of tokens stands; nil of none.
func (t *Tokens) Stand() *decide.Stand {
	if t.Holder == nil {
		return nil
	}
	return &decide.Stand{State: t.After, At: t.At}
}

// Order is a statement that is to take ahead.
type Order struct {
	Holder   *Holder
	Ahead    float64 // tokens to take, if there are twice as many
	Capacity float64 // to count with
	dropped  int
}

// Order says how much is to be taken ahead for a key with need tokens, by a statement
// that is about to be sent; 0 if it is not worth it. ok is false if nothing can be.
func (h *Holder) Order(need float64) (o Order, ok bool) {
	if !h.Holds() || need > h.lowered {
		return o, false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	o = Order{Holder: h, Capacity: h.lowered, dropped: h.dropped}
	if len(h.lots) == 0 && !h.demand.enough() {
		return o, true
	}
	now, lasts := h.memory.moment(), h.memory.lasts
	left := h.live(now)
	want := h.demand.want(now, lasts)*float64(Longest(&h.ask.Definition, lasts))/float64(lasts) - left
	if min(want, h.spare(need, now)) >= 1 {
		o.Ahead = min(want, h.lowered)
	}
	return o, true
}

// spare is what a statement that takes need tokens can take ahead besides, by what is known
// of the row: it has more only if others have given back. It needs mu.
func (h *Holder) spare(need float64, now moment) float64 {
	if len(h.lots) == 0 {
		return math.Inf(1)
	}
	last := h.lots[len(h.lots)-1]
	return (h.ask.Definition.Settle(last.after, last.databaseAt(now)).Value - need) / 2
}

// Arrived adds what an order has brought ahead. What it has brought besides, to those who
// waited for it, each of them can put back: see Arrival.
func (o *Order) Arrived(l Lot) *Arrival {
	h, now := o.Holder, o.Holder.memory.moment()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forget()                                        // it was of the row as it was before
	counts := h.ask.Definition.Charged(l.After, l.At) // later than At if the clock has gone back
	had := &lot{
		after: l.After, at: counts, sent: h.memory.sent(l.Sent, l.At), epoch: o.dropped, seen: l.Count,
		lasts: usable(&h.ask.Definition, l.After.TS, counts, h.memory.lasts),
	}
	had.put(l.Count)
	if l.Count > 0 && h.dropped == o.dropped && !had.over(now) {
		h.wanted = h.live(now) + l.Count
		if l.Count < o.Ahead/2 {
			h.waitFor(now)
		}
		h.insert(had)
		h.restock()
		h.tick()
	}
	return &Arrival{h, had}
}

// sent is when a statement was sent that decided at an instant. An injected clock stands
// still meanwhile.
func (m *Memory) sent(sent, at time.Time) moment {
	if m.clock != nil {
		return momentOf(at)
	}
	return momentOf(sent)
}

// Arrival is what an order has brought.
type Arrival struct {
	holder *Holder
	lot    *lot
}

// Tokens are those of somebody who waited for them: a part of what the order brought.
func (a *Arrival) Tokens(n float64, after bucket.State) Tokens {
	return Tokens{Holder: a.holder, Count: n, At: a.lot.at, After: after, part: part{a.lot, n}}
}

// waitFor has nobody take ahead without being asked for a while, since there is little.
func (h *Holder) waitFor(now moment) { h.scarce.Store(int64(now.mono + h.memory.lasts/4)) }

// Refilled notes that taking ahead, which a memory's refill was called for, is over.
func (h *Holder) Refilled(ok bool) {
	if !ok {
		h.waitFor(h.memory.moment())
	}
	h.refilling.Store(false)
}

// Note notes that so much was handed out by the row, to so many calls.
func (h *Holder) Note(n float64, calls int) {
	if h == nil {
		return
	}
	now := h.memory.moment()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.demand.add(n, calls, now, h.memory.lasts)
}

// Miss notes that n tokens are taken from the row, since they are not held, and has more
// taken ahead if it is time.
func (h *Holder) Miss(n float64) {
	if !h.Holds() {
		return
	}
	now := h.memory.moment()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.demand.add(n, 1, now, h.memory.lasts)
	if now.mono >= time.Duration(h.scarce.Load()) && h.demand.want(now, h.memory.lasts) >= 1 {
		h.refill()
	}
}

// drop throws away what is held, and what is being taken ahead.
func (h *Holder) drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forget()
	h.dropped++
	for _, l := range h.lots {
		l.left.Store(0)
	}
	h.lots, h.ended = nil, nil
	h.restock()
}

func (h *Holder) idle(now moment) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.refusal.Load()
	return len(h.lots)+len(h.ended) == 0 && !h.refilling.Load() && h.demand.over(now, h.memory.lasts) && (r == nil || r.over(now, h.memory.lasts))
}

// tick has the timer ring, four times while what is held lasts. It needs mu.
func (h *Holder) tick() {
	if h.ticking {
		return
	}
	h.ticking, h.used = true, 0
	if h.timer == nil {
		h.timer = time.AfterFunc(h.memory.lasts/4, h.ring)
	} else {
		h.timer.Reset(h.memory.lasts / 4)
	}
}

// ring gives back what is not needed.
func (h *Holder) ring() {
	h.mu.Lock()
	h.live(h.memory.moment())
	used := max(0, h.used)
	h.ticking = false
	h.mu.Unlock()
	if returns := h.takeBack(4 * used); len(returns) > 0 {
		h.memory.give(returns)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.lots)+len(h.ended) > 0 {
		h.tick()
	}
}

// takeBack takes out of memory what is over, and what is more than is needed, the newest
// first: of that the most is given back. What is hardly more is kept, and a lot of which
// nothing would be in the row again: that can be used here only.
func (h *Holder) takeBack(needed float64) (returns []Return) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.memory.moment()
	left := h.live(now)
	returns, h.ended = h.ended, nil
	if needed > 0 && left < 2*needed {
		return returns
	}
	for i := len(h.lots) - 1; i >= 0 && left > needed; i-- {
		l := h.lots[i]
		if !h.arrives(l, now) {
			continue
		}
		n, _ := l.take(left-needed, true)
		l.seen -= n
		left -= n
		if n > 0 {
			returns = append(returns, h.returnOf(l, n))
		}
	}
	h.restock()
	return returns
}

// arrives reports whether anything of what is left of a lot would be in the row, if it were
// given back.
func (h *Holder) arrives(l *lot, now moment) bool {
	d := &h.ask.Definition
	return stands(d) > 0 || l.count() > refilled(d, now.since(l.sent))
}
