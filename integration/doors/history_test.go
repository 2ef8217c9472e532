package doors

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
)

// history puts the same random calls to a store and to one in memory. (Package pgstore does so
// with more of what can come together, through pgx and through database/sql with its driver;
// here the drivers are what differs.)
type history struct {
	rand   *rand.Rand
	now    time.Time
	limits []ratelimit.Limit
	stores [2]ratelimit.Store
	taken  [][2]ratelimit.Result
	said   map[string]int // how often an answer was of a kind
	worst  bool           // an answer is of the one limit that a caller must know
	noText bool           // receipts are not read from text
	onward bool           // the clock does not go back

	leaps bool // weeks pass now and then
	moves bool // slots and edges change: a credit and a settlement differ by what a store has met

	before func(requests []ratelimit.Request) error // changes what is asked, if not nil
	keeps  func(taken ratelimit.Result) bool        // whether what was taken can be settled, if not nil
}

func newHistory(seed uint64) *history {
	h := &history{rand: rand.New(rand.NewPCG(seed, 7)), now: usual, said: map[string]int{}}
	period := pick(h.rand, time.Millisecond, time.Second, time.Hour)
	rate := pick(h.rand, 3, 10, 1.0/3, 7.77, 1e6)
	h.limits = []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "bucket", Rate: rate, Period: period, Capacity: max(rate*2.5, 1), MaxReserved: rate},
		ratelimit.FixedWindow{Name: "window", Rate: max(rate, 1), Period: period, MaxReserved: 3 * rate},
		ratelimit.SlidingWindow{Name: "sliding", Rate: max(rate, 1), Period: period, Slots: pick(h.rand, 1, 6, 16), MaxReserved: rate},
	}
	return h
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

// reply is what a call said.
type reply struct {
	result ratelimit.Result
	until  time.Time
	said   bool
	err    error
}

// step makes one call of both stores, and returns an error if they differ.
func (h *history) step(ctx context.Context) error {
	back := -0.3
	if h.onward {
		back = 0.3
	}
	h.now = h.now.Add(time.Duration(h.rand.Float64() * float64(h.limits[0].Definition().Period) * pick(h.rand, 0, 0.1, 1, 1, back))).Truncate(time.Microsecond)
	if h.leaps && h.rand.IntN(6) == 0 {
		h.now = h.now.Add(time.Duration(h.rand.Int64N(int64(50 * 24 * time.Hour)))).Truncate(time.Microsecond)
	}
	requests := make([]ratelimit.Request, pick(h.rand, 1, 1, 2, 3))
	for i := range requests {
		limit := pick(h.rand, h.limits...)
		most := limit.Definition().Capacity
		requests[i] = limit.ForN(pick(h.rand, "", "a", `o'neil \ "$1" %s é {,}`), pick(h.rand, 0, 1, most*h.rand.Float64(), most/3, most*1.5))
	}
	if h.before != nil {
		if err := h.before(requests); err != nil {
			return err
		}
	}
	verb := pick(h.rand, "allow", "allow", "reserve", "reserve", "check", "at most", "first", "credit", "settle", "cancel", "pause", "resume", "reset")
	target, lasts, share := 0, time.Duration(1+h.rand.Int64N(int64(time.Second))), h.rand.Float64()*2
	if len(h.taken) > 0 {
		target = h.rand.IntN(len(h.taken))
	} else if verb == "settle" || verb == "cancel" {
		verb = "allow"
	}
	if h.keeps != nil && (verb == "settle" || verb == "cancel") && !h.keeps(h.taken[target][0]) {
		verb = "allow"
	}
	if h.moves && verb == "credit" && !plain(requests[0].Limit) {
		verb = "check"
	}
	var replies [2]reply
	for i, store := range h.stores {
		replies[i] = h.put(ctx, store, verb, requests, func() ratelimit.Result { return h.taken[target][i] }, lasts, share)
	}
	got, want := replies[0], replies[1]
	if got.result.Receipt != nil && want.result.Receipt != nil {
		h.taken = append(h.taken, [2]ratelimit.Result{got.result, want.result})
	}
	if f, ok := h.stores[0].(*functions); ok && f.knows(requests...) && len(got.result.Several) > 0 || verb == "settle" && h.worst && len(h.taken[target][1].Several) > 1 {
		got.result.Several, want.result.Several = nil, nil
		if verb == "settle" {
			got.result, want.result = ratelimit.Result{}, ratelimit.Result{}
		}
	}
	h.said[verb]++
	if got.err == nil && got.result.OK {
		h.said[verb+" OK"]++
	}
	if err := differ(got, want); err != nil {
		return fmt.Errorf("%s %v at %v: %w\ngot  %+v\nwant %+v", verb, requests, h.now, err, got, want)
	}
	return nil
}

