package main

import (
	"context"
	"crypto/tls"
	_ "embed"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

//go:embed bucket.lua
var bucketLua string

//go:embed permits.lua
var permitsLua string

// redisServer is a Redis.
type redisServer struct {
	address string
	counts  *counts
	close   func() error
}

// startRedis starts a Redis, which keeps nothing on disk unless settings say so.
func startRedis(ctx context.Context, settings ...string) (*redisServer, error) {
	address, closer, err := throwaway.Redis(ctx, "redis-server", settings...)
	if err != nil {
		return nil, err
	}
	return &redisServer{address: address, counts: &counts{}, close: closer}, nil
}

func (r *redisServer) facts(ctx context.Context) (string, error) {
	client := r.goRedis()
	defer client.Close()
	info, err := client.Info(ctx, "server").Result()
	if err != nil {
		return "", fmt.Errorf("asking Redis for its version: %w", err)
	}
	_, version, _ := strings.Cut(info, "redis_version:")
	version, _, _ = strings.Cut(version, "\r\n")
	return "Redis " + version + ", nothing kept on disk", nil
}

func (r *redisServer) goRedis() *redis.Client {
	return redis.NewClient(&redis.Options{Addr: r.address, Dialer: r.counts.dial})
}

// redisKey keeps the implementations' keys apart.
func (w workload) redisKey(key string) []string { return []string{w.limit.Name + ":" + key} }

// luaArgs returns the arguments of the script: the rate, the capacity, and a count.
func (w workload) luaArgs() []string {
	d := w.limit.Definition()
	float := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	return []string{float(d.Rate / d.Period.Seconds()), float(d.Capacity), "1"}
}

func openGoRedisLua(ctx context.Context, e *env, w workload) (contender, error) {
	client, script := e.redis.goRedis(), redis.NewScript(bucketLua)
	args := w.luaArgs()
	decide := func(ctx context.Context, key string) (bool, error) {
		answer, err := script.Run(ctx, client, w.redisKey(key), args[0], args[1], args[2]).Slice()
		if err != nil {
			return false, err
		}
		granted, ok := answer[0].(int64)
		if !ok {
			return false, fmt.Errorf("the script answered %v", answer)
		}
		return granted == 1, nil
	}
	c := contender{decide: decide, close: func() { client.Close() }}
	return c, c.empty(ctx, w)
}

func openRueidisLua(ctx context.Context, e *env, w workload) (contender, error) {
	client, err := rueidis.NewClient(rueidis.ClientOption{
		InitAddress: []string{e.redis.address},
		DialCtxFn: func(ctx context.Context, address string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			return e.redis.counts.dial(ctx, "tcp", address)
		},
	})
	if err != nil {
		return contender{}, fmt.Errorf("connecting to Redis: %w", err)
	}
	script := rueidis.NewLuaScript(bucketLua)
	args := w.luaArgs()
	decide := func(ctx context.Context, key string) (bool, error) {
		answer, err := script.Exec(ctx, client, w.redisKey(key), args).ToArray()
		if err != nil {
			return false, err
		}
		granted, err := answer[0].AsInt64()
		return granted == 1, err
	}
	c := contender{decide: decide, close: client.Close}
	return c, c.empty(ctx, w)
}

const permitLease = 30 * time.Second

// openPermitsRedis takes a permit, and releases it.
func openPermitsRedis(server func(*env) *redisServer) opener {
	return func(_ context.Context, e *env, w workload) (contender, error) {
		client, script := server(e).goRedis(), redis.NewScript(permitsLua)
		var holders atomic.Int64
		decide := func(ctx context.Context, key string) (bool, error) {
			keys, holder := w.redisKey(key), holders.Add(1)
			granted, err := script.Run(ctx, client, keys, w.permits, permitLease.Seconds(), holder).Int()
			if err != nil || granted == 0 {
				return false, err
			}
			return true, client.ZRem(ctx, keys[0], holder).Err()
		}
		return contender{decide: decide, close: func() { client.Close() }}, nil
	}
}
