package memstore_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

const d = 100 * time.Millisecond

var t0 = time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)

var (
	bucket = ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: time.Second, Capacity: 5, MaxReserved: 3}
	other  = ratelimit.TokenBucket{Name: "other", Rate: 10, Period: time.Second}
)

// A plan's cancelling costs a faster plan nothing of what was refilled.
func TestCancelBesidePlans(t *testing.T) {
	ctx := context.Background()
	now := t0
	s := memstore.New(func() time.Time { return now })
	free := ratelimit.TokenBucket{Name: "api", Rate: 1, Period: time.Second, Capacity: 100}
	paid := ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Second, Capacity: 100}
	res, err := s.Allow(ctx, paid.ForN("bob", 90))
	must(t, err)
	must(t, errOf(s.Allow(ctx, free.For("alice"))))
	must(t, errOf(s.Allow(ctx, paid.ForN("bob", 10))))
	now = t0.Add(time.Second)
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
	must(t, err)
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
	must(t, err)
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
	if n, err := s.Prunable(ctx, nil, bucket); n != 1 || err != nil {
		t.Errorf("Prunable() = %d, %v, want the 1 that the bad call left", n, err)
	}
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

// All verbs at once: the race detector looks, and what was only taken and
// given back is all there in the end.
func TestConcurrentVerbs(t *testing.T) {
	ctx := context.Background()
	limit := ratelimit.TokenBucket{Name: "a", Rate: 1000, Period: time.Hour}
	s := memstore.New(func() time.Time { return t0 })
	var callers sync.WaitGroup
	for i := range 64 {
		callers.Go(func() {
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
	}
	callers.Wait()
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
	for _, s := range []*memstore.Store{nil, {}} {
		verbs := every(s, bucket.For("a"))
		verbs["Settle"] = func(ctx context.Context) error { return errOf(s.Settle(ctx, new(ratelimit.Receipt), 1)) }
		verbs["Cancel"] = func(ctx context.Context) error { return errOf(s.Cancel(ctx, nil)) }
		verbs["Prune"] = func(ctx context.Context) error { return errOf(s.Prune(ctx, bucket)) }
		verbs["PauseEach"] = func(ctx context.Context) error {
			return errOf(s.PauseEach(ctx, []ratelimit.Request{bucket.For("a")}, d))
		}
		verbs["Rows"] = func(ctx context.Context) (err error) {
			for _, err = range s.Rows(ctx, bucket, ratelimit.Page{}) {
			}
			return err
		}
		for name, verb := range verbs {
			if err := verb(t.Context()); !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("%s: %v, want ErrInvalid", name, err)
			}
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
