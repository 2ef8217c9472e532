package memstore_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

const d = 100 * time.Millisecond

// A timeline's instants. At 10 tokens a second, d brings one token, exactly.
var (
	t0 = time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)
	t1 = t0.Add(1 * d)
	t2 = t0.Add(2 * d)
	t3 = t0.Add(3 * d)
	t4 = t0.Add(4 * d)
	t5 = t0.Add(5 * d)
	t6 = t0.Add(6 * d)
	t9 = t0.Add(9 * d)
)

var (
	bucket = ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: time.Second, Capacity: 5, MaxReserved: 3}
	other  = ratelimit.TokenBucket{Name: "other", Rate: 10, Period: time.Second}
	window = ratelimit.FixedWindow{Name: "window", Rate: 3, Period: 4 * d, Start: t0, MaxReserved: ratelimit.None}
)

// clock is an instant that a test sets.
type clock struct{ now time.Time }

func (c *clock) read() time.Time { return c.now }

// verb is what a step of a timeline does; its answer is told in a line.
type verb func(ctx context.Context, s *memstore.Store) (string, error)

type step struct {
	at   time.Time
	do   verb
	want string
}

func run(t *testing.T, steps []step) {
	t.Helper()
	var c clock
	s := memstore.New(c.read)
	for i, st := range steps {
		c.now = st.at
		got, err := st.do(context.Background(), s)
		if err != nil || got != st.want {
			t.Errorf("step %d at t0%+v: %q, %v, want %q", i, st.at.Sub(t0), got, err, st.want)
		}
	}
}

// show tells a result: OK, the wait, and each limit's value.
func show(res ratelimit.Result, err error) (string, error) {
	line := fmt.Sprint(res.OK, " ", res.RetryAfter)
	for _, s := range res.Each() {
		line += fmt.Sprint(" ", s.Value)
	}
	return line, err
}

func allow(requests ...ratelimit.Request) verb {
	return func(ctx context.Context, s *memstore.Store) (string, error) {
		return show(s.Allow(ctx, requests...))
	}
}

func reserve(requests ...ratelimit.Request) verb {
	return func(ctx context.Context, s *memstore.Store) (string, error) {
		return show(s.Reserve(ctx, requests...))
	}
}

func check(requests ...ratelimit.Request) verb {
	return func(ctx context.Context, s *memstore.Store) (string, error) {
		return show(s.Check(ctx, requests...))
	}
}

func reset(limit ratelimit.Limit, key string) verb {
	return func(ctx context.Context, s *memstore.Store) (string, error) {
		return "", s.Reset(ctx, limit, key)
	}
}

func resume(limit ratelimit.Limit, key string) verb {
	return func(ctx context.Context, s *memstore.Store) (string, error) {
		return "", s.Resume(ctx, limit, key)
	}
}

func credit(r ratelimit.Request) verb {
	return func(ctx context.Context, s *memstore.Store) (string, error) {
		status, err := s.Credit(ctx, r)
		return fmt.Sprint(status.OK, " ", status.RetryAfter, " ", status.Value), err
	}
}

// pause tells the end of the pause, by its distance from t0.
func pause(limit ratelimit.Limit, key string, lasts time.Duration) verb {
	return func(ctx context.Context, s *memstore.Store) (string, error) {
		until, err := s.Pause(ctx, limit, key, lasts)
		return fmt.Sprint(until.Sub(t0)), err
	}
}

func prune(limits ...ratelimit.Limit) verb {
	return func(ctx context.Context, s *memstore.Store) (string, error) {
		before, err := s.Prunable(ctx, nil, limits...)
		if err != nil {
			return "", err
		}
		n, err := s.Prune(ctx, limits...)
		if n != before {
			return fmt.Sprintf("%d of %d", n, before), err
		}
		return fmt.Sprint(n), err
	}
}

