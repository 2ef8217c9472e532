package main

import (
	"cmp"
	"context"
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

// served is a caller that waited for a permit, and worked with it, on the machine's clock.
type served struct {
	Process         int
	N               int   // permits
	Asked, From, To int64 // microseconds
}

// queueForPermits waits for permits, works with them, and waits again.
func queueForPermits(ctx context.Context, e *env) error {
	return e.workers(ctx, func(worker int, _ *rand.Rand) {
		s := served{Process: e.Process, N: 1, Asked: time.Now().UnixMicro()}
		if e.Process == 1 && worker == 0 {
			s.N = queueHeavy
		}
		_ = e.store.Permits().Hold(ctx, queueLimit.ForN("", s.N), func(context.Context, ratelimit.Permit) error {
			s.From = time.Now().UnixMicro()
			time.Sleep(queueWork)
			s.To = time.Now().UnixMicro()
			e.out.Write(s)
			return nil
		})
	})
}

// waitForPermits has 1,000 wait for 10 permits.
func waitForPermits(ctx context.Context, l *site, c *chapter) error {
	c.say("Then 1,000 goroutines in 3 processes wait for 10 permits, and work with them for %v, again and again. One of them wants 8 at a time.", queueWork)
	p, err := l.place(ctx, 4)
	if err != nil {
		return err
	}
	defer p.close()
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
	from, before := time.Now().UnixMicro(), commits(ctx, p.pool)
	time.Sleep(l.seconds(60, 4))
	to, after := time.Now().UnixMicro(), commits(ctx, p.pool)
	lab.End(children)
	seconds := func(micros int64) float64 { return float64(micros) / 1e6 }
	var busy, longest, heavy int64
	pieces := 0
	for _, s := range all {
		if s.From >= to {
			continue
		}
		longest = max(longest, s.From-s.Asked)
		if s.N > 1 {
			heavy = max(heavy, s.From-s.Asked)
		}
		if s.To > from {
			busy += int64(s.N) * (min(s.To, to) - max(s.From, from))
			pieces++
		}
	}
	// The machine has other work: with none, they are busy 98 % of the time.
	c.AtLeast("permits that are waited for are busy", 100*seconds(busy)/seconds(to-from)/float64(queueLimit.Limit), 50, "%")
	perSecond := float64(pieces) / seconds(to-from)
	c.Tell("pieces of work", "%.0f a second", perSecond)
	// One for each piece, three processes that look up to 20 times a second and try what they see,
	// and the server's own.
	c.AtMost("transactions of the database", float64(after-before)/seconds(to-from), perSecond+3*60, "a second")
	c.AtMost("longest wait", seconds(longest), 60, "s")
	// Twice its place in line, times the work of each before it, over the permits.
	c.AtMost("longest wait of the one that wants 8", seconds(heavy), 2*1000*queueWork.Seconds()/float64(queueLimit.Limit), "s")
	c.Zero("served before somebody in the process who came a second earlier", outOfTurn(all))
	return nil
}

// outOfTurn counts those who were served before somebody of their process who had come before.
// What is less than a second apart may have been seen in either order.
func outOfTurn(all []served) (n int) {
	const apart = 1e6
	for process := range queueProcesses {
		mine := slices.DeleteFunc(slices.Clone(all), func(s served) bool { return s.Process != process+1 })
		slices.SortFunc(mine, func(a, b served) int { return cmp.Compare(a.From, b.From) })
		latest, next := int64(0), 0 // the arrival of a caller that was served by now, a second before
		for _, s := range mine {
			for ; mine[next].From < s.From-apart; next++ {
				latest = max(latest, mine[next].Asked)
			}
			if s.Asked+apart < latest {
				n++
			}
		}
	}
	return n
}

// commits returns how many transactions the database has committed, as far as its statistics know.
func commits(ctx context.Context, pool *pgxpool.Pool) (n int64) {
	_ = pool.QueryRow(ctx, "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()").Scan(&n)
	return n
}
