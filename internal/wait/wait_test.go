package wait_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/wait"
	"github.com/pgratelimit/ratelimit/memstore"
)

// Time in these tests is that of a bubble: it goes on when all sleep, so that nothing
// is early or late but what the code makes so.

var partner = ratelimit.TokenBucket{Name: "partner", Rate: 1, Period: time.Second, Capacity: 2, MaxReserved: 100}

// left is how many tokens there are.
func left(t *testing.T, s *memstore.Store) float64 {
	t.Helper()
	status, err := s.Check(context.Background(), partner.ForN("", 0))
	if err != nil {
		t.Fatal(err)
	}
	return status.Value
}

func TestWaitsUntilDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(time.Now)
		begun := time.Now()
		for i, want := range []time.Duration{0, 0, time.Second, 2 * time.Second, 3 * time.Second} {
			result, err := s.Wait(t.Context(), partner.For(""))
			if got := time.Since(begun); got != want || err != nil || !result.OK {
				t.Errorf("wait %d: returned after %v, %v, %v, want after %v", i, got, result, err, want)
			}
		}
	})
}

// A wait that cannot be over in time ends at once, and takes nothing. A deadline that is just far enough
// does not end it.
func TestDeadlineNearerThanTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(time.Now)
		if err := s.Take(t.Context(), partner.ForN("", 2)); err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 2999*time.Millisecond)
		defer cancel()
		_, err := s.Wait(ctx, partner.ForN("", 3))
		var failed *ratelimit.WaitError
		if !errors.As(err, &failed) || !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ratelimit.ErrRefused) {
			t.Fatalf("error %v, want a *WaitError that is DeadlineExceeded", err)
		}
		if failed.Wait != 3*time.Second || failed.Result.RetryAfter != 3*time.Second {
			t.Errorf("the wait is %v of %v, want 3 s", failed.Wait, failed.Result.RetryAfter)
		}
		if got := time.Since(begun); got != 0 {
			t.Errorf("returned after %v, want at once", got)
		}
		if got := left(t, s); got != 0 {
			t.Errorf("%v tokens left, want 0", got)
		}
		ctx, cancel = context.WithTimeout(t.Context(), 3001*time.Millisecond)
		defer cancel()
		if _, err := s.Wait(ctx, partner.ForN("", 3)); err != nil {
			t.Error(err)
		}
	})
}

func TestContextEndsFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(time.Now)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(400*time.Millisecond, cancel)
		_, err := s.Wait(ctx, partner.ForN("", 3))
		var failed *ratelimit.WaitError
		if !errors.As(err, &failed) || !errors.Is(err, context.Canceled) || failed.Wait != 600*time.Millisecond {
			t.Errorf("error %v, want context.Canceled with 600 ms to go", err)
		}
		if got := left(t, s); got != 2 {
			t.Errorf("%v tokens left, want 2", got)
		}
	})
}

// A pause that begins while somebody sleeps holds for him too.
func TestPauseWhileItSleeps(t *testing.T) {
	for _, test := range []struct {
		name     string
		deadline time.Duration
		want     time.Duration // until it returns
		err      error
	}{
		{"without a deadline", time.Hour, 10500 * time.Millisecond, nil},
		{"with one that is nearer", 5 * time.Second, time.Second, context.DeadlineExceeded},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := memstore.New(time.Now)
				time.AfterFunc(500*time.Millisecond, func() {
					if _, err := s.Pause(context.Background(), partner, "", 10*time.Second); err != nil {
						t.Error(err)
					}
				})
				ctx, cancel := context.WithTimeout(t.Context(), test.deadline)
				defer cancel()
				begun := time.Now()
				_, err := s.Wait(ctx, partner.ForN("", 3))
				if got := time.Since(begun); got != test.want || !errors.Is(err, test.err) {
					t.Errorf("returned %v after %v, want %v after %v", err, got, test.err, test.want)
				}
			})
		})
	}
}

func TestNoWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(time.Now)
		if _, err := s.Wait(t.Context(), partner.ForN("", 103)); !errors.Is(err, ratelimit.ErrExceedsCapacity) {
			t.Errorf("error %v, want ErrExceedsCapacity", err)
		}
		if _, err := s.Reserve(t.Context(), partner.ForN("", 102)); err != nil {
			t.Fatal(err)
		}
		if result, err := s.Wait(t.Context(), partner.For("")); !errors.Is(err, ratelimit.ErrRefused) || result.RetryAfter != time.Second {
			t.Errorf("got %v, %v, want ErrRefused and when to try again", result, err)
		}
	})
}

// away is a store whose database goes away.
type away struct {
	ratelimit.Store
	check, cancel error
}

func (a away) Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if a.check != nil {
		return ratelimit.Result{}, a.check
	}
	return a.Store.Check(ctx, requests...)
}

func (a away) Cancel(ctx context.Context, r *ratelimit.Receipt) (bool, error) {
	if a.cancel != nil {
		return false, a.cancel
	}
	return a.Store.Cancel(ctx, r)
}

// Without an answer it does not say that the work may run.
func TestFaults(t *testing.T) {
	gone := errors.New("the database is away")
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New(time.Now)
		if _, err := wait.Wait(t.Context(), away{Store: s, check: gone}, partner.ForN("", 3)); !errors.Is(err, gone) {
			t.Errorf("error %v, want %v", err, gone)
		}
		if got := left(t, s); got != 2 {
			t.Errorf("%v tokens left, want 2", got)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err := wait.Wait(ctx, away{Store: s, cancel: gone}, partner.ForN("", 3))
		if !errors.Is(err, gone) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v, want %v and DeadlineExceeded", err, gone)
		}
	})
}
