package escrow

import (
	"hash/maphash"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/exact"
)

const (
	stripes   = 64
	mostKeys  = 256 // a stripe; past that, keys that hold nothing are forgotten
	lookedAt  = 8   // of them, for one more
	enoughFor = 8   // calls of a key lately, before anything is taken ahead: for keys that are asked now and then it would only have to be given back
	growth    = 8   // times what was handed out lately is the most that is taken ahead
)

// Memory is what a process holds, by key. It is safe for concurrent use; what calls for
// one key share is theirs alone, but for a moment in which a key is looked up.
type Memory struct {
	lasts   time.Duration
	clock   func() time.Time // nil for the machine's
	give    func([]Return)
	seed    maphash.Seed
	stripes [stripes]stripe
}

type stripe struct {
	sync.RWMutex
	held map[decide.Key]*Holder
	_    [64]byte // so that stripes are in different lines of a processor's cache
}

// New is an empty memory of what lasts so long. The clock, if it is not nil, is one that
// was injected. give is called, on a goroutine of its own, with what is not needed.
func New(lasts time.Duration, clock func() time.Time, give func([]Return)) *Memory {
	m := &Memory{lasts: lasts, clock: clock, give: give, seed: maphash.MakeSeed()}
	for i := range m.stripes {
		m.stripes[i].held = make(map[decide.Key]*Holder)
	}
	return m
}

// Now is the instant from which a statement's lot must count that is not sent yet.
func (m *Memory) Now() time.Time {
	if m == nil {
		return time.Time{}
	}
	if m.clock != nil {
		return m.clock()
	}
	return time.Now()
}

func (m *Memory) moment() moment { return momentOf(m.Now()) }

func (m *Memory) stripe(key decide.Key) *stripe {
	h := maphash.String(m.seed, key.Key) ^ maphash.String(m.seed, key.Name)*3
	return &m.stripes[h%stripes]
}

func (m *Memory) holder(key decide.Key) *Holder {
	s := m.stripe(key)
	s.RLock()
	h := s.held[key]
	s.RUnlock()
	return h
}

// Holder is what a process holds of one key.
type Holder struct {
	memory *Memory
	ask    decide.Ask      // for one token; sound, so that a request that is like it need not be checked
	limit  ratelimit.Limit // of the ask, to compare; nil if that can change
	least  float64         // count

	mu        sync.Mutex
	lots      []*lot // oldest first
	demand    demand
	wanted    float64       // when something was taken ahead last
	refilling bool          // somebody is taking ahead
	scarce    time.Duration // until then, taking ahead without being asked is not worth it
	dropped   int           // how often what is held was thrown away
	used      float64       // since the timer rang
	timer     *time.Timer
	ticking   bool
}

// Of is the holder of an ask's key, which begins to be remembered; nil if nothing can be
// taken ahead from it.
func (m *Memory) Of(a *decide.Ask) *Holder {
	if m == nil || a.Sharded() || Lowered(&a.Definition, m.lasts) <= 0 {
		return nil
	}
	h := m.holder(a.Of())
	if h != nil && h.ask.Definition == a.Definition {
		return h
	}
	h = &Holder{memory: m, ask: *a, least: max(exact.Tolerance(a.Definition.Capacity, 0, 0), 1e-300)}
	h.ask.Count = 0
	if reflect.TypeOf(a.Limit).Kind() != reflect.Pointer {
		h.limit = a.Limit
	}
	s := m.stripe(a.Of())
	s.Lock()
	defer s.Unlock()
	if before := s.held[a.Of()]; before != nil {
		before.drop()
	} else if len(s.held) >= mostKeys && !s.forget() {
		return nil
	}
	s.held[a.Of()] = h
	return h
}

// forget forgets a key that holds nothing, of some; false if there is none.
func (s *stripe) forget() bool {
	n := 0
	for key, h := range s.held { // which begins anywhere
		if h.idle() {
			delete(s.held, key)
			return true
		}
		if n++; n == lookedAt {
			break
		}
	}
	return false
}

func (h *Holder) idle() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.lots) == 0 && !h.refilling && h.demand.over(h.memory.moment(), h.memory.lasts)
}

// Drop throws away what is held of a key, and what is being taken ahead.
func (m *Memory) Drop(key decide.Key) {
	if m == nil {
		return
	}
	if h := m.holder(key); h != nil {
		h.drop()
	}
}

// DropAll throws away everything.
func (m *Memory) DropAll() {
	m.each(func(h *Holder) { h.drop() })
}

// TakeBack takes what is left of everything out of memory.
func (m *Memory) TakeBack() (returns []Return) {
	m.each(func(h *Holder) { returns = append(returns, h.takeBack(0)...) })
	return returns
}

