package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/machine"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrations"
)

type options struct {
	quick, write bool
	only, skip   string
	bin          string
	minutes      float64
	pieces       int
}

// lab is what sections attack with: a server of their own, which comes back when it is
// killed.
type lab struct {
	options
	server     *throwaway.Server
	version    string
	schemas    int
	tablespace string // of the tables that schema makes; "" for the usual
}

// settings are those of servers that are attacked.
var settings = map[string]string{
	"max_connections": "300", "synchronous_commit": "on",
	"restart_after_crash": "on", "autovacuum_naptime": "1s",
}

func newLab(ctx context.Context, o options) (*lab, error) {
	_ = os.Unsetenv("DATABASE_URL") // nobody's server is to be killed
	server, err := throwaway.StartWith(ctx, throwaway.Options{Fsync: true, Restart: true, BinDir: o.bin, Settings: settings})
	if err != nil {
		return nil, err
	}
	l := &lab{options: o, server: server}
	if err := l.ask(ctx, "SHOW server_version", &l.version); err != nil {
		return nil, errors.Join(err, server.Close())
	}
	return l, nil
}

func (l *lab) close() error { return l.server.Close() }

// seconds is a duration, or with --quick a shorter one.
func (l *lab) seconds(whole, quick float64) time.Duration {
	s := whole
	if l.quick {
		s = quick
	}
	return time.Duration(s * float64(time.Second))
}

// ask runs a statement on a connection of its own, and reads its one row.
func (l *lab) ask(ctx context.Context, sql string, to ...any) error {
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
func (l *lab) schema(ctx context.Context) (name string, err error) {
	l.schemas++
	name = fmt.Sprintf("attack_%d", l.schemas)
	return name, l.ask(ctx, fmt.Sprintf(`SET default_tablespace = '%[3]s'; CREATE SCHEMA %[1]s; SET search_path = %[1]s; %[2]s;
		CREATE TABLE ledger (id int8, name text, key text, tokens float8);
		CREATE INDEX ON ledger (id)`, name, migrations.UpSQL(), l.tablespace))
}

// place makes a schema, and connections to the server.
func (l *lab) place(ctx context.Context, most int32) (schema string, pool *pgxpool.Pool, err error) {
	if schema, err = l.schema(ctx); err != nil {
		return "", nil, err
	}
	pool, err = l.pool(ctx, most)
	return schema, pool, err
}

// pool is connections to the server, of which no more than so many.
func (l *lab) pool(ctx context.Context, most int32) (*pgxpool.Pool, error) {
	return newPool(ctx, l.server.URL, most, nil)
}

func newPool(ctx context.Context, url string, most int32, change func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = most
	config.ConnConfig.RuntimeParams["search_path"] = ""
	if change != nil {
		change(config)
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// signal sends a signal to the server's first process, and returns when another
// answers in its place, or the same again.
func (l *lab) signal(ctx context.Context, signal syscall.Signal) error {
	var before, after string
	const life = "SELECT pg_postmaster_start_time()::text"
	if err := l.ask(ctx, life, &before); err != nil {
		return err
	}
	pid, err := l.server.Postmaster(ctx)
	if err != nil {
		return err
	}
	if err := syscall.Kill(pid, signal); err != nil {
		return err
	}
	return within(ctx, time.Minute, "the server is up again", func() bool {
		return l.ask(ctx, life, &after) == nil && after != before
	})
}

// within polls until something is so.
func within(ctx context.Context, most time.Duration, what string, so func() bool) error {
	for deadline := time.Now().Add(most); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("waited %v for this: %s", most, what)
		}
	}
	return nil
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

// facts are what the figures depend on.
func (l *lab) facts() []string {
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
