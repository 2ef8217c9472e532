package main

import (
	"context"
	"fmt"
	"time"
)

// attackPools has the server's time-outs strike, and pools that are too small.
func attackPools(ctx context.Context, l *lab, c *chapter) error {
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
	c.say("The work of the accounts on connections whose time-outs strike (transaction_timeout is there since PostgreSQL 17); then 500 goroutines with a pool of one connection and 500 with a pool of four; then connections that live 30 ms.")
	a, err := l.suffer(ctx, c, tasks, l.seconds(20, 4), 0, nil)
	if err != nil {
		return err
	}
	for _, t := range timeouts {
		c.happened(fmt.Sprintf("told of %s (%s)", t.name, t.code), a.coded(t.code))
	}
	for _, conns := range []int32{1, 4} {
		a, err := l.suffer(ctx, c, []task{{Conns: conns, Workers: 500}}, l.seconds(10, 2), 0, nil)
		if err != nil {
			return err
		}
		c.atLeast(fmt.Sprintf("calls of 500 goroutines with a pool of %d", conns), float64(a.own()+len(a.byID)), 500, "")
		c.zero("errors among them", a.unexpected(c))
	}
	a, err = l.suffer(ctx, c, []task{{Conns: 4, Workers: 16, Lifetime: 30 * time.Millisecond}}, l.seconds(10, 2), 0, nil)
	if err != nil {
		return err
	}
	c.atLeast("connections that lived 30 ms", float64(a.connections), 50, "")
	c.zero("errors on them", a.unexpected(c))
	return nil
}
