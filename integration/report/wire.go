package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/relay"
)

// relayed has connections go through a relay, and each statement carry its text, so
// that the relay knows a COMMIT when it sees one.
func relayed(c *pgxpool.Config, address string) {
	host, port, _ := net.SplitHostPort(address)
	n, _ := strconv.Atoi(port) // it is a listener's
	c.ConnConfig.Host, c.ConnConfig.Port, c.ConnConfig.Fallbacks = host, uint16(n), nil
	c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
}

// faulty does harm to some of what a relay passes on, and counts it.
type faulty struct {
	mu     sync.Mutex
	rarely int // one of so many messages
	done   map[string]int
	turns  map[string]int // of kinds of messages: how many came to harm
}

var harms = map[relay.Fate]string{
	relay.Cut: "cut before", relay.CutWithin: "cut within", relay.CutAfter: "cut after",
	relay.Slow: "byte by byte", relay.Silence: "silence from", relay.Fatal: "FATAL instead of",
}

// judge has all kinds of harm done to requests or answers, and to those of COMMIT more
// often.
func (f *faulty) judge(what string, fates []relay.Fate) relay.Judge {
	for _, fate := range fates {
		f.done[harms[fate]+" COMMIT's "+what], f.done[harms[fate]+" a statement's "+what] = 0, 0
	}
	return func(_ int, message []byte) relay.Fate {
		kind, rarely := "a statement's "+what, f.rarely
		if bytes.Contains(bytes.ToUpper(message), []byte("COMMIT\x00")) {
			kind, rarely = "COMMIT's "+what, f.rarely/4
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.turns[kind] < len(fates) { // until each has happened once
			rarely /= 4
		}
		if rand.IntN(max(rarely, 1)) > 0 {
			return relay.Pass
		}
		fate := fates[f.turns[kind]%len(fates)]
		f.turns[kind]++
		f.done[harms[fate]+" "+kind]++
		return fate
	}
}

// attackWire has processes work through a network that loses, cuts and delays.
func attackWire(ctx context.Context, l *lab, c *chapter) error {
	r, err := relayTo(l.server.URL)
	if err != nil {
		return err
	}
	defer r.Close()
	f := &faulty{rarely: 60, done: map[string]int{}, turns: map[string]int{}}
	f.interfere(r)
	c.say("Two processes do the work of the accounts through a relay that cuts connections before, within and after requests and answers, has some arrive byte by byte, tells FATAL as a pooler does, or goes silent while new connections work. What a caller was told an error of is counted as perhaps taken; all else is exact.")
	_, err = l.suffer(ctx, c, []task{
		{Conns: 8, Workers: 8, Relay: r.Address().String(), Patience: 1500 * time.Millisecond},
		{Conns: 8, Workers: 8, Relay: r.Address().String(), Patience: 1500 * time.Millisecond, Isolation: "serializable"},
	}, l.seconds(40, 10), 0, nil)
	if err != nil {
		return err
	}
	f.tell(c, "")
	return nil
}

// suffering is what work is under way, and then what came of it.
type suffering struct {
	*account
	schema   string
	children []*child
	verdict  verdict
}

// suffer has processes do the work of the accounts while something is done to them, and
// compares. Each of killed processes takes what it was not told with it.
func (l *lab) suffer(ctx context.Context, c *chapter, tasks []task, lasts time.Duration, killed int, harm func(context.Context, *suffering) error) (*suffering, error) {
	s := &suffering{account: newAccount()}
	var err error
	if s.schema, err = l.schema(ctx); err != nil {
		return nil, err
	}
	if err := l.seed(ctx, s.schema); err != nil {
		return nil, err
	}
	for n, t := range tasks {
		t.Job, t.URL, t.Schema, t.Process, t.For, t.Seed = "work", l.server.URL, s.schema, n+1, lasts, rand.Uint64()
		child, err := start(ctx, t, s.read)
		if err != nil {
			return nil, err
		}
		s.children = append(s.children, child)
	}
	if harm != nil {
		err = harm(ctx, s)
	}
	gone := 0
	for _, child := range s.children {
		if <-child.done != nil {
			gone++
		}
	}
	if err != nil {
		return nil, err
	}
	if gone != killed {
		return nil, fmt.Errorf("%d processes failed, want %d", gone, killed)
	}
	slack := 0.0
	for _, t := range tasks[:killed] {
		slack += float64(t.Workers) * 9 // three requests for one key, three tokens each
	}
	return s, l.compare(ctx, c, s, slack)
}

// compare compares what is there with what was told, give or take what killed clients had
// under way.
func (l *lab) compare(ctx context.Context, c *chapter, s *suffering, slack float64) error {
	pool, err := l.pool(ctx, 2)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := l.quiet(ctx); err != nil {
		return err
	}
	if s.verdict, err = s.audit(ctx, pool, s.schema); err != nil {
		return err
	}
	c.tell("decisions on their own, transactions and runs", "%d, %d", s.own(), len(s.byID))
	s.verdict.lines(c, slack)
	c.tell("calls that were told an error, or that nobody knows", "%d", s.total("", "error")+s.total("", "unknown"))
	c.tell("of transactions that nobody knew of: there", "%d of %d", s.verdict.resolved, s.total("", "unknown"))
	return nil
}

// quiet waits until the server has ended what clients left behind: transactions of
// callers that it has not heard of for good, and what it is still doing.
func (l *lab) quiet(ctx context.Context) error {
	var busy int
	if err := l.ask(ctx, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'", &busy); err != nil {
		return err
	}
	return within(ctx, time.Minute, "nothing is under way any more", func() bool {
		err := l.ask(ctx, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND (state <> 'idle' OR backend_xid IS NOT NULL)", &busy)
		return err == nil && busy == 0
	})
}

// attackCrash kills servers, their processes, and clients.
func attackCrash(ctx context.Context, l *lab, c *chapter) error {
	c.say("Two processes do the work of the accounts while the server's processes are killed (kill -9 of one backend, which has PostgreSQL recover from its log, and of the first process), while it is restarted, and while single connections are terminated; a third client process is killed itself. fsync is on.")
	rounds := 4
	if l.quick {
		rounds = 1
	}
	done := map[string]int{}
	tasks := []task{
		{Conns: 8, Workers: 8, Patience: 5 * time.Second}, // is killed
		{Conns: 8, Workers: 8, Patience: 5 * time.Second},
		{Conns: 8, Workers: 8, Patience: 5 * time.Second, Isolation: "serializable"},
	}
	_, err := l.suffer(ctx, c, tasks, l.seconds(45, 12), 1, func(ctx context.Context, s *suffering) error {
		time.Sleep(time.Second)
		if err := s.children[0].cmd.Process.Kill(); err != nil {
			return err
		}
		done["client process, kill -9"]++
		for range rounds {
			for _, harm := range []struct {
				name string
				do   func(context.Context) error
			}{
				{"connections, pg_terminate_backend", l.terminate},
				{"backend, kill -9", l.killBackend},
				{"server, kill -9", func(ctx context.Context) error { return l.signal(ctx, syscall.SIGKILL) }},
				{"server, fast restart", func(ctx context.Context) error { return l.signal(ctx, syscall.SIGINT) }},
			} {
				time.Sleep(700 * time.Millisecond)
				if err := harm.do(ctx); err != nil {
					return fmt.Errorf("%s: %w", harm.name, err)
				}
				done[harm.name]++
			}
		}
		return nil
	})
	for _, name := range slices.Sorted(maps.Keys(done)) {
		c.happened(name, done[name])
	}
	return err
}

func (l *lab) terminate(ctx context.Context) error {
	var n int
	err := l.ask(ctx, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()", &n)
	if err == nil && n == 0 {
		err = errors.New("nobody was there")
	}
	return err
}

// killBackend kills a process of the server that has work, and returns when the server
// has recovered.
func (l *lab) killBackend(ctx context.Context) error {
	var pid int
	if err := within(ctx, 5*time.Second, "a backend is at work", func() bool {
		return l.ask(ctx, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND state <> 'idle' AND pid <> pg_backend_pid() LIMIT 1", &pid) == nil
	}); err != nil {
		return err
	}
	return l.crash(ctx, func() (up func() error, err error) {
		return func() error { return nil }, syscall.Kill(pid, syscall.SIGKILL)
	})
}

// crash has the server fall, then what hinders it go, and returns when it has recovered.
func (l *lab) crash(ctx context.Context, fall func() (up func() error, err error)) error {
	const crashes = "SELECT stats_reset FROM pg_stat_bgwriter"
	var reset, again time.Time
	if err := l.ask(ctx, crashes, &reset); err != nil {
		return err
	}
	up, err := fall()
	if up != nil {
		err = errors.Join(err, up())
	}
	if err != nil {
		return err
	}
	return within(ctx, time.Minute, "the server has recovered", func() bool {
		return l.ask(ctx, crashes, &again) == nil && !again.Equal(reset)
	})
}

// attackPools has the server's time-outs strike, and pools that are too small.
func attackPools(ctx context.Context, l *lab, c *chapter) error {
	timeouts := []struct{ name, code string }{
		{"statement_timeout", "57014"}, {"lock_timeout", "55P03"},
		{"idle_in_transaction_session_timeout", "25P03"}, {"transaction_timeout", "25P04"},
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
