package pgstore_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/relay"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// The probe needs no connection of the pool. After a silence it has the pool replace those that are
// dead without knowing, and waits until there is one.
func TestProbe(t *testing.T) {
	t.Parallel()
	r := newRelay(t)
	s := r.newScene(t, 1)
	held, err := s.Pool.Acquire(t.Context())
	must(t, err)
	if err := s.store.Probe(t.Context()); err != nil || !s.store.PoolInUse() {
		t.Errorf("with the pool in use: Probe() = %v, PoolInUse() = %v, want an answer and true", err, s.store.PoolInUse())
	}
	held.Release()

	silence := func(int) relay.Fate { return relay.Silence }
	r.interfere(silence)
	ctx := within(t, 200*time.Millisecond)
	if err := s.store.Probe(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("through a silent network: Probe() = %v, want its deadline", err)
	}
	r.interfere(func(int) relay.Fate { return relay.Cut }) // as by a balancer without a server
	if err := s.store.Probe(t.Context()); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("on a connection that ends: Probe() = %v, want io.ErrUnexpectedEOF", err)
	}
	r.Interfere(nil, nil)
	opened := s.Pool.Stat().NewConnsCount()
	held = acquireConn(t, s.Pool)
	ctx = within(t, 200*time.Millisecond)
	if err := s.store.Probe(ctx); !errors.Is(err, context.DeadlineExceeded) || s.store.PoolInUse() {
		t.Errorf("after a silence, with the pool held: Probe() = %v, PoolInUse() = %v, want its deadline and false", err, s.store.PoolInUse())
	}
	held.Release()
	must(t, s.store.Probe(t.Context()))
	mustAllow(t, s.store, slow("l", 10).For("k"))
	if opened == s.Pool.Stat().NewConnsCount() {
		t.Error("a call after the silence had a connection from before it")
	}
	if err := (*pgstore.Store)(nil).Probe(t.Context()); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("a nil Store: %v", err)
	}
}

// A server whose commits hang, here since no synchronous standby is there, answers no probe until they go on;
// a role that may not ask for that, and a server that is read-only, have an answer.
func TestProbeOfCommits(t *testing.T) {
	t.Setenv("DATABASE_URL", "") // a server whose settings may change
	server, err := throwaway.StartWith(t.Context(), throwaway.Options{})
	must(t, err)
	t.Cleanup(func() {
		should(t, server.Close())
	})
	admin, pool := connect(t, server.URL), newPool(t, server.URL)
	store, err := pgstore.New(pool, nil)
	must(t, err)
	exec := func(statements ...string) {
		t.Helper()
		for _, sql := range statements {
			must(t, errOf(admin.Exec(t.Context(), sql)))
		}
	}
	probe := func(lasts time.Duration) error {
		ctx := within(t, lasts)
		return store.Probe(ctx)
	}
	exec("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
	eventually(t, "commits hang", func() bool { return errors.Is(probe(200*time.Millisecond), context.DeadlineExceeded) })
	exec("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
	eventually(t, "commits go on", func() bool { return probe(10*time.Second) == nil })
	exec("ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
	if err := probe(10 * time.Second); err != nil {
		t.Errorf("of a server that is read-only: %v", err)
	}
	exec("SET default_transaction_read_only = off", "ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()",
		"REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pg_catalog FROM PUBLIC", "CREATE ROLE probing LOGIN PASSWORD 'probing'")
	config := pool.Config()
	config.ConnConfig.User, config.ConnConfig.Password = "probing", "probing"
	if pool, err = pgxpool.NewWithConfig(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if store, err = pgstore.New(pool, nil); err != nil {
		t.Fatal(err)
	}
	if err := probe(10 * time.Second); err != nil {
		t.Errorf("of a role that may not: %v", err)
	}
}

// A pool that has all the connections that its role may have is no silence: the probe, for which
// there is none, asks by one of the pool, or when all are in use, it has its answer.
func TestProbeOfAFullRole(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	needRoles(t, db)
	role := strings.Replace(db.Schema, "ratelimit_test_", "ratelimit_full_", 1)
	must(t, errOf(db.Pool.Exec(t.Context(), "CREATE ROLE "+role+" LOGIN PASSWORD 'full' CONNECTION LIMIT 2")))
	t.Cleanup(func() { _, _ = db.Pool.Exec(context.Background(), "DROP ROLE "+role) })
	config := db.Pool.Config()
	config.MaxConns, config.ConnConfig.User, config.ConnConfig.Password = 2, role, "full"
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	defer pool.Close()
	store, err := pgstore.New(pool, nil)
	must(t, err)
	held := []*pgxpool.Conn{acquireConn(t, pool), acquireConn(t, pool)}
	if err := store.Probe(t.Context()); err != nil {
		t.Errorf("with the pool in use: Probe() = %v, want an answer", err)
	}
	for _, c := range held {
		c.Release()
	}
	opened := pool.Stat().NewConnsCount()
	if err := store.Probe(t.Context()); err != nil {
		t.Errorf("with the pool at rest: Probe() = %v, want an answer", err)
	}
	if pool.Stat().NewConnsCount() != opened {
		t.Error("the pool has given up connections that it may not get again")
	}

	pool.Reset()
	for others, end := 0, time.Now().Add(10*time.Second); others < 2; { // who come for its places, once those are free
		other, err := pgx.ConnectConfig(t.Context(), config.ConnConfig)
		if err == nil {
			others++
			defer other.Close(context.Background())
		} else if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	if err := store.Probe(t.Context()); err == nil {
		t.Error("without a connection: Probe() = nil, want an error")
	}
}

func acquireConn(t *testing.T, pool *pgxpool.Pool) *pgxpool.Conn {
	t.Helper()
	c, err := pool.Acquire(t.Context())
	must(t, err)
	return c
}
