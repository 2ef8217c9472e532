package integration

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/memstore"
	"pgregory.net/rapid"
)

// The properties are quick; more checks than rapid's hundred find more, and .ci/run makes
// ten times as many. -rapid.checks on the command line has the last word, and with -short it
// is a fifth.
func init() {
	if err := flag.Set("rapid.checks", manyChecks); err != nil {
		panic(err)
	}
}

const manyChecks = "200"

// checks is how many there are of each property.
func checks(t *testing.T) int {
	t.Helper()
	n, err := strconv.Atoi(flag.Lookup("rapid.checks").Value.String())
	must(t, err)
	return n
}

// slack is how far rounding may move a value, relative to the largest number
// that took part in its history: four times what a single decision tolerates.
const slack = 0x1p-44

const year = 365 * 24 * time.Hour

// epoch is in the middle of the instants of the histories.
var epoch = time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC).UnixMicro()

// magnitude draws a number between least and most, evenly over their
// logarithms, and as often a round one as not.
func magnitude(least, most float64) *rapid.Generator[float64] {
	return rapid.Custom(func(t *rapid.T) float64 {
		v := math.Exp(rapid.Float64Range(math.Log(least), math.Log(most)).Draw(t, "log"))
		switch rapid.IntRange(0, 3).Draw(t, "roundness") {
		case 0:
			v = math.Round(v)
		case 1: // some decimals, few of them exact in binary
			digits := math.Pow(10, math.Ceil(2-math.Log10(v)))
			v = math.Round(v*digits) / digits
		case 2: // one digit
			ten := math.Pow(10, math.Floor(math.Log10(v)))
			v = math.Round(v/ten) * ten
		}
		return min(max(v, least), most)
	})
}

// period draws from a microsecond to a year.
func period() *rapid.Generator[time.Duration] {
	return rapid.OneOf(
		rapid.SampledFrom([]time.Duration{
			time.Microsecond, time.Millisecond, time.Second, time.Minute, time.Hour, 24 * time.Hour, 30 * 24 * time.Hour, year,
		}),
		rapid.Map(magnitude(1, float64(year.Microseconds())), func(v float64) time.Duration {
			return time.Duration(v) * time.Microsecond
		}),
	)
}

// limits draws sound definitions with the given name.
func limits(name string) *rapid.Generator[ratelimit.Limit] {
	return rapid.Custom(func(t *rapid.T) ratelimit.Limit {
		b := ratelimit.TokenBucket{
			Name:   name,
			Rate:   magnitude(1e-6, 1e9).Draw(t, "rate"),
			Period: period().Draw(t, "period"),
		}
		most := min(1e6, 99*float64(year)/float64(b.Period), ratelimit.MaxTokens/b.Rate)
		switch rapid.IntRange(0, 3).Draw(t, "capacity is") {
		case 0:
			b.Capacity = ratelimit.None
		case 1:
			b.Capacity = min(b.Rate*magnitude(1e-6, most).Draw(t, "capacity/rate"), ratelimit.MaxTokens)
		case 2:
			b.Capacity = magnitude(b.Rate*1e-3, b.Rate*min(1e3, most)).Draw(t, "capacity")
		case 3: // the default, where that is at least one token
			if b.Rate < 1 {
				b.Capacity = b.Rate
			}
		}
		switch rapid.IntRange(0, 2).Draw(t, "maxReserved is") {
		case 0:
			b.MaxReserved = ratelimit.None
		case 1:
			b.MaxReserved = min(b.Rate*magnitude(1e-6, most).Draw(t, "maxReserved/rate"), ratelimit.MaxTokens)
		}
		if rapid.Bool().Draw(t, "token bucket") {
			return b
		}
		w := ratelimit.FixedWindow{Name: b.Name, Rate: b.Rate, Period: b.Period, Capacity: b.Capacity, MaxReserved: b.MaxReserved}
		if rapid.Bool().Draw(t, "has a start") {
			w.Start = instant(epoch + rapid.Int64Range(-1e15, 1e15).Draw(t, "start"))
		}
		return w
	})
}