func (m *Memory) each(do func(*Holder)) {
	if m == nil {
		return
	}
	for i := range m.stripes {
		s := &m.stripes[i]
		s.RLock()
		for _, h := range s.held {
			do(h)
		}
		s.RUnlock()
	}
}

// Tokens are tokens that were taken from memory.
type Tokens struct {
	Holder *Holder
	Count  float64
	At     time.Time       // on the database's clock, as far as it is known
	After  ratelimit.State // what there is then: in the row, as far as it is known, and in this memory
	Low    bool            // it is time for the caller to take ahead: see Refill

	parts [2]part // of which it is; more are not kept, and are lost if they are put back
}

// part is tokens of a lot. Each goes back to its own, since they end when they do.
type part struct {
	lot   *lot
	count float64
}

// Take takes what a request asks for, if it is for a limit that was found sound before,
// and so much is held.
func (m *Memory) Take(r *ratelimit.Request) (t Tokens, ok bool) {
	h := m.holder(decide.Key{Name: ratelimit.NameOf(r.Limit), Key: r.Key})
	if h == nil || h.limit == nil || h.limit != r.Limit {
		return t, false
	}
	return h.Take(r.Count)
}

// Take takes n tokens, if so many are held.
func (h *Holder) Take(n float64) (t Tokens, ok bool) {
	if h == nil || !(n >= h.least) { // a count of 0 asks the row whether there is debt
		return t, false
	}
	now := h.memory.moment()
	h.mu.Lock()
	left := h.live(now)
	if !(n <= left) {
		h.mu.Unlock()
		return t, false
	}
	t.At = h.lots[0].At.Add(h.lots[0].age(now))
	for i, rest := 0, n; ; i++ {
		l := h.lots[0]
		count := min(rest, l.Count)
		l.Count -= count
		rest -= count
		if i < len(t.parts) {
			t.parts[i] = part{l, count}
		}
		if l.Count > 0 || len(h.lots) == 1 {
			break
		}
		h.lots = append(h.lots[:0], h.lots[1:]...)
	}
	last := h.lots[len(h.lots)-1]
	t.After = last.After
	h.used += n
	h.demand.add(n, 1, now, h.memory.lasts)
	left -= n
	t.Low = !h.refilling && h.low(last, left, now)
	h.refilling = h.refilling || t.Low
	h.mu.Unlock()
	t.At = t.At.Truncate(time.Microsecond)
	t.Holder, t.Count = h, n
	t.After = h.ask.Definition.Settle(t.After, t.At)
	t.After.Value += left
	return t, true
}

// low reports whether it is time to take ahead, before nothing is left. It needs mu.
func (h *Holder) low(last *lot, left float64, now moment) bool {
	if now.mono < h.scarce {
		return false
	}
	return left < h.wanted/2 || last.age(now) > last.lasts-h.memory.lasts/4
}

// Miss notes that n tokens are taken from the row, since they are not held. It reports
// whether it is time for the caller to take ahead.
func (h *Holder) Miss(n float64) (low bool) {
	now := h.memory.moment()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.demand.add(n, 1, now, h.memory.lasts)
	low = !h.refilling && now.mono >= h.scarce && h.demand.want(now, h.memory.lasts) >= 1
	h.refilling = h.refilling || low
	return low
}

// live throws away the lots that are over, and says how much there is in the others. It
// needs mu.
func (h *Holder) live(now moment) (left float64) {
	n := 0
	for _, l := range h.lots {
		if l.age(now) >= l.lasts {
			continue
		}
		left += l.Count
		h.lots[n] = l
		n++
	}
	clear(h.lots[n:])
	h.lots = h.lots[:n]
	return left
}

// PutBack puts tokens back that were taken and not used, unless their time is over.
func (t *Tokens) PutBack() {
	h := t.Holder
	now := h.memory.moment()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.live(now)
	for _, p := range t.parts {
		if p.lot == nil || p.lot.epoch != h.dropped || p.lot.age(now) >= p.lot.lasts {
			continue
		}
		p.lot.Count += p.count
		h.insert(p.lot)
	}
	h.tick()
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

// Ask is the ask that tokens are for.
func (t *Tokens) Ask() decide.Ask {
	a := t.Holder.ask
	a.Count = t.Count
	return a
}

// Stand is how the limit of tokens stands; nil of none.
func (t *Tokens) Stand() *decide.Stand {
	if t.Holder == nil {
		return nil
	}
	return &decide.Stand{State: t.After, At: t.At}
}

// Ask is the ask of a holder's key, for nothing.
func (h *Holder) Ask() decide.Ask { return h.ask }

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
	if h == nil {
		return o, false
	}
	lowered := Lowered(&h.ask.Definition, h.memory.lasts)
	if need > lowered {
		return o, false
	}
	now := h.memory.moment()
	h.mu.Lock()
	defer h.mu.Unlock()
	left := h.live(now)
	want := h.demand.want(now, h.memory.lasts) - left
	if want < 1 {
		want = 0
	}
	return Order{Holder: h, Ahead: min(want, lowered), Capacity: lowered, dropped: h.dropped}, true
}

