package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// attackPromotion kills a primary in the middle of its work, and has its synchronous
// standby go on.
func attackPromotion(ctx context.Context, l *site, c *chapter) error {
	c.say("Two processes repeat the exact accounts on a primary with a synchronous standby (pg_basebackup, synchronous_standby_names). In the middle the primary is killed (kill -9), the standby is promoted, and the address moves to it. The standby must have every granted token.")
	rounds := 3
	if l.quick {
		rounds = 1
	}
	promoted, after := 0, 0
	for range rounds {
		n, err := l.promoteOnce(ctx, c)
		if errors.Is(err, exec.ErrNotFound) {
			c.notRun("a standby promoted", "there is no pg_basebackup")
			return nil
		}
		if err != nil {
			return err
		}
		promoted++
		after += n
	}
	c.happened(
		count{"standby promoted when the primary was killed", promoted},
		count{"calls told OK by the new primary", after},
	)
	return nil
}

// promoteOnce promotes a standby once, and counts the calls that were told OK by it.
func (l *site) promoteOnce(ctx context.Context, c *chapter) (after int, err error) {
	pair, standby, err := l.withStandby(ctx)
	if err != nil {
		return 0, err
	}
	primary := pair.server
	defer func() {
		_ = primary.Close() // it was killed
		err = errors.Join(err, standby.Close())
	}()
	r, err := relayTo(primary.URL)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	lasts := l.seconds(20, 5)
	before := 0
	a, err := pair.suffer(ctx, c, attack{lasts: lasts, tasks: []task{
		{Conns: 8, Workers: 8, Relay: r.Address().String(), Patience: 3 * time.Second},
		{Conns: 8, Workers: 8, Relay: r.Address().String(), Patience: 3 * time.Second, Isolation: "serializable"},
	}, harm: func(ctx context.Context, s *suffering) error {
		time.Sleep(lasts / 3)
		if err := kill(ctx, pair.server, syscall.SIGKILL); err != nil {
			return err
		}
		pair.server = standby
		var done bool
		if err := pair.ask(ctx, "SELECT pg_promote()", &done); err != nil || !done {
			return fmt.Errorf("promoted: %v, %w", done, err)
		}
		before = s.granted()
		return errors.Join(redirect(r, standby.URL), s.goOn(ctx))
	}})
	if err != nil {
		return 0, err
	}
	return a.granted() - before, nil
}

// withStandby starts a primary, which is the server of the lab that it returns, and a
// standby without which it commits nothing.
func (l *site) withStandby(ctx context.Context) (pair *site, standby *throwaway.Server, err error) {
	options := throwaway.Options{Fsync: true, Settings: settings}
	primary, err := throwaway.StartWith(ctx, options)
	if err != nil {
		return nil, nil, err
	}
	options.StandbyOf = primary.URL
	standby, err = throwaway.StartWith(ctx, options)
	if err != nil {
		return nil, nil, errors.Join(err, primary.Close())
	}
	pair = &site{options: l.options, server: primary}
	err = pair.set(ctx, "synchronous_standby_names", "*")
	if err == nil {
		err = lab.Within(ctx, time.Minute, "the standby is synchronous", func() bool {
			var n int
			return pair.ask(ctx, "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'", &n) == nil && n == 1
		})
	}
	if err != nil {
		return nil, nil, errors.Join(err, standby.Close(), primary.Close())
	}
	return pair, standby, nil
}

// set changes a setting of the running server, and returns when it holds.
func (l *site) set(ctx context.Context, name, value string) error {
	if err := l.ask(ctx, fmt.Sprintf("ALTER SYSTEM SET %s = '%s'", name, value)); err != nil {
		return err
	}
	return lab.Within(ctx, 10*time.Second, name+" is "+value, func() bool {
		var reloaded bool
		var now string
		return l.ask(ctx, "SELECT pg_reload_conf(), current_setting('"+name+"')", &reloaded, &now) == nil && now == value
	})
}