// definition is a limit's, with the arithmetic.
func definition(l ratelimit.Limit) bucket.Definition { return bucket.Definition(l.Definition()) }

// counts draws counts that d can grant at some time, and that are near its
// measures.
func counts(d bucket.Definition, reserve bool) *rapid.Generator[float64] {
	most := min(d.Capacity-d.Floor(reserve), ratelimit.MaxTokens)
	return rapid.Custom(func(t *rapid.T) float64 {
		n := 0.0
		switch rapid.IntRange(0, 5).Draw(t, "count is") {
		case 0:
		case 1:
			n = most
		case 2:
			n = d.Capacity
		case 3:
			n = 1
		case 4:
			n = d.Rate * magnitude(1e-6, 1e3).Draw(t, "count/rate")
		case 5:
			n = most * rapid.Float64Range(0, 1).Draw(t, "count/most")
		}
		if n < max(d.Capacity*0x1p-46, 1e-15) { // a count that is invalid
			n = 0
		}
		return min(n, most)
	})
}

// fillTime is about how long d needs to fill, and at least a microsecond.
func fillTime(d bucket.Definition) int64 {
	span := (d.Capacity/d.Rate + 1) * float64(d.Period.Microseconds())
	return int64(min(max(span, 1), float64((10 * year).Microseconds())))
}

// later draws the next instant of a history: at once, a little or long after,
// just when or before something was promised, or before, when a clock goes
// back.
func later(t *rapid.T, d bucket.Definition, now, promised int64, back bool) int64 {
	fill := fillTime(d)
	switch rapid.IntRange(0, 5).Draw(t, "step is") {
	case 1:
		now += rapid.Int64Range(0, 1000).Draw(t, "µs")
	case 2:
		now += rapid.Int64Range(0, 3*fill).Draw(t, "µs")
	case 3:
		now = max(now, promised)
	case 4:
		now = max(now, promised-1)
	case 5:
		if back {
			now -= rapid.Int64Range(0, 3*fill).Draw(t, "µs back")
		}
	}
	span := (60 * year).Microseconds()
	return min(max(now, epoch-span), epoch+span)
}

// history plays random calls on one limit through the package and through the
// exact model.
type history struct {
	d     bucket.Definition
	limit ratelimit.Limit
	exact limit
	state bucket.State
	row   row
	scale float64 // the largest number so far
	now   int64
	retry int64 // the instant that was promised last
}

func newHistory(t *rapid.T, l ratelimit.Limit) *history {
	d := definition(l)
	if err := l.Validate(); err != nil {
		t.Fatalf("drew a bad limit %+v: %v", l, err)
	}
	now := epoch + rapid.Int64Range(-1e12, 1e12).Draw(t, "now")
	h := &history{d: d, limit: l, exact: newLimit(d), scale: d.Capacity, now: now, retry: now}
	h.state = d.Fresh("k", instant(now))
	h.row = row{rat(d.Capacity), h.state.TS.UnixMicro(), 0}
	if past := now - h.row.ts; past < 0 || d.Every == 0 && (d.Kind == ratelimit.KindTokenBucket && past > 0 || past >= d.Period.Microseconds()) {
		t.Fatalf("a fresh row at %v is of %v", instant(now), h.state.TS)
	}
	return h
}

// tolerance is how far the package may be from the exact value.
func (h *history) tolerance() *big.Rat { return rat(h.scale * slack) }

