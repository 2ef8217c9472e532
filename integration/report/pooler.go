package main

import (
	"context"
	"errors"
	"net/url"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// pooled is how many connections PgBouncer has to the server.
const pooled = 4

// attackPooler has processes work through PgBouncer, whose connections to the server then
// come to harm.
func attackPooler(ctx context.Context, l *site, c *chapter) error {
	c.say("Two processes of eight connections each repeat the exact accounts through PgBouncer, which pools transactions over %d connections to the server. Then a relay between PgBouncer and the server cuts, delays and silences connections.", pooled)
	r, err := relayTo(l.server.URL)
	if err != nil {
		return err
	}
	defer r.Close()
	behind, err := url.Parse(l.server.URL)
	if err != nil {
		return err
	}
	behind.Host = r.Address().String()
	bouncer, err := throwaway.PgBouncer(ctx, behind.String(), pooled)
	if errors.Is(err, exec.ErrNotFound) {
		c.notRun("PgBouncer between", "there is no pgbouncer")
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = bouncer.Close() }()
	through, err := url.Parse(bouncer.URL)
	if err != nil {
		return err
	}
	tasks := []task{
		{Conns: 8, Workers: 8, Relay: through.Host, Patience: 10 * time.Second},
		{Conns: 8, Workers: 8, Relay: through.Host, Patience: 10 * time.Second},
	}
	var clients, servers int
	a, err := l.suffer(ctx, c, attack{tasks: tasks, lasts: l.seconds(15, 4), harm: func(ctx context.Context, s *suffering) (err error) {
		waited := lab.Within(ctx, patient, "more connections of clients than of the server", func() bool {
			clients, servers, err = pools(ctx, bouncer.URL)
			return err == nil && clients > pooled && s.granted() > 100
		})
		return errors.Join(waited, err)
	}})
	if err != nil {
		return err
	}
	c.Zero("errors that nobody made", a.unexpected(c))
	c.AtLeast("connections of clients to PgBouncer", float64(clients), pooled+1, "")
	c.AtMost("connections of PgBouncer to the server, for those", float64(servers), pooled, "")

	f := &faulty{rarely: 60, done: map[string]int{}, turns: map[string]int{}}
	f.interfere(r)
	for i := range tasks {
		tasks[i].Patience = 1500 * time.Millisecond
	}
	_, err = l.suffer(ctx, c, attack{tasks: tasks, lasts: l.seconds(30, 6), must: func(s *suffering) []count {
		gone := count{"calls told by PgBouncer that the server was gone (08P01)", s.coded("08P01")}
		return append(f.counts("between PgBouncer and server: "), gone)
	}})
	r.Interfere(nil, nil)
	return err
}

// pools asks PgBouncer how many connections it has from clients and to the server.
func pools(ctx context.Context, through string) (clients, servers int, err error) {
	config, err := pgx.ParseConfig(through)
	if err != nil {
		return 0, 0, err
	}
	config.Database, config.DefaultQueryExecMode = "pgbouncer", pgx.QueryExecModeSimpleProtocol
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close(ctx)
	for what, n := range map[string]*int{"CLIENTS": &clients, "SERVERS": &servers} {
		rows, err := conn.Query(ctx, "SHOW "+what)
		if err != nil {
			return 0, 0, err
		}
		all, err := pgx.CollectRows(rows, pgx.RowToMap)
		if err != nil {
			return 0, 0, err
		}
		for _, one := range all {
			if one["database"] != "pgbouncer" { // the console
				*n++
			}
		}
	}
	return clients, servers, nil
}
