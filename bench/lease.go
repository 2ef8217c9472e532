package main

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// openBareLease is openNoLimit for processes that share one row as those do that prefetch from
// it, but by a bare UPDATE: the bound of prefetching. A transaction begins only while its
// process's last UPDATE is no older than escrow.
func openBareLease(ctx context.Context, e *env, w workload) (contender, error) {
	const fill = `INSERT INTO counters SELECT $1::text, k, 0 FROM unnest($2::text[]) AS k ON CONFLICT DO NOTHING`
	if err := e.postgres.fill(ctx, fill, w); err != nil {
		return contender{}, err
	}
	free, err := openNoLimit(ctx, e, w)
	if err != nil {
		return contender{}, err
	}
	l := &bareRow{pool: e.postgres.many, name: w.limit.Name, key: w.keys[0]}
	l.written = sync.NewCond(&l.mu)
	return contender{decide: func(ctx context.Context, key string) (bool, error) {
		if err := l.wait(); err != nil {
			return false, err
		}
		return free.decide(ctx, key)
	}}, nil
}

// bareRow is a row that a process writes now and then.
type bareRow struct {
	pool      *pgxpool.Pool
	name, key string

	mu      sync.Mutex
	written *sync.Cond
	end     time.Time     // until which transactions may begin
	took    time.Duration // to write the row, on average
	writes  bool          // it is being written
	err     error
}

// wait waits until a transaction may begin. It has the row written in time: a quarter of escrow
// before that ends, and sooner by as long as it takes.
func (r *bareRow) wait() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.err == nil && !time.Now().Before(r.end) {
		r.write()
		r.written.Wait()
	}
	if time.Until(r.end) < escrow/4+r.took {
		r.write()
	}
	return r.err
}

// write writes the row, unless it is being written. It needs mu.
func (r *bareRow) write() {
	const update = `UPDATE counters SET n = n + 1 WHERE name = $1::text AND key = $2::text RETURNING clock_timestamp()`
	if r.writes {
		return
	}
	r.writes = true
	go func() {
		begun := time.Now()
		var at time.Time // after the wait for the row
		err := r.pool.QueryRow(context.Background(), update, r.name, r.key).Scan(&at)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.end, r.took, r.writes, r.err = at.Add(escrow), (r.took+time.Since(begun))/2, false, err
		r.written.Broadcast()
	}()
}
