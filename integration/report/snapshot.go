package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// attackSnapshot has one row be taken from while a snapshot is held.
func attackSnapshot(ctx context.Context, l *site, c *chapter) error {
	lasts, window := l.seconds(60, 3), l.seconds(10, 1)
	if l.minutes > 0 {
		lasts = time.Duration(l.minutes * float64(time.Minute))
		window = min(window, lasts/3)
	}
	c.say("A snapshot is held for %v, so PostgreSQL keeps every version of a row. Meanwhile %d goroutines of one process take from one key, %d times a second together, by one verb after the other. The report shows the calls a second, and their p99, in the first %v and in the last.", lasts, hotCallers, hotRate, window)
	for _, verb := range hotVerbs {
		p, err := l.place(ctx, hotCallers+8)
		if err != nil {
			return err
		}
		took, versions, err := p.takeHot(ctx, verb, lasts)
		p.close()
		if err != nil {
			return err
		}
		first, last := paceOf(took, 0, window), paceOf(took, lasts-window, lasts)
		c.Tell(verb.name+", first", "%s", first)
		c.Tell(verb.name+", last", "%s", last)
		c.happened(count{verb.name + ", dead versions then", versions})
		if verb.holds && !l.quick { // which asserts no speed
			c.AtLeast(verb.name+", rate at the end, of that at first", last.rate/first.rate, 0.5, "×")
		}
	}
	return nil
}

const (
	hotRate    = 200 // calls a second
	hotCallers = 32
)

var hot = ratelimit.TokenBucket{Name: "hot", Rate: 1e6, Period: time.Second}

// hotVerb is a way to take from the key, and whether it is to hold.
type hotVerb struct {
	name   string
	escrow time.Duration
	holds  bool
	call   func(ctx context.Context, p *place, store *pgstore.Store) error
}

var hotVerbs = []hotVerb{
	{"AllowTx", 0, false, func(ctx context.Context, p *place, store *pgstore.Store) error {
		return pgx.BeginFunc(ctx, p.pool, func(tx pgx.Tx) error {
			if _, err := store.AllowTx(ctx, tx, hot.For("k")); err != nil {
				return err
			}
			return p.work(ctx, tx)
		})
	}},
	{"AllowFunc", 0, false, func(ctx context.Context, p *place, store *pgstore.Store) error {
		_, err := store.AllowFunc(ctx, []ratelimit.Request{hot.For("k")}, func(tx pgx.Tx, _ ratelimit.Result) error { return p.work(ctx, tx) })
		return err
	}},
	{"Allow", 0, true, allowHot},
	{"Allow with Escrow", 100 * time.Millisecond, true, allowHot},
}

func allowHot(ctx context.Context, _ *place, store *pgstore.Store) error {
	_, err := store.Allow(ctx, hot.For("k"))
	return err
}

// work returns what a transaction does beside taking.
func (p *place) work(ctx context.Context, tx pgx.Tx) error {
	return send(ctx, tx, "INSERT INTO "+p.schema+".ledger (id) VALUES (1)")
}

// hotCall is a call, and when it ended.
type hotCall struct{ ended, took time.Duration }

// takeHot takes by a verb for a time in which a snapshot is held. It returns also how many dead
// versions the table has then.
func (p *place) takeHot(ctx context.Context, verb hotVerb, lasts time.Duration) (calls []hotCall, versions int, err error) {
	store, err := p.store(pgstore.Config{Escrow: verb.escrow})
	if err != nil {
		return nil, 0, err
	}
	if err := verb.call(ctx, p, store); err != nil { // so that there is a row
		return nil, 0, err
	}
	snapshot, err := p.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = snapshot.Rollback(context.WithoutCancel(ctx)) }() // closing the pool waits for it
	if err := send(ctx, snapshot, "SELECT FROM "+p.schema+".rate_limits"); err != nil {
		return nil, 0, err
	}
	var mu sync.Mutex
	begun := time.Now()
	err = lab.Each(hotCallers, func(i int) error {
		const every = hotCallers * time.Second / hotRate
		for due := begun.Add(every * time.Duration(i) / hotCallers); time.Since(begun) < lasts; due = due.Add(every) {
			time.Sleep(time.Until(due))
			if time.Until(due) < -every { // and what was not called meanwhile is not caught up with
				due = time.Now()
			}
			at := time.Now()
			if err := verb.call(ctx, p, store); err != nil {
				return err
			}
			mu.Lock()
			calls = append(calls, hotCall{time.Since(begun), time.Since(at)})
			mu.Unlock()
		}
		return nil
	})
	if err == nil {
		_, err = p.pool.Exec(ctx, "ANALYZE "+p.schema+".rate_limits")
	}
	if err == nil {
		err = lab.Within(ctx, patient, "dead versions are counted", func() bool {
			err := p.pool.QueryRow(ctx, "SELECT n_dead_tup FROM pg_stat_all_tables WHERE relid = $1::regclass", p.schema+".rate_limits").Scan(&versions)
			return err == nil && versions > 0
		})
	}
	return calls, versions, err
}

// pace is the rate of calls, and their p99.
type pace struct {
	rate float64
	p99  time.Duration
}

func (p pace) String() string {
	return fmt.Sprintf("%.0f/s, p99 %v", p.rate, p.p99.Round(100*time.Microsecond))
}

// paceOf returns that of the calls that ended between two instants.
func paceOf(calls []hotCall, from, to time.Duration) pace {
	var took []time.Duration
	for _, c := range calls {
		if from <= c.ended && c.ended < to {
			took = append(took, c.took)
		}
	}
	return pace{float64(len(took)) / (to - from).Seconds(), lab.P99(took)}
}
