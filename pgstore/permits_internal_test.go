package pgstore

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// TestPermitOfOneWhoLeft: a permit is released that a statement takes for a caller who gives up while
// it is under way.
func TestPermitOfOneWhoLeft(t *testing.T) {
	var sends onSend
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &sends }))
	store, err := New(db.Pool, &Config{Schema: db.Schema})
	if err != nil {
		t.Fatal(err)
	}
	limit := ratelimit.InFlight{Name: "l", Limit: 50, Lease: time.Minute}
	for first := range 4 { // of what is sent, and one of these takes the permit
		ctx, giveUp := context.WithCancel(t.Context())
		returned := make(chan struct{})
		sends.after(first, func() {
			giveUp()
			select {
			case <-returned:
			case <-time.After(100 * time.Millisecond): // it is sent by the caller itself
			}
		})
		permit, err := store.Permits().Acquire(ctx, limit.For("k"))
		close(returned)
		sends.next.Store(nil)
		if err == nil && permit.OK {
			err = store.Permits().Release(t.Context(), permit)
		}
		if err != nil && ctx.Err() == nil {
			t.Error(err)
		}
		giveUp()
	}
	store.Close() // which waits for what gives back
	after, err := New(db.Pool, &Config{Schema: db.Schema})
	if err != nil {
		t.Fatal(err)
	}
	permits, err := after.Permits().Held(t.Context(), limit, "k")
	if err != nil || len(permits) > 0 {
		t.Errorf("got %d permits that are held, and %v, of nobody", len(permits), err)
	}
}
