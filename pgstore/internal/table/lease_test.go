package table

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// account is a row as the rule has it for what comes back beside what processes hold in
// memory (see package escrow's model). The statements must agree with it, to the last token.
type account struct {
	definition bucket.Definition
	key        string
	there      bool
	state      bucket.State
	out        bucket.Out
}

// at is the row's time: never before its ts.
func (a *account) at(now time.Time) time.Time {
	if a.there && a.state.TS.After(now) {
		return a.state.TS
	}
	return now
}

// make makes the row, full, if it is not there.
func (a *account) make(now time.Time) {
	if !a.there {
		*a = account{definition: a.definition, key: a.key, there: true, state: a.definition.Fresh(a.key, now)}
	}
}

// refilled is what comes in from an instant to another.
func (a *account) refilled(from, to time.Time) float64 {
	if a.definition.Kind != bucket.TokenBucket || to.Before(from) {
		return 0
	}
	return float64(to.Sub(from).Microseconds()) * a.definition.Rate / float64(a.definition.Period.Microseconds())
}

// owed is how much the row must leave free.
func (a *account) owed(now time.Time) float64 {
	switch {
	case a.out.Tokens <= 0:
		return 0
	case a.definition.Kind != bucket.TokenBucket:
		if a.out.Until.After(now) {
			return a.out.Tokens
		}
		return 0
	}
	return max(0, a.out.Tokens+a.refilled(now, a.out.Until)-a.refilled(a.out.Until, now))
}

// forgets reports whether nothing is out at an instant of the row, and nothing of what was is
// taken off any more.
func (a *account) forgets(t time.Time) bool {
	if a.out.Tokens <= 0 || a.definition.Kind != bucket.TokenBucket {
		return a.out.Tokens <= 0 || !a.out.Until.After(t)
	}
	return !a.out.Until.Add(time.Second).After(t) && a.out.Tokens <= a.refilled(a.out.Until, t)
}

// counts reports whether a lease that ends then is out for sure at an instant of the row.
func (a *account) counts(end, t time.Time) bool {
	switch a.definition.Kind {
	case bucket.SlidingWindow:
		return end.Equal(a.out.Until)
	case bucket.FixedWindow:
		return end.After(t)
	}
	return !end.IsZero() && end.Add(time.Second).After(t)
}

// say takes off what was spent.
func (a *account) say(s bucket.Spent, t time.Time) {
	if a.counts(s.SpentEnd, t) {
		a.out.Tokens = max(a.out.Tokens-s.Spent, 0)
	}
}

// prefetch is a grant that prefetches, and what it prefetched. On a distributed table it makes
// the row.
func (a *account) prefetch(g *Grant, now time.Time) (more float64, ok bool) {
	if !a.there || a.state.Paused.After(now) || g.Need > g.capacity() {
		return 0, false
	}
	d := a.definition
	d.Capacity = g.capacity()
	left, ok := d.Take(a.state, now, g.Count, g.Need-g.Count)
	if !ok || left.Value < g.Need-g.Count {
		return 0, false
	}
	if a.forgets(left.TS) {
		a.out = bucket.Out{}
	}
	a.say(g.Spent, left.TS)
	more = max(0, min(g.Prefetch, left.Value/2, d.Capacity/2-a.out.Tokens-g.Out))
	a.state, a.out.Tokens = d.Spend(left, now, more), a.out.Tokens+g.Out+more
	if end := g.ends(a.state.TS); end.After(a.out.Until) {
		a.out.Until = end
	}
	return more, true
}

