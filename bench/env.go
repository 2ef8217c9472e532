package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/pgratelimit/ratelimit/internal/machine"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// env is the servers.
type env struct {
	postgres *postgresServer
	redis    *redisServer // nil if there is none
	network  *network     // nil if there is none

	servers, clients *processors // that they have; nil for all
}

// counts returns those of the server that an implementation uses. Clients of the
// other may be heard from at any time: rueidis pings.
func (e *env) counts(impl string) *counts {
	if needsRedis[impl] {
		return e.redis.counts
	}
	return e.postgres.counts
}

// startServers starts the servers that jobs may need. A missing Redis is a message.
func startServers(ctx context.Context, postgres throwaway.Options, redis string, stderr io.Writer) (*env, error) {
	e := &env{}
	var err error
	if e.postgres, err = startPostgres(ctx, postgres); err != nil {
		return nil, err
	}
	if e.redis, err = startRedis(ctx, redis); err != nil {
		fmt.Fprintf(stderr, "bench: %v\n", err)
	}
	return e, nil
}

func (e *env) close() error {
	var redis error
	if e.redis != nil {
		redis = e.redis.close()
	}
	return errors.Join(redis, e.postgres.close())
}

// facts returns the facts that the figures depend on, a line each.
func (e *env) facts(ctx context.Context) ([]string, error) {
	postgres, err := e.postgres.facts(ctx)
	if err != nil {
		return nil, err
	}
	redis := "Redis: none"
	if e.redis != nil {
		if redis, err = e.redis.facts(ctx); err != nil {
			return nil, err
		}
	}
	disk, err := syncTime()
	if err != nil {
		return nil, err
	}
	return []string{machine.Name() + ", " + runtime.Version(), postgres, redis, fmt.Sprintf("one fsync of 8 KiB in the directory for temporary files: %d µs", disk.Microseconds())}, nil
}

// syncTime returns the median time that the disk takes to keep a page.
func syncTime() (time.Duration, error) {
	dir, err := os.MkdirTemp("", "ratelimit-bench")
	if err != nil {
		return 0, fmt.Errorf("making a directory: %w", err)
	}
	defer os.RemoveAll(dir)
	f, err := os.Create(filepath.Join(dir, "page"))
	if err != nil {
		return 0, fmt.Errorf("making a file: %w", err)
	}
	defer f.Close()
	page := make([]byte, 8192)
	times := make([]time.Duration, 101)
	for i := range times {
		start := time.Now()
		_, err := f.WriteAt(page, 0)
		if err := errors.Join(err, f.Sync()); err != nil {
			return 0, fmt.Errorf("writing a page: %w", err)
		}
		times[i] = time.Since(start)
	}
	return median(times), nil
}
