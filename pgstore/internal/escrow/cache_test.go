package escrow_test

import (
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
)

var (
	noon   = time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	plain  = ratelimit.TokenBucket{Name: "bucket", Rate: 100, Period: time.Second, Capacity: 1000}
	window = ratelimit.FixedWindow{Name: "window", Rate: 1000, Period: time.Second}
)

// memory is one of what lasts a second, on a clock that is given, and what it gives back.
type memory struct {
	*escrow.Cache
	t *testing.T

	mu   sync.Mutex
	at   time.Time
	back []escrow.Return
}

func newMemory(t *testing.T) *memory {
	m := &memory{t: t, at: noon}
	m.Cache = escrow.New(escrow.Config{
		Lasts: time.Second, Clock: m.now, Prefetch: func(*escrow.Entry) {},
		GiveBack: func(r []escrow.Return) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.back = append(m.back, r...)
		},
	})
	return m
}

func (m *memory) now() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.at
}

func (m *memory) pass(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.at = m.at.Add(d)
}

func (m *memory) returned() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.back)
}

// demand is that of one call.
func demand(t *testing.T, r ratelimit.Request) *decide.Demand {
	t.Helper()
	call, err := decide.New(false, r)
	if err != nil {
		t.Fatal(err)
	}
	return &call.Demands[0]
}

func (m *memory) of(limit ratelimit.Limit) *escrow.Entry {
	m.t.Helper()
	h := m.FindOrAdd(demand(m.t, limit.For("k")))
	if h == nil {
		m.t.Fatal("nothing can be taken ahead")
	}
	return h
}

// order is one for a key that others take from, too.
func (m *memory) order(e *escrow.Entry) escrow.Prefetch {
	m.t.Helper()
	e.CountDemand(100, 1)
	e.Contended()
	o := e.Plan(0, 0)
	if o.Count == 0 {
		m.t.Fatal("nothing is ordered")
	}
	return o
}

// lease is one of n tokens of a row that has 500 left.
func (m *memory) lease(n float64) escrow.Lease {
	return escrow.Lease{Count: n, After: bucket.State{Value: 500, TS: m.now()}, At: m.now(), End: m.now().Add(time.Second), Sent: m.now()}
}

// bring brings n tokens from a row.
func (m *memory) bring(e *escrow.Entry, n float64) {
	o := m.order(e)
	o.Receive(m.lease(n))
}

func (m *memory) want(limit ratelimit.Limit, n float64, want bool) escrow.Tokens {
	m.t.Helper()
	r := limit.ForN("k", n)
	var tokens escrow.Tokens
	if ok := m.Find(&r).Take(n, false, &tokens); ok != want {
		m.t.Fatalf("%v of %s: got %v, want %v", n, ratelimit.NameOf(limit), ok, want)
	}
	return tokens
}

func TestTakeUntilTheEnd(t *testing.T) {
	m := newMemory(t)
	m.want(plain, 1, false)
	m.bring(m.of(plain), 10)
	if tokens := m.want(plain, 4, true); !tokens.At.Equal(m.now()) || tokens.After.Value != 506 {
		t.Errorf("got %v at %v, want 506 at %v", tokens.After.Value, tokens.At, m.now())
	}
	m.want(plain, 7, false)
	m.want(plain, 0, false) // asks the row
	m.want(plain, -1, false)
	m.want(plain, 1e-20, false)
	m.pass(time.Second - time.Microsecond)
	m.want(plain, 5, true)
	m.pass(time.Microsecond)
	m.want(plain, 1, false)
}

// Another definition, one behind a pointer, which can change, and one of a type of the program's own,
// which may have a pointer in it or be not comparable, are not known.
func TestTakeKnowsOneDefinition(t *testing.T) {
	m := newMemory(t)
	m.bring(m.of(plain), 10)
	other := plain
	other.Rate = -1
	m.want(other, 1, false)
	if m.Find(&ratelimit.Request{Limit: &plain, Key: "k", Count: 1}) != nil {
		t.Error("a limit behind a pointer is known")
	}
	for _, own := range []ratelimit.Limit{struct{ *ratelimit.TokenBucket }{&plain}, incomparable{TokenBucket: plain}} {
		request := &ratelimit.Request{Limit: own, Key: "own", Count: 1}
		m.FindOrAdd(demand(t, *request))
		if m.Find(request) != nil {
			t.Errorf("a limit of the type %T is known", own)
		}
	}
	m.want(plain, 1, true)
	other.Rate = 200
	m.of(other)
	m.want(plain, 1, false)
	m.want(other, 1, false)
}

