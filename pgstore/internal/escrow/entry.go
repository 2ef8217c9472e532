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

// Config says how a cache works.
type Config struct {
	Lasts time.Duration    // for how long tokens are handed out
	Clock func() time.Time // nil for the machine's

	// Prefetch is called when it is time to prefetch, on the way of a call that is not to
	// wait for it. Entry.Prefetched must be called when that is over.
	Prefetch func(*Entry)

	// GiveBack is called with the tokens to return, without a lock held.
	GiveBack func([]Return)
}

func (c *Config) now() time.Time {
	if c.Clock != nil {
		return c.Clock()
	}
	return time.Now()
}

func (c *Config) moment() moment { return momentOf(c.now()) }

// sent returns when a statement was sent that decided at an instant. An injected clock
// stands still meanwhile.
func (c *Config) sent(sent, at time.Time) moment {
	if c.Clock != nil {
		return momentOf(at)
	}
	return momentOf(sent)
}

// margin returns how long before its end the rest of a lease is returned.
func (c *Config) margin() time.Duration { return c.Lasts / 16 }

// Entry is a process's knowledge of one key. A nil Entry is of a key that is not remembered.
type Entry struct {
	config   *Config
	template decide.Demand   // an allow of nothing; sound, so that a request that is like it need not be checked
	paid     *receipt.Limit  // the ask's in receipts
	limit    ratelimit.Limit // of the ask, to compare; nil if that can change
	lowered  float64         // capacity; 0 if nothing can be prefetched
	least    float64         // count that is handed out

	stock       atomic.Pointer[stock]   // nil if nothing is held
	refusal     atomic.Pointer[refusal] // nil if none is known
	prefetching atomic.Bool
	scarceUntil atomic.Int64 // until then, on the monotonic clock, prefetching without being asked is not worth it

	mu         sync.Mutex
	leases     []*lease // oldest first
	demand     demand
	wanted     float64       // when something was prefetched last
	latency    time.Duration // to prefetch, lately: from the order to the arrival,
	service    time.Duration // and of that, from its turn at the row on
	epoch      int           // of the leases that are handed out: an edit begins another
	changes    int           // how often a statement is known to have changed the row
	usedLately float64       // since the timer was set
	spent      float64       // of leases that the row counts as out beside last, and not told yet
	last       *lease        // that was prefetched, with the latest end
	returns    []Return
	firing     sync.Mutex // held while the timer rings, until its returns are under way; taken before mu
	timer      *time.Timer
	timerSet   bool
	timerSetAt moment // when the timer was set
}

// stock is the tokens that are handed out without a lock. It is immutable, but for the rest of
// its lease; a new one takes its place.
type stock struct {
	*lease
	others float64       // in the leases after it
	low    float64       // it is time to prefetch when less is left in all,
	fresh  time.Duration // or the last lease is as old
	last   *lease
}

// Of steady demand, usedBy is the share of the time until the end of a lease in which the held
// tokens are used up, so that none are left to be returned.
const usedBy = 0.9

// ahead is how long before the held tokens are used up, or end, more is prefetched: as long as
// that takes lately from its turn on, and a quarter of the time that they last, since it may take
// longer. Were the wait for the turn to count, processes that wait would order sooner, which only
// makes the line longer.
func (e *Entry) ahead() time.Duration { return e.service + e.config.Lasts/4 }

// leastOf returns the least count that is handed out: less cannot be told from nothing.
func leastOf(d *bucket.Definition) float64 {
	return max(exact.Tolerance(d.Capacity, 0, 0), 1e-300)
}

// Template returns an ask of the entry's key, that of an allow of nothing.
func (e *Entry) Template() *decide.Demand { return &e.template }

// CanPrefetch reports whether the entry's key can be prefetched from.
func (e *Entry) CanPrefetch() bool { return e != nil && e.lowered > 0 }

// Tokens are tokens that were taken from memory, or that a statement granted which
// prefetched, too. The zero Tokens are none.
type Tokens struct {
	Entry *Entry
	Count float64
	At    time.Time    // on the database's clock, as far as it is known
	After bucket.State // the state then: of the row, as far as it is known, and this memory

	part part
	more []part // if it was not all of one lease
}

// part is tokens of a lease. Each goes back to its own, since they end when it does.
type part struct {
	lease *lease
	count float64
}

