package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// churnSize is how long a limit's rows are rewritten: for so many decisions,
// and for so long.
type churnSize struct {
	decisions int64
	vacuum    time.Duration // so often the table is vacuumed: see vacuumEach
	atLeast   time.Duration
}

// churnResult is the state of a table after many decisions.
type churnResult struct {
	hotPercent float64
	firstBytes int64 // the table and its index, early on
	endBytes   int64
}

// measureChurn measures one implementation after another, each on an empty
// table.
func measureChurn(ctx context.Context, e *env, o options, jobs []job) ([]result, error) {
	var results []result
	for _, j := range jobs {
		if _, err := e.postgres.many.Exec(ctx, "TRUNCATE rate_limits"); err != nil {
			return nil, fmt.Errorf("emptying the table: %w", err)
		}
		r, err := measureOneChurn(ctx, e, o.churn, j)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", j.impl, err)
		}
		results = append(results, r)
	}
	return results, nil
}

func measureOneChurn(ctx context.Context, e *env, size churnSize, j job) (result, error) {
	w := j.workload(j.impl)
	c, err := implementations[j.impl](ctx, e, w)
	if err != nil {
		return result{}, err
	}
	defer closeAll(map[string]contender{j.impl: c})
	if err := e.postgres.analyze(ctx); err != nil {
		return result{}, err
	}
	before, err := e.postgres.updates(ctx)
	if err != nil {
		return result{}, err
	}
	vacuuming, stop := context.WithCancel(ctx)
	defer stop()
	var early int64
	var vacuumed sync.WaitGroup
	vacuumed.Go(func() { early, err = e.postgres.vacuumEach(vacuuming, size.vacuum) })
	perGoroutine := (size.decisions + int64(j.goroutines) - 1) / int64(j.goroutines)
	asked := round{contender: c, keys: w.keys, goroutines: j.goroutines, duration: size.atLeast, enough: perGoroutine}
	s := asked.run(ctx, e.counts(j.impl))
	stop()
	vacuumed.Wait()
	if err := errors.Join(ctx.Err(), err); err != nil {
		return result{}, err
	}
	end, err := e.postgres.size(ctx)
	if err != nil {
		return result{}, err
	}
	after, err := e.postgres.updates(ctx)
	if err != nil {
		return result{}, err
	}
	r := summarize(j, []*sample{s}, s.elapsed)
	done := updates{after.all - before.all, after.hot - before.hot}
	r.perDecision = float64(done.all) / float64(max(s.decisions, 1))
	r.churn = &churnResult{
		hotPercent: 100 * float64(done.hot) / float64(max(done.all, 1)),
		firstBytes: early, endBytes: end,
	}
	return r, nil
}

// vacuumEach vacuums the table again and again until ctx is over, as autovacuum does each
// minute, at the same moments for everyone, and returns its size after the second time. In
// between a table grows by dead rows, which only a vacuum clears; that room is to be enough
// from then on.
func (p *postgresServer) vacuumEach(ctx context.Context, d time.Duration) (early int64, err error) {
	whole := context.WithoutCancel(ctx)
	for n := 1; ; n++ {
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return early, nil
		}
		if _, err := p.many.Exec(whole, "VACUUM rate_limits"); err != nil {
			return 0, fmt.Errorf("vacuuming the table: %w", err)
		}
		if n == 2 {
			if early, err = p.size(whole); err != nil {
				return 0, err
			}
		}
	}
}

// size returns that of the table and its index.
func (p *postgresServer) size(ctx context.Context) (bytes int64, err error) {
	err = p.many.QueryRow(ctx, "SELECT pg_total_relation_size('rate_limits')").Scan(&bytes)
	if err != nil {
		return 0, fmt.Errorf("measuring the table: %w", err)
	}
	return bytes, nil
}

// analyze runs ANALYZE, as autovacuum would within a minute, at the same moment for all.
func (p *postgresServer) analyze(ctx context.Context) error {
	if _, err := p.many.Exec(ctx, "ANALYZE rate_limits, naive_limits, counters, work"); err != nil {
		return fmt.Errorf("analyzing the tables: %w", err)
	}
	return nil
}

// updates are counts of new versions of rows in our table.
type updates struct{ all, hot int64 }

const (
	statsTimeout  = 30 * time.Second
	statsInterval = 600 * time.Millisecond // more than it takes PostgreSQL 14 to write them
)

// updates reads the counts once they are complete: a server process tells its
// own at its end at the latest.
func (p *postgresServer) updates(ctx context.Context) (updates, error) {
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	last := updates{-1, -1}
	for {
		for _, pool := range []*pgxpool.Pool{p.few, p.many, p.hasty} {
			pool.Reset() // each time, since prefetched tokens are given back a little later
		}
		var (
			now    updates
			others int
		)
		err := p.many.QueryRow(ctx, `SELECT n_tup_upd, n_tup_hot_upd,
	(SELECT count(*) FROM pg_stat_activity WHERE application_name = current_setting('application_name') AND pid <> pg_backend_pid())
FROM pg_stat_user_tables WHERE relid = 'rate_limits'::regclass`).Scan(&now.all, &now.hot, &others)
		if err != nil {
			return updates{}, fmt.Errorf("reading the statistics: %w", err)
		}
		if others == 0 && now == last {
			return now, nil
		}
		last = now
		select {
		case <-time.After(statsInterval):
		case <-ctx.Done():
			return updates{}, fmt.Errorf("waiting for the statistics to be complete: %w", ctx.Err())
		}
	}
}
