package integration

import (
	"context"
	"flag"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/memstore"
	"pgregory.net/rapid"
)

// slidingWindows draws sound definitions. Where dyadic, their numbers of tokens are
// multiples of a power of two, so that floating point counts them exactly and no
// answer is left to rounding.
func slidingWindows(dyadic bool) *rapid.Generator[ratelimit.SlidingWindow] {
	return rapid.Custom(func(t *rapid.T) ratelimit.SlidingWindow {
		l := ratelimit.SlidingWindow{
			Name:   "a",
			Rate:   magnitude(1, 1e9).Draw(t, "rate"),
			Period: period().Draw(t, "period"),
			Slots:  rapid.SampledFrom([]int{0, 1, 2, 3, 6, 12, 16, 60, 1000}).Draw(t, "slots"),
		}
		if dyadic {
			l.Rate = math.Ceil(l.Rate*16) / 16
		}
		switch rapid.IntRange(0, 2).Draw(t, "maxReserved is") {
		case 0:
			l.MaxReserved = ratelimit.None
		case 1:
			l.MaxReserved = min(l.Rate*magnitude(1e-3, 100).Draw(t, "maxReserved/rate"), ratelimit.MaxTokens)
		}
		if rapid.Bool().Draw(t, "has a start") {
			l.Start = instant(epoch + rapid.Int64Range(-1e15, 1e15).Draw(t, "start"))
		}
		return l
	})
}

// sharded draws a number of shards for l, such that each of them has whole sixteenths.
func sharded(t *rapid.T, l ratelimit.SlidingWindow) ratelimit.SlidingWindow {
	l.Shards = rapid.SampledFrom([]int{2, 4, 8}).Draw(t, "shards")
	l.Rate = math.Ceil(l.Rate/8) * 8
	return l
}

// windowCounts draws counts that l can grant.
func windowCounts(l ratelimit.SlidingWindow, dyadic bool) *rapid.Generator[float64] {
	return rapid.Custom(func(t *rapid.T) float64 {
		n := l.Rate
		switch rapid.IntRange(0, 4).Draw(t, "count is") {
		case 0:
			return 0
		case 1:
			n = 1
		case 2:
			n = l.Rate * rapid.Float64Range(0, 1).Draw(t, "count/rate")
		case 3:
			n = l.Rate / 3
		}
		if dyadic {
			return math.Floor(n*16) / 16
		}
		return max(n, l.Rate*1e-9) // far above what rounding decides
	})
}

// windowStep draws the next instant: at once, a little later, at or around the edge of
// a slot, as promised, or back.
func windowStep(t *rapid.T, d bucket.Definition, origin, now, promised int64) int64 {
	width, period := d.SlotWidth().Microseconds(), d.Period.Microseconds()
	switch rapid.IntRange(0, 6).Draw(t, "step is") {
	case 1:
		now += rapid.Int64Range(0, width).Draw(t, "µs")
	case 2:
		now += rapid.Int64Range(0, 2*period).Draw(t, "µs")
	case 3: // an edge, or a microsecond before it
		edge := now - (now-origin)%width + width*rapid.Int64Range(1, int64(d.Slots+2)).Draw(t, "slots")
		now = edge - rapid.Int64Range(0, 1).Draw(t, "µs before")
	case 4:
		now = max(now, promised)
	case 5:
		now = max(now, promised-1)
	case 6:
		now -= rapid.Int64Range(0, 2*period).Draw(t, "µs back")
	}
	span := (60 * year).Microseconds()
	return min(max(now, epoch-span), epoch+span)
}