// Take takes n tokens, if there are as many, into t. It reports whether it did. Those of a
// transaction are out until [Tokens.Spend] or [Tokens.PutBack].
func (e *Entry) Take(n float64, transaction bool, t *Tokens) bool {
	if e == nil || !(n >= e.least) { // a count of 0 asks the row whether there is debt
		return false
	}
	s := e.stock.Load()
	if s == nil {
		return false
	}
	now := e.config.moment()
	if !s.over(now) {
		took, left := s.take(n, false, transaction)
		if left += s.others; took == 0 && !(n <= left) {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.holds(n, now)
			return false
		}
		if took > 0 {
			s.calls.Add(1)
			t.part = part{s.lease, n}
			e.complete(t, n, s.lease, s, left, now)
			return true
		}
	}
	return e.takeOfSeveral(n, now, transaction, t)
}

// complete completes tokens that were taken from a lease, the last of them, and has more
// prefetched if it is time.
func (e *Entry) complete(t *Tokens, n float64, from *lease, s *stock, left float64, now moment) {
	t.Entry, t.Count, t.At = e, n, from.databaseAt(now)
	t.After = e.template.Definition.Refill(s.last.after, t.At)
	t.After.Value += left
	if (left < s.low || now.since(s.last.sent) > s.fresh) && now.mono >= time.Duration(e.scarceUntil.Load()) {
		e.prefetch()
	}
}

// holds reports whether n tokens are held for a call. If none are, it stops the clock of the
// demand. It needs mu.
func (e *Entry) holds(n float64, now moment) bool {
	left := e.sweep(now)
	if left == 0 {
		e.demand.block(now)
	}
	return n <= left
}

// prefetch begins to prefetch, unless that is under way.
func (e *Entry) prefetch() {
	if !e.prefetching.Load() && e.prefetching.CompareAndSwap(false, true) {
		e.config.Prefetch(e)
	}
}

func (e *Entry) takeOfSeveral(n float64, now moment, transaction bool, t *Tokens) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.holds(n, now) {
		return false
	}
	rest := n
	var parts []part
	for _, l := range e.inOneWindow(n) {
		if took, _ := l.take(rest, true, transaction); took > 0 {
			parts = append(parts, part{l, took})
			rest -= took
		}
		if rest <= 0 {
			break
		}
	}
	e.restock()
	if rest > 0 { // others were faster
		for _, p := range parts {
			p.lease.left.add(p.count)
			if transaction {
				p.lease.out.add(-p.count)
			}
		}
		return false
	}
	last, s := parts[len(parts)-1].lease, e.stock.Load()
	last.calls.Add(1)
	t.part, t.more = parts[0], parts[1:]
	e.complete(t, n, last, s, s.left.load()+s.others, now)
	return true
}

// inOneWindow returns the leases that n tokens can be taken from: all, or those that count
// in one window or slot, since that is when a call is told that it takes. It needs mu.
func (e *Entry) inOneWindow(n float64) []*lease {
	if !e.template.Definition.Stepped() {
		return e.leases
	}
	for _, first := range e.leases {
		var same []*lease
		left := 0.0
		for _, l := range e.leases {
			if l.after.TS.Equal(first.after.TS) {
				same, left = append(same, l), left+l.left.load()
			}
		}
		if left >= n {
			return same
		}
	}
	return nil
}

// sweep takes out the leases that are over, counts the tokens used of all, and returns those
// left in the others. It needs mu.
func (e *Entry) sweep(now moment) (left float64) {
	n := 0
	for _, l := range e.leases {
		e.account(l, now)
		if l.over(now) {
			e.endLease(l, now)
			continue
		}
		left += l.left.load()
		e.leases[n] = l
		n++
	}
	if n < len(e.leases) {
		clear(e.leases[n:])
		e.leases = e.leases[:n]
		e.restock()
	}
	return left
}

// account counts the tokens used of a lease since they were counted last. It needs mu.
func (e *Entry) account(l *lease, now moment) {
	had := l.unspent()
	used := l.accounted - had
	l.accounted = had
	e.usedLately += used
	if e.counts(l.outUntil, now) {
		e.spent += used
	}
	e.demand.add(used, int(l.calls.Swap(0)), now, e.config.Lasts)
}

// counts reports whether the row counts the tokens out until an instant together with the last
// lease, the end of which is reported with its spent tokens: in the same window or slot, or if
// the clock does not stand still, for certain until a grace after that instant. It needs mu.
func (e *Entry) counts(until time.Time, now moment) bool {
	switch d := &e.template.Definition; {
	case e.last == nil:
		return false
	case d.Stepped():
		return until.Equal(e.last.outUntil)
	default:
		return e.last.databaseAt(now).Before(d.Counted(until))
	}
}

