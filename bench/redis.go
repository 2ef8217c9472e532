package main

import (
	"context"
	"crypto/tls"
	_ "embed"
	"fmt"
	"net"
	"strconv"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
)

//go:embed bucket.lua
var bucketLua string

// redisKey keeps the implementations' keys apart.
func (w workload) redisKey(key string) string { return w.limit.Name + ":" + key }

// luaArgs returns the arguments of the script.
func (w workload) luaArgs() (rate, capacity, count string) {
	d := w.limit.Definition()
	perSecond := d.Rate / d.Period.Seconds()
	return formatFloat(perSecond), formatFloat(d.Capacity), "1"
}

func formatFloat(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

func (r *redisServer) goRedis() *redis.Client {
	return redis.NewClient(&redis.Options{Addr: r.address, Dialer: r.counts.dial})
}

func (r *redisServer) rueidis() (rueidis.Client, error) {
	return rueidis.NewClient(rueidis.ClientOption{
		InitAddress: []string{r.address},
		DialCtxFn: func(ctx context.Context, address string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			return r.counts.dial(ctx, "tcp", address)
		},
	})
}

func openGoRedisLua(ctx context.Context, e *env, w workload) (contender, error) {
	client := e.redis.goRedis()
	script := redis.NewScript(bucketLua)
	rate, capacity, count := w.luaArgs()
	decide := func(ctx context.Context, key string) (bool, error) {
		answer, err := script.Run(ctx, client, []string{w.redisKey(key)}, rate, capacity, count).Slice()
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
	client, err := e.redis.rueidis()
	if err != nil {
		return contender{}, fmt.Errorf("connecting to Redis: %w", err)
	}
	script := rueidis.NewLuaScript(bucketLua)
	rate, capacity, count := w.luaArgs()
	decide := func(ctx context.Context, key string) (bool, error) {
		answer, err := script.Exec(ctx, client, []string{w.redisKey(key)}, []string{rate, capacity, count}).ToArray()
		if err != nil {
			return false, err
		}
		granted, err := answer[0].AsInt64()
		return granted == 1, err
	}
	c := contender{decide: decide, close: client.Close}
	return c, c.empty(ctx, w)
}