func (h *history) compare(t *rapid.T, what string, got bucket.State, want row) {
	off := new(big.Rat).Sub(rat(got.Value), want.value)
	if off.Abs(off).Cmp(h.tolerance()) > 0 {
		t.Fatalf("%s: value %v, want %s", what, got.Value, want.value.FloatString(20))
	}
	if ts := got.TS.UnixMicro(); ts != want.ts {
		t.Fatalf("%s: ts %v, want %v", what, got.TS, instant(want.ts))
	}
	if paused := want.paused; got.Paused.IsZero() != (paused == 0) || paused != 0 && got.Paused.UnixMicro() != paused {
		t.Fatalf("%s: paused until %v, want %v", what, got.Paused, instant(paused))
	}
}

// settle looks at the row at an instant and leaves it as it is.
func (h *history) settle(t *rapid.T, now int64) {
	h.scale = max(h.scale, math.Abs(h.state.Value))
	h.compare(t, "settle", h.d.Refill(h.state, instant(now)), h.exact.settle(h.row, now))
}

// promise checks an instant that was told for missing tokens to come in to
// the exact row r, and for a pause to be over: it is the exact one, unless the
// value is so near a boundary that the tolerance decides.
func (h *history) promise(t *rapid.T, got time.Time, r row, missing *big.Rat, paused int64) {
	first := h.exact.when(r, new(big.Rat).Sub(missing, h.tolerance()))
	last := h.exact.when(r, new(big.Rat).Add(missing, h.tolerance()))
	if missing.Cmp(h.tolerance()) <= 0 {
		first = min(first, h.now)
	}
	first, last = max(first, paused), max(last, paused)
	if us := got.UnixMicro(); us < first || us > last {
		t.Fatalf("RetryAt = %v, want from %v to %v", got, instant(first), instant(last))
	}
}

// decided is the decision of a call on a limit that has one row, and the row that
// it leaves behind.
func decided(call *decide.Call, now time.Time, s bucket.State) (ratelimit.Result, bucket.State) {
	view := decide.View{States: [][]bucket.State{{s}}, At: now}
	changes, ok := call.Plan(view)
	if !ok {
		return call.Refused(view), s
	}
	return call.Granted(changes, view), changes[0].After
}

func checked(call *decide.Call, now time.Time, s bucket.State) ratelimit.Result {
	return call.Checked(decide.View{States: [][]bucket.State{{s}}, At: now})
}

// take asks for n tokens and reports whether they were taken.
func (h *history) take(t *rapid.T, reserve bool, n float64) bool {
	call, err := decide.New(reserve, h.limit.ForN("k", n))
	if err != nil {
		t.Fatalf("New(%v, %v) = %v", reserve, n, err)
	}
	h.scale = max(h.scale, math.Abs(h.state.Value), n)
	result, after := decided(&call, instant(h.now), h.state)
	h.retry = result.RetryAt.UnixMicro()

	floor, paused := new(big.Rat), ongoing(h.row.paused, h.now)
	hinders := paused // a pause, which is for allow
	if reserve {
		floor, hinders = h.exact.floor, 0
	}
	left := h.exact.take(h.row, h.now, n)
	h.scale = max(h.scale, math.Abs(result.Value))
	margin := new(big.Rat).Sub(left.value, floor)
	near := new(big.Rat).Abs(margin).Cmp(h.tolerance()) <= 0
	if want := margin.Sign() > 0 && hinders == 0; (!near || hinders != 0) && result.OK != want {
		t.Fatalf("OK = %v with a margin of %s, paused until %v", result.OK, margin.FloatString(20), instant(hinders))
	}
	if want := result.At.Add(result.RetryAfter); !result.RetryAt.Equal(want) {
		t.Fatalf("RetryAt = %v, want %v, RetryAfter later", result.RetryAt, want)
	}
	if !result.OK {
		if result.RetryAfter <= 0 {
			t.Fatalf("refused with a RetryAfter of %v", result.RetryAfter)
		}
		h.promise(t, result.RetryAt, h.exact.settle(h.row, h.now), new(big.Rat).Neg(margin), hinders)
		h.asPromised(t, &call)
		return false
	}
	h.row, h.state = left, after
	h.compare(t, "take", h.state, h.row)
	counts := max(h.now, left.ts) // the clock may be behind the row
	if debt := new(big.Rat).Neg(left.value); debt.Cmp(h.tolerance()) > 0 {
		h.promise(t, result.RetryAt, left, debt, paused)
		h.debtPaid(t, result)
	} else if want := instant(max(counts, paused)); debt.Add(debt, h.tolerance()).Sign() < 0 && !result.RetryAt.Equal(want) {
		t.Fatalf("RetryAt = %v with %v tokens left, want %v", result.RetryAt, result.Value, want)
	}
	if paused != 0 || result.RetryAfter > 0 {
		counts = h.now
	}
	if want := instant(counts); !result.At.Equal(want) {
		t.Fatalf("At = %v, want %v", result.At, want)
	}
	return true
}

