// Package wait is the stores' Wait: a reservation, and sleep until it is due.
package wait

import (
	"context"
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Wait reserves, and returns when the reservation is due and none of its limits is
// paused. If ctx ends before, or would, the reservation is given back.
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

// untilDue sleeps until a reservation is due. It returns an error if it is not, and how
// long it would have to sleep.
//
// It counts from the answer, on the monotonic clock, which is not before the decision:
// so it wakes up a little late rather than early, whatever the machine's clock says. A
// pause that has begun in the meantime holds, so it looks again after it has slept.
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

// sleep sleeps for a while, unless ctx ends before. Then it says at once how long it
// would have to.
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

// paused is how long the requests' limits are paused still.
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

// giveBackTime bounds giving back, for which ctx is over.
const giveBackTime = 5 * time.Second

func giveBack(ctx context.Context, s ratelimit.Store, failed *ratelimit.WaitError) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTime)
	defer cancel()
	if _, err := s.Cancel(ctx, failed.Result.Receipt); err != nil {
		return errors.Join(failed, err)
	}
	return failed
}
