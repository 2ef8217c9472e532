package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// patience is the deadline of each call beside locked rows.
const patience = 400 * time.Millisecond

// openOursLocked is Store.Allow while a transaction holds so many rows that
// nobody else asks for, but for one call that waits for each.
func openOursLocked(o ours, rows int) opener {
	return func(ctx context.Context, e *env, w workload) (contender, error) {
		store, err := o.newStore(ctx, e.postgres, w)
		if err != nil {
			return contender{}, err
		}
		c := contender{decide: allow(store, w.limit), close: store.Close}
		if rows == 0 {
			return c, nil
		}
		h := holder{store: store, postgres: e.postgres, limit: w.limit, rows: rows}
		c.disturb = h.hold
		return c, nil
	}
}

// holder locks rows, each of which a call waits for: others each time, since those that were
// waited for are prefetched from when they are free again.
type holder struct {
	store    *pgstore.Store
	postgres *postgresServer
	limit    ratelimit.TokenBucket
	rows     int
	held     int // times
}

// errNotHeld is a measurement that shows nothing.
var errNotHeld = errors.New("a call was decided while another transaction held its row")

// hold takes from the rows in a transaction that stays open until end is called,
// which returns when the calls that had to wait for it are decided.
func (h *holder) hold(ctx context.Context) (end func() error, err error) {
	h.held++
	keys := make([]string, h.rows)
	for i := range keys {
		keys[i] = fmt.Sprintf("held-%d-%d", h.held, i)
	}
	if err := h.postgres.fillOurs(ctx, workload{limit: h.limit, keys: keys}); err != nil {
		return nil, err
	}
	tx, err := h.postgres.many.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("beginning to hold rows: %w", err)
	}
	for _, key := range keys {
		if _, err := h.store.AllowTx(ctx, tx, h.limit.For(key)); err != nil {
			return nil, errors.Join(fmt.Errorf("holding a row: %w", err), tx.Rollback(ctx))
		}
	}
	var free atomic.Bool
	var calls sync.WaitGroup
	faults := make([]error, len(keys))
	for i, key := range keys {
		calls.Go(func() {
			_, faults[i] = h.store.Allow(ctx, h.limit.For(key))
			if !free.Load() {
				faults[i] = errors.Join(errNotHeld, faults[i])
			}
		})
	}
	return func() error {
		free.Store(true)
		err := tx.Rollback(ctx)
		calls.Wait()
		return errors.Join(append(faults, err)...)
	}, nil
}
