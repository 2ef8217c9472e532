// Package wait implements the stores' Wait: it reserves, and sleeps until the reservation is due.
package wait

import (
	"context"
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Wait reserves, and returns when the reservation is due and none of its limits is paused. If ctx
// ends before that, or would, Wait gives the reservation back and returns an error.
func Wait(ctx context.Context, s ratelimit.Store, requests ...ratelimit.Request) (ratelimit.Result, error) {
	result, err := ratelimit.Granted(s.Reserve(ctx, requests...))
	if err != nil {
		return result, err
	}
	if left, err := untilDue(ctx, s, result, requests); err != nil {
		return result, giveBack(ctx, s, &ratelimit.WaitError{Result: result, Wait: left, Err: err})
	}
	return result, nil
}

// untilDue sleeps until a reservation is due. If ctx ends first, or would, it returns the time left
// to sleep and an error.
//
// It counts from the arrival of the answer, on the monotonic clock. That is not before the
// decision, so it wakes a little late rather than early, whatever the machine's clock says. After
// sleeping it looks for pauses that began meanwhile.
func untilDue(ctx context.Context, s ratelimit.Store, result ratelimit.Result, requests []ratelimit.Request) (left time.Duration, err error) {
	for left = result.RetryAfter; left > 0; {
		if left, err = sleep(ctx, left); err != nil {
			return left, err
		}
		if left, err = paused(ctx, s, requests); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

// sleep sleeps for d, unless ctx ends before that: then it returns at once with the time left to
// sleep.
func sleep(ctx context.Context, pause time.Duration) (left time.Duration, err error) {
	begun := time.Now()
	if deadline, ok := ctx.Deadline(); ok && deadline.Sub(begun) < pause {
		return pause, context.DeadlineExceeded
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return 0, nil
	case <-ctx.Done():
		return max(0, pause-time.Since(begun)), ctx.Err()
	}
}

// paused returns the time until all limits of the requests have resumed.
func paused(ctx context.Context, s ratelimit.Store, requests []ratelimit.Request) (left time.Duration, err error) {
	questions := make([]ratelimit.Request, len(requests))
	for i, r := range requests {
		questions[i] = r
		questions[i].Count = 0
	}
	result, err := s.Check(ctx, questions...)
	for _, status := range result.Each() {
		if status.Request.Mode == ratelimit.ModeShadow {
			continue
		}
		left = max(left, status.PausedUntil.Sub(status.At))
	}
	return left, err
}

// giveBackTime bounds giving back, which outlives ctx.
const giveBackTime = 5 * time.Second

func giveBack(ctx context.Context, s ratelimit.Store, failed *ratelimit.WaitError) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTime)
	defer cancel()
	if _, err := s.Cancel(ctx, failed.Result.Receipt); err != nil {
		return errors.Join(failed, err)
	}
	return failed
}
