package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/machine"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

type options struct {
	quick, write bool
	only, skip   string
	minutes      float64
}

// site is what sections attack with: a server of their own, which comes back when it is
// killed.
type site struct {
	options
	server  *throwaway.Server
	version string
	schemas atomic.Int64
}

// settings are those of servers that are attacked.
var settings = map[string]string{
	"max_connections": "300", "synchronous_commit": "on",
	"restart_after_crash": "on", "autovacuum_naptime": "1s",
}

func newSite(ctx context.Context, o options) (*site, error) {
	_ = os.Unsetenv("DATABASE_URL") // nobody's server is to be killed
	server, err := throwaway.StartWith(ctx, throwaway.Options{Fsync: true, Restart: true, Settings: settings})
	if err != nil {
		return nil, err
	}
	l := &site{options: o, server: server}
	if err := l.ask(ctx, "SHOW server_version", &l.version); err != nil {
		return nil, errors.Join(err, server.Close())
	}
	return l, nil
}

func (l *site) close() error { return l.server.Close() }

// seconds returns a duration, or with --quick a shorter one.
func (l *site) seconds(whole, quick float64) time.Duration {
	s := whole
	if l.quick {
		s = quick
	}
	return time.Duration(s * float64(time.Second))
}

// ask runs a statement on a connection of its own, and reads its one row.
func (l *site) ask(ctx context.Context, sql string, to ...any) error {
	conn, err := pgx.Connect(ctx, l.server.URL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	if len(to) == 0 {
		_, err = conn.Exec(ctx, sql)
		return err
	}
	return conn.QueryRow(ctx, sql).Scan(to...)
}

// schema makes a schema with the library's table, and one for the changes of transactions.
func (l *site) schema(ctx context.Context) (name string, err error) {
	name = fmt.Sprintf("attack_%d", l.schemas.Add(1))
	return name, l.ask(ctx, fmt.Sprintf(`CREATE SCHEMA %[1]s; SET search_path = %[1]s; %[2]s;
		CREATE TABLE ledger (id int8, name text, key text, tokens float8);
		CREATE INDEX ON ledger (id)`, name, migrations.UpSQL()))
}

// place is a schema, and connections to the server.
type place struct {
	schema string
	pool   *pgxpool.Pool
	stores []*pgstore.Store
}

// place makes a schema, and at most so many connections.
func (l *site) place(ctx context.Context, most int32) (*place, error) {
	schema, err := l.schema(ctx)
	if err != nil {
		return nil, err
	}
	return l.at(schema, most)
}

// at returns the place of a schema that is there.
func (l *site) at(schema string, most int32) (*place, error) {
	pool, err := newPool(l.server.URL, most, nil)
	return &place{schema: schema, pool: pool}, err
}

// store makes a store, which ends with the place.
func (p *place) store(config pgstore.Config) (*pgstore.Store, error) {
	config.Schema = p.schema
	store, err := pgstore.New(p.pool, &config)
	if err == nil {
		p.stores = append(p.stores, store)
	}
	return store, err
}

func (p *place) close() {
	for _, store := range p.stores {
		store.Close()
	}
	p.pool.Close()
}

func newPool(url string, most int32, change func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	return lab.NewPool(url, most, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["search_path"] = ""
		if change != nil {
			change(config)
		}
	})
}

// signal sends a signal to the server's first process, and returns when another
// answers in its place, or the same again.
func (l *site) signal(ctx context.Context, signal syscall.Signal) error {
	var before, after string
	const life = "SELECT pg_postmaster_start_time()::text"
	if err := l.ask(ctx, life, &before); err != nil {
		return err
	}
	if err := kill(ctx, l.server, signal); err != nil {
		return err
	}
	return lab.Within(ctx, time.Minute, "the server is up again", func() bool {
		return l.ask(ctx, life, &after) == nil && after != before
	})
}

// kill sends a signal to a server's first process.
func kill(ctx context.Context, server *throwaway.Server, signal syscall.Signal) error {
	pid, err := server.Postmaster(ctx)
	if err != nil {
		return err
	}
	return syscall.Kill(pid, signal)
}

// until says whether to go on: for as long as this lasts, and up to patient longer until
// something is so.
func until(lasts time.Duration, so func() bool) (more func() bool) {
	begun := time.Now()
	return func() bool {
		since := time.Since(begun)
		return since < lasts || since < lasts+patient && !so()
	}
}

// facts returns what the figures depend on.
func (l *site) facts() []string {
	return []string{
		machine.Name(),
		fmt.Sprintf("PostgreSQL %s, fsync on; %s; pgx %s", l.version, runtime.Version(), moduleVersion("github.com/jackc/pgx/v5")),
	}
}

func moduleVersion(path string) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == path {
				return strings.TrimPrefix(m.Version, "v")
			}
		}
	}
	return "of an unknown version"
}