// incomparable is a type of a program's own.
type incomparable struct {
	ratelimit.TokenBucket
	Tags []string
}

// wantOut takes n tokens for a transaction.
func (m *memory) wantOut(limit ratelimit.Limit, n float64) escrow.Tokens {
	m.t.Helper()
	r := limit.ForN("k", n)
	var tokens escrow.Tokens
	if !m.Find(&r).Take(n, true, &tokens) {
		m.t.Fatalf("%v of %s are not held", n, ratelimit.NameOf(limit))
	}
	return tokens
}

// wantReturned asserts how many tokens were returned, of which callers had been told or not,
// and how many the row was told of.
func (m *memory) wantReturned(told, untold, spent float64) {
	m.t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	var got [3]float64
	for _, r := range m.back {
		if r.End.IsZero() {
			got[0] += r.Count
		} else {
			got[1] += r.Count
		}
		got[2] += r.Spent.Spent
	}
	if got != [3]float64{told, untold, spent} {
		m.t.Errorf("returned %v that were told, %v others, and %v spent, want %v, %v and %v", got[0], got[1], got[2], told, untold, spent)
	}
	m.back = nil
}

// Tokens of a transaction that was rolled back go to the lease that they are of, and if that
// has ended to the row, which is told that it counts them no more.
func TestTakenFromSeveralLeases(t *testing.T) {
	m := newMemory(t)
	e := m.of(plain)
	m.bring(e, 3)
	m.pass(time.Second / 2)
	m.bring(e, 3)
	tokens := m.wantOut(plain, 5)
	m.pass(time.Second/2 + time.Microsecond)
	tokens.PutBack()
	m.wantReturned(3, 0, 3)
	m.want(plain, 4, false)
	tokens = m.wantOut(plain, 3)
	m.want(plain, 1, false)
	m.pass(time.Second)
	tokens.PutBack()
	m.want(plain, 1, false)
	m.wantReturned(3, 0, 3)
}

func TestWindowEndsWithIt(t *testing.T) {
	m := newMemory(t)
	h := m.of(window)
	o, lease := m.order(h), m.lease(10)
	lease.After.TS = m.now().Add(-time.Second * 9 / 10)
	o.Receive(lease)
	m.pass(time.Second/10 - time.Microsecond)
	m.want(window, 1, true)
	m.pass(time.Microsecond)
	m.want(window, 1, false)
}

// A call counts in one window: what is held of two is not put together for it, and it is
// told an instant of the window that it counts in.
func TestTakenFromOneWindow(t *testing.T) {
	m := newMemory(t)
	h := m.of(window)
	for _, window := range []time.Duration{0, 500 * time.Millisecond} { // the database's clock was set
		o, at := m.order(h), noon.Add(window)
		o.Receive(escrow.Lease{Count: 3, After: bucket.State{Value: 500, TS: at}, At: at, End: at.Add(time.Second), Sent: m.now()})
	}
	m.want(window, 4, false)
	m.want(window, 2, true)
	if tokens := m.want(window, 2, true); !tokens.At.Equal(noon.Add(500 * time.Millisecond)) {
		t.Errorf("told %v, want an instant of the second window", tokens.At)
	}
	if tokens := m.want(window, 1, true); !tokens.At.Equal(noon) {
		t.Errorf("told %v, want %v", tokens.At, noon)
	}
}

// What was held when a key was edited, and what was prefetched before, is not used after it,
// but returned.
func TestEvict(t *testing.T) {
	m := newMemory(t)
	e := m.of(plain)
	m.bring(e, 10)
	tokens := m.wantOut(plain, 7)
	before := m.order(e)
	m.want(plain, 1, true)
	returns := m.Evict(decide.Key{Name: "bucket", Key: "k"})
	if len(returns) != 1 || returns[0].Count != 2 || !returns[0].Taken.Equal(m.now()) || !returns[0].End.Equal(m.now().Add(time.Second)) {
		t.Errorf("got %+v, want 2 until a second later", returns)
	}
	if again := m.Evict(decide.Key{Name: "bucket", Key: "k"}); again != nil {
		t.Errorf("got %+v again", again)
	}
	tokens.PutBack()
	m.wantReturned(7, 0, 7)
	m.want(plain, 1, false)
	before.Receive(m.lease(10))
	m.want(plain, 1, false)
	if returns := m.Evict(decide.Key{Name: "bucket", Key: "k"}); len(returns)+m.returned() != 1 { // or the timer was faster
		t.Errorf("got %+v, want what had been prefetched before", returns)
	}
	m.bring(e, 10)
	m.want(plain, 1, true)
}