// back is a Return.
func (a *account) back(r *bucket.Return, now time.Time) {
	if !a.there {
		return
	}
	t, end := a.at(now), r.End
	if r.Known.After(t) && a.definition.Kind != bucket.SlidingWindow {
		t = r.Known
	}
	if a.definition.Kind == bucket.SlidingWindow && !end.IsZero() {
		end = r.Taken.Add(a.definition.SlotWidth())
	}
	if a.say(r.Spent, t); !end.IsZero() && a.counts(end, t) {
		a.out.Tokens = max(a.out.Tokens-r.Count, 0)
	}
	n, swallowed := r.Count, !end.IsZero() && a.state.Paused.After(now) && a.definition.Every == 0
	switch a.definition.Kind {
	case bucket.SlidingWindow:
		if oldest := a.state.TS.Add(time.Duration(a.state.Slots.Ahead-int64(a.definition.Slots)) * a.definition.SlotWidth()); !r.Taken.Before(oldest) {
			a.state = a.definition.Refund(a.state, a.state.TS, n, a.definition.Slot(bucket.State{TS: r.Taken, Slots: a.definition.Fresh(a.key, r.Taken).Slots}))
		}
		return
	case bucket.FixedWindow:
		if swallowed || a.state.TS.After(r.Taken) || !end.IsZero() && (!a.definition.Refill(a.state, now).TS.Equal(r.Taken) || !end.After(t)) {
			return
		}
	default:
		if !end.IsZero() {
			n = max(0, n-a.refilled(end, t))
		}
		if swallowed {
			n = 0
		}
	}
	a.add(n, a.definition.Capacity, now)
}

// give is a Give of some tokens.
func (a *account) give(n, most float64, spent bucket.Spent, now time.Time) {
	if !a.there {
		a.make(now)
		return
	}
	prefetched := a.out.Tokens > 0
	a.say(spent, a.at(now))
	switch {
	case prefetched && a.definition.Kind == bucket.TokenBucket: // it is settled later
		a.state.Value += max(0, min(n, a.definition.Capacity-a.definition.Refill(a.state, now).Value-a.owed(now)))
	case a.owed(now) > 0:
		a.add(n, most, now)
	default:
		a.state.Value = min(a.state.Value+n, max(a.state.Value, most))
	}
}

// add gives back n tokens. A window's row is not settled: while something is out of it, it is
// that of now, and otherwise what comes in is added as well before or after.
func (a *account) add(n, most float64, now time.Time) {
	s, owed := a.definition.Refill(a.state, now), a.owed(now)
	if a.definition.Kind == bucket.FixedWindow {
		if s = a.state; owed > 0 {
			s.Value = min(s.Value, a.definition.Capacity)
		}
	}
	if owed > 0 || a.definition.Kind == bucket.TokenBucket {
		s.Value = max(s.Value, min(s.Value+n, a.definition.Capacity-owed))
	} else {
		s.Value = min(s.Value+n, max(s.Value, most))
	}
	a.state = s
}

// history is a random one of a row, which is in the table and on account.
type history struct {
	*testing.T
	*rand.Rand
	db    *pgtest.DB
	table *Table
	row   decide.Row
	account
	now    time.Time
	latest time.Time // that now has been: what has ended by then, by the clock of its process, is so for good
	lasts  time.Duration
	leases []*lease
	done   map[string]int
}

// lease is what a process has prefetched.
type lease struct {
	left, unsaid float64
	taken, end   time.Time
}