// takeSpent takes out the tokens that the row is to be told of, which were spent, and the
// instant until which it counts them as out. It needs mu.
func (e *Entry) takeSpent(now moment) bucket.Spent {
	if !e.unreported(now) {
		e.spent = min(e.spent, 0)
		return bucket.Spent{}
	}
	told := bucket.Spent{Spent: e.spent, SpentEnd: e.last.outUntil}
	e.spent = 0
	return told
}

// unreported reports whether there is anything to tell the row: it was spent, and is counted. It
// needs mu.
func (e *Entry) unreported(now moment) bool {
	if e.spent <= 0 || e.last == nil {
		return false
	}
	return e.last.databaseAt(now).Before(e.template.Definition.Counted(e.last.outUntil))
}

// restoreSpent notes that the row did not learn of the tokens that a statement was to report.
func (e *Entry) restoreSpent(told bucket.Spent) {
	if e == nil || told.Spent == 0 {
		return
	}
	now := e.config.moment()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.counts(told.SpentEnd, now) {
		e.spent += told.Spent
		e.setTimer()
	}
}

// endLease has the rest of a lease returned to its row, unless that has abundance. Tokens that
// transactions still have of it are accounted for when they end. It needs mu.
func (e *Entry) endLease(l *lease, now moment) {
	l.ended.Store(true)
	if n, _ := l.left.take(math.Inf(1), true); n > 0 {
		l.accounted -= n
		switch {
		case !e.abundant():
			e.returns = append(e.returns, e.returnOf(l, n))
		case e.counts(l.outUntil, now):
			e.spent += n
		}
	}
	e.account(l, now)
}

func (e *Entry) returnOf(l *lease, n float64) Return {
	return Return{
		Row: decide.Row{Key: e.template.KeyOf()}, Definition: e.template.Definition,
		Return: bucket.Return{Count: n, Taken: l.after.TS, End: l.fullUntil}, lease: l,
	}
}

// restock has tokens handed out from the first lease that has any. It needs mu.
func (e *Entry) restock() {
	if len(e.leases) == 0 {
		e.stock.Store(nil)
		return
	}
	first, last := 0, e.leases[len(e.leases)-1]
	for e.leases[first] != last && e.leases[first].left.load() == 0 {
		first++
	}
	ahead := e.ahead()
	s := &stock{lease: e.leases[first], low: e.wanted * min(float64(ahead)/(usedBy*float64(e.config.Lasts)), 1), fresh: last.lasts - ahead, last: last}
	for _, l := range e.leases[first+1:] {
		s.others += l.left.load()
	}
	e.stock.Store(s)
}

// Spend notes that the transaction that has the tokens was committed, or that nobody knows.
func (t *Tokens) Spend() {
	t.each(func(p part) {
		if p.lease.out.add(-p.count); p.lease.ended.Load() {
			t.Entry.accountLate(p.lease)
		}
	})
}

// accountLate accounts for a lease that has ended, and of which a transaction had some until now.
func (e *Entry) accountLate(l *lease) {
	now := e.config.moment()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.account(l, now)
	e.setTimer()
}

// PutBack puts the tokens back, since the transaction was rolled back: into memory, or if
// that is over into the row.
func (t *Tokens) PutBack() {
	e := t.Entry
	if e == nil {
		return
	}
	now := e.config.moment()
	e.mu.Lock()
	e.sweep(now)
	t.each(func(p part) { e.putBack(p, now) })
	e.restock()
	returns := e.takeDue(now)
	e.setTimer()
	e.mu.Unlock()
	if len(returns) > 0 {
		e.config.GiveBack(returns)
	}
}

func (t *Tokens) each(do func(part)) {
	if t.Entry == nil {
		return
	}
	do(t.part)
	for _, p := range t.more {
		do(p)
	}
}

// putBack needs mu. Tokens of a lease that has ended, or of before an edit, go to the row
// as a cancelled call's do.
func (e *Entry) putBack(p part, now moment) {
	if p.lease.epoch == e.epoch && !p.lease.over(now) {
		p.lease.left.add(p.count)
		p.lease.out.add(-p.count)
		p.lease.ended.Store(false)
		e.insert(p.lease)
		return
	}
	p.lease.out.add(-p.count)
	if p.lease.ended.Load() { // it is spent, and a refund is as good as any other
		e.account(p.lease, now)
	}
	r := e.returnOf(p.lease, p.count)
	r.End = time.Time{}
	e.returns = append(e.returns, r)
}

