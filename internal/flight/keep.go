package flight

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Store is the part of a store that keeping a slot needs.
type Store interface {
	Renew(ctx context.Context, slot ratelimit.Slot) (ratelimit.Slot, error)
	Release(ctx context.Context, slot ratelimit.Slot) error
}

// Keepers is the slots of a store that are kept. The zero value is ready to use. It is safe
// for concurrent use.
type Keepers struct {
	mu   sync.Mutex
	kept map[slotID]*keeper
}

// slotID is a slot in the hands of one holder.
type slotID struct {
	name, key string
	number    int
	fence     int64
}

func idOf(slot ratelimit.Slot) slotID {
	return slotID{slot.InFlight.Name, slot.Key, slot.Number, slot.Fence}
}

// Released notes that a holder has released its slot, or has in a transaction with an unknown
// end: that is the reason if the slot is not held any more.
func (k *Keepers) Released(slot ratelimit.Slot) {
	k.mu.Lock()
	kept := k.kept[idOf(slot)]
	k.mu.Unlock()
	if kept != nil {
		kept.mu.Lock()
		kept.released++
		kept.mu.Unlock()
	}
}

// keeper keeps one slot.
type keeper struct {
	store  Store
	cancel context.CancelCauseFunc

	mu       sync.Mutex
	slot     ratelimit.Slot
	released int // how often the holder has said so
	lost     bool
}

// retryPause is how long a keeper waits before it renews again, after a fault.
const retryPause = 50 * time.Millisecond

// releaseTime bounds the release after the work, for which the context may be over.
const releaseTime = 5 * time.Second

// Keep runs do with a context that ends when the slot is lost, or with ctx, renews it until do
// has ended, and releases it. In ModeShadow the context is ctx, and it is no error that the slot
// was lost.
func (k *Keepers) Keep(ctx context.Context, store Store, slot ratelimit.Slot, do func(context.Context, ratelimit.Slot) error) (err error) {
	if err := slot.Err(); err != nil {
		return err
	}
	if err := slot.Validate(); err != nil {
		return err
	}
	if do == nil {
		return &ratelimit.FieldError{Limit: slot.InFlight.Name, Field: "Func", Value: nil, Reason: "must not be nil"}
	}
	if slot.Shadowed {
		return do(ctx, slot)
	}
	if !now().before(slot.Ends()) { // it was read, or waited for; it may be held all the same
		renewed, err := store.Renew(ctx, slot)
		if err != nil {
			return err
		}
		if slot = renewed; slot.Shadowed {
			return do(ctx, slot)
		}
	}
	inner, cancel := context.WithCancelCause(ctx)
	kept := &keeper{store: store, cancel: cancel, slot: slot}
	k.add(slot, kept)
	// The slot of a function that goes on working when ctx is over is renewed all the same.
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
		k.remove(slot)
		if lost := kept.release(ctx); lost != nil && slot.InFlight.Mode != ratelimit.ModeShadow {
			err = errors.Join(err, lost)
		}
	}()
	if slot.InFlight.Mode == ratelimit.ModeShadow {
		return do(ctx, slot)
	}
	return do(&leased{inner, kept}, slot)
}

func (k *Keepers) add(slot ratelimit.Slot, kept *keeper) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.kept == nil {
		k.kept = make(map[slotID]*keeper)
	}
	k.kept[idOf(slot)] = kept
}

func (k *Keepers) remove(slot ratelimit.Slot) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.kept, idOf(slot))
}

// releases is how often the holder has released the slot.
func (k *keeper) releases() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.released
}

// ends is when the slot must be taken for lost.
func (k *keeper) ends() time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.slot.Ends()
}

// lose ends the holder's context.
func (k *keeper) lose() {
	k.mu.Lock()
	k.lost = true
	k.mu.Unlock()
	k.cancel(ratelimit.ErrLeaseLost)
}

// over reports whether the slot is lost, or must be taken for that by now.
func (k *keeper) over() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lost || !now().before(k.slot.Ends())
}

// renew renews the slot at half of its lease until ctx is over.
func (k *keeper) renew(ctx context.Context) {
	end := time.NewTimer(0) // of the lease
	next := time.NewTimer(0)
	defer end.Stop()
	defer next.Stop()
	set := func() {
		left := time.Until(k.ends())
		end.Reset(left)
		next.Reset(left - k.slot.InFlight.LeaseOrDefault()/2)
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
				end.Stop() // it is as the holder wanted it
			case errors.Is(err, ratelimit.ErrLeaseLost):
				k.lose()
			default:
				next.Reset(min(retryPause, k.slot.InFlight.LeaseOrDefault()/8))
			}
		}
	}
}

func (k *keeper) renewOnce(ctx context.Context) error {
	k.mu.Lock()
	slot, released := k.slot, k.released
	k.mu.Unlock()
	ctx, cancel := context.WithDeadline(ctx, slot.Ends())
	defer cancel()
	renewed, err := k.store.Renew(ctx, slot)
	if err == nil && renewed.Shadowed {
		err = ratelimit.ErrLeaseLost
	}
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.slot.Asked, k.slot.At, k.slot.Until = renewed.Asked, renewed.At, renewed.Until
	k.released -= released // the earlier releases were rolled back
	return nil
}

// release releases the slot. It returns an error if that was lost while it was worked with.
func (k *keeper) release(ctx context.Context) error {
	lost := k.over()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTime)
	defer cancel()
	err := k.store.Release(ctx, k.slot)
	if k.releases() > 0 {
		return nil
	}
	if lost || errors.Is(err, ratelimit.ErrLeaseLost) {
		return ratelimit.ErrLeaseLost
	}
	return nil // a slot that cannot be released is free when its lease is over
}

// leased is a context that is over when the lease is: also in a process that was stopped, and
// in which no timer has rung yet.
type leased struct {
	context.Context
	keeper *keeper
}

// Err returns why the context is over, if it is.
func (c *leased) Err() error {
	if c.Context.Err() == nil && c.keeper.over() && c.keeper.releases() == 0 {
		c.keeper.lose()
	}
	return c.Context.Err()
}

// instant is the time by the monotonic clock and by the other, which goes on while the machine
// is asleep.
type instant struct{ time.Time }

func now() instant { return instant{time.Now()} }

// before reports whether it is before t by both clocks.
func (i instant) before(t time.Time) bool {
	return i.Time.Before(t) && i.Round(0).Before(t.Round(0))
}