// asPromised repeats a refused call at the instant that was told, and a
// microsecond before.
func (h *history) asPromised(t *rapid.T, call *decide.Call) {
	if again := checked(call, instant(h.retry), h.state); !again.OK {
		t.Fatalf("refused at %v, promised at %v: %v", again.At, instant(h.now), again.Err())
	}
	early := h.exact.take(h.row, h.retry-1, call.Demands[0].Count)
	margin := early.value.Sub(early.value, rat(call.Demands[0].Floor))
	paused := !call.Reserve && ongoing(early.paused, h.retry-1) != 0
	if margin.Cmp(new(big.Rat).Neg(h.tolerance())) > 0 && !paused {
		return // rounding may decide
	}
	if before := checked(call, instant(h.retry-1), h.state); before.OK {
		t.Fatalf("granted at %v, a microsecond before the promise", before.At)
	}
}

// debtPaid asks at a reservation's instant whether the limit is in debt.
func (h *history) debtPaid(t *rapid.T, result ratelimit.Result) {
	call, err := decide.New(false, h.limit.ForN("k", 0))
	must(t, err)
	if due := checked(&call, result.RetryAt, h.state); !due.OK {
		t.Fatalf("in debt when the reservation is due, for another %v: %v tokens", due.RetryAfter, due.Value)
	}
}

func (h *history) credit(t *rapid.T, n float64) {
	h.scale = max(h.scale, math.Abs(h.state.Value), n)
	h.state = h.d.Credit(h.state, time.Time{}, n)
	h.row = h.exact.credit(h.row, n)
	h.compare(t, "credit", h.state, h.row)
}

func (h *history) pause(t *rapid.T, until int64) {
	h.scale = max(h.scale, math.Abs(h.state.Value))
	h.state = h.d.Pause(h.state, instant(h.now), instant(until))
	h.row = h.exact.pause(h.row, h.now, until)
	h.scale = max(h.scale, math.Abs(h.state.Value))
	h.compare(t, "pause", h.state, h.row)
}

func (h *history) resume(t *rapid.T) {
	h.scale = max(h.scale, math.Abs(h.state.Value))
	tick := h.d.Fresh("k", instant(h.now)).TS.UnixMicro()
	h.state = h.d.Resume("k", h.state, instant(h.now))
	h.row = h.exact.resume(h.row, h.now, tick)
	h.compare(t, "resume", h.state, h.row)
}

// The package agrees with exact arithmetic: on the value to sixteen bits more
// than a millionth needs, over whole histories, on every decision and every
// instant that rounding does not decide. And what it promises it keeps.
func TestExact(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		h := newHistory(t, limits("a").Draw(t, "limit"))
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			h.now = later(t, h.d, h.now, h.retry, true)
			switch rapid.IntRange(0, 10).Draw(t, "do") {
			case 10:
				h.resume(t)
			case 0:
				h.credit(t, counts(h.d, true).Draw(t, "credit"))
			case 1:
				h.pause(t, later(t, h.d, h.now, h.retry, true))
			case 2, 3, 4, 5:
				h.take(t, true, counts(h.d, true).Draw(t, "reserve"))
			default:
				h.take(t, false, counts(h.d, false).Draw(t, "allow"))
			}
			h.settle(t, h.retry)
		}
	})
}