// takeDue takes out the returns of tokens that a caller was told of, which do not wait for the
// timer. It needs mu.
func (e *Entry) takeDue(now moment) (returns []Return) {
	e.returns = slices.DeleteFunc(e.returns, func(r Return) bool {
		if r.End.IsZero() {
			returns = append(returns, r)
		}
		return r.End.IsZero()
	})
	if len(returns) > 0 { // their count leaves no room for them
		returns[0].Spent = e.takeSpent(now)
	}
	return returns
}

// insert puts a lease in its place among the others, if it is not there. It needs mu.
func (e *Entry) insert(l *lease) {
	if slices.Contains(e.leases, l) {
		return
	}
	i := 0
	for i < len(e.leases) && e.leases[i].sent.mono <= l.sent.mono {
		i++
	}
	e.leases = slices.Insert(e.leases, i, l)
}

// Result tells the result of the call that got the tokens.
func (t *Tokens) Result(reserve bool, result *ratelimit.Result) {
	t.Entry.template.Held(t.Entry.paid, t.Count, reserve, &t.After, t.At, result)
}

// Balance returns the state of the limit of tokens; nil of none.
func (t *Tokens) Balance() *decide.Balance {
	if t.Entry == nil {
		return nil
	}
	return &decide.Balance{State: t.After, At: t.At}
}

// Prefetch is a statement that is to prefetch.
type Prefetch struct {
	Entry        *Entry
	Count        float64 // tokens to prefetch, if there are twice as many
	Capacity     float64 // to count with
	bucket.Spent         // to tell the row of
	epoch        int
	lasting      float64       // of the tokens that are held then, those that can be used until they end
	begun        time.Duration // on the monotonic clock
}