func TestReturnsAgree(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	for name, table := range map[string]*Table{"plain": New(db.Schema, false, time.Second), "distributed": New(db.Schema, true, time.Second)} {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket{Name: "bucket", Rate: 70, Period: time.Second, Capacity: 20},
			ratelimit.TokenBucket{Name: "slow", Rate: 7, Period: time.Hour, Capacity: 20},
			ratelimit.FixedWindow{Name: "window", Rate: 20, Period: 300 * time.Millisecond, Capacity: 30},
			ratelimit.SlidingWindow{Name: "sliding", Rate: 20, Period: time.Second, Slots: 5},
			ratelimit.FixedWindow{Name: "calendar", Rate: 20, Every: ratelimit.Day, Zone: "Asia/Beirut", Capacity: 30},
		} {
			d := limit.Definition()
			begins := quarterPast
			if d.Every != 0 {
				begins = time.Date(2026, 3, 28, 21, 59, 59, 950e6, time.UTC) // the next day begins soon
			}
			t.Run(name+"/"+d.Name, func(t *testing.T) {
				done := make(map[string]int)
				for seed := range uint64(12) {
					h := &history{
						T: t, Rand: rand.New(rand.NewPCG(seed, 26)), db: db, table: table, done: done, now: begins,
						row:   decide.Row{Key: decide.Key{Name: d.Name, Key: fmt.Sprint(name, seed)}},
						lasts: []time.Duration{10 * time.Millisecond, 100 * time.Millisecond}[seed%2],
					}
					h.account.definition, h.account.key = bucket.Definition(d), h.row.Key.Key
					for range 60 {
						h.step()
					}
				}
				for _, verb := range []string{"prefetched", "prefetched in turn", "refused", "used", "returned", "told", "said", "reset"} {
					if done[verb] < 8 {
						t.Errorf("%s %d times only, so this tells little", verb, done[verb])
					}
				}
			})
		}
	}
}

// step does something, and compares.
func (h *history) step() {
	h.now = h.now.Add(time.Duration([]int{0, 0, 1, 1, 2, 4, 12}[h.IntN(7)]*h.IntN(int(h.lasts.Microseconds())/4)) * time.Microsecond)
	if h.IntN(20) == 0 { // the clock goes back
		h.now = h.now.Add(-time.Duration(h.IntN(5_000)) * time.Microsecond)
	}
	if h.now.After(h.latest) {
		h.latest = h.now
	}
	h.leases = slices.DeleteFunc(h.leases, func(*lease) bool { return h.IntN(40) == 0 }) // killed
	verbs := []func(){h.take, h.prefetch, h.prefetch, h.prefetch, h.use, h.use, h.use, h.use, h.giveBack, h.giveBack, h.tell, h.credit, h.touch, h.pause, h.pause, h.reset}
	verbs[h.IntN(len(verbs))]()
	h.compare()
}

func (h *history) change(n float64) decide.Change {
	return decide.Change{Row: h.row, Definition: h.definition, Count: n, Past: h.now, Before: h.state}
}

func (h *history) send(queue func(*pgx.Batch)) {
	h.Helper()
	var batch pgx.Batch
	queue(&batch)
	noError(h, h.db.Pool.SendBatch(h.Context(), &batch).Close())
}

func (h *history) count() float64 { return float64(h.IntN(9)) + float64(h.IntN(2))/8 }

func (h *history) take() {
	c := h.change(h.count())
	taken, err := h.table.Take(h.Context(), h.db.Pool, false, &c, &h.now)
	noError(h, err)
	h.make(h.now)
	after, ok := h.definition.Take(h.state, h.now, c.Count, 0)
	if ok = ok && !h.state.Paused.After(h.now) && h.definition.Plain(h.state, h.now); ok != taken.OK {
		h.Fatalf("took %v of %v: %v, want %v", c.Count, h.state, taken.OK, ok)
	}
	if ok {
		h.state = after
	}
}

func (h *history) spent() (s bucket.Spent) {
	for _, l := range h.leases {
		if l.end.After(h.now) && l.unsaid > 0 {
			s.Spent += l.unsaid
			if l.unsaid = 0; s.SpentEnd.IsZero() || l.end.Before(s.SpentEnd) {
				s.SpentEnd = l.end
			}
			h.done["said"]++
		}
	}
	return s
}