// Of a sharded limit, all rows are paused, resumed and reset.
func TestShards(t *testing.T) {
	limit := ratelimit.TokenBucket{Name: "s", Rate: 40, Period: time.Second, Shards: 4, MaxReserved: 40}
	run(t, []step{
		{t0, allow(limit.ForN("k", 40)), "true 0s 0"},
		{t0, allow(limit.ForN("k", 2)), "false 50ms 0"}, // from two of them
		{t0, credit(limit.ForN("k", 12)), "true 0s 12"},
		{t0, allow(limit.ForN("k", 12)), "true 0s 0"},
		{t0, reserve(limit.ForN("k", 40)), "true 1s -40"},
		{t0, reserve(limit.For("k")), "false 25ms -40"},
		{t0, reset(limit, "k"), ""},
		{t0, check(limit.ForN("k", 0)), "true 0s 40"},
		{t0, pause(limit, "k", 4*d), "400ms"},
		{t0, check(limit.For("k")), "false 425ms 0"},
		{t0, credit(limit.ForN("k", 8)), "false 400ms 8"},
		{t0, allow(limit.For("k")), "false 400ms 8"},
		{t0, reserve(limit.ForN("k", 8)), "true 400ms 0"},
		{t1, resume(limit, "k"), ""},
		{t2, check(limit.ForN("k", 4)), "true 0s 4"},
		{t2.Add(time.Minute), prune(limit), "0"},
		{t2.Add(time.Minute + 9*d), prune(limit), "4"},
	})
}

// A prune forgets what has been full for a minute, and never a debt or a pause.
func TestPrune(t *testing.T) {
	const m = time.Minute
	run(t, []step{
		{t0, reserve(bucket.ForN("debt", 8)), "true 300ms -3"},
		{t0, allow(bucket.For("spent")), "true 0s 4"},
		{t0, pause(bucket, "paused", m+9*d), "1m0.9s"},
		{t0, allow(other.For("spent")), "true 0s 9"},
		{t0, allow(window.For("spent")), "true 0s 2"},
		{t0, pause(window, "paused", m+6*d), "1m0.6s"},

		{t0, prune(bucket, other, window), "0"},
		{t1, prune(bucket), "0"}, // full, but only now
		{t1.Add(m - 1), prune(bucket), "0"},
		{t1.Add(m), prune(bucket), "1"}, // the spent one
		{t1.Add(m), check(bucket.For("spent")), "true 0s 5"},
		{t1.Add(m), check(bucket.For("paused")), "false 900ms 0"},
		{t3.Add(m), prune(window), "0"},
		{t4.Add(m), prune(window), "1"},
		{t4.Add(m), prune(window), "0"},
		{t4.Add(m), check(window.For("paused")), "false 200ms 0"},
		{t6.Add(2 * m), prune(window), "0"},                        // full, but with edges of its own
		{t6.Add(2*m + 4*d - time.Microsecond), prune(window), "0"}, // not a whole window for nothing
		{t6.Add(2*m + 4*d), prune(window), "1"},
		{t9.Add(m), check(bucket.For("paused")), "false 100ms 0"},
		{t9.Add(m), prune(bucket), "1"}, // the debt, paid and full
		{t9.Add(2*m + 5*d - 1), prune(bucket), "0"},
		{t9.Add(2*m + 5*d), prune(bucket), "1"},
		{t9.Add(2*m + 5*d), prune(bucket, other), "1"},
	})

	// A clock that went back: full, but not by now.
	run(t, []step{
		{t5, credit(bucket.For("a")), "true 0s 5"},
		{t0.Add(m), prune(bucket), "0"},
		{t5.Add(m), prune(bucket), "1"},
	})
}