// Prefetch says how much is to be prefetched from a key by a statement that is about to be sent,
// which takes a number of tokens if the row has as many as it needs. It is the zero Order if
// it is not worth it.
func (e *Entry) Plan(takes, need float64) (o Prefetch) {
	if !e.CanPrefetch() || need > e.lowered {
		return o
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	now, lasts := e.config.moment(), e.config.Lasts
	left := e.sweep(now)
	if left == 0 {
		e.demand.block(now)
	}
	if len(e.leases) == 0 && !e.demand.enough(now) {
		return o
	}
	pace := e.demand.want(takes, now, lasts) / float64(lasts)
	lasting := usedBy * pace * float64(usable(&e.template.Definition, time.Unix(0, 0), time.Unix(0, 0), lasts))
	left = max(0, min(left, pace*float64(e.remains(now)))-pace*float64(e.latency)) // when more arrives
	want := lasting - left
	if want >= 1 && e.abundant() { // nobody else lacks them, and the next order may have to wait
		want += lasting
	}
	want = math.Floor(want) // of a part of a token there would be something left to return
	if min(want, e.spare(need, now)) < 1 {
		return o
	}
	o = Prefetch{Entry: e, Count: min(want, e.lowered), Capacity: e.lowered, epoch: e.epoch, lasting: lasting, begun: now.mono}
	o.Spent = e.takeSpent(now)
	return o
}

// remains returns for how long the latest of the held tokens can be used; 0 if there are none. It
// needs mu.
func (e *Entry) remains(now moment) time.Duration {
	if len(e.leases) == 0 {
		return 0
	}
	last := e.leases[len(e.leases)-1]
	return last.lasts - now.since(last.sent)
}

// spare returns the tokens that a statement that takes need tokens can prefetch, by the known
// state of the row: it has more only if others have returned some. It needs mu.
func (e *Entry) spare(need float64, now moment) float64 {
	if len(e.leases) == 0 {
		return math.Inf(1)
	}
	last := e.leases[len(e.leases)-1]
	return (e.template.Definition.Refill(last.after, last.databaseAt(now)).Value - need) / 2
}

// Failed notes that the statement of an order has told the row nothing.
func (o *Prefetch) Failed() {
	if o != nil {
		o.Entry.restoreSpent(o.Spent)
	}
}

// Receive adds the tokens of an order. It returns the arrival, by which the calls that waited
// for it have tokens that they can put back.
func (o *Prefetch) Receive(l Lease) *Received {
	e, now := o.Entry, o.Entry.config.moment()
	e.mu.Lock()
	e.rowChanged()                                         // it was of the row as it was before
	counts := e.template.Definition.Charged(l.After, l.At) // later than At if the clock has gone back
	had := &lease{
		after: l.After, at: counts, sent: e.config.sent(l.Sent, l.At), epoch: o.epoch, accounted: l.Count + l.Out,
		lasts: usable(&e.template.Definition, l.After.TS, counts, e.config.Lasts),
	}
	had.outUntil = l.End
	had.fullUntil = l.End.Add(time.Duration(e.template.Definition.Slots) * e.template.Definition.SlotWidth()) // a slot can be returned to for longer
	had.left.add(l.Count)
	had.out.add(l.Out)
	left := e.sweep(now)
	e.latency = (e.latency + now.mono - o.begun) / 2
	e.service = (e.service + max(now.mono-had.sent.mono, 0)) / 2
	e.noteLatest(had)
	switch {
	case e.epoch != o.epoch || had.over(now):
		e.endLease(had, now)
	default:
		if e.wanted = min(left+l.Count, o.lasting); l.Count < o.Count/2 {
			e.backOff(now)
		}
		e.insert(had)
		e.restock()
	}
	e.setTimer()
	e.mu.Unlock()
	return &Received{e, had}
}

// noteLatest has the end of a lease reported with the tokens spent from now on, if it is the
// latest. Tokens spent before are reported with it, unless the row may have begun to count anew
// with it. It needs mu.
func (e *Entry) noteLatest(had *lease) {
	last := e.last
	if last != nil && had.outUntil.Before(last.outUntil) {
		return
	}
	if e.last = had; last != nil && !had.at.Before(e.template.Definition.Counted(last.outUntil)) {
		e.spent = 0
	}
}

// Granted returns tokens that the row granted to a transaction, which took nothing besides
// for this memory.
func (e *Entry) Granted(n float64, after bucket.State, at time.Time) Tokens {
	return (&Received{e, &lease{after: after, at: at, epoch: -1}}).Tokens(n, after)
}

// Received is the tokens that an order has brought.
type Received struct {
	entry *Entry
	lease *lease
}

// Tokens returns those of a call that the order's statement granted.
func (a *Received) Tokens(n float64, after bucket.State) Tokens {
	return Tokens{Entry: a.entry, Count: n, At: a.lease.at, After: after, part: part{a.lease, n}}
}

// backOff has nobody prefetch without being asked for a while, since there is little.
func (e *Entry) backOff(now moment) { e.scarceUntil.Store(int64(now.mono + e.config.Lasts/4)) }

// Prefetched notes that the prefetching is over that the cache's prefetch was called for.
func (e *Entry) Prefetched(ok bool) {
	if !ok {
		e.backOff(e.config.moment())
	}
	e.prefetching.Store(false)
}

// CountDemand notes that n tokens were handed out by the row, to a number of calls.
func (e *Entry) CountDemand(n float64, calls int) {
	if e == nil {
		return
	}
	now := e.config.moment()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.demand.unblock(now)
	e.demand.add(n, calls, now, e.config.Lasts)
}

// Contended notes that a call met others at the row: it waited for them, or was run again.
// Such calls are worth prefetching for sooner.
func (e *Entry) Contended() {
	if !e.CanPrefetch() {
		return
	}
	now := e.config.moment()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.demand.contend(now, e.config.Lasts)
}

// Miss notes that n tokens are taken from the row, since they are not held, and has more
// prefetched if it is time.
func (e *Entry) Miss(n float64) {
	if !e.CanPrefetch() {
		return
	}
	now := e.config.moment()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.demand.add(n, 1, now, e.config.Lasts)
	if now.mono >= time.Duration(e.scarceUntil.Load()) && e.demand.want(0, now, e.config.Lasts) >= 1 {
		e.prefetch()
	}
}

// WorthPrefetching reports whether it is worth to prefetch, which a call that finds nothing held does
// then by its own statement.
func (e *Entry) WorthPrefetching() bool {
	if !e.CanPrefetch() {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.config.moment()
	e.demand.roll(now, e.config.Lasts)
	return len(e.leases) > 0 || e.demand.enough(now)
}

// RowChanged forgets the known state of the row, which a statement has changed. Leases stay.
func (e *Entry) RowChanged() {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.rowChanged()
}

// rowChanged is Changed. It needs mu.
func (e *Entry) rowChanged() {
	e.changes++
	e.refusal.Store(nil)
}

// evict takes out the held tokens, and those being prefetched when they arrive.
func (e *Entry) evict() (returns []Return) {
	now := e.config.moment()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.rowChanged()
	e.sweep(now)
	e.epoch++
	for _, l := range e.leases {
		e.endLease(l, now)
	}
	e.leases = nil
	e.restock()
	e.reportSpent(now)
	returns, e.returns = e.returns, nil
	return returns
}

// discard is evict of an entry that is replaced: its timer returns the tokens that it held.
func (e *Entry) discard() {
	returns := e.evict()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.returns = append(returns, e.returns...)
	e.setTimer()
}

func (e *Entry) idle(now moment) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.refusal.Load()
	return len(e.leases)+len(e.returns) == 0 && !e.prefetching.Load() && e.demand.over(now, e.config.Lasts) && (r == nil || r.over(now, e.config.Lasts))
}

// setTimer sets the timer: four times during a lease, and before one ends. It needs mu.
func (e *Entry) setTimer() {
	if e.timerSet {
		return
	}
	now := e.config.moment()
	if len(e.leases)+len(e.returns) == 0 && !e.unreported(now) {
		return
	}
	e.timerSet, e.usedLately, e.timerSetAt = true, 0, now
	next := e.config.Lasts / 4
	if len(e.returns) > 0 {
		next = 0
	}
	for _, l := range e.leases {
		next = min(next, max(l.lasts-now.since(l.sent)-e.config.margin(), 0))
	}
	if e.timer == nil {
		e.timer = time.AfterFunc(next, e.onTimer)
	} else {
		e.timer.Reset(next)
	}
}

// onTimer returns the tokens that are not needed.
func (e *Entry) onTimer() {
	e.firing.Lock()
	defer e.firing.Unlock()
	e.mu.Lock()
	now := e.config.moment()
	e.sweep(now)
	past := max(now.since(e.timerSetAt), 1)
	needed := max(0, e.usedLately) * float64(e.config.Lasts) / float64(past)
	if e.demand.contended(now) { // to have it again costs more than to keep it until it ends
		needed = max(needed, e.demand.want(0, now, e.config.Lasts))
	}
	e.release(needed, now)
	returns := e.returns
	e.returns, e.timerSet = nil, false
	e.setTimer()
	e.mu.Unlock()
	if len(returns) > 0 {
		e.config.GiveBack(returns)
	}
}

// abundant reports whether the row is full again within one lease's time or two, after all that
// its last lease took. The rest of a lease is not returned to such a row: the next order, or
// others, would wait while it is written, for tokens that none of them lacks. It needs mu.
func (e *Entry) abundant() bool {
	inflow := e.template.Definition.Capacity - e.lowered
	return inflow > 0 && e.last != nil && e.last.after.Value >= e.template.Definition.Capacity-2*inflow
}

// release has the rest of leases returned that are about to end, and tokens beyond those
// needed, the newest first. A small excess is kept. With that, and when no lease is left, the
// used tokens are reported to the row; to one that has abundance, by the next order. It needs
// mu.
func (e *Entry) release(needed float64, now moment) {
	left := 0.0
	for _, l := range e.leases {
		left += l.left.load()
	}
	keep := needed
	if needed > 0 && left < 2*needed || e.abundant() {
		keep = left
	}
	kept := e.leases[:0:0]
	for i := len(e.leases) - 1; i >= 0; i-- {
		l := e.leases[i]
		if now.since(l.sent)+2*e.config.margin() >= l.lasts {
			left -= l.left.load()
			e.endLease(l, now)
			continue
		}
		took, _ := l.left.take(max(0, left-keep), true)
		l.accounted -= took
		left -= took
		if took > 0 {
			e.returns = append(e.returns, e.returnOf(l, took))
		}
		e.account(l, now)
		kept = append(kept, l)
	}
	slices.Reverse(kept)
	e.leases = kept
	e.restock()
	if len(e.returns) > 0 || len(kept) == 0 && !e.abundant() {
		e.reportSpent(now)
	}
}

// reportSpent has the spent tokens reported to the row, with a return if there is one. It needs mu.
func (e *Entry) reportSpent(now moment) {
	told := e.takeSpent(now)
	if told.Spent == 0 {
		return
	}
	if len(e.returns) == 0 {
		e.returns = append(e.returns, e.returnOf(e.last, 0))
	}
	e.returns[0].Spent = told
}
