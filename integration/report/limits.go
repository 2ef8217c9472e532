package main

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
)

// attackPools has the server's time-outs strike, and pools that are too small.
func attackPools(ctx context.Context, l *site, c *chapter) error {
	timeouts := []struct{ name, code string }{
		{"statement_timeout", "57014"},
		{"lock_timeout", "55P03"},
		{"idle_in_transaction_session_timeout", "25P03"},
		{"transaction_timeout", "25P04"},
	}
	tasks := []task{
		{Conns: 8, Workers: 8, Params: map[string]string{"statement_timeout": "10ms", "idle_in_transaction_session_timeout": "10ms"}},
		{Conns: 8, Workers: 12, Params: map[string]string{"lock_timeout": "3ms"}, Isolation: "repeatable read"},
		{Conns: 8, Workers: 8, Params: map[string]string{"transaction_timeout": "10ms"}},
	}
	var known bool // since PostgreSQL 17
	if err := l.ask(ctx, "SELECT count(*) > 0 FROM pg_settings WHERE name = 'transaction_timeout'", &known); err != nil {
		return err
	}
	if !known {
		timeouts, tasks = timeouts[:3], tasks[:2]
	}
	c.say("The exact accounts are repeated on connections with time-outs that end statements and transactions (transaction_timeout from PostgreSQL 17 on). Then 500 goroutines share a pool of one connection, and 500 a pool of four. Last, connections live for 30 ms.")
	struck := func(s *suffering) (counts []count) {
		for _, t := range timeouts {
			counts = append(counts, count{fmt.Sprintf("told of %s (%s)", t.name, t.code), s.coded(t.code)})
		}
		return counts
	}
	if _, err := l.suffer(ctx, c, attack{tasks: tasks, lasts: l.seconds(20, 4), must: struck}); err != nil {
		return err
	}
	for _, conns := range []int32{1, 4} {
		const goroutines = 500
		a, err := l.suffer(ctx, c, attack{tasks: []task{{Conns: conns, Workers: goroutines}}, lasts: l.seconds(10, 2), harm: func(ctx context.Context, s *suffering) error {
			return lab.Within(ctx, patient, "a call of each goroutine", func() bool { return s.calls() >= goroutines })
		}})
		if err != nil {
			return err
		}
		c.AtLeast(fmt.Sprintf("calls of %d goroutines with a pool of %d", goroutines, conns), float64(a.calls()), goroutines, "")
		c.Zero("errors among them", a.unexpected(c))
	}
	const connections = 50
	a, err := l.suffer(ctx, c, attack{tasks: []task{{Conns: 4, Workers: 16, Lifetime: 30 * time.Millisecond}}, lasts: l.seconds(10, 2), harm: func(ctx context.Context, s *suffering) error {
		return lab.Within(ctx, patient, "connections come and go", func() bool { return s.connections() >= connections })
	}})
	if err != nil {
		return err
	}
	c.AtLeast("connections that lived 30 ms", float64(a.connections()), connections, "")
	c.Zero("errors on them", a.unexpected(c))
	return nil
}