func values(t *rapid.T, s *memstore.Store, none []ratelimit.Request) []float64 {
	res, err := s.Check(context.Background(), none...)
	must(t, err)
	var vs []float64
	for _, each := range res.Each() {
		vs = append(vs, each.Value)
	}
	return vs
}

// pause pauses for a number of microseconds, if it is one that can be.
func pause(t *rapid.T, s *memstore.Store, l ratelimit.Limit, key string, micros int64) string {
	lasts := time.Duration(min(micros, ratelimit.MaxSpan.Microseconds())) * time.Microsecond
	if lasts <= 0 {
		return ""
	}
	until, err := s.Pause(context.Background(), l, key, lasts)
	must(t, err)
	return until.String()
}

// A result that was cancelled gives back what it took, once.
func TestCancelOnce(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	rapid.Check(t, func(t *rapid.T) {
		now := epoch
		s := memstore.New(func() time.Time { return instant(now) })
		l := limits("a").Draw(t, "limit")
		d := definition(l)
		none := []ratelimit.Request{l.ForN("k", 0)}
		var taken []ratelimit.Result
		cancelled := map[*ratelimit.Receipt]bool{}
		spent := 0.0 // the row may have been that low, and was rounded there
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			now = later(t, d, now, now, true)
			if len(taken) == 0 || rapid.Bool().Draw(t, "take") {
				res, err := s.Reserve(ctx, l.ForN("k", counts(d, true).Draw(t, "count")))
				must(t, err)
				if res.OK != (res.Receipt != nil) {
					t.Fatalf("OK = %v with receipt %v", res.OK, res.Receipt)
				}
				taken = append(taken, res)
				spent += res.Request.Count
				continue
			}
			res := rapid.SampledFrom(taken).Draw(t, "cancel")
			before := values(t, s, none)[0]
			ok, err := s.Cancel(ctx, res.Receipt)
			must(t, err)
			if want := res.Receipt != nil && !cancelled[res.Receipt]; ok != want {
				t.Fatalf("Cancel() = %v, want %v", ok, want)
			}
			want, off := before, 0.0
			if ok {
				want = min(before+res.Request.Count, d.Capacity)
				off = max(math.Abs(before), spent, d.Capacity) * slack // added before what came in, not after
				cancelled[res.Receipt] = true
			}
			if after := values(t, s, none)[0]; math.Abs(after-want) > off {
				t.Fatalf("Cancel() = %v of %v: %v tokens after %v, want %v", ok, res.Request.Count, after, before, want)
			}
		}
	})
}

// What is settled leaves what there would be if the call had taken that: less comes back,
// up to the capacity, and more is taken whatever there is. By its text a receipt is as
// good.
func TestSettle(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	rapid.Check(t, func(t *rapid.T) {
		now := epoch
		s := memstore.New(func() time.Time { return instant(now) })
		l := limits("a").Draw(t, "limit")
		d := definition(l)
		none := []ratelimit.Request{l.ForN("k", 0)}
		spent := 0.0 // the row may have been that low, and was rounded there
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			now = later(t, d, now, now, true)
			res, err := s.Reserve(ctx, l.ForN("k", counts(d, true).Draw(t, "count")))
			must(t, err)
			if !res.OK {
				continue
			}
			now = later(t, d, now, now, true)
			receipt := res.Receipt
			if rapid.Bool().Draw(t, "by text") {
				text, err := receipt.MarshalText()
				must(t, err)
				receipt = new(ratelimit.Receipt)
				if err := receipt.UnmarshalText(text); err != nil {
					t.Fatal(err)
				}
			}
			before, used := values(t, s, none)[0], counts(d, true).Draw(t, "used")
			settled, err := s.Settle(ctx, receipt, used)
			must(t, err)
			want := min(before+res.Taken-used, max(before, d.Capacity))
			spent += res.Taken + used
			off := max(math.Abs(before), spent, d.Capacity) * slack
			if math.Abs(settled.Value-want) > off || settled.Taken != used || !settled.OK {
				t.Fatalf("Settle(%v) of %v: %v tokens after %v, want %v", used, res.Taken, settled.Value, before, want)
			}
			if after := values(t, s, none)[0]; after != settled.Value {
				t.Fatalf("Settle() tells of %v tokens, and there are %v", settled.Value, after)
			}
			if _, err := s.Settle(ctx, receipt, used); !errors.Is(err, ratelimit.ErrSettled) {
				t.Fatalf("Settle() again: %v", err)
			}
		}
	})
}