// TestSlidingWindowExact: every answer of random histories is that of the exact model.
func TestSlidingWindowExact(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	rapid.Check(t, func(t *rapid.T) {
		l := slidingWindows(true).Draw(t, "limit")
		d := definition(l)
		now := epoch
		s := memstore.New(func() time.Time { return instant(now) })
		origin := d.Fresh("k", instant(epoch-int64(70*year/time.Microsecond))).TS.UnixMicro()
		m := newSlidingModel(d, origin)
		promised := now
		var taken []ratelimit.Result
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			now = windowStep(t, d, origin, now, promised)
			n := windowCounts(l, true).Draw(t, "count")
			switch do := rapid.SampledFrom([]string{"allow", "allow", "allow", "reserve", "reserve", "reserve", "at most", "check", "credit", "settle", "settle", "cancel", "pause", "resume"}).Draw(t, "do"); do {
			case "credit":
				must(t, errOf(s.Credit(ctx, l.ForN("k", n))))
				m.credit(now, n)
			case "cancel":
				if len(taken) == 0 {
					continue
				}
				i := rapid.IntRange(0, len(taken)-1).Draw(t, "which")
				must(t, errOf(s.Cancel(ctx, taken[i].Receipt)))
				p := receipt.Payments(taken[i].Receipt)[0]
				m.refund(now, m.slotOf(p.Slot), rat(p.Tokens))
				taken = append(taken[:i], taken[i+1:]...)
			case "settle":
				if len(taken) == 0 {
					continue
				}
				i := rapid.IntRange(0, len(taken)-1).Draw(t, "which")
				p, used := receipt.Payments(taken[i].Receipt)[0], n*float64(rapid.IntRange(1, 3).Draw(t, "times"))
				settled, err := s.Settle(ctx, taken[i].Receipt, used)
				if err != nil || settled.Taken != used {
					t.Fatalf("settled for %v: %v, %v", used, settled, err)
				}
				if more := rat(used - p.Tokens); more.Sign() > 0 {
					m.charge(now, more)
				} else {
					m.refund(now, m.slotOf(p.Slot), more.Neg(more))
				}
				taken = append(taken[:i], taken[i+1:]...)
			case "at most":
				if n < 1 {
					continue
				}
				want, slot, some := m.askAtMost(now, n)
				want = m.told(want, slot)
				got, err := s.AllowAtMost(ctx, l.ForN("k", n))
				must(t, err)
				if got.OK != want.ok || got.RetryAt.UnixMicro() != want.retryAt || got.OK && got.Taken != some {
					t.Fatalf("at most %v at %v: %v of them %v at %v, want %v of them %v at %v", n, instant(now), got.Taken, got.OK, got.RetryAt, some, want.ok, instant(want.retryAt))
				}
				if promised = want.retryAt; got.OK {
					m.take(now, slot, some)
					taken = append(taken, got)
				}
			case "pause":
				lasts := rapid.Int64Range(1, 2*d.Period.Microseconds()).Draw(t, "lasts")
				must(t, errOf(s.Pause(ctx, l, "k", time.Duration(lasts)*time.Microsecond)))
				m.pause(now, now+lasts)
			case "resume":
				must(t, s.Resume(ctx, l, "k"))
				m.resume(now)
			default:
				ask := map[string]func(context.Context, ...ratelimit.Request) (ratelimit.Result, error){
					"allow": s.Allow, "reserve": s.Reserve, "check": s.Check,
				}[do]
				want, slot := m.ask(do == "reserve", now, n)
				if do != "check" {
					want = m.told(want, slot)
				}
				got, err := ask(ctx, l.ForN("k", n))
				must(t, err)
				if delay := m.tokens(m.start(slot) - now); do == "reserve" && delay.Cmp(m.most) != 0 && near(delay, m.most) {
					return // rounding may decide how far ahead is too far
				}
				off := got.RetryAt.UnixMicro() - want.retryAt
				if do == "reserve" && !want.ok && off*off <= 1 {
					off = 0 // rounding may decide which microsecond is near enough
				}
				if got.OK != want.ok || off != 0 {
					t.Fatalf("%s %v at %v: %v at %v, want %v at %v", do, n, instant(now), got.OK, got.RetryAt, want.ok, instant(want.retryAt))
				}
				if promised = want.retryAt; got.OK && do != "check" {
					m.take(now, slot, n)
					taken = append(taken, got)
				}
			}
			none, err := s.Check(ctx, l.ForN("k", 0))
			must(t, err)
			if want := m.value(now); !near(rat(none.Value), want) {
				t.Fatalf("at %v: %v tokens, want %s", instant(now), none.Value, want.FloatString(9))
			}
		}
	})
}

// near reports whether two numbers are the same but for rounding.
func near(a, b *big.Rat) bool {
	slack := new(big.Rat).Abs(b)
	slack.Add(slack, big.NewRat(1, 1)).Mul(slack, rat(1e-9))
	off := new(big.Rat).Sub(a, b)
	return off.Abs(off).Cmp(slack) <= 0
}

