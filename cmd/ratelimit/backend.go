package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// backend is where replays keep their limits.
type backend interface {
	// withEmpty calls use with a store that has nothing in it and lives on
	// clock, and leaves nothing of it behind, whatever happens.
	withEmpty(ctx context.Context, clock func() time.Time, use func(ratelimit.Store) error) error

	close() error
	String() string
}

func openBackend(ctx context.Context, flags replayFlags) (backend, error) {
	if flags.store == "postgres" {
		return openPostgres(ctx, flags.portable)
	}
	return memory{}, nil
}

type memory struct{}

func (memory) withEmpty(_ context.Context, clock func() time.Time, use func(ratelimit.Store) error) error {
	return use(memstore.New(clock))
}

func (memory) close() error   { return nil }
func (memory) String() string { return "memory" }

// postgres keeps limits on a server, each store in a schema of its own.
type postgres struct {
	server   *throwaway.Server
	pool     *pgxpool.Pool
	portable bool
}

func openPostgres(ctx context.Context, portable bool) (*postgres, error) {
	server, err := throwaway.Start(ctx)
	if err != nil {
		return nil, err
	}
	pool, err := pgxpool.New(ctx, server.URL)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a pool: %w", err), server.Close())
	}
	return &postgres{server, pool, portable}, nil
}

func (p *postgres) close() error {
	p.pool.Close()
	return p.server.Close()
}

func (p *postgres) String() string {
	if p.portable {
		return "postgres, portable, its table not distributed (" + p.server.Source + ")"
	}
	return "postgres (" + p.server.Source + ")"
}

// schemaPrefix tells whose schema it is, should one be left behind by a replay
// that was killed.
const schemaPrefix = "ratelimit_replay_"

func (p *postgres) withEmpty(ctx context.Context, clock func() time.Time, use func(ratelimit.Store) error) (err error) {
	schema := schemaPrefix + strings.ToLower(rand.Text())
	defer func() { err = errors.Join(err, p.drop(ctx, schema)) }()
	if _, err := migrate.Up(ctx, p.pool, &migrate.Config{Schema: schema}); err != nil {
		return err
	}
	s, err := pgstore.New(p.pool, &pgstore.Config{Schema: schema, Clock: clock, Portable: p.portable})
	if err != nil {
		return err
	}
	return use(s)
}

// dropTimeout bounds the clean-up, which runs although the replay was stopped.
const dropTimeout = 10 * time.Second

func (p *postgres) drop(ctx context.Context, schema string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	_, err := p.pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{schema}.Sanitize()+" CASCADE")
	if err != nil {
		return fmt.Errorf("drop schema %s: %w", schema, err)
	}
	return nil
}
