package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

const permitsHelp = `Usage: go run ./bench permits [flags]

Measures how many at once: 64 goroutines that take a permit and release it, for one key with 1,
10, 100 and 1,000 permits, and over 10,000 keys with 10 permits each. All implementations take
turns, in several rounds; a figure is the median of its rounds.

  a second      pieces of work: a permit taken, and released
  refused       of those who asked; they ask again at once
  processor     time of this program and the servers for a piece of work, on Linux: other
                programs on the machine change it less than they do what is done a second

"ours, hasty" is with synchronous_commit off: a server that fails forgets the last half second of
permits, which are given out again. "UPDATE, combined" is PostgreSQL's own bound for calls that gather
as ours do: two statements a piece that only write the rows, over two connections, and grant and
limit nothing. "Redis" is the usual semaphore, a sorted set of holders by a script, in a Redis
that keeps nothing on disk; "Redis, fsync" in one that waits for the disk as PostgreSQL does
(appendfsync always). How busy permits are for which many wait, go run ./integration/report --only permits
says.

All of it on a throwaway PostgreSQL, whose commits wait for the disk, and Redis.

Flags:
`

//go:embed permits.lua
var permitsLua string

// permitCase is how many permits each of so many keys has.
type permitCase struct {
	keys, permits int
}

func (c permitCase) String() string {
	if c.keys == 1 {
		return fmt.Sprintf("one key, %d permits", c.permits)
	}
	return fmt.Sprintf("%s keys, %d permits", thousands(float64(c.keys)), c.permits)
}

var permitCases = []permitCase{{1, 1}, {1, 10}, {1, 100}, {1, 1000}, {10_000, 10}}

const permitLease = 30 * time.Second

// permitServers are the servers of "bench permits".
type permitServers struct {
	postgres       *postgresServer
	redis, durable *redisServer // nil if there is none
}

// permitImpl is an implementation, which opens for a case; with a nil decide if it lacks its server.
type permitImpl struct {
	name string
	open func(ctx context.Context, e *permitServers, c permitCase) (contender, error)
}

var permitImpls = []permitImpl{
	{"ours", func(_ context.Context, e *permitServers, c permitCase) (contender, error) {
		return openPermits(e.postgres.few, c)
	}},
	{"ours, hasty", func(_ context.Context, e *permitServers, c permitCase) (contender, error) {
		return openPermits(e.postgres.hasty, c)
	}},
	{"UPDATE, combined", openPermitBound},
	{"Redis", func(_ context.Context, e *permitServers, c permitCase) (contender, error) {
		return openPermitsRedis(e.redis, c)
	}},
	{"Redis, fsync", func(_ context.Context, e *permitServers, c permitCase) (contender, error) {
		return openPermitsRedis(e.durable, c)
	}},
}

func openPermits(pool *pgxpool.Pool, c permitCase) (contender, error) {
	store, err := pgstore.New(pool, nil)
	if err != nil {
		return contender{}, err
	}
	limit := ratelimit.InFlight{Name: fmt.Sprintf("permits-%d-%d", c.keys, c.permits), Limit: c.permits, Lease: permitLease}
	decide := func(ctx context.Context, key string) (bool, error) {
		permit, err := store.Permits().Acquire(ctx, limit.For(key))
		if err != nil || !permit.OK {
			return false, err
		}
		return true, store.Permits().Release(ctx, permit)
	}
	return contender{decide: decide, close: store.Close}, nil
}

// openPermitBound has calls gather and only write rows: one statement for taking, one for releasing.
func openPermitBound(ctx context.Context, e *permitServers, c permitCase) (contender, error) {
	w := workload{limit: ratelimit.TokenBucket{Name: fmt.Sprintf("bound-%d-%d", c.keys, c.permits)}, keys: userKeys(c.keys)}
	write, err := openServerBound(ctx, &env{postgres: e.postgres}, w)
	if err != nil {
		return contender{}, err
	}
	decide := func(ctx context.Context, key string) (bool, error) {
		if _, err := write.decide(ctx, key); err != nil {
			return false, err
		}
		return write.decide(ctx, key)
	}
	return contender{decide: decide, close: write.close}, nil
}

func openPermitsRedis(server *redisServer, c permitCase) (contender, error) {
	if server == nil {
		return contender{}, nil
	}
	client, script := server.goRedis(), redis.NewScript(permitsLua)
	var holders atomic.Int64
	decide := func(ctx context.Context, key string) (bool, error) {
		key, holder := fmt.Sprintf("permits-%d-%d:%s", c.keys, c.permits, key), holders.Add(1)
		granted, err := script.Run(ctx, client, []string{key}, c.permits, permitLease.Seconds(), holder).Int()
		if err != nil || granted == 0 {
			return false, err
		}
		return true, client.ZRem(ctx, key, holder).Err()
	}
	return contender{decide: decide, close: func() { client.Close() }}, nil
}

// permitFigures are those of an implementation in a case, by round.
type permitFigures struct{ perSecond, refused, processor []float64 }

func runPermits(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	only := ""
	o, err := parseComparison("permits", permitsHelp, time.Second, args, stderr, func(flags *flag.FlagSet) {
		flags.StringVar(&only, "only", "", "the cases that match this `regexp`, such as \"10,000 keys\"")
	})
	if err != nil {
		return err
	}
	chosen, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	e, err := startServers(ctx, durable, defaults().redisServer, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	servers := &permitServers{postgres: e.postgres, redis: e.redis}
	if e.redis != nil {
		if servers.durable, err = startRedis(ctx, defaults().redisServer, durableRedis...); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, servers.durable.close()) }()
	}
	p := printer{w: stdout}
	facts, err := e.facts(ctx)
	if err != nil {
		return err
	}
	for _, fact := range facts {
		p.linef("%s", fact)
	}
	p.linef("\n%-24s %-16s %10s %8s %10s", "", "", "a second", "refused", "processor")
	for _, c := range permitCases {
		if !chosen.MatchString(c.String()) {
			continue
		}
		if err := comparePermits(ctx, &p, servers, c, o); err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
	}
	return p.err
}

// comparePermits measures all implementations in a case, in turns. Each is open all the time, as in
// a program that has been running.
func comparePermits(ctx context.Context, p *printer, e *permitServers, c permitCase, o comparison) error {
	opened, figures := map[string]contender{}, make([]permitFigures, len(permitImpls))
	defer func() { closeAll(opened) }()
	for _, impl := range permitImpls {
		var err error
		if opened[impl.name], err = impl.open(ctx, e, c); err != nil {
			return err
		}
	}
	for n := range o.rounds {
		for i, impl := range permitImpls {
			if opened[impl.name].decide == nil {
				continue
			}
			before := processorTime()
			s, _, err := compared(ctx, e.postgres, opened[impl.name], userKeys(c.keys), n, o.round)
			took := processorTime() - before
			if err != nil {
				return fmt.Errorf("%s: %w", impl.name, err)
			}
			f := &figures[i]
			f.perSecond = append(f.perSecond, float64(s.granted)/s.elapsed.Seconds())
			f.processor = append(f.processor, took.Seconds()*1e6/max(float64(s.granted)*warmedUp, 1))
			f.refused = append(f.refused, 1-float64(s.granted)/float64(max(s.decisions, 1)))
		}
	}
	for i, impl := range permitImpls {
		if f := figures[i]; f.perSecond != nil {
			p.linef("%-24v %-16s %10s %7.0f%% %7.0f µs", c, impl.name, thousands(median(f.perSecond)), 100*median(f.refused), median(f.processor))
		}
	}
	return nil
}