// TestPromise: whoever is refused and asks again exactly at RetryAfter is served, whatever the
// definition and the counts, and a microsecond before is not. This is of sliding windows; of the
// other kinds, TestExact asks again after each refusal.
func TestPromise(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	definitions, kept := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		definitions++
		l := slidingWindows(false).Draw(t, "limit")
		if rapid.IntRange(0, 9).Draw(t, "sharded") == 0 {
			l = sharded(t, l)
		}
		d := definition(l)
		now := epoch
		s := memstore.New(func() time.Time { return instant(now) })
		origin := d.Fresh("k", instant(epoch)).TS.UnixMicro()
		for range 20 {
			if now > epoch+int64(60*year/time.Microsecond) {
				return
			}
			now = windowStep(t, d, origin, now, now)
			take, check := s.Allow, s.Check
			if rapid.Bool().Draw(t, "reserve") {
				take, check = s.Reserve, s.CheckReserve
			}
			if rapid.IntRange(0, 9).Draw(t, "pause") == 0 {
				must(t, errOf(s.Pause(ctx, l, "k", time.Duration(1+rapid.Int64Range(0, d.Period.Microseconds()).Draw(t, "lasts"))*time.Microsecond)))
			}
			ask := l.ForN("k", windowCounts(l, false).Draw(t, "count"))
			refused, err := take(ctx, ask)
			must(t, err)
			if refused.OK {
				continue
			}
			now = refused.RetryAt.UnixMicro() - 1
			if early, err := check(ctx, ask); err != nil || early.OK {
				t.Fatalf("%v at %v, a microsecond before %v that was promised, %v", early, instant(now), refused.RetryAt, err)
			}
			now++
			if served, err := take(ctx, ask); err != nil || !served.OK {
				t.Fatalf("%v when it was promised, %v", served, err)
			}
			kept++
		}
	})
	t.Logf("%d definitions, %d promises kept", definitions, kept)
	if kept < definitions {
		t.Errorf("%d promises for %d definitions tell little", kept, definitions)
	}
}

// arrivals are the instants at which work begins that a limit has granted, by a clock
// that never goes back, and those that callers are told, by the limit's clock.
type arrivals struct {
	s            *memstore.Store
	l            ratelimit.Limit
	now          int64 // by the clock that never goes back
	behind       int64 // how far the limit's clock is, since it went back
	events, told []curve.Event
}

func newArrivals(l ratelimit.Limit) *arrivals {
	a := &arrivals{l: l, now: epoch}
	a.s = memstore.New(func() time.Time { return instant(a.now - a.behind) })
	return a
}

// take asks for n. The work begins when the answer says, or late after that.
func (a *arrivals) take(reserve bool, n float64, late time.Duration) ratelimit.Result {
	take := a.s.Allow
	if reserve {
		take = a.s.Reserve
	}
	result, err := take(context.Background(), a.l.ForN("k", n))
	if err != nil {
		panic(err)
	}
	if result.OK && n > 0 {
		at := instant(a.now).Add(result.RetryAfter + late)
		if result.RetryAfter == 0 && late > 0 { // within the slot that it is in
			at, late = instant(a.now), 0
		}
		a.events = append(a.events, curve.Event{At: at, Count: n})
		a.told = append(a.told, curve.Event{At: result.RetryAt.Add(late), Count: n})
	}
	return result
}

