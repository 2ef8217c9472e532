package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
)

// attackCrash kills servers, their processes, and clients.
func attackCrash(ctx context.Context, l *site, c *chapter) error {
	c.say("Two processes repeat the exact accounts. Meanwhile a backend or the server's first process is killed (kill -9), and the server restarts. Single connections are terminated, and a third client process is killed. fsync is on.")
	rounds := 4
	if l.quick {
		rounds = 1
	}
	harms := []struct {
		what string
		do   func(context.Context) error
	}{
		{"connections, pg_terminate_backend", l.terminate},
		{"backend, kill -9", l.killBackend},
		{"server, kill -9", func(ctx context.Context) error { return l.signal(ctx, syscall.SIGKILL) }},
		{"server, fast restart", func(ctx context.Context) error { return l.signal(ctx, syscall.SIGINT) }},
	}
	tasks := []task{
		{Conns: 8, Workers: 8, Patience: 5 * time.Second}, // is killed
		{Conns: 8, Workers: 8, Patience: 5 * time.Second},
		{Conns: 8, Workers: 8, Patience: 5 * time.Second, Isolation: "serializable"},
	}
	done := 0
	_, err := l.suffer(ctx, c, attack{tasks: tasks, lasts: l.seconds(45, 12), killed: 1, harm: func(ctx context.Context, s *suffering) error {
		if err := errors.Join(s.goOn(ctx), s.children[0].Kill()); err != nil {
			return err
		}
		for ; done < rounds*len(harms); done++ {
			h := harms[done%len(harms)]
			if err := errors.Join(s.goOn(ctx), h.do(ctx)); err != nil {
				return fmt.Errorf("%s: %w", h.what, err)
			}
		}
		return s.goOn(ctx)
	}})
	for i, h := range harms {
		c.happened(count{h.what, (done + len(harms) - 1 - i) / len(harms)})
	}
	return err
}

func (l *site) terminate(ctx context.Context) error {
	var n int
	err := l.ask(ctx, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()", &n)
	if err == nil && n == 0 {
		err = errors.New("nobody was there")
	}
	return err
}

// killBackend kills a process of the server that has work, and returns when the server
// has recovered.
func (l *site) killBackend(ctx context.Context) error {
	const crashes = "SELECT stats_reset FROM pg_stat_bgwriter"
	var reset, again time.Time
	if err := l.ask(ctx, crashes, &reset); err != nil {
		return err
	}
	if err := lab.Within(ctx, 5*time.Second, "a backend at work is killed", func() bool {
		var pid int
		err := l.ask(ctx, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND state <> 'idle' AND pid <> pg_backend_pid() LIMIT 1", &pid)
		return err == nil && syscall.Kill(pid, syscall.SIGKILL) == nil // it may have ended in between
	}); err != nil {
		return err
	}
	return lab.Within(ctx, time.Minute, "the server has recovered", func() bool {
		return l.ask(ctx, crashes, &again) == nil && !again.Equal(reset)
	})
}