// A store that is pruned at any time answers as its twin that never is. The
// clock does not go back behind a prune: a row that was full by then is full
// for an earlier now too, when it is gone. A fixed window is paused to an edge
// of its own, since a fresh row does not know of others.
func TestPruneChangesNothing(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	rapid.Check(t, func(t *rapid.T) {
		now := epoch
		clock := func() time.Time { return instant(now) }
		pruned, twin := memstore.New(clock), memstore.New(clock)
		all := []ratelimit.Limit{limits("a").Draw(t, "a"), limits("b").Draw(t, "b")}
		keys := []string{"", "k"}
		promised := now
		gone := int64(0)
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			l := rapid.SampledFrom(all).Draw(t, "limit")
			key := rapid.SampledFrom(keys).Draw(t, "key")
			d := definition(l)
			now = later(t, d, now, promised, false)
			var do func(*memstore.Store) string
			switch rapid.IntRange(0, 7).Draw(t, "do") {
			case 0:
				n := counts(d, true).Draw(t, "credit")
				do = func(s *memstore.Store) string {
					status, err := s.Credit(ctx, l.ForN(key, n))
					return fmt.Sprint(plain(status), err)
				}
			case 1:
				until := later(t, d, now, promised, false)
				if d.Kind == ratelimit.KindFixedWindow {
					until = d.Fresh(key, instant(until)).TS.UnixMicro()
				}
				lasts := until - now
				do = func(s *memstore.Store) string { return pause(t, s, l, key, lasts) }
			case 2:
				do = func(s *memstore.Store) string { return fmt.Sprint(s.Reset(ctx, l, key)) }
			case 7:
				do = func(s *memstore.Store) string { return fmt.Sprint(s.Resume(ctx, l, key)) }
			case 3:
				n, m := counts(d, true).Draw(t, "count"), counts(definition(all[0]), true).Draw(t, "count of a")
				do = func(s *memstore.Store) string {
					return told(s.Reserve(ctx, l.ForN(key, n), all[0].ForN("another", m)))
				}
			default:
				n := counts(d, false).Draw(t, "count")
				do = func(s *memstore.Store) string { return told(s.Allow(ctx, l.ForN(key, n))) }
			}
			if got, want := do(pruned), do(twin); got != want {
				t.Fatalf("after pruning %d rows: %s\nwithout: %s", gone, got, want)
			}
			limits := rapid.SampledFrom([][]ratelimit.Limit{nil, all[:1], all}).Draw(t, "prune")
			if len(limits) == 0 {
				continue
			}
			n, err := pruned.Prune(ctx, limits...)
			must(t, err)
			gone += n
		}
	})
}

// told is all that a result says, in a line.
func told(res ratelimit.Result, err error) string {
	line := fmt.Sprintf("%+v %v", plain(res.Status), err)
	for _, each := range res.Each() {
		line += fmt.Sprintf(" %+v", plain(each))
	}
	return line
}

// plain is a status without its String, which does not say all.
func plain(s ratelimit.Status) any {
	type fields ratelimit.Status
	return fields(s)
}

// must fails the test, or the history of a property, for an error.
func must(t interface {
	Helper()
	Fatal(args ...any)
}, err error,
) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }
