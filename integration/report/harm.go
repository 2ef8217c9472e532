package main

import (
	"context"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
)

// harm is something that is done to processes, to the server or between them. Do returns how often it
// has happened.
type harm struct {
	what string
	do   func() (int, error)
}

// inTurn does harms one after the other, with pauses of up to so long: for as long as lasts, and then
// until all have happened and enough returns true.
func inTurn(lasts, pause time.Duration, enough func() bool, harms ...harm) (counts []count, err error) {
	for _, h := range harms {
		counts = append(counts, count{what: h.what})
	}
	more := until(lasts, func() bool { return happened(counts...) && enough() })
	for n := 0; more(); n++ {
		time.Sleep(rand.N(pause))
		times, err := harms[n%len(harms)].do()
		if err != nil {
			return nil, err
		}
		counts[n%len(harms)].n += times
	}
	return counts, nil
}

func always() bool { return true }

// millis returns a random duration, in milliseconds.
func millis(least, most int) time.Duration {
	return time.Duration(least+rand.IntN(most-least)) * time.Millisecond
}

// processes are children of which some are killed and replaced.
type processes struct {
	*site
	task     func(n int) task // of the n-th that is started
	read     func(line []byte) error
	started  int
	children []*lab.Child
}

// start starts some more.
func (p *processes) start(ctx context.Context, n int) error {
	for range n {
		p.started++
		t := p.task(p.started)
		t.Process = p.started
		started, err := p.launch(ctx, []task{t}, p.read)
		p.children = append(p.children, started...)
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *processes) any() *lab.Child { return p.children[rand.IntN(len(p.children))] }

// killOne kills a process, and starts another.
func (p *processes) killOne(ctx context.Context) error {
	i := rand.IntN(len(p.children))
	victim := p.children[i]
	if err := victim.Kill(); err != nil {
		return err
	}
	_ = victim.Wait() // with an error, of course
	p.children = append(p.children[:i], p.children[i+1:]...)
	return p.start(ctx, 1)
}

// standStill stops a process for a while.
func standStill(c *lab.Child, lasts time.Duration) error {
	if err := c.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	time.Sleep(lasts)
	return c.Signal(syscall.SIGCONT)
}

// suspend stops the server for a while.
func (l *site) suspend(ctx context.Context, lasts time.Duration) error {
	resume, err := l.server.Suspend(ctx)
	if err != nil {
		return err
	}
	time.Sleep(lasts)
	return resume()
}

// holdRow keeps the first row of a limit locked for a while. It returns 0 if there is none.
func (l *site) holdRow(ctx context.Context, schema string, limit ratelimit.Limit, lasts time.Duration) (n int, err error) {
	conn, err := pgx.Connect(ctx, l.server.URL)
	if err != nil {
		return 0, err
	}
	defer conn.Close(ctx)
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, "SELECT FROM "+schema+".rate_limits WHERE name = $1 AND key = $2 AND shard = 0 FOR UPDATE", ratelimit.NameOf(limit), arrivalKey)
		n = int(tag.RowsAffected())
		time.Sleep(lasts)
		return err
	})
	return n, err
}