func (h *history) put(ctx context.Context, s ratelimit.Store, verb string, requests []ratelimit.Request, taken func() ratelimit.Result, lasts time.Duration, share float64) (a reply) {
	r := requests[0]
	switch verb {
	case "allow":
		a.result, a.err = s.Allow(ctx, requests...)
	case "reserve":
		a.result, a.err = s.Reserve(ctx, requests...)
	case "check":
		a.result, a.err = s.CheckReserve(ctx, requests...)
	case "at most":
		a.result, a.err = s.AllowAtMost(ctx, r)
	case "first":
		a.result, a.err = s.AllowFirst(ctx, requests...)
	case "credit":
		a.result.Status, a.err = s.Credit(ctx, r)
	case "settle":
		text, err := taken().Receipt.MarshalText() // as another process would
		if err != nil {
			return reply{err: err}
		}
		var read ratelimit.Receipt
		if err := read.UnmarshalText(text); err != nil {
			return reply{err: err}
		}
		receipt := &read
		if h.noText {
			receipt = taken().Receipt
		}
		var used []float64
		for range taken().Each() {
			used = append(used, share)
		}
		a.result, a.err = s.Settle(ctx, receipt, used...)
	case "cancel":
		a.said, a.err = s.Cancel(ctx, taken().Receipt)
	case "pause":
		a.until, a.err = s.Pause(ctx, r.Limit, r.Key, lasts)
	case "resume":
		a.err = s.Resume(ctx, r.Limit, r.Key)
	case "reset":
		a.err = s.Reset(ctx, r.Limit, r.Key)
	}
	return a
}

// differ returns in what two replies differ.
func differ(got, want reply) error {
	for _, kind := range []error{ratelimit.ErrInvalid, ratelimit.ErrExceedsCapacity, ratelimit.ErrSettled} {
		if errors.Is(got.err, kind) != errors.Is(want.err, kind) {
			return fmt.Errorf("error %w, want %w", got.err, want.err)
		}
	}
	if (got.err == nil) != (want.err == nil) || got.said != want.said || !got.until.Equal(want.until) {
		return fmt.Errorf("error %v, said %v, until %v, want %v, %v, %v", got.err, got.said, got.until, want.err, want.said, want.until)
	}
	g, w := append(got.result.Each(), got.result.Status), append(want.result.Each(), want.result.Status)
	if len(g) != len(w) {
		return fmt.Errorf("%d limits, want %d", len(g), len(w))
	}
	for i := range g {
		slack := 1e-6 * max(1, math.Abs(w[i].Value), w[i].Capacity)
		if g[i].OK != w[i].OK || g[i].Taken != w[i].Taken || g[i].Remaining != w[i].Remaining || !g[i].At.Equal(w[i].At) ||
			!g[i].PausedUntil.Equal(w[i].PausedUntil) || !(math.Abs(g[i].Value-w[i].Value) <= slack) ||
			(g[i].RetryAfter-w[i].RetryAfter).Abs() > time.Microsecond || (g[i].ResetAfter-w[i].ResetAfter).Abs() > time.Microsecond {
			return fmt.Errorf("status %+v, want %+v", g[i], w[i])
		}
	}
	return nil
}

func TestHistories(t *testing.T) {
	pgtest.Long(t)
	const calls, seeds = 60, uint64(6)
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		said := map[string]int{}
		for seed := range seeds {
			must(t, errOf(db.Pool.Exec(t.Context(), "TRUNCATE "+db.Schema+".rate_limits")))
			h := newHistory(seed)
			clock := func() time.Time { return h.now }
			h.stores = [2]ratelimit.Store{committed{store: newStore(t, db, clock), pool: pool}, memstore.New(clock)}
			for n := range calls {
				if err := h.step(t.Context()); err != nil {
					t.Fatalf("seed %d, call %d: %v", seed, n, err)
				}
			}
			for kind, n := range h.said {
				said[kind] += n
			}
		}
		for _, kind := range []string{"allow OK", "reserve OK", "at most OK", "first OK", "settle OK", "cancel", "credit", "pause", "resume", "reset"} {
			if said[kind] == 0 {
				t.Errorf("nothing of %q in %v", kind, said)
			}
		}
	})
}
