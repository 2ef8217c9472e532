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
	"github.com/pgratelimit/ratelimit/internal/escrow"
)

var (
	noon   = time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	plain  = ratelimit.TokenBucket{Name: "bucket", Rate: 100, Period: time.Second, Capacity: 1000}
	window = ratelimit.FixedWindow{Name: "window", Rate: 1000, Period: time.Second}
)

// memory is one of what lasts a second, on a clock that is given, and what it gives back.
type memory struct {
	*escrow.Memory
	t *testing.T

	mu   sync.Mutex
	at   time.Time
	back []escrow.Return
}

func newMemory(t *testing.T) *memory {
	m := &memory{t: t, at: noon}
	m.Memory = escrow.New(time.Second, m.now, func(*escrow.Holder) {}, func(r []escrow.Return) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.back = append(m.back, r...)
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

func (m *memory) of(limit ratelimit.Limit) *escrow.Holder {
	m.t.Helper()
	call, err := decide.New(false, limit.For("k"))
	if err != nil {
		m.t.Fatal(err)
	}
	h := m.Of(&call.Asks[0])
	if h == nil {
		m.t.Fatal("nothing can be taken ahead")
	}
	return h
}

func (m *memory) order(h *escrow.Holder) escrow.Order {
	m.t.Helper()
	o, ok := h.Order(1)
	if !ok {
		m.t.Fatal("nothing can be ordered")
	}
	return o
}

// bring brings n tokens from a row.
func (m *memory) bring(h *escrow.Holder, n float64) {
	o := m.order(h)
	o.Arrived(escrow.Lot{Count: n, After: bucket.State{Value: 500, TS: m.now()}, At: m.now(), Sent: m.now()})
}

func (m *memory) want(limit ratelimit.Limit, n float64, want bool) escrow.Tokens {
	m.t.Helper()
	r := limit.ForN("k", n)
	var tokens escrow.Tokens
	if ok := m.Seen(&r).Take(n, &tokens); ok != want {
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

// Another definition, and one behind a pointer, which can change, are not known.
func TestTakeKnowsOneDefinition(t *testing.T) {
	m := newMemory(t)
	m.bring(m.of(plain), 10)
	other := plain
	other.Rate = -1
	m.want(other, 1, false)
	if m.Seen(&ratelimit.Request{Limit: &plain, Key: "k", Count: 1}) != nil {
		t.Error("a limit behind a pointer is known")
	}
	m.want(plain, 1, true)
	other.Rate = 200
	m.of(other)
	m.want(plain, 1, false)
	m.want(other, 1, false)
}

func TestTakenFromSeveralLots(t *testing.T) {
	m := newMemory(t)
	h := m.of(plain)
	m.bring(h, 3)
	m.pass(time.Second / 2)
	m.bring(h, 3)
	tokens := m.want(plain, 5, true)
	m.pass(time.Second/2 + time.Microsecond)
	tokens.PutBack() // three of them are over
	m.want(plain, 4, false)
	m.want(plain, 3, true)
	m.want(plain, 1, false)
	m.pass(time.Second)
	tokens.PutBack()
	m.want(plain, 1, false)
}

func TestWindowEndsWithIt(t *testing.T) {
	m := newMemory(t)
	h := m.of(window)
	o := m.order(h)
	o.Arrived(escrow.Lot{Count: 10, After: bucket.State{Value: 500, TS: m.now().Add(-time.Second * 9 / 10)}, At: m.now(), Sent: m.now()})
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
		o.Arrived(escrow.Lot{Count: 3, After: bucket.State{TS: at}, At: at, Sent: m.now()})
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

// What was asked for before a key was edited is not used after it.
func TestDrop(t *testing.T) {
	m := newMemory(t)
	h := m.of(plain)
	m.bring(h, 10)
	tokens := m.want(plain, 10, true) // of which nothing is left
	o := m.order(h)
	empty := m.order(h)
	waited := empty.Arrived(escrow.Lot{After: bucket.State{TS: m.now()}, At: m.now(), Sent: m.now()}).Tokens(1, bucket.State{})
	waited.PutBack()
	m.want(plain, 1, true)
	m.Edited(decide.Key{Name: "bucket", Key: "k"})
	o.Arrived(escrow.Lot{Count: 10, After: bucket.State{TS: m.now()}, At: m.now(), Sent: m.now()})
	tokens.PutBack()
	waited.PutBack()
	m.want(plain, 1, false)
	m.bring(h, 10)
	m.want(plain, 1, true)
}

// An answer that comes late brings nothing, on the machine's clock.
func TestArrivedLate(t *testing.T) {
	m := escrow.New(time.Second, nil, func(*escrow.Holder) {}, func([]escrow.Return) {})
	call, err := decide.New(false, plain.For("k"))
	if err != nil {
		t.Fatal(err)
	}
	for late, want := range map[time.Duration]bool{0: true, 2 * time.Second: false} {
		o, _ := m.Of(&call.Asks[0]).Order(1)
		now := time.Now()
		o.Arrived(escrow.Lot{Count: 10, After: bucket.State{TS: now}, At: now, Sent: now.Add(-late)})
		r := plain.ForN("k", 10)
		if ok := m.Seen(&r).Take(10, new(escrow.Tokens)); ok != want {
			t.Errorf("%v late: got %v, want %v", late, ok, want)
		}
	}
}

func TestTakeBack(t *testing.T) {
	m := newMemory(t)
	h := m.of(plain)
	m.bring(h, 10)
	m.want(plain, 4, true)
	taken := m.now()
	back := m.TakeBack()
	if len(back) != 1 || back[0].Count != 6 || !back[0].Taken.Equal(taken) || !back[0].End.Equal(taken.Add(time.Second)) {
		t.Errorf("got %+v, want 6 until a second later", back)
	}
	m.want(plain, 1, false)
	if back := m.TakeBack(); back != nil {
		t.Errorf("got %+v again", back)
	}
}

// How much is ordered follows what was handed out, and is bounded by what the limit holds.
func TestOrder(t *testing.T) {
	m := newMemory(t)
	h := m.of(plain)
	if o := m.order(h); o.Ahead != 0 || o.Capacity != 900 {
		t.Errorf("got %+v, want nothing of 900", o)
	}
	if _, ok := h.Order(901); ok {
		t.Error("more than the lowered capacity can be ordered")
	}
	for range 100 {
		m.pass(10 * time.Millisecond)
		h.Note(2, 1)
	}
	if o := m.order(h); o.Ahead < 190 || o.Ahead > 210 {
		t.Errorf("got %v, want about 200, which were handed out in a second", o.Ahead)
	}
	h.Note(1e6, 1)
	if o := m.order(h); o.Ahead > 900 {
		t.Errorf("got %v, want 900 at most", o.Ahead)
	}
	m.pass(time.Minute)
	if o := m.order(h); o.Ahead != 0 {
		t.Errorf("got %v, want nothing after a minute", o.Ahead)
	}
	tight := plain
	tight.Capacity = 100
	call, err := decide.New(false, tight.For("tight"))
	if err != nil {
		t.Fatal(err)
	}
	if h := m.Of(&call.Asks[0]); h.Holds() {
		t.Error("a limit that is refilled in a second can be taken ahead from for one")
	}
}

// Of a key that is asked now and then nothing is taken ahead.
func TestOrderOfFewCalls(t *testing.T) {
	m := newMemory(t)
	h := m.of(plain)
	h.Note(100, 31)
	if o := m.order(h); o.Ahead != 0 {
		t.Errorf("got %v after 31 calls, want nothing", o.Ahead)
	}
	h.Note(1, 1)
	if o := m.order(h); o.Ahead < 100 {
		t.Errorf("got %v after 32 calls, want what they took", o.Ahead)
	}
	m.pass(1999 * time.Millisecond)
	if o := m.order(h); o.Ahead == 0 {
		t.Error("got nothing in the second after them")
	}
	m.pass(2 * time.Second)
	if o := m.order(h); o.Ahead != 0 {
		t.Errorf("got %v after two seconds more, want nothing", o.Ahead)
	}
}

// From a row that is known to have next to nothing nothing is taken ahead, until it has come in.
func TestOrderOfLittle(t *testing.T) {
	m := newMemory(t)
	h := m.of(plain)
	h.Note(100, 100)
	o := m.order(h)
	o.Arrived(escrow.Lot{Count: 1, After: bucket.State{Value: 1, TS: m.now()}, At: m.now(), Sent: m.now()})
	if o := m.order(h); o.Ahead != 0 {
		t.Errorf("got %v, want nothing", o.Ahead)
	}
	m.pass(50 * time.Millisecond)
	if o := m.order(h); o.Ahead == 0 {
		t.Error("got nothing when 5 have come in")
	}
}

// What would not be in the row if it were given back, since as much has come in, is kept.
func TestTakeBackKeepsWhatWouldBeLost(t *testing.T) {
	m := newMemory(t)
	h := m.of(plain)
	m.bring(h, 10)
	m.pass(100 * time.Millisecond)
	if back := m.TakeBack(); back != nil {
		t.Errorf("got %+v, of which nothing would be in the row", back)
	}
	m.want(plain, 10, true)
	m.bring(h, 10)
	m.pass(99 * time.Millisecond)
	if back := m.TakeBack(); len(back) != 1 || back[0].Count != 10 {
		t.Errorf("got %+v, want 10", back)
	}
}

// What is left of a slot that is over goes back to it all the same: no window would have
// room for it else for a whole period. What is put back then goes with it.
func TestSlotIsGivenBackAfterItsEnd(t *testing.T) {
	m := newMemory(t)
	sliding := ratelimit.SlidingWindow{Name: "sliding", Rate: 1000, Period: 2 * time.Second, Slots: 10}
	h, d := m.of(sliding), bucket.Definition(sliding.Definition())
	o := m.order(h)
	o.Arrived(escrow.Lot{Count: 10, After: d.Fresh("k", m.now()), At: m.now(), Sent: m.now()})
	used := m.want(sliding, 1, true)
	undone := m.want(sliding, 3, true)
	m.pass(200*time.Millisecond + time.Microsecond)
	m.want(sliding, 1, false)
	undone.PutBack()
	back := m.TakeBack()
	total := 0.0
	for _, b := range back {
		total += b.Count
		if want := used.After.TS.Add(11 * 200 * time.Millisecond); !b.Taken.Equal(used.After.TS) || !b.End.Equal(want) {
			t.Errorf("got %+v, want it to the slot of %v until %v", b, used.After.TS, want)
		}
	}
	if total != 9 {
		t.Errorf("got %v back, want 9", total)
	}
	if back := m.TakeBack(); back != nil {
		t.Errorf("got %+v again", back)
	}
	m.Edited(decide.Key{Name: "sliding", Key: "k"})
	used.PutBack()
	if back := m.TakeBack(); back != nil {
		t.Errorf("got %+v of what was thrown away", back)
	}
}

// A refusal is told again until time has brought enough, the row is known to have changed,
// or the moment is over.
func TestRefusal(t *testing.T) {
	empty := bucket.State{TS: noon}
	for name, test := range map[string]struct {
		do   func(*memory, *escrow.Holder)
		n    float64
		want bool
	}{
		"at once":             {n: 1, want: true},
		"more":                {n: 1000, want: true},
		"more than there is":  {n: 1001},
		"nothing":             {n: 0},
		"just before":         {do: func(m *memory, _ *escrow.Holder) { m.pass(999 * time.Millisecond) }, n: 100, want: true},
		"enough has come":     {do: func(m *memory, _ *escrow.Holder) { m.pass(10 * time.Millisecond) }, n: 1},
		"over":                {do: func(m *memory, _ *escrow.Holder) { m.pass(time.Second) }, n: 1000},
		"the clock went back": {do: func(m *memory, _ *escrow.Holder) { m.pass(-1) }, n: 1},
		"taken since":         {do: func(_ *memory, h *escrow.Holder) { h.Changed() }, n: 1},
		"edited since":        {do: func(m *memory, h *escrow.Holder) { m.Edited(h.Ask().Of()) }, n: 1},
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
	h.Changed()
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
	ask := func(i int) *escrow.Holder {
		call, err := decide.New(false, plain.For(strconv.Itoa(i)))
		if err != nil {
			t.Fatal(err)
		}
		return m.Of(&call.Asks[0])
	}
	fill := func(from int) (n int) {
		for i := range keys {
			if h := ask(from + i); h != nil {
				h.Note(1, 1)
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
	const goroutines, lots, each = 16, 20, 50_000
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
				ok := m.Seen(&request).Take(float64(1+i%3), &tokens)
				switch {
				case ok && n%5 == 0:
					tokens.PutBack()
				case ok:
					taken.Add(int64(tokens.Count))
				default:
					runtime.Gosched()
				}
			}
		})
	}
	back := 0.0
	for range lots {
		m.bring(h, each)
		had := m.returned()
		for want := taken.Load() + each/2; taken.Load() < want && m.returned() == had; { // or the timer has given it back
			runtime.Gosched()
		}
		for _, r := range m.TakeBack() {
			back += r.Count
		}
		m.bring(h, each)
	}
	close(stop)
	wg.Wait()
	for _, r := range append(m.TakeBack(), m.back...) {
		back += r.Count
	}
	if sum := back + float64(taken.Load()); sum != 2*lots*each {
		t.Errorf("handed out %d, gave back %v: %v, want %d", taken.Load(), back, sum, 2*lots*each)
	}
}
