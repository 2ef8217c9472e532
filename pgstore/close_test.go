package pgstore_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Close ends those who wait for a reservation, and returns when they have given it back.
func TestCloseEndsWaits(t *testing.T) {
	t.Parallel()
	db, store := setUp(t, maxConns(8))
	limit := slow("l", 1)
	mustAllow(t, store, limit.For("k"))
	type answer struct {
		result ratelimit.Result
		err    error
	}
	answers := make(chan answer, 2)
	for range 2 {
		go func() {
			result, err := store.Wait(t.Context(), limit.For("k"))
			answers <- answer{result, err}
		}()
	}
	eventually(t, "both wait", func() bool {
		check, err := store.Check(t.Context(), limit.ForN("k", 0))
		return err == nil && check.Value < -1.5
	})
	holder, err := db.Pool.Begin(t.Context())
	must(t, err)
	mustExec(t, holder, "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE")
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		store.Close()
	}()
	eventually(t, "one who gives back waits for the row", func() bool { return waitsForLong(t, db, holder) > 0 })
	select {
	case <-closed:
		t.Error("Close has returned before they have given back")
	default:
	}
	must(t, holder.Rollback(t.Context()))
	<-closed
	wantLeft(t, newStore(t, db), limit.For("k"), 0)
	for range 2 {
		var waited *ratelimit.WaitError
		if a := <-answers; !errors.As(a.err, &waited) || !errors.Is(a.err, pgstore.ErrClosed) || waited.Wait < time.Hour {
			t.Errorf("got %v, want a wait that the store has ended", a.err)
		}
	}
	if _, err := store.Wait(t.Context(), limit.For("k")); !errors.Is(err, pgstore.ErrClosed) {
		t.Errorf("got %v of a wait afterwards, want %v", err, pgstore.ErrClosed)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := newStore(t, db).Wait(ctx, limit.For("k")); errors.Is(err, pgstore.ErrClosed) || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v of a wait that its caller ended, want %v", err, context.Canceled)
	}
}