// A plan's cancelling costs a faster plan nothing of what was refilled.
func TestCancelBesidePlans(t *testing.T) {
	ctx := context.Background()
	var c clock
	s := memstore.New(c.read)
	c.now = t0
	free := ratelimit.TokenBucket{Name: "api", Rate: 1, Period: time.Second, Capacity: 100}
	paid := ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Second, Capacity: 100}
	res, err := s.Allow(ctx, paid.ForN("bob", 90))
	must(t, err)
	must(t, errOf(s.Allow(ctx, free.For("alice"))))
	must(t, errOf(s.Allow(ctx, paid.ForN("bob", 10))))
	c.now = t0.Add(time.Second)
	if ok, err := s.Cancel(ctx, res.Receipt); !ok || err != nil {
		t.Fatalf("Cancel() = %v, %v", ok, err)
	}
	after, err := s.Check(ctx, paid.ForN("bob", 0))
	if err != nil || after.Value != 100 {
		t.Errorf("%v tokens, %v, want the 90 that were given back and the 10 of a second", after.Value, err)
	}
}

// A count that was added up from several requests is given back whole, also
// where no single request may ask for so much.
func TestCancelLargeCount(t *testing.T) {
	ctx := context.Background()
	s := memstore.New(func() time.Time { return t0 })
	vast := ratelimit.TokenBucket{Name: "vast", Rate: ratelimit.MaxTokens, Period: time.Second}
	result, err := s.Reserve(ctx, vast.ForN("", ratelimit.MaxTokens), vast.ForN("", ratelimit.MaxTokens))
	if err != nil || result.Value != -ratelimit.MaxTokens {
		t.Fatalf("Reserve() = %v tokens, %v, want %v", result.Value, err, -ratelimit.MaxTokens)
	}
	if ok, err := s.Cancel(ctx, result.Receipt); !ok || err != nil {
		t.Errorf("Cancel() = %v, %v, want true", ok, err)
	}
	after, err := s.Check(ctx, vast.For(""))
	if err != nil || after.Value != ratelimit.MaxTokens {
		t.Errorf("%v tokens, %v, want %v", after.Value, err, ratelimit.MaxTokens)
	}
}

// every is all the verbs on one request, each by its name.
func every(s *memstore.Store, r ratelimit.Request) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"Allow":        func(ctx context.Context) error { _, err := s.Allow(ctx, r); return err },
		"AllowSeveral": func(ctx context.Context) error { _, err := s.Allow(ctx, bucket.For("a"), r); return err },
		"Reserve":      func(ctx context.Context) error { _, err := s.Reserve(ctx, bucket.For("a"), r); return err },
		"Check":        func(ctx context.Context) error { _, err := s.Check(ctx, r); return err },
		"CheckReserve": func(ctx context.Context) error { _, err := s.CheckReserve(ctx, r); return err },
		"Reset":        func(ctx context.Context) error { return s.Reset(ctx, r.Limit, r.Key) },
		"Resume":       func(ctx context.Context) error { return s.Resume(ctx, r.Limit, r.Key) },
		"Credit":       func(ctx context.Context) error { _, err := s.Credit(ctx, r); return err },
		"Pause":        func(ctx context.Context) error { _, err := s.Pause(ctx, r.Limit, r.Key, 9*d); return err },
		"Take":         func(ctx context.Context) error { return s.Take(ctx, r) },
		"AllowAtMost":  func(ctx context.Context) error { _, err := s.AllowAtMost(ctx, r); return err },
		"AllowFirst":   func(ctx context.Context) error { _, err := s.AllowFirst(ctx, r, other.For("a")); return err },
		"Wait":         func(ctx context.Context) error { _, err := s.Wait(ctx, r); return err },
		"CheckEach":    func(ctx context.Context) error { _, err := s.CheckEach(ctx, bucket.For("a"), r); return err },
	}
}

// counts reports whether a verb has a count.
func counts(verb string) bool { return verb != "Reset" && verb != "Pause" && verb != "Resume" }

// spent is a store in which bucket's key a has 2 tokens left, and the result
// that took the others.
func spent(t *testing.T) (*memstore.Store, ratelimit.Result) {
	t.Helper()
	s := memstore.New(func() time.Time { return t0 })
	result, err := s.Allow(context.Background(), bucket.ForN("a", 3))
	if err != nil {
		t.Fatalf("Allow() = %v", err)
	}
	return s, result
}

