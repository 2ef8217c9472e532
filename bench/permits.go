package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"sync"
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
limit nothing. "counter" is a column that counts up to the limit and down again, by two UPDATEs: what leaks when
a process dies. "Redis" is the usual semaphore, a sorted set of holders by a script, in a Redis
that keeps nothing on disk; "Redis, fsync" in one that waits for the disk as PostgreSQL does
(appendfsync always). "advisory lock" tries locks of the session in order, and keeps its connection during the work; there are
16 connections.

Then somebody waits: 1,000 goroutines in 3 stores, which know nothing of each other, for 10 permits
of one key, with work of 50 ms.

  busy          how long permits were worked with, of all the time that there was
  round trips   to PostgreSQL, of which one is for each piece of work
  longest wait  of anybody

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
	{"counter", openPermitCounter},
	{"Redis", func(_ context.Context, e *permitServers, c permitCase) (contender, error) {
		return openPermitsRedis(e.redis, c)
	}},
	{"Redis, fsync", func(_ context.Context, e *permitServers, c permitCase) (contender, error) {
		return openPermitsRedis(e.durable, c)
	}},
	{"advisory lock", openPermitsAdvisory},
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
	w := workload{limit: ratelimit.TokenBucket{Name: fmt.Sprintf("bound-%d-%d", c.keys, c.permits)}, keys: c.keyNames()}
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

func openPermitCounter(ctx context.Context, e *permitServers, c permitCase) (contender, error) {
	name := fmt.Sprintf("permits-%d-%d", c.keys, c.permits)
	const fill = `INSERT INTO counters SELECT $1::text, k, 0 FROM unnest($2::text[]) AS k ON CONFLICT DO NOTHING`
	if err := e.postgres.fill(ctx, fill, workload{limit: ratelimit.TokenBucket{Name: name}, keys: c.keyNames()}); err != nil {
		return contender{}, err
	}
	decide := func(ctx context.Context, key string) (bool, error) {
		tag, err := e.postgres.many.Exec(ctx, `UPDATE counters SET n = n + 1 WHERE name = $1::text AND key = $2::text AND n < $3::int4`, name, key, c.permits)
		if err != nil || tag.RowsAffected() == 0 {
			return false, err
		}
		_, err = e.postgres.many.Exec(ctx, `UPDATE counters SET n = n - 1 WHERE name = $1::text AND key = $2::text`, name, key)
		return err == nil, err
	}
	return contender{decide: decide}, nil
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

func openPermitsAdvisory(_ context.Context, e *permitServers, c permitCase) (contender, error) {
	decide := func(ctx context.Context, key string) (bool, error) {
		conn, err := e.postgres.many.Acquire(ctx)
		if err != nil {
			return false, err
		}
		defer conn.Release()
		var permit *int32
		const take = `SELECT (SELECT n FROM generate_series(1, $2::int4) AS n WHERE pg_try_advisory_lock(hashtext($1::text), n) LIMIT 1)`
		if err := conn.QueryRow(ctx, take, key, c.permits).Scan(&permit); err != nil || permit == nil {
			return false, err
		}
		_, err = conn.Exec(ctx, `SELECT pg_advisory_unlock(hashtext($1::text), $2::int4)`, key, *permit)
		return err == nil, err
	}
	return contender{decide: decide}, nil
}

func (c permitCase) keyNames() []string {
	keys := make([]string, c.keys)
	for i := range keys {
		keys[i] = fmt.Sprintf("user-%05d", i)
	}
	return keys
}

// permitFigures are those of an implementation in a case, by round.
type permitFigures struct{ perSecond, refused, processor []float64 }

func runPermits(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	only := ""
	o, err := parseComparisonWith("permits", permitsHelp, time.Second, args, stderr, func(flags *flag.FlagSet) {
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
		if servers.durable, err = startDurableRedis(ctx, defaults().redisServer); err != nil {
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
	if !chosen.MatchString("waiting") {
		return p.err
	}
	return errors.Join(waitForPermits(ctx, &p, e, 5*o.round), p.err)
}

// comparePermits measures all implementations in a case, in turns. Each is open all the time, as in
// a program that has been running.
func comparePermits(ctx context.Context, p *printer, e *permitServers, c permitCase, o comparison) error {
	opened, figures := make([]contender, len(permitImpls)), make([]permitFigures, len(permitImpls))
	defer func() {
		for _, o := range opened {
			if o.close != nil {
				o.close()
			}
		}
	}()
	for i, impl := range permitImpls {
		var err error
		if opened[i], err = impl.open(ctx, e, c); err != nil {
			return err
		}
	}
	for n := range o.rounds {
		for i, impl := range permitImpls {
			if opened[i].decide == nil {
				continue
			}
			before := processorTime()
			s, _, err := compared(ctx, e.postgres, opened[i], c.keyNames(), n, o.round)
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

const (
	waitingStores  = 3
	waitingAll     = 999
	waitingPermits = 10
	waitingWork    = 50 * time.Millisecond
)

// waitForPermits measures the calls that wait.
func waitForPermits(ctx context.Context, p *printer, e *env, duration time.Duration) error {
	limit := ratelimit.InFlight{Name: "waiting", Limit: waitingPermits, Lease: permitLease}
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	var (
		wg      sync.WaitGroup
		mu      sync.Mutex
		fault   error
		longest time.Duration
		atWork  [waitingStores]time.Duration
		pieces  int
	)
	start := time.Now().Add(duration / 5) // when all are in line
	end := start.Add(duration)
	hold := func(store *pgstore.Store, n int) {
		for waiting.Err() == nil {
			asked := time.Now()
			err := store.Permits().Hold(waiting, limit.For("k"), func(context.Context, ratelimit.Permit) error {
				begun := time.Now()
				time.Sleep(waitingWork)
				over := time.Now()
				mu.Lock()
				defer mu.Unlock()
				if over.After(start) && begun.Before(end) {
					if begun.Before(start) {
						begun = start
					}
					if over.After(end) {
						over = end
					}
					atWork[n] += over.Sub(begun)
					pieces++
					longest = max(longest, begun.Sub(asked))
				}
				return nil
			})
			if err != nil && waiting.Err() == nil {
				mu.Lock()
				fault = errors.Join(fault, err)
				mu.Unlock()
				return
			}
		}
	}
	for n := range waitingStores {
		store, err := pgstore.New(e.postgres.many, nil)
		if err != nil {
			return err
		}
		for range waitingAll / waitingStores {
			wg.Go(func() { hold(store, n) })
		}
	}
	time.Sleep(time.Until(start))
	before := e.postgres.counts.now()
	time.Sleep(time.Until(end))
	counted := e.postgres.counts.now().minus(before)
	cancel()
	wg.Wait()
	var all time.Duration
	shares := ""
	for _, w := range atWork {
		all += w
		shares += fmt.Sprintf(" %.0f%%", 100*w.Seconds()/duration.Seconds()/waitingPermits)
	}
	p.linef("\n%d waiters in %d stores, %d permits, work of %v: busy %.1f%% (%s by store), %.0f pieces of work and %.0f round trips a second, longest wait %v",
		waitingAll, waitingStores, waitingPermits, waitingWork, 100*all.Seconds()/duration.Seconds()/waitingPermits, shares[1:],
		float64(pieces)/duration.Seconds(), float64(counted.trips)/duration.Seconds(), longest.Round(time.Millisecond))
	return fault
}
