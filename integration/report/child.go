package main

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// task is what a child process does until its stdin ends. Its journal has an entry for each thing
// that it was told.
type task struct {
	Job         string // the name of one of jobs
	URL, Schema string
	Process     int // its number, from 1
	Workers     int
	Conns       int32
	Isolation   string        // the level of its connections' transactions, if nobody says another
	Relay       string        // the address that it connects to, if that is not the server's
	Patience    time.Duration // of a call; 0 for long
	Seed        uint64
	Escrow      time.Duration
	Portable    bool
}

// jobs are the jobs of children, by name.
var jobs = map[string]func(context.Context, *env) error{
	"work":    work,
	"arrive":  arrive,
	"hoard":   hoard,
	"permits": holdPermits,
	"queue":   queueForPermits,
}

// env is the environment of a child's job.
type env struct {
	task
	pool  *pgxpool.Pool
	store *pgstore.Store
	out   *lab.Journal
}

func runChild() error {
	var t task
	ctx, journal, err := lab.Task(context.Background(), &t)
	if err != nil {
		return err
	}
	pool, err := newPool(t.URL, t.Conns, func(c *pgxpool.Config) {
		if t.Isolation != "" {
			c.ConnConfig.RuntimeParams["default_transaction_isolation"] = t.Isolation
		}
		if t.Relay != "" {
			relayed(c, t.Relay)
		}
	})
	if err != nil {
		return err
	}
	// Its connections end with the process: to close them is to wait for a silent network.
	store, err := pgstore.New(pool, &pgstore.Config{Schema: t.Schema, Escrow: t.Escrow, Portable: t.Portable, Observe: observe})
	if err != nil {
		return err
	}
	return jobs[t.Job](ctx, &env{t, pool, store, journal})
}

// workers calls do again and again in each of its goroutines, until ctx is over.
func (e *env) workers(ctx context.Context, do func(n int, r *rand.Rand)) error {
	return lab.Each(e.Workers, func(n int) error {
		r := rand.New(rand.NewPCG(e.Seed, uint64(n)))
		for ctx.Err() == nil {
			do(n, r)
		}
		return nil
	})
}

// three returns a task for three processes, the last of which is Portable.
func three(t task) []task {
	tasks := []task{t, t, t}
	tasks[2].Portable = true
	return tasks
}

// launch starts a child for each task, with numbers from 1 and at the site's server unless the task
// names another. It has each line of their journals read.
func (l *site) launch(ctx context.Context, tasks []task, read func(line []byte) error) (children []*lab.Child, err error) {
	for n, t := range tasks {
		t.Seed = rand.Uint64()
		if t.URL == "" {
			t.URL = l.server.URL
		}
		if t.Process == 0 {
			t.Process = n + 1
		}
		child, err := lab.Start(ctx, t, read)
		if err != nil {
			lab.End(children)
			return nil, err
		}
		children = append(children, child)
	}
	return children, nil
}
