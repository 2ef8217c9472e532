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

// A newStore calls use with a store that has nothing in it and lives on clock, and leaves nothing of it
// behind, whatever happens.
type newStore func(ctx context.Context, clock func() time.Time, use func(ratelimit.Store) error) error

func inMemory(_ context.Context, clock func() time.Time, use func(ratelimit.Store) error) error {
	return use(memstore.New(clock))
}

// onPostgres runs do with stores on a server, each in a schema of its own. It returns the server's name.
func onPostgres(ctx context.Context, portable bool, do func(newStore) error) (name string, err error) {
	server, err := throwaway.Start(ctx)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	pool, err := pgxpool.New(ctx, server.URL)
	if err != nil {
		return "", fmt.Errorf("open a pool: %w", err)
	}
	defer pool.Close()
	name = "postgres" + when(portable, ", portable, its table not distributed") + " (" + server.Source + ")"
	return name, do(func(ctx context.Context, clock func() time.Time, use func(ratelimit.Store) error) (err error) {
		schema := schemaPrefix + strings.ToLower(rand.Text())
		defer func() { err = errors.Join(err, drop(ctx, pool, schema)) }()
		if _, err := migrate.Up(ctx, pool, &migrate.Config{Schema: schema}); err != nil {
			return err
		}
		s, err := pgstore.New(pool, &pgstore.Config{Schema: schema, Clock: clock, Portable: portable})
		if err != nil {
			return err
		}
		return use(s)
	})
}

// schemaPrefix tells whose schema it is, should one be left behind by a replay
// that was killed.
const schemaPrefix = "ratelimit_replay_"

// dropTimeout bounds the clean-up, which runs although the replay was stopped.
const dropTimeout = 10 * time.Second

func drop(ctx context.Context, pool *pgxpool.Pool, schema string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	if _, err := pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{schema}.Sanitize()+" CASCADE"); err != nil {
		return fmt.Errorf("drop schema %s: %w", schema, err)
	}
	return nil
}
