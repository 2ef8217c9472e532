package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
)

// queueLimit is waited for by many.
var queueLimit = ratelimit.InFlight{Name: "queue", Limit: 10, Lease: 30 * time.Second}

const (
	queueProcesses = 3
	queueWork      = 50 * time.Millisecond
	queueHeavy     = 8 // permits that one of the callers wants
)

// served is a caller that waited for a permit, and worked with it, on the machine's clock; or one
// that is Bare, which has no limit and commits a row of its own instead.
type served struct {
	Process         int
	N               int // permits
	Bare            bool
	Asked, From, To time.Time
}

// queueForPermits waits for permits, works with them, and waits again.
func queueForPermits(ctx context.Context, e *env) error {
	for row := e.Process - 1; row < queueLimit.Limit; row += queueProcesses {
		go workBare(ctx, e, row)
	}
	return e.workers(ctx, func(worker int, _ *rand.Rand) {
		s := served{Process: e.Process, N: 1, Asked: time.Now()}
		if e.Process == 1 && worker == 0 {
			s.N = queueHeavy
		}
		_ = e.store.Permits().Hold(ctx, queueLimit.ForN("", s.N), func(context.Context, ratelimit.Permit) error {
			s.From = time.Now()
			time.Sleep(queueWork)
			s.To = time.Now()
			e.out.Write(s)
			return nil
		})
	})
}

// workBare does the work of one permit without a limit: between two pieces it commits a row, as
// little as a permit that is handed on needs.
func workBare(ctx context.Context, e *env, row int) {
	for ctx.Err() == nil {
		s := served{Process: e.Process, N: 1, Bare: true, From: time.Now()}
		time.Sleep(queueWork)
		s.To = time.Now()
		e.out.Write(s)
		_, _ = e.pool.Exec(ctx, "UPDATE "+e.Schema+".bare SET n = n + 1 WHERE row = $1::int4", row)
	}
}

// busyFor returns how long callers worked between two instants, and how often.
func busyFor(all []served, bare bool, from, to time.Time) (busy time.Duration, pieces int) {
	for _, s := range all {
		if s.Bare == bare && s.To.After(from) && s.From.Before(to) {
			busy += time.Duration(s.N) * earlier(s.To, to).Sub(later(s.From, from))
			pieces++
		}
	}
	return busy, pieces
}

// waitForPermits has 1,000 wait for 10 permits.
func waitForPermits(ctx context.Context, l *site, c *chapter) error {
	c.say("Then 1,000 goroutines in 3 processes wait for 10 permits, and work with them for %v, again and again. One of them wants 8 at a time. Beside them, 10 goroutines do the same work without a limit, and commit a row of their own between two pieces. That shows what the machine can do.", queueWork)
	p, err := l.place(ctx, 4)
	if err != nil {
		return err
	}
	defer p.close()
	bare := fmt.Sprintf("CREATE TABLE %s.bare WITH (fillfactor = 50) AS SELECT row, 0 AS n FROM generate_series(0, %d) AS row", p.schema, queueLimit.Limit-1)
	if _, err := p.pool.Exec(ctx, bare); err != nil {
		return err
	}
	var (
		mu  sync.Mutex
		all []served
	)
	tasks := make([]task, queueProcesses)
	for i := range tasks {
		tasks[i] = task{Job: "queue", Schema: p.schema, Workers: 1000 / queueProcesses, Conns: 8}
	}
	tasks[0].Workers += 1000 % queueProcesses
	children, err := l.launch(ctx, tasks, lab.Reading(&mu, func(s served) { all = append(all, s) }))
	if err != nil {
		return err
	}
	lab.AtWork(children)
	time.Sleep(l.seconds(5, 1)) // until all are in line
	from, before := time.Now(), commits(ctx, p.pool)
	time.Sleep(l.seconds(60, 4))
	to, after := time.Now(), commits(ctx, p.pool)
	lab.End(children)
	lasted := to.Sub(from)
	busy, pieces := busyFor(all, false, from, to)
	most, alone := busyFor(all, true, from, to)
	all = slices.DeleteFunc(all, func(s served) bool { return s.Bare })
	longest, heavy := time.Duration(0), time.Duration(0)
	for _, s := range all {
		if s.From.Before(to) {
			longest = max(longest, s.From.Sub(s.Asked))
			if s.N > 1 {
				heavy = max(heavy, s.From.Sub(s.Asked))
			}
		}
	}
	share := func(busy time.Duration) float64 {
		return 100 * busy.Seconds() / lasted.Seconds() / float64(queueLimit.Limit)
	}
	c.Tell("permits that are waited for are busy", "%.1f %%, and the same work without a limit %.1f %%", share(busy), share(most))
	c.AtLeast("of that without a limit", 100*busy.Seconds()/most.Seconds(), map[bool]float64{false: 90, true: 70}[l.quick], "%")
	perSecond := float64(pieces) / lasted.Seconds()
	c.Tell("pieces of work", "%.0f a second", perSecond)
	// One for each piece, of those without a limit too, three processes that look up to 20 times
	// a second and try what they see, and the server's own.
	c.AtMost("transactions of the database", float64(after-before)/lasted.Seconds(), perSecond+float64(alone)/lasted.Seconds()+3*60, "a second")
	c.AtMost("longest wait", longest.Seconds(), 60, "s")
	// Twice its place in line, times the work of each before it, over the permits.
	c.AtMost("longest wait of the one that wants 8", heavy.Seconds(), 2*1000*queueWork.Seconds()/float64(queueLimit.Limit), "s")
	c.Zero("served before somebody in the process who came a second earlier", outOfTurn(all))
	return nil
}

// outOfTurn counts those who were served before somebody of their process who had come before.
// What is less than a second apart may have been seen in either order.
func outOfTurn(all []served) (n int) {
	const apart = time.Second
	for process := range queueProcesses {
		mine := slices.DeleteFunc(slices.Clone(all), func(s served) bool { return s.Process != process+1 })
		slices.SortFunc(mine, func(a, b served) int { return a.From.Compare(b.From) })
		var latest time.Time // the arrival of a caller that was served by now, a second before
		next := 0
		for _, s := range mine {
			for ; mine[next].From.Before(s.From.Add(-apart)); next++ {
				latest = later(latest, mine[next].Asked)
			}
			if s.Asked.Add(apart).Before(latest) {
				n++
			}
		}
	}
	return n
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// commits returns how many transactions the database has committed, as far as its statistics know.
func commits(ctx context.Context, pool *pgxpool.Pool) (n int64) {
	_ = pool.QueryRow(ctx, "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()").Scan(&n)
	return n
}