func (h *history) prefetch() {
	_, distributed := h.table.Decider().(distributedTable)
	grants, await := make([]Grant, 1), h.IntN(3) == 0
	g := &grants[0]
	*g = Grant{Change: h.change(h.count()), Lasts: h.lasts, Prefetch: h.count(), Lowered: h.definition.Capacity}
	if h.definition.Kind == bucket.TokenBucket {
		g.Lowered -= h.refilled(time.Time{}, time.Time{}.Add(h.lasts))
	}
	g.Need = g.Count + float64(h.IntN(2))
	g.Out = g.Count * float64(h.IntN(2))
	g.Spent = h.spent()
	if !await && !distributed && h.IntN(2) == 0 { // with another, which is not there
		other := *g
		other.Row.Key.Key += " other"
		grants = append(grants, other)
		g = &grants[0]
	}
	noError(h, h.table.Decider().Grant(h.Context(), h.db.Pool, grants, await, &h.now))
	before := h.account
	if !h.there && distributed {
		h.make(h.now)
	}
	more, ok := h.account.prefetch(g, h.now)
	if ok = ok && (distributed || h.definition.Plain(before.state, h.now)); ok != g.Taken.OK || math.Abs(more-g.Taken.Extra) > 1e-9 {
		h.Fatalf("%+v of %+v at %v: %v and %v, want %v and %v", g, before, h.now, g.Taken.OK, g.Taken.Extra, ok, more)
	}
	if !g.Taken.OK {
		h.account = before
		h.done["refused"]++
		return
	}
	h.done["prefetched"]++
	if await {
		h.done["prefetched in turn"]++
	}
	h.leases = append(h.leases, &lease{left: g.Taken.Extra + g.Out, taken: g.Taken.After.TS, end: g.End()})
}

func (h *history) lease() *lease {
	if len(h.leases) == 0 {
		return &lease{}
	}
	return h.leases[h.IntN(len(h.leases))]
}

func (h *history) use() {
	alive := slices.DeleteFunc(slices.Clone(h.leases), func(l *lease) bool { return l.left == 0 || !l.end.After(h.latest) })
	if len(alive) > 0 {
		l := alive[h.IntN(len(alive))]
		n := l.left * []float64{1, 0.5}[h.IntN(2)]
		l.left, l.unsaid = l.left-n, l.unsaid+n
		h.done["used"]++
	}
}

// giveBack gives back what is left of a lease.
func (h *history) giveBack() {
	if l := h.lease(); l.left > 0 {
		h.back(&bucket.Return{Count: l.left, Taken: l.taken, End: l.end, Spent: h.spent()})
		l.left = 0
		h.done["returned"]++
	}
}

// tell gives back what was used.
func (h *history) tell() {
	if l := h.lease(); !l.taken.IsZero() {
		h.back(&bucket.Return{Count: min(l.unsaid, h.count()), Taken: l.taken, Spent: h.spent()})
		h.done["told"]++
	}
}

func (h *history) back(r *bucket.Return) {
	if h.IntN(2) == 0 { // the database's clock was set back, and to resume set the row's instant back
		r.Known = h.latest.Add(time.Duration(h.IntN(2_000_000)) * time.Microsecond)
	}
	done, err := h.table.Return(h.Context(), h.db.Pool, h.row, &h.definition, r, false, &h.now)
	if err != nil || !done {
		h.Fatal(done, err)
	}
	h.account.back(r, h.now)
}

func (h *history) credit() {
	if h.definition.Kind == bucket.SlidingWindow {
		return
	}
	n, most := h.count(), []float64{h.definition.Capacity, math.MaxFloat64}[h.IntN(2)]
	c, spent := h.change(0), h.spent()
	taken := h.given(Give{Change: &c, Tokens: n, Most: most, Spent: spent})
	if n > 0 || spent.Spent > 0 {
		h.give(n, most, spent, h.now)
	}
	h.make(h.now)
	h.told(taken)
}

// given gives to the row, and returns it as it was then.
func (h *history) given(g Give) Taken {
	h.Helper()
	gives, there := []Give{g}, h.there
	noError(h, errOf(h.table.Give(h.Context(), h.db.Pool, &pgx.Batch{}, gives, &h.now)))
	if gives[0].Taken.Made == there {
		h.Fatalf("made: %v, there was a row: %v", gives[0].Taken.Made, there)
	}
	return gives[0].Taken
}

func (h *history) touch() {
	c := h.change(0)
	taken := h.given(Give{Change: &c})
	h.make(h.now)
	h.told(taken)
}