// An answer that comes late brings nothing, on the machine's clock, and is returned.
func TestArrivedLate(t *testing.T) {
	var returned atomic.Int64
	m := escrow.New(escrow.Config{
		Lasts: time.Second, Prefetch: func(*escrow.Entry) {},
		GiveBack: func(r []escrow.Return) { returned.Add(int64(r[0].Count)) },
	})
	for _, late := range []time.Duration{2 * time.Second, 0} {
		e := m.FindOrAdd(demand(t, plain.For("k")))
		e.CountDemand(100, 1)
		e.Contended()
		o := e.Plan(0, 1)
		now := time.Now()
		o.Receive(escrow.Lease{Count: 10, After: bucket.State{TS: now}, At: now, End: now.Add(time.Second), Sent: now.Add(-late)})
		r := plain.ForN("k", 10)
		if ok, want := m.Find(&r).Take(10, false, new(escrow.Tokens)), late == 0; ok != want {
			t.Errorf("%v late: got %v, want %v", late, ok, want)
		}
	}
	for deadline := time.Now().Add(10 * time.Second); returned.Load() != 10; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d returned, want 10", returned.Load())
		}
	}
}

// How much is ordered follows what was handed out, and is bounded by what the limit holds.
func TestOrder(t *testing.T) {
	m := newMemory(t)
	h := m.of(plain)
	if o := h.Plan(0, 1); o.Count != 0 {
		t.Errorf("got %+v, want nothing", o)
	}
	for range 100 {
		m.pass(10 * time.Millisecond)
		h.CountDemand(2, 1)
	}
	if o := h.Plan(0, 1); o.Count < 170 || o.Count > 190 || o.Capacity != 900 {
		t.Errorf("got %v of %v, want about 180 of 900, since 200 were handed out in a second", o.Count, o.Capacity)
	}
	h.CountDemand(1e6, 1)
	if o := h.Plan(0, 1); o.Count > 900 {
		t.Errorf("got %v, want 900 at most", o.Count)
	}
	if o := h.Plan(0, 901); o.Count != 0 {
		t.Errorf("got %+v beside more than the lowered capacity", o)
	}
	m.pass(time.Minute)
	if o := h.Plan(0, 1); o.Count != 0 {
		t.Errorf("got %v, want nothing after a minute", o.Count)
	}
	tight := plain
	tight.Capacity = 100
	if h := m.FindOrAdd(demand(t, tight.For("tight"))); h.CanPrefetch() {
		t.Error("a limit that is refilled in a second can be taken ahead from for one")
	}
}

// From a key that is asked now and then nothing is prefetched; but soon from one that others
// take from, too.
func TestOrderOfFewCalls(t *testing.T) {
	m := newMemory(t)
	e := m.of(plain)
	order := func() float64 { o := e.Plan(0, 1); return o.Count }
	e.CountDemand(100, 31)
	if n := order(); n != 0 || e.WorthPrefetching() {
		t.Errorf("got %v after 31 calls, want nothing", n)
	}
	e.CountDemand(1, 1)
	if n := order(); n < 90 || !e.WorthPrefetching() {
		t.Errorf("got %v after 32 calls, want most of what they took", n)
	}
	m.pass(1999 * time.Millisecond)
	if n := order(); n == 0 {
		t.Error("got nothing in the second after them")
	}
	m.pass(2 * time.Second)
	if n := order(); n != 0 {
		t.Errorf("got %v after two seconds more, want nothing", n)
	}
	e.CountDemand(10, 1)
	e.Contended()
	if n := order(); n < 9 {
		t.Errorf("got %v after a call that met others, want most of what it took", n)
	}
}