// Arrived adds what an order has brought ahead. What it has brought besides, to those who
// waited for it, each of them can put back: see Arrival.
func (o *Order) Arrived(l Lot) Arrival {
	h, now := o.Holder, o.Holder.memory.moment()
	h.mu.Lock()
	defer h.mu.Unlock()
	d := &h.ask.Definition
	sent := momentOf(l.Sent)
	if h.memory.clock != nil {
		sent = momentOf(l.At)
	}
	had := &lot{Lot: l, sent: sent, lasts: usable(d, l.After.TS, l.At, h.memory.lasts), epoch: o.dropped}
	if l.Count > 0 && h.dropped == o.dropped && had.age(now) < had.lasts {
		h.wanted = h.live(now) + l.Count
		if l.Count < o.Ahead/2 {
			h.scarce = now.mono + h.memory.lasts/4
		}
		h.insert(had)
		h.tick()
	}
	return Arrival{h, had}
}

// Arrival is what an order has brought.
type Arrival struct {
	holder *Holder
	lot    *lot
}

// Tokens are those of somebody who waited for them: a part of what the order brought.
func (a Arrival) Tokens(n float64, after ratelimit.State) Tokens {
	return Tokens{Holder: a.holder, Count: n, At: a.lot.At, After: after, parts: [2]part{{a.lot, n}}}
}

// Refilled notes that taking ahead, which Low has asked for, is over.
func (h *Holder) Refilled(ok bool) {
	now := h.memory.moment()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refilling = false
	if !ok {
		h.scarce = now.mono + h.memory.lasts/4
	}
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

func (h *Holder) drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dropped++
	h.lots = nil
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
	used := h.used
	h.ticking = false
	h.mu.Unlock()
	if returns := h.takeBack(4 * used); len(returns) > 0 {
		h.memory.give(returns)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.lots) > 0 {
		h.tick()
	}
}

// takeBack takes out of memory what is more than is needed, the newest first: of that
// the most is given back. What is hardly more is kept.
func (h *Holder) takeBack(needed float64) (returns []Return) {
	h.mu.Lock()
	defer h.mu.Unlock()
	left := h.live(h.memory.moment())
	if needed > 0 && left < 2*needed {
		return nil
	}
	d := &h.ask.Definition
	for i := len(h.lots) - 1; i >= 0 && left > needed; i-- {
		l := h.lots[i]
		n := min(l.Count, left-needed)
		l.Count -= n
		left -= n
		if n > 0 {
			returns = append(returns, Return{
				Row: decide.Row{Key: h.ask.Of()}, Definition: *d, Count: n,
				Taken: l.After.TS, End: end(d, l.After.TS, h.memory.lasts),
			})
		}
		if l.Count == 0 {
			h.lots = h.lots[:i]
		}
	}
	return returns
}

// demand is how much was handed out lately: in this stretch of time, and in the one
// before it, which are as long as what is taken ahead lasts.
type demand struct {
	begun  time.Duration // on the monotonic clock
	count  float64
	calls  int
	before float64
	called int
}

func (d *demand) over(now moment, lasts time.Duration) bool {
	return now.mono-d.begun >= 2*lasts
}

func (d *demand) roll(now moment, lasts time.Duration) {
	past := now.mono - d.begun
	switch {
	case past < 0 || past >= 2*lasts:
		*d = demand{begun: now.mono}
	case past >= lasts:
		*d = demand{begun: now.mono, before: d.count * float64(lasts) / float64(past), called: d.calls}
	}
}

func (d *demand) add(n float64, calls int, now moment, lasts time.Duration) {
	d.roll(now, lasts)
	d.count += n
	d.calls += calls
}

// want is how much would be needed while it lasts.
func (d *demand) want(now moment, lasts time.Duration) float64 {
	d.roll(now, lasts)
	if d.calls+d.called < enoughFor {
		return 0
	}
	past := float64(max(now.mono-d.begun, lasts/1000, 1)) / float64(lasts)
	if d.called > 0 {
		return d.count + d.before*(1-min(past, 1))
	}
	return min(d.count/past, growth*d.count)
}