func wantTokens(t *testing.T, s *memstore.Store, want float64) {
	t.Helper()
	res, err := s.Check(context.Background(), bucket.ForN("a", 0))
	if err != nil || res.Value != want {
		t.Errorf("%v tokens, %v, want %v", res.Value, err, want)
	}
}

func TestInvalidChangesNothing(t *testing.T) {
	tests := []struct {
		name    string
		request ratelimit.Request
		field   string
	}{
		{"negative count", bucket.ForN("a", -1), "Count"},
		{"count NaN", bucket.ForN("a", math.NaN()), "Count"},
		{"count Inf", bucket.ForN("a", math.Inf(1)), "Count"},
		{"bad key", bucket.For("a\x00"), "Key"},
		{"bad definition", ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: time.Second, Capacity: -5}.For("a"), "Capacity"},
		{"no limit", ratelimit.Request{Key: "a", Count: 1}, "Limit"},
		{"a nil limit", ratelimit.Request{Limit: (*ratelimit.TokenBucket)(nil), Key: "a", Count: 1}, "Limit"},
	}
	for _, tt := range tests {
		s, _ := spent(t)
		for name, verb := range every(s, tt.request) {
			if tt.field == "Count" && !counts(name) {
				continue
			}
			t.Run(tt.name+"/"+name, func(t *testing.T) {
				err := verb(context.Background())
				var fe *ratelimit.FieldError
				if !errors.As(err, &fe) || fe.Field != tt.field || !errors.Is(err, ratelimit.ErrInvalid) {
					t.Errorf("error = %v, want *FieldError of %s that is ErrInvalid", err, tt.field)
				}
				wantTokens(t, s, 2)
			})
		}
	}
}

func TestPruneInvalid(t *testing.T) {
	ctx, now := context.Background(), t0
	s := memstore.New(func() time.Time { return now })
	result, err := s.Allow(ctx, bucket.ForN("a", 3))
	if err != nil {
		t.Fatalf("Allow() = %v", err)
	}
	if _, err := s.Cancel(ctx, result.Receipt); err != nil { // full, to be pruned
		t.Fatalf("Cancel() = %v", err)
	}
	for name, limits := range map[string][]ratelimit.Limit{
		"no limit":    nil,
		"a nil limit": {bucket, nil},
		"a nil plan":  {bucket, (*ratelimit.FixedWindow)(nil)},
		"a bad limit": {bucket, ratelimit.TokenBucket{Name: "bad"}},
	} {
		n, err := s.Prune(ctx, limits...)
		if !errors.Is(err, ratelimit.ErrInvalid) || n != 0 {
			t.Errorf("Prune(%s) = %d, %v, want 0, ErrInvalid", name, n, err)
		}
		if n, err := s.Prunable(ctx, nil, limits...); !errors.Is(err, ratelimit.ErrInvalid) || n != 0 {
			t.Errorf("Prunable(%s) = %d, %v, want 0, ErrInvalid", name, n, err)
		}
	}
	now = t0.Add(time.Minute)
	if n, err := s.Prune(ctx, bucket); n != 1 || err != nil {
		t.Errorf("Prune() = %d, %v, want the 1 that the bad call left", n, err)
	}
}

func TestCancelledContext(t *testing.T) {
	s, result := spent(t)
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	verbs := every(s, bucket.For("a"))
	verbs["Cancel"] = func(ctx context.Context) error {
		ok, err := s.Cancel(ctx, result.Receipt)
		if ok {
			t.Error("Cancel() = true")
		}
		return err
	}
	verbs["Prune"] = func(ctx context.Context) error { _, err := s.Prune(ctx, bucket); return err }
	for name, verb := range verbs {
		t.Run(name, func(t *testing.T) {
			if err := verb(gone); !errors.Is(err, context.Canceled) {
				t.Errorf("error = %v, want context.Canceled", err)
			}
			wantTokens(t, s, 2)
		})
	}
	// What was not cancelled for the context's sake still can be.
	if ok, err := s.Cancel(context.Background(), result.Receipt); !ok || err != nil {
		t.Errorf("Cancel() = %v, %v, want true", ok, err)
	}
	wantTokens(t, s, 5)
}