// The row is told with the next order what was used of leases that it counts as out, until a
// grace after their end; not what a transaction may put back.
func TestSpentIsTold(t *testing.T) {
	m := newMemory(t)
	e := m.of(plain)
	m.bring(e, 10)
	m.want(plain, 3, true)
	tokens := m.wantOut(plain, 4)
	o := m.order(e)
	if o.Spent.Spent != 3 || !o.SpentEnd.Equal(noon.Add(time.Second)) {
		t.Errorf("told %v until %v, want 3 until a second later", o.Spent, o.SpentEnd)
	}
	tokens.Spend()
	if o := m.order(e); o.Spent.Spent != 4 {
		t.Errorf("told %v, want 4", o.Spent)
	} else {
		o.Failed()
	}
	if o := m.order(e); o.Spent.Spent != 4 {
		t.Errorf("told %v again, want 4", o.Spent)
	} else {
		o.Failed()
	}
	m.pass(time.Second)
	if o := m.order(e); o.Spent.Spent != 4 || !o.SpentEnd.Equal(noon.Add(time.Second)) {
		t.Errorf("told %v until %v after the end, want 4 until then", o.Spent, o.SpentEnd)
	} else {
		o.Failed()
	}
	m.pass(bucket.Grace)
	if o := m.order(e); o.Spent.Spent != 0 {
		t.Errorf("told %v of a lease that the row may count no more", o.Spent)
	}
}

// What a transaction uses of a lease that has ended meanwhile is told all the same; when
// nothing else is held, by the timer.
func TestSpentIsToldAfterTheEnd(t *testing.T) {
	m := newMemory(t)
	m.bring(m.of(window), 10)
	tokens := m.wantOut(window, 4)
	if returns := m.Evict(decide.Key{Name: "window", Key: "k"}); len(returns) != 1 || returns[0].Count != 6 || returns[0].Spent.Spent != 0 {
		t.Errorf("got %+v, want 6", returns)
	}
	tokens.Spend()
	for deadline := time.Now().Add(10 * time.Second); m.returned() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nothing is told")
		}
	}
	m.wantReturned(0, 0, 4)
}

// What was used of one window is not told as if it were of the next, which does not count it.
func TestSpentIsOfOneWindow(t *testing.T) {
	m := newMemory(t)
	e := m.of(window)
	m.bring(e, 10)
	tokens := m.wantOut(window, 4)
	m.want(window, 3, true)
	failed := m.order(e)
	m.pass(time.Second)
	m.bring(e, 10)
	tokens.Spend()
	failed.Failed()
	m.want(window, 2, true)
	if o := m.order(e); o.Spent.Spent != 2 || !o.SpentEnd.Equal(noon.Add(2*time.Second)) {
		t.Errorf("told %v until %v, want 2 of the second window", o.Spent.Spent, o.SpentEnd)
	}
}

// What is left of a slot that is over goes back to it all the same: no window would have
// room for it else for a whole period.
func TestSlotIsReturnedAfterItsEnd(t *testing.T) {
	m := newMemory(t)
	sliding := ratelimit.SlidingWindow{Name: "sliding", Rate: 1000, Period: 2 * time.Second, Slots: 10}
	e, d := m.of(sliding), bucket.Definition(sliding.Definition())
	o, fresh := m.order(e), d.Fresh("k", m.now())
	o.Receive(escrow.Lease{Count: 10, After: fresh, At: m.now(), End: fresh.TS.Add(200 * time.Millisecond), Sent: m.now()})
	m.want(sliding, 1, true)
	undone := m.wantOut(sliding, 3)
	m.pass(200*time.Millisecond + time.Microsecond)
	m.want(sliding, 1, false)
	undone.PutBack()
	told, left := 0.0, 0.0
	for _, r := range append(m.Evict(decide.Key{Name: "sliding", Key: "k"}), m.back...) {
		if !r.Taken.Equal(fresh.TS) {
			t.Errorf("got %+v, want it to the slot of %v", r, fresh.TS)
		}
		if r.End.IsZero() {
			told += r.Count
			continue
		}
		left += r.Count
		if want := fresh.TS.Add(11 * 200 * time.Millisecond); !r.End.Equal(want) {
			t.Errorf("returned until %v, want %v", r.End, want)
		}
	}
	if told != 3 || left != 6 {
		t.Errorf("got %v and %v back, want 3 and 6", told, left)
	}
}

