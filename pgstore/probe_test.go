package pgstore_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/relay"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// The probe needs no connection of the pool, and after a silence has it replace those that are dead
// without knowing.
func TestProbe(t *testing.T) {
	t.Parallel()
	r := newRelay(t)
	s := r.newScene(t, 1)
	held, err := s.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.store.Probe(t.Context()); err != nil || !s.store.PoolInUse() {
		t.Errorf("with the pool in use: Probe() = %v, PoolInUse() = %v, want an answer and true", err, s.store.PoolInUse())
	}
	held.Release()

	silence := func(int) relay.Fate { return relay.Silence }
	r.interfere(nil, silence)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := s.store.Probe(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("through a silent network: Probe() = %v, want its deadline", err)
	}
	r.interfere(nil, nil)
	opened := s.Pool.Stat().NewConnsCount()
	if err := s.store.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustAllow(t, s.store, slow("l", 10).For("k"))
	if opened == s.Pool.Stat().NewConnsCount() {
		t.Error("a call after the silence had a connection from before it")
	}
	if err := (*pgstore.Store)(nil).Probe(t.Context()); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("a nil Store: %v", err)
	}
}