// told compares what a give has told of what is out.
func (h *history) told(taken Taken) {
	h.Helper()
	if math.Abs(taken.Out.Tokens-h.out.Tokens) > 1e-9 || h.out.Tokens > 0 && !taken.Out.Until.Equal(h.out.Until) {
		h.Fatalf("told %v, want %v", taken.Out, h.out)
	}
}

func (h *history) pause() {
	if !h.there || h.IntN(3) > 0 {
		return
	}
	if h.state.Paused.After(h.now) {
		h.state = h.definition.Resume(h.row.Key.Key, h.state, h.now)
	} else {
		h.state = h.definition.Pause(h.state, h.now, h.now.Add(time.Duration(h.IntN(50))*time.Millisecond))
	}
	h.send(func(b *pgx.Batch) { h.table.QueuePut(b, h.row, h.state) })
}

// reset is as a Store does it.
func (h *history) reset() {
	if h.IntN(2) == 0 {
		return
	}
	left, err := h.table.Reset(h.Context(), h.db.Pool, h.row.Key)
	noError(h, err)
	if stays := h.there && h.out.Tokens > 0; stays != (len(left) == 1) {
		h.Fatalf("left %v of %v", left, h.account)
	}
	h.done["reset"]++
	if len(left) == 0 {
		h.account = account{definition: h.definition, key: h.key}
		return
	}
	c := h.change(0)
	h.told(h.given(Give{Change: &c}))
	t := h.at(h.now)
	if h.state.Paused.After(h.now) {
		t = h.now
	}
	if h.state.Paused = (time.Time{}); h.forgets(t) {
		h.send(func(b *pgx.Batch) { h.table.QueueRemove(b, h.row) })
		h.account = account{definition: h.definition, key: h.key}
		return
	}
	if h.definition.Kind != bucket.SlidingWindow { // whose slots tell what is out
		h.state = h.definition.Refill(h.state, h.now)
		h.state.Value = max(h.state.Value, h.definition.Capacity-h.owed(h.now))
	}
	h.send(func(b *pgx.Batch) { h.table.QueuePut(b, h.row, h.state) })
}

// compare compares the row with the account; and what is there with what there may be.
func (h *history) compare() {
	h.Helper()
	var (
		s     state
		ahead []float64
	)
	sql := `SELECT value, ts, paused, slots, ahead FROM ` + h.db.Schema + `.rate_limits WHERE name = $1 AND key = $2`
	rows, err := h.db.Pool.Query(h.Context(), sql, h.row.Name, h.row.Key.Key)
	noError(h, err)
	noError(h, errOf(pgx.ForEachRow(rows, s.fields(&ahead), func() error { return nil })))
	got, there := s.get()
	out := readOut(ahead)
	if there != h.there {
		h.Fatalf("there is a row: %v, want %v", there, h.there)
	}
	if !there {
		return
	}
	want := h.state
	if h.definition.Kind == bucket.FixedWindow { // which mean the same
		got, want = h.definition.Refill(got, h.now), h.definition.Refill(want, h.now)
	}
	same := math.Abs(got.Value-want.Value) < 1e-9 && got.TS.Equal(want.TS) && got.Paused.Equal(want.Paused)
	same = same && math.Abs(out.Tokens-h.out.Tokens) < 1e-9 && (out.Tokens == 0 || out.Until.Equal(h.out.Until))
	if got.Slots != nil && want.Slots != nil {
		for slot := range h.definition.Slots + 1 {
			same = same && math.Abs(got.Slots.Of(slot)-want.Slots.Of(slot)) < 1e-9
		}
	}
	if !same {
		h.Fatalf("%v, out %v; want %v, %v; at %v", got, out, want, h.out, h.now)
	}
	held := h.definition.Refill(got, h.now).Value
	for _, l := range h.leases {
		if l.end.After(h.latest) {
			held += l.left
		}
	}
	if held > h.definition.Capacity+1e-9 {
		h.Fatalf("%v in the row and in memory", held)
	}
}
