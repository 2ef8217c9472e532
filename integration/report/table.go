package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var (
	often     = ratelimit.TokenBucket{Name: "often", Rate: 1e9, Period: time.Second, Capacity: 1e9}
	oftenHeld = ratelimit.InFlight{Name: "often held", Limit: 10}
)

// attackTable calls often, and looks whether the table stays small.
func attackTable(ctx context.Context, l *site, c *chapter) error {
	c.say("64 goroutines take from 1,000 keys. Then they take and release permits of as many. The table must not have more rows than keys and permits, and updates must be heap-only (HOT).")
	if err := l.callOften(ctx, c, "decisions", 1, func(store *pgstore.Store, key string) error {
		return store.Take(ctx, often.For(key))
	}); err != nil {
		return err
	}
	return l.callOften(ctx, c, "permits taken and released", oftenHeld.Limit, func(store *pgstore.Store, key string) error {
		permit, err := store.Permits().Acquire(ctx, oftenHeld.For(key))
		if err == nil && permit.OK {
			err = store.Permits().Release(ctx, permit)
		}
		return err
	})
}

// callOften makes calls for a while, and measures the table after that. A key has at most so many rows.
func (l *site) callOften(ctx context.Context, c *chapter, what string, perKey int, call func(store *pgstore.Store, key string) error) error {
	const keys, goroutines = 1000, 64
	p, err := l.place(ctx, 4)
	if err != nil {
		return err
	}
	defer p.close()
	store, err := p.store(pgstore.Config{})
	if err != nil {
		return err
	}
	var calls atomic.Int64
	// With few updates, those that were not HOT for the sake of one old snapshot would count.
	more := until(l.seconds(60, 2), func() bool { return calls.Load() >= 20*keys })
	if err := lab.Each(goroutines, func(worker int) error {
		for n := worker; more() && ctx.Err() == nil; n += 7 * goroutines {
			if err := call(store, fmt.Sprint(n%keys)); err != nil {
				return err
			}
			calls.Add(1)
		}
		return nil
	}); err != nil {
		return err
	}
	store.Close()
	p.pool.Reset() // a connection that ends tells its statistics
	var rows, bytes, updates, hot int64
	if err := lab.Within(ctx, patient, "the statistics of the table", func() bool {
		err := p.pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM `+p.schema+`.rate_limits), pg_total_relation_size(relid), n_tup_upd, n_tup_hot_upd
			FROM pg_stat_user_tables WHERE schemaname = $1 AND relname = 'rate_limits'`, p.schema).Scan(&rows, &bytes, &updates, &hot)
		return err == nil && updates >= calls.Load()/2-rows // calls for one row share an update
	}); err != nil {
		return err
	}
	c.happened(count{what, int(calls.Load())})
	c.AtMost(what+": rows", float64(rows), float64(keys*perKey), "")
	c.Tell(what+": size of the table", "%.1f MB", float64(bytes)/1e6)
	c.AtLeast(what+": heap-only updates (HOT)", 100*float64(hot)/float64(max(updates, 1)), 99, "%")
	return nil
}