// attacks are ways to get more than is promised.
var attacks = []struct {
	name string
	late bool // jobs start late in their slots, which only a sliding window allows
	run  func(t *rapid.T, a *arrivals, late func() time.Duration)
}{
	{"flood", false, func(t *rapid.T, a *arrivals, _ func() time.Duration) {
		gap := rapid.Int64Range(1, max(1, a.l.Definition().Period.Microseconds()/7)).Draw(t, "gap")
		for range 200 {
			for a.take(false, a.l.Definition().Rate/10, 0).OK {
			}
			a.now += gap
		}
	}},
	{"edges", false, func(t *rapid.T, a *arrivals, _ func() time.Duration) {
		for range 50 { // as much as can be had, right before and right after what is promised
			part := rapid.SampledFrom([]float64{1, 2, 7}).Draw(t, "part")
			n := a.l.Definition().Rate / part
			result := a.take(false, n, 0)
			if !result.OK {
				a.now = max(a.now+1, result.RetryAt.UnixMicro()+a.behind-rapid.Int64Range(0, 1).Draw(t, "before"))
			} else if rapid.Bool().Draw(t, "wait") {
				a.now += rapid.Int64Range(0, a.l.Definition().Period.Microseconds()).Draw(t, "µs")
			}
		}
	}},
	{"late starts", true, func(t *rapid.T, a *arrivals, late func() time.Duration) {
		for range 100 {
			a.take(true, a.l.Definition().Rate/float64(rapid.IntRange(1, 10).Draw(t, "part")), late())
			a.now += rapid.Int64Range(0, a.l.Definition().Period.Microseconds()/3).Draw(t, "µs")
		}
	}},
	{"a clock that goes back", false, func(t *rapid.T, a *arrivals, _ func() time.Duration) {
		for range 100 {
			if rapid.IntRange(0, 9).Draw(t, "back") == 0 {
				a.behind += rapid.Int64Range(1, 2*a.l.Definition().Period.Microseconds()).Draw(t, "µs back")
			}
			a.take(rapid.Bool().Draw(t, "reserve"), a.l.Definition().Rate/5, 0)
			a.now += rapid.Int64Range(0, a.l.Definition().Period.Microseconds()/3).Draw(t, "µs")
		}
	}},
	{"clock back and late starts", true, func(t *rapid.T, a *arrivals, late func() time.Duration) {
		for range 100 {
			if rapid.IntRange(0, 9).Draw(t, "back") == 0 {
				a.behind += rapid.Int64Range(1, 2*a.l.Definition().Period.Microseconds()).Draw(t, "µs back")
			}
			a.take(true, a.l.Definition().Rate/5, late())
			a.now += rapid.Int64Range(0, a.l.Definition().Period.Microseconds()/3).Draw(t, "µs")
		}
	}},
}

// TestArrivalCurve: over all stretches of every history no kind of limit grants more
// than it promises, whatever is tried, and all of that can be had.
func TestArrivalCurve(t *testing.T) {
	if testing.Short() {
		t.Skip("left out with -short")
	}
	kinds := []struct {
		name  string
		limit func(*rapid.T) ratelimit.Limit
	}{
		{"token bucket", func(t *rapid.T) ratelimit.Limit {
			return ratelimit.TokenBucket{Name: "a", Rate: float64(rapid.IntRange(1, 1000).Draw(t, "rate")), Period: period().Draw(t, "period")}
		}},
		{"fixed window", func(t *rapid.T) ratelimit.Limit {
			return ratelimit.FixedWindow{Name: "a", Rate: float64(rapid.IntRange(1, 1000).Draw(t, "rate")), Period: period().Draw(t, "period")}
		}},
		{"sliding window", func(t *rapid.T) ratelimit.Limit { return slidingWindows(true).Draw(t, "limit") }},
		{"sliding window, shards", func(t *rapid.T) ratelimit.Limit { return sharded(t, slidingWindows(true).Draw(t, "limit")) }},
	}
	fewer(t, 4)
	for _, kind := range kinds {
		for _, attack := range attacks {
			if attack.late && !strings.HasPrefix(kind.name, "sliding window") {
				continue
			}
			t.Run(fmt.Sprint(kind.name, "/", attack.name), func(t *testing.T) {
				var worst curve.Worst
				histories := 0
				rapid.Check(t, func(rt *rapid.T) {
					histories++
					a := newArrivals(kind.limit(rt))
					d := a.l.Definition()
					attack.run(rt, a, func() time.Duration {
						return time.Duration(rapid.Int64Range(0, max(0, d.SlotWidth().Microseconds()-1)).Draw(rt, "late")) * time.Microsecond
					})
					got := curve.Judge(a.events, curve.Of(d))
					if got.Share > 1+1e-9 {
						rt.Fatalf("%v, %v", d, got)
					}
					if told := curve.Judge(a.told, curve.Of(d)); told.Share > 1+1e-9 {
						rt.Fatalf("%v, by the instants that callers were told %v", d, told)
					}
					if got.Share > worst.Share {
						worst = got
					}
				})
				t.Logf("%d histories, at worst %v", histories, worst)
				if worst.Share < 1-1e-9 {
					t.Errorf("the bound was never touched: at worst %v", worst)
				}
			})
		}
	}
}

// fewer makes the histories of a test one of each part, and 200 at most, since each of them is
// long. As it changes what others look at, its tests are not parallel.
func fewer(t *testing.T, part int) {
	t.Helper()
	all := checks(t)
	set := func(n int) {
		if err := flag.Set("rapid.checks", strconv.Itoa(n)); err != nil {
			t.Error(err)
		}
	}
	set(min(all/part, 200))
	t.Cleanup(func() { set(all) })
}