// A refusal is told again until time has brought enough, the row is known to have changed,
// or the moment is over.
func TestRefusal(t *testing.T) {
	empty := bucket.State{TS: noon}
	for name, test := range map[string]struct {
		do   func(*memory, *escrow.Entry)
		n    float64
		want bool
	}{
		"at once":             {n: 1, want: true},
		"more":                {n: 1000, want: true},
		"more than there is":  {n: 1001},
		"nothing":             {n: 0},
		"just before":         {do: func(m *memory, _ *escrow.Entry) { m.pass(999 * time.Millisecond) }, n: 100, want: true},
		"enough has come":     {do: func(m *memory, _ *escrow.Entry) { m.pass(10 * time.Millisecond) }, n: 1},
		"over":                {do: func(m *memory, _ *escrow.Entry) { m.pass(time.Second) }, n: 1000},
		"the clock went back": {do: func(m *memory, _ *escrow.Entry) { m.pass(-1) }, n: 1},
		"taken since":         {do: func(_ *memory, h *escrow.Entry) { h.RowChanged() }, n: 1},
		"edited since":        {do: func(m *memory, h *escrow.Entry) { m.Evict(h.Template().KeyOf()) }, n: 1},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t)
			h := m.of(plain)
			h.Refused(empty, m.now(), m.now(), h.Changes())
			if test.do != nil {
				test.do(m, h)
			}
			result, ok := h.Refuse(test.n)
			if ok != test.want {
				t.Fatalf("got %v, want %v", ok, test.want)
			}
			due := noon.Add(time.Duration(test.n) * 10 * time.Millisecond)
			if ok && (result.OK || result.Request.Count != test.n || !result.At.Equal(m.now()) || !result.RetryAt.Equal(due)) {
				t.Errorf("got %+v, want %v refused until %v", result, test.n, due)
			}
		})
	}
}

// What a statement read before the row changed is not remembered.
func TestRefusalBeforeAChange(t *testing.T) {
	m := newMemory(t)
	h := m.of(plain)
	asked := h.Changes()
	h.RowChanged()
	h.Refused(bucket.State{TS: noon}, m.now(), m.now(), asked)
	if _, ok := h.Refuse(1); ok {
		t.Error("refused by what was there before")
	}
}

// In a pause the end of it is what a refusal tells.
func TestRefusalInAPause(t *testing.T) {
	m := newMemory(t)
	h, end := m.of(plain), noon.Add(time.Minute)
	h.Refused(bucket.State{Value: 1000, TS: noon, Paused: end}, m.now(), m.now(), h.Changes())
	if result, ok := h.Refuse(1); !ok || result.OK || !result.RetryAt.Equal(end) || !result.PausedUntil.Equal(end) || result.Value != 1000 {
		t.Errorf("got %v, %+v, want a refusal until %v with 1000 left", ok, result, end)
	}
}

// A memory remembers so many keys. Those of which nothing is known any more make place.
func TestMemoryIsBounded(t *testing.T) {
	const keys, most = 30_000, 2048 * 8
	m := newMemory(t)
	ask := func(i int) *escrow.Entry { return m.FindOrAdd(demand(t, plain.For(strconv.Itoa(i)))) }
	fill := func(from int) (n int) {
		for i := range keys {
			if h := ask(from + i); h != nil {
				h.CountDemand(1, 1)
				n++
			}
		}
		return n
	}
	held := ask(-1)
	m.bring(held, 10)
	if n := fill(0); n > most || n < most*8/10 {
		t.Errorf("remembers %d keys, want up to %d", n, most)
	}
	if n := fill(keys); n > most/5 {
		t.Errorf("remembers %d keys more, while all are in use", n)
	}
	m.pass(time.Second - 1)
	if ask(-1) != held {
		t.Error("a key that holds something was forgotten")
	}
	m.pass(time.Minute)
	if n := fill(2 * keys); n < most*8/10 {
		t.Errorf("remembers %d other keys after a minute, want about %d", n, most)
	}
}

// However many take and put back at once, each token is handed out once.
func TestTokensAreHandedOutOnce(t *testing.T) {
	const goroutines, leases, each = 16, 20, 50_000
	m := newMemory(t)
	h := m.of(window)
	request := window.For("k")
	var taken atomic.Int64
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for i := range goroutines {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				var tokens escrow.Tokens
				ok := m.Find(&request).Take(float64(1+i%3), true, &tokens)
				switch {
				case ok && n%5 == 0:
					tokens.PutBack()
				case ok:
					tokens.Spend()
					taken.Add(int64(tokens.Count))
				default:
					runtime.Gosched()
				}
			}
		})
	}
	back := 0.0
	for range leases {
		m.bring(h, each)
		had := m.returned()
		for want := taken.Load() + each/2; taken.Load() < want && m.returned() == had; { // or the timer has given it back
			runtime.Gosched()
		}
		for _, r := range m.EvictAll() {
			back += r.Count
		}
		m.bring(h, each)
	}
	close(stop)
	wg.Wait()
	returns := m.EvictAll()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range append(returns, m.back...) {
		back += r.Count
	}
	if sum := back + float64(taken.Load()); sum != 2*leases*each {
		t.Errorf("handed out %d, gave back %v: %v, want %d", taken.Load(), back, sum, 2*leases*each)
	}
}
