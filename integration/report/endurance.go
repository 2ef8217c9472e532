package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// attackEndurance has the work of the accounts go on, and looks whether anything grows.
func attackEndurance(ctx context.Context, l *site, c *chapter) error {
	lasts := l.seconds(20*60, 30)
	if l.minutes > 0 {
		lasts = time.Duration(l.minutes * float64(time.Minute))
	}
	c.say("Two processes repeat the exact accounts for %v, beside Prune and edits. For the first half a snapshot is held, so PostgreSQL keeps all old versions of rows. Keys come and go, and their rows stay. The table may grow only with the number of rows. In each quarter, the run measures the p99 of a call with its own key, the table's size, and the processes' heaps after a collection.", lasts)
	var w watch
	tasks := []task{{Conns: 8, Workers: 4}, {Conns: 8, Workers: 4, Isolation: "repeatable read"}}
	_, err := l.suffer(ctx, c, attack{tasks: tasks, harm: func(ctx context.Context, s *suffering) error {
		return w.watch(ctx, l, s, lasts)
	}})
	if err != nil {
		return err
	}
	for i, q := range w.quarters {
		c.Tell(fmt.Sprintf("quarter %d: calls measured, p99; rows, table per row; largest heap", i+1), "%d, %.2f ms; %d, %.0f B; %.1f MB",
			len(q.took), q.p99(), q.rows, q.perRow(), float64(q.heap)/1e6)
	}
	first, second, last := w.quarters[0], w.quarters[1], w.quarters[3]
	c.happened(
		count{"transactions begun while the snapshot was held, of which it saw none", w.unseen},
		count{"rounds of Prune and edits beside", w.disturbed.rounds},
	)
	c.AtMost("p99 of the last quarter, of the first", last.p99()/first.p99(), 3, "×")
	c.AtMost("table per row at the end, of that when the snapshot was released", last.perRow()/second.perRow(), 1, "×")
	c.AtMost("heap at the end, beyond that in the first quarter", float64(last.heap-first.heap)/1e6, 8, "MB")
	return nil
}

// watch is the measurements made meanwhile.
type watch struct {
	quarters  [4]quarter
	disturbed disturbed
	unseen    int // transactions since the snapshot
}

type quarter struct {
	took        []time.Duration
	table, rows int
	heap        int // of a process, the largest, as it was last told
}

func (q *quarter) p99() float64 { return float64(lab.P99(q.took).Microseconds()) / 1000 }

func (q *quarter) perRow() float64 { return float64(q.table) / float64(max(q.rows, 1)) }

func (w *watch) watch(ctx context.Context, l *site, s *suffering, lasts time.Duration) error {
	p, err := l.at(s.schema, 2)
	if err != nil {
		return err
	}
	defer p.close()
	pool := p.pool
	store, err := p.store(pgstore.Config{})
	if err != nil {
		return err
	}
	stop, err := l.disturb(ctx, s.schema)
	if err != nil {
		return err
	}
	snapshot, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		return err
	}
	defer func() { _ = snapshot.Rollback(context.WithoutCancel(ctx)) }() // closing the pool waits for it
	if _, err := snapshot.Exec(ctx, "SELECT count(*) FROM "+s.schema+".rate_limits"); err != nil {
		return err
	}
	measured := ratelimit.TokenBucket{Name: "measured", Rate: 1e9, Period: time.Second}
	begun := time.Now()
	for n := range w.quarters {
		q := &w.quarters[n]
		for time.Since(begun) < lasts*time.Duration(n+1)/4 {
			at := time.Now()
			if _, err := store.Allow(ctx, measured.For(fmt.Sprint("edited ", rand.IntN(10)))); err != nil {
				return err
			}
			q.took = append(q.took, time.Since(at))
			time.Sleep(5 * time.Millisecond)
		}
		if err := pool.QueryRow(ctx, "SELECT pg_total_relation_size('"+s.schema+".rate_limits'), (SELECT count(*) FROM "+s.schema+".rate_limits)").Scan(&q.table, &q.rows); err != nil {
			return err
		}
		q.heap = s.largestHeap()
		if n == 1 {
			err := snapshot.QueryRow(ctx, "SELECT age(backend_xmin) FROM pg_stat_activity WHERE pid = pg_backend_pid()").Scan(&w.unseen)
			if err := errors.Join(err, snapshot.Rollback(ctx)); err != nil {
				return err
			}
		}
	}
	w.disturbed, err = stop()
	return err
}