// together runs f in n goroutines that start at once.
func together(n int, f func(i int)) {
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			<-start
			f(i)
		})
	}
	close(start)
	wg.Wait()
}

// Many goroutines get what the limit has: never more, and when all ask for
// more than that, not less.
func TestConcurrentAllow(t *testing.T) {
	const goroutines, calls, burst = 64, 200, 1000
	limit := ratelimit.TokenBucket{Name: "a", Rate: 1, Period: time.Microsecond, Capacity: burst}
	start := time.Now()
	var now atomic.Int64 // microseconds that the clock went; it also goes back
	s := memstore.New(func() time.Time { return start.Add(time.Duration(now.Load()) * time.Microsecond) })
	var granted atomic.Int64
	together(goroutines, func(i int) {
		for call := range calls {
			now.Store(int64(call+i) % 500)
			res, err := s.Allow(context.Background(), limit.For("k"), other.ForN("k", 0))
			if err != nil {
				t.Errorf("Allow() = %v", err)
			}
			if res.OK {
				granted.Add(1)
			}
		}
	})
	// The clock went to at most calls+goroutines−2, and capacity and what
	// comes in until then are fewer than the calls.
	const most = burst + calls + goroutines - 2
	if got := granted.Load(); got < burst || got > most {
		t.Errorf("granted %d, want from %d to %d", got, burst, most)
	}
}

// All verbs at once: the race detector looks, and what was only taken and
// given back is all there in the end.
func TestConcurrentVerbs(t *testing.T) {
	ctx := context.Background()
	limit := ratelimit.TokenBucket{Name: "a", Rate: 1000, Period: time.Hour}
	s := memstore.New(func() time.Time { return t0 })
	together(64, func(i int) {
		res, err := s.Reserve(ctx, limit.ForN("k", float64(i+1)))
		if err != nil {
			t.Errorf("Reserve() = %v", err)
		}
		if _, err := s.Prune(ctx, limit); err != nil {
			t.Errorf("Prune() = %v", err)
		}
		if _, err := s.Pause(ctx, limit, fmt.Sprint(i), 9*d); err != nil {
			t.Errorf("Pause() = %v", err)
		}
		if err := s.Reset(ctx, limit, fmt.Sprint(i)); err != nil {
			t.Errorf("Reset() = %v", err)
		}
		if ok, err := s.Cancel(ctx, res.Receipt); !ok || err != nil {
			t.Errorf("Cancel() = %v, %v", ok, err)
		}
	})
	res, err := s.Check(ctx, limit.For("k"))
	if err != nil || res.Value != 1000 {
		t.Errorf("%v tokens, %v, want 1000", res.Value, err)
	}
}

// A decision is made at whole microseconds, as in the database.
func TestDecidesAtMicroseconds(t *testing.T) {
	ctx := context.Background()
	now := t0
	s := memstore.New(func() time.Time { return now })
	limit := ratelimit.TokenBucket{Name: "a", Rate: 1, Period: time.Microsecond}
	must(t, errOf(s.Allow(ctx, limit.For("k"))))
	now = t0.Add(1999)
	res, err := s.Allow(ctx, limit.For("k"))
	if err != nil || !res.OK || !res.At.Equal(t0.Add(1000)) {
		t.Errorf("Allow() = OK %v at %v, %v, want it granted at %v", res.OK, res.At, err, t0.Add(1000))
	}
	now = t0.Add(2000) // and what came in by then was not taken twice
	if res, err := s.Allow(ctx, limit.For("k")); err != nil || !res.OK || res.Value != 0 {
		t.Errorf("Allow() = OK %v, %v tokens, %v, want it granted and 0", res.OK, res.Value, err)
	}
}

