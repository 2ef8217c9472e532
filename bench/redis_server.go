package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// errNoRedis is a machine without it.
var errNoRedis = errors.New(`no Redis, so the rest runs without it; install one with "apt-get install redis-server" or "brew install redis"`)

// redisServer is a Redis.
type redisServer struct {
	address string
	counts  *counts
	close   func() error
}

// durableRedis has a Redis answer when what it has changed is on the disk.
var durableRedis = []string{"--appendonly", "yes", "--appendfsync", "always"}

// startRedis starts a Redis, which keeps nothing on disk unless options say so.
func startRedis(ctx context.Context, program string, options ...string) (*redisServer, error) {
	address, closer, err := throwaway.Redis(ctx, program, options...)
	if errors.Is(err, exec.ErrNotFound) {
		err = fmt.Errorf("%w (%w)", errNoRedis, err)
	}
	if err != nil {
		return nil, err
	}
	return &redisServer{address: address, counts: &counts{}, close: closer}, nil
}

func (r *redisServer) facts(ctx context.Context) (string, error) {
	client := redis.NewClient(&redis.Options{Addr: r.address})
	defer client.Close()
	info, err := client.Info(ctx, "server").Result()
	if err != nil {
		return "", fmt.Errorf("asking Redis for its version: %w", err)
	}
	for line := range strings.Lines(info) {
		if version, ok := strings.CutPrefix(line, "redis_version:"); ok {
			return "Redis " + strings.TrimSpace(version) + ", nothing kept on disk", nil
		}
	}
	return "Redis", nil
}
