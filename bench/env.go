package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"

	"github.com/pgratelimit/ratelimit/internal/machine"
)

// env is the servers.
type env struct {
	postgres       *postgresServer
	redis, durable *redisServer // nil if there is none; durable answers when its changes are on the disk
}

// counts returns those of the server that an implementation uses. Clients of the
// other may be heard from at any time: rueidis pings.
func (e *env) counts(impl string) *counts {
	switch {
	case impl == permitsRedisDurable:
		return e.durable.counts
	case needsRedis[impl]:
		return e.redis.counts
	}
	return e.postgres.counts
}

// startServers starts the servers that jobs may need. A missing Redis is a message.
func startServers(ctx context.Context, stderr io.Writer) (e *env, err error) {
	e = &env{}
	if e.postgres, err = startPostgres(ctx); err != nil {
		return nil, err
	}
	if e.redis, err = startRedis(ctx); err == nil {
		e.durable, err = startRedis(ctx, "--appendonly", "yes", "--appendfsync", "always")
	}
	if err != nil {
		fmt.Fprintf(stderr, "bench: no Redis, so the rest runs without it (apt-get install redis-server): %v\n", err)
	}
	return e, nil
}

func (e *env) close() error {
	err := e.postgres.close()
	for _, redis := range []*redisServer{e.redis, e.durable} {
		if redis != nil {
			err = errors.Join(err, redis.close())
		}
	}
	return err
}

// behind returns the servers with answers that come late, for the caller to close its pools.
func (e *env) behind(late time.Duration) (*env, error) {
	far := &env{postgres: &postgresServer{server: e.postgres.server, schema: e.postgres.schema, counts: &counts{late: late}}}
	if e.redis != nil {
		far.redis = &redisServer{address: e.redis.address, counts: &counts{late: late}}
	}
	return far, far.postgres.openPools()
}

// facts returns the facts that the figures depend on, a line each.
func (e *env) facts(ctx context.Context) ([]string, error) {
	postgres, err := e.postgres.facts(ctx)
	if err != nil {
		return nil, err
	}
	redis := "Redis: none"
	if e.redis != nil {
		redis, err = e.redis.facts(ctx)
	}
	return []string{machine.Name() + ", " + runtime.Version(), postgres, redis}, err
}