// A nil Store, and one that New has not made, are told.
func TestNoStore(t *testing.T) {
	r := new(ratelimit.Receipt)
	for _, s := range []*memstore.Store{nil, {}} {
		if _, err := s.Settle(context.Background(), r, 1); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("Settle: %v, want ErrInvalid", err)
		}
		if _, err := s.PauseEach(context.Background(), []ratelimit.Request{bucket.For("a")}, d); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("PauseEach: %v, want ErrInvalid", err)
		}
		for _, err := range s.Rows(context.Background(), bucket, ratelimit.Page{}) {
			if !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("Rows: %v, want ErrInvalid", err)
			}
		}
		for name, verb := range every(s, bucket.For("a")) {
			if err := verb(context.Background()); !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("%s: %v, want ErrInvalid", name, err)
			}
		}
		if _, err := s.Prune(context.Background(), bucket); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("Prune: %v, want ErrInvalid", err)
		}
		if _, err := s.Cancel(context.Background(), nil); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("Cancel: %v, want ErrInvalid", err)
		}
	}
}

// A test of code that limits sets the clock, and need not wait.
func ExampleNew() {
	now := time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)
	store := memstore.New(func() time.Time { return now })
	password := ratelimit.TokenBucket{Name: "password", Rate: 3, Period: time.Hour}

	for _, later := range []time.Duration{0, 0, 0, 0, 20 * time.Minute} {
		now = now.Add(later)
		res, err := store.Allow(context.Background(), password.For("alice"))
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(now.Format(time.TimeOnly), res.OK, res.RetryAfter)
	}
	// Output:
	// 12:00:00 true 0s
	// 12:00:00 true 0s
	// 12:00:00 true 0s
	// 12:00:00 false 20m0s
	// 12:20:00 true 0s
}

// mailer sends each customer three messages an hour at most. In production its store is
// pgstore's.
type mailer struct{ limits ratelimit.Store }

func (m mailer) send(ctx context.Context, customer string) error {
	hourly := ratelimit.TokenBucket{Name: "mail", Rate: 3, Period: time.Hour}
	return m.limits.Take(ctx, hourly.For(customer))
}

// down is a database that does not answer.
type down struct{ ratelimit.Store }

func (down) Take(context.Context, ...ratelimit.Request) error {
	return errors.New("the database does not answer")
}

// Fakes in tests of code that takes a store: memstore's Store, and for faults a type of
// the test's own.
func ExampleStore() {
	ctx := context.Background()
	store := memstore.New(func() time.Time { return t0 })
	m := mailer{store}
	for range 4 {
		fmt.Println(m.send(ctx, "ann"))
	}
	fmt.Println(m.send(ctx, "bob"))
	fmt.Println(mailer{down{}}.send(ctx, "ann"))
	// Output:
	// <nil>
	// <nil>
	// <nil>
	// ratelimit: limit "mail" refused, retry after 20m0s
	// <nil>
	// the database does not answer
}

// A store that a test has silenced fails in every form, changes nothing, and works again.
func TestSetSilent(t *testing.T) {
	s := memstore.New(nil)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 2, Period: time.Hour}
	tx, err := s.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(t.Context())
	s.SetSilent(true)
	_, allowed := s.Allow(t.Context(), limit.For("k"))
	_, acquired := s.Permits().Acquire(t.Context(), ratelimit.InFlight{Name: "f", Limit: 1}.For("k"))
	_, begun := s.Begin(t.Context())
	for name, err := range map[string]error{
		"Allow": allowed, "Acquire": acquired, "Begin": begun,
		"TakeTx": s.TakeTx(t.Context(), tx, limit.For("k")), "Reset": s.Reset(t.Context(), limit, "k"),
	} {
		var state interface{ SQLState() string }
		if !errors.Is(err, memstore.ErrSilent) || !errors.As(err, &state) || state.SQLState() != "08006" {
			t.Errorf("%s: %v, want ErrSilent", name, err)
		}
	}
	s.SetSilent(false)
	if result, err := s.Check(t.Context(), limit.For("k")); err != nil || result.Remaining != 2 {
		t.Errorf("afterwards %v, %v, want as before", result, err)
	}
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }
