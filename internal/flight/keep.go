package flight

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Store is the part of a store that keeping a permit needs.
type Store interface {
	Renew(ctx context.Context, permit ratelimit.Permit) (ratelimit.Permit, error)
	Release(ctx context.Context, permit ratelimit.Permit) error
}

// Renewers holds the permits of a store that are kept. The zero value is ready to use. It is safe
// for concurrent use.
type Renewers struct {
	mu      sync.Mutex
	running map[permitID]*renewer
}

// permitID identifies a permit that one holder has. Its parts have IDs of their own.
type permitID struct {
	name, key string
	number    int
	fence     int64
	more      int // permits that are held with it
}

func idOf(permit ratelimit.Permit) permitID {
	more := len(permit.More)
	for _, p := range permit.With {
		more += 1 + len(p.More)
	}
	return permitID{permit.InFlight.Name, permit.Key, permit.Number, permit.Fence, more}
}

// Released notes that a holder has released its permit, perhaps in a transaction whose end is
// unknown. If the permit turns out not to be held, it does not count as lost.
func (k *Renewers) Released(permit ratelimit.Permit) { k.note(permit, false) }

// Gone notes that the release of a permit is committed, so Keep does not release it again.
func (k *Renewers) Gone(permit ratelimit.Permit) { k.note(permit, true) }

func (k *Renewers) note(permit ratelimit.Permit, gone bool) {
	k.mu.Lock()
	kept := k.running[idOf(permit)]
	k.mu.Unlock()
	if kept != nil {
		kept.mu.Lock()
		kept.released++
		kept.gone = kept.gone || gone
		kept.mu.Unlock()
	}
}

// renewer keeps one permit.
type renewer struct {
	store  Store
	cancel context.CancelCauseFunc

	mu       sync.Mutex
	permit   ratelimit.Permit
	released int // releases that the holder has reported
	gone     bool
	lost     bool
}

// retryPause is how long a renewer waits after a fault before it renews again.
const retryPause = 50 * time.Millisecond

// releaseTime bounds the release after the work, whose context may have ended.
const releaseTime = 5 * time.Second

// Keep runs do, renews the permit meanwhile, and releases it afterwards. The context of do ends
// with ctx, or when the permit is lost.
func (k *Renewers) Keep(ctx context.Context, store Store, permit ratelimit.Permit, do func(context.Context, ratelimit.Permit) error) (err error) {
	if err := permit.Err(); err != nil {
		return err
	}
	if err := permit.Validate(); err != nil {
		return err
	}
	if do == nil {
		return &ratelimit.FieldError{Limit: permit.InFlight.Name, Field: "Func", Value: nil, Reason: "must not be nil"}
	}
	if ended(permit.Ends()) { // its lease seems over here, but the permit may still be held
		renewed, err := store.Renew(ctx, permit)
		if err != nil {
			return err
		}
		permit = renewed
	}
	inner, cancel := context.WithCancelCause(ctx)
	kept := &renewer{store: store, cancel: cancel, permit: permit}
	k.set(permit, kept)
	// Renewing goes on while do works, even after ctx has ended.
	working, stop := context.WithCancel(context.WithoutCancel(ctx))
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		kept.renew(working)
	}()
	defer func() { // also when do panics, or ends its goroutine
		stop()
		cancel(nil)
		<-stopped
		k.set(permit, nil)
		if lost := kept.release(ctx); lost != nil {
			err = errors.Join(err, lost)
		}
	}()
	return do(&leased{inner, kept}, permit)
}

// set notes the renewer of a permit, or with nil that it has none.
func (k *Renewers) set(permit ratelimit.Permit, kept *renewer) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.running == nil {
		k.running = make(map[permitID]*renewer)
	}
	if k.running[idOf(permit)] = kept; kept == nil {
		delete(k.running, idOf(permit))
	}
}

// releases returns how often the holder has reported a release.
func (k *renewer) releases() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.released
}

// ends returns when the permit counts as lost.
func (k *renewer) ends() time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.permit.Ends()
}

// lose ends the holder's context.
func (k *renewer) lose() {
	k.mu.Lock()
	k.lost = true
	k.mu.Unlock()
	k.cancel(ratelimit.ErrLeaseLost)
}

// over reports whether the permit is lost, or its lease is over by this machine's clocks.
func (k *renewer) over() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lost || ended(k.permit.Ends())
}

// renew renews the permit at half of its lease, until ctx ends.
func (k *renewer) renew(ctx context.Context) {
	end := time.NewTimer(0) // of the lease
	next := time.NewTimer(0)
	defer end.Stop()
	defer next.Stop()
	set := func() {
		left := time.Until(k.ends())
		end.Reset(left)
		next.Reset(left - k.permit.Lease()/2)
	}
	set()
	results := make(chan error, 1)
	asking := false
	for {
		select {
		case <-ctx.Done():
			if asking {
				<-results
			}
			return
		case <-end.C:
			k.lose()
		case <-next.C:
			if asking || k.over() {
				continue
			}
			asking = true
			go func() { results <- k.renewOnce(ctx) }()
		case err := <-results:
			asking = false
			switch {
			case err == nil:
				set()
			case errors.Is(err, ratelimit.ErrLeaseLost) && k.releases() > 0:
				end.Stop() // the holder has released it
			case errors.Is(err, ratelimit.ErrLeaseLost):
				k.lose()
			default:
				next.Reset(min(retryPause, k.permit.Lease()/8))
			}
		}
	}
}

func (k *renewer) renewOnce(ctx context.Context) error {
	k.mu.Lock()
	permit, released := k.permit, k.released
	k.mu.Unlock()
	ctx, cancel := context.WithDeadline(ctx, permit.Ends())
	defer cancel()
	renewed, err := k.store.Renew(ctx, permit)
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.permit.Asked, k.permit.At, k.permit.Until, k.permit.With = renewed.Asked, renewed.At, renewed.Until, renewed.With
	k.released -= released // the earlier releases were rolled back
	return nil
}

// release releases the permit. It returns ErrLeaseLost if the permit was lost and the holder has
// released nothing.
func (k *renewer) release(ctx context.Context) error {
	k.mu.Lock()
	gone := k.gone
	k.mu.Unlock()
	if gone {
		return nil
	}
	lost := k.over()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTime)
	defer cancel()
	err := k.store.Release(ctx, k.permit)
	if k.releases() > 0 {
		return nil
	}
	if lost || errors.Is(err, ratelimit.ErrLeaseLost) {
		return ratelimit.ErrLeaseLost
	}
	return nil // a permit that cannot be released is free when its lease is over
}

// leased is a context that ends with the lease. Err checks the clock, because in a process that was
// stopped no timer may have fired yet.
type leased struct {
	context.Context
	keeper *renewer
}

// Err returns why the context is over, if it is.
func (c *leased) Err() error {
	if c.Context.Err() == nil && c.keeper.over() && c.keeper.releases() == 0 {
		c.keeper.lose()
	}
	return c.Context.Err()
}

// ended reports whether an instant is past, by the monotonic clock or by the wall clock, which goes on
// while the machine is asleep.
func ended(at time.Time) bool {
	now := time.Now()
	return !now.Before(at) || !now.Round(0).Before(at.Round(0))
}
