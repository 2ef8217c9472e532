package main

import (
	"context"
	"crypto/tls"
	_ "embed"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
)

//go:embed bucket.lua
var bucketLua string

// redisKey keeps the implementations' keys apart.
func (w workload) redisKey(key string) string { return w.limit.Name + ":" + key }

// luaArgs are the arguments of the script.
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

// openRedisRace reads, decides in the program, and writes: two callers that read at the same
// time take the same token.
func openRedisRace(_ context.Context, e *env, w workload) (contender, error) {
	client := e.redis.goRedis()
	decide := func(ctx context.Context, key string) (bool, error) {
		key = w.redisKey(key)
		b, err := readBucket(ctx, client, w, key)
		if err != nil || !b.take(w, time.Now()) {
			return false, err
		}
		return true, client.HSet(ctx, key, b.fields()).Err()
	}
	return contender{decide: decide, close: func() { client.Close() }}, nil
}

// openRedisWatch is openRedisRace with optimistic locking: run again at once
// when another has written in between.
func openRedisWatch(_ context.Context, e *env, w workload) (contender, error) {
	client := e.redis.goRedis()
	decide := func(ctx context.Context, key string) (granted bool, err error) {
		key = w.redisKey(key)
		attempt := func(tx *redis.Tx) error {
			b, err := readBucket(ctx, tx, w, key)
			if granted = err == nil && b.take(w, time.Now()); !granted {
				return err
			}
			_, err = tx.TxPipelined(ctx, func(p redis.Pipeliner) error {
				return p.HSet(ctx, key, b.fields()).Err()
			})
			return err
		}
		for {
			err = client.Watch(ctx, attempt, key)
			if !errors.Is(err, redis.TxFailedErr) {
				return granted && err == nil, err
			}
			e.redis.counts.retries.Add(1)
		}
	}
	return contender{decide: decide, close: func() { client.Close() }}, nil
}

type hashReader interface {
	HMGet(ctx context.Context, key string, fields ...string) *redis.SliceCmd
}

// readBucket reads a tokenBucket, which is full if it is not there.
func readBucket(ctx context.Context, r hashReader, w workload, key string) (tokenBucket, error) {
	full := tokenBucket{w.limit.Definition().Capacity, time.Now()}
	values, err := r.HMGet(ctx, key, "tokens", "ts").Result()
	if err != nil || values[0] == nil {
		return full, err
	}
	tokens, err1 := strconv.ParseFloat(fmt.Sprint(values[0]), 64)
	micros, err2 := strconv.ParseInt(fmt.Sprint(values[1]), 10, 64)
	return tokenBucket{tokens, time.UnixMicro(micros)}, errors.Join(err1, err2)
}

func (b tokenBucket) fields() []any { return []any{"tokens", b.tokens, "ts", b.ts.UnixMicro()} }
