// Package migrate puts the schema of ratelimit in place, in one call:
//
//	applied, err := migrate.Up(ctx, pool, nil)
//
// Call it at every start of the program, before the first limit is used. When
// there is nothing to do it changes nothing. Several processes may call it at
// the same time: they take turns.
//
// The package runs the files of package migrations with goose. It notes the
// migrations that it applied in a table of its own, [migrations.VersionTable],
// beside the table of the limits, and neither sees nor touches the application's
// own migrations, whether they use goose or not. Applications that would rather run the files
// with their own goose do not need this package: see package migrations.
//
// # Connections
//
// All functions open up to two connections of their own, configured as those of
// the pool that they are given, and close them before they return. The pool
// itself is only asked for its configuration.
//
// Behind a connection pooler in transaction mode, such as PgBouncer, leave
// [Config.Schema] empty, or go round the pooler: a search_path that is set on
// such a connection is not kept for its owner, but handed on to others.
//
// # A table that is in use
//
// Programs go on deciding while the schema changes. A migration waits for a lock for one second
// at most, since whatever decides waits behind it. If somebody else has the table locked, such as
// a dump, [Up] and [Down] try again each second until the context ends: give them one that does.
//
// # Errors
//
// Errors of the database can be had with errors.As as a *pgconn.PgError. A
// migration runs in a transaction: one that fails leaves nothing behind, and
// those before it stay. A [SchemaError] says that parts of the schema are missing, and how to get
// them back. All functions are safe for concurrent use.
package migrate

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"

	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/migrations"
)

// Config configures the calls of this package. The zero value and a nil *Config hold the defaults.
type Config struct {
	// Schema is the PostgreSQL schema that holds the tables, written as it is
	// stored: it is quoted where need be. [Up] creates it if it is missing.
	//
	// Default: the first existing schema of the connection's search_path, which
	// is public on most databases. A store looks for the table along its
	// connections' search_path, unless pgstore.Config.Schema names this schema.
	Schema string

	// Set selects a set of migrations. The default is the limits' own. Apply that first, then
	// [migrations.Catalog], [migrations.Functions] and [migrations.Refusals] by calls of their own.
	Set migrations.Set
}

// A Migration is one step of the schema.
type Migration struct {
	Version int64  // 1, 2, 3, …
	Name    string // of its file in package migrations
	Applied bool   // whether the database has it after the call

	// Untracked reports that another tool applied it: the table has its columns, and there is no
	// version table.
	Untracked bool

	// Newer reports that a newer program applied it: this one has no such file.
	Newer bool
}

// losses says what taking a migration back loses, by the migration's name.
var losses = map[string]string{
	"00001_rate_limits.sql":     "every limit is full again, and debts, pauses and what is held are forgotten",
	"00002_pauses.sql":          "pauses are forgotten",
	"00003_sliding_windows.sql": "what sliding windows have granted is forgotten",
	"00004_escrow.sql":          "what processes hold in memory is forgotten, so that it can be granted twice",
	"00001_definitions.sql":     "all definitions and overrides and their history are deleted",
	"00001_functions.sql":       "the functions are dropped, with the rights that were granted on them",
	"00001_refusals.sql":        "what was recorded of refusals is deleted",
	"00001_parked.sql":          "jobs that wait in line are woken by nobody, and start a day later",
}

// Loses says what taking the migration back loses; "" if all of it can be applied again.
func (m Migration) Loses() string { return losses[m.Name] }

// Up brings the schema to the newest version and returns the migrations that it
// applied, oldest first: none if the schema was there already. With an error it returns those
// that it applied before, which stay.
//
// The role needs the right to create tables in the schema and, if the schema
// itself is missing, to create schemas in the database. If there is nothing to apply it
// needs no right but USAGE of the schema, so a program may call Up with a role that can use the
// table and no more.
//
// A table that another tool made, such as from [migrations.UpSQL], is left to that tool:
// Up applies nothing, and returns an error that names the migrations that the table
// lacks, if it lacks any. A server older than PostgreSQL 14 is an error too.
func Up(ctx context.Context, pool *pgxpool.Pool, cfg *Config) ([]Migration, error) {
	return with(ctx, pool, cfg, "up", (*target).up)
}

// Down takes the newest migration back that the version table has, and only that one,
// and returns it, or nil if there is none. Call it until it returns nil to take all of
// them back. The version table and the schema stay.
//
// [Migration.Loses] says what is lost by it. Down asks nobody. It is an error that names them,
// and nothing is taken back, while other objects depend on what would be dropped: the sets
// [migrations.Catalog] and [migrations.Functions], or views and functions of yours.
func Down(ctx context.Context, pool *pgxpool.Pool, cfg *Config) (*Migration, error) {
	return with(ctx, pool, cfg, "down", (*target).down)
}

// Newest returns the migration that [Down] would take back, or nil if there is none. It changes nothing,
// and returns the error with which Down would refuse. Views and functions of yours that depend on the
// migration are an error of Down only.
func Newest(ctx context.Context, pool *pgxpool.Pool, cfg *Config) (*Migration, error) {
	return with(ctx, pool, cfg, "down", (*target).newest)
}

// Status returns all migrations, oldest first, and last those of a newer program. It writes nothing and
// waits for no lock. If the role cannot read a version table, what the schema has decides. With a
// [*SchemaError] it returns them too.
func Status(ctx context.Context, pool *pgxpool.Pool, cfg *Config) ([]Migration, error) {
	return with(ctx, pool, cfg, "status", (*target).status)
}

// with returns what a verb returns for a target that it makes. Its error names the verb.
func with[T any](ctx context.Context, pool *pgxpool.Pool, cfg *Config, verb string, do func(*target, context.Context) (T, error)) (result T, err error) {
	err = withTarget(ctx, pool, cfg, func(t *target) (err error) {
		result, err = do(t, ctx)
		return err
	})
	if err != nil {
		return result, fmt.Errorf("migrate %s: %w", verb, err)
	}
	return result, nil
}

// A target is a schema, with connections that have it first in their search_path.
type target struct {
	schema string // "" if the search_path was left as it is
	set    migrations.Set
	pool   *pgxpool.Pool
	db     *sql.DB // of that pool, for goose
	goose  *goose.Provider
}

// withTarget runs f with connections of its own, made from the configuration of the user's pool. A
// search_path set on a connection of that pool would stay there. A URL would lose what the
// configuration knows, such as a BeforeConnect that fetches passwords.
func withTarget(ctx context.Context, users *pgxpool.Pool, cfg *Config, f func(*target) error) error {
	if users == nil {
		return errors.New("the pool is nil")
	}
	if cfg == nil {
		cfg = &Config{}
	}
	if !slices.Contains(migrations.Sets(), cfg.Set) {
		return fmt.Errorf("Config.Set %q: must be one of %q", cfg.Set, migrations.Sets())
	}
	if len(cfg.Schema) > longestName {
		return fmt.Errorf("Config.Schema %q: must have at most %d bytes, to which PostgreSQL cuts a name", cfg.Schema, longestName)
	}
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig(users.Config(), cfg.Schema))
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer pool.Close()
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close() // before pool.Close, which waits for its connections
	provider, err := newProvider(db, cfg.Set)
	if err != nil {
		return err
	}
	return f(&target{schema: cfg.Schema, set: cfg.Set, pool: pool, db: db, goose: provider})
}

// longestName is the largest number of bytes of a name in PostgreSQL.
const longestName = 63

// poolConfig turns the configuration of the user's pool into ours: one connection holds the lock,
// the other does the work.
func poolConfig(cfg *pgxpool.Config, schema string) *pgxpool.Config {
	cfg.MaxConns = 2
	cfg.MinConns = 0
	cfg.MinIdleConns = 0
	if schema == "" {
		return cfg
	}
	// A startup parameter would be shorter, but PgBouncer refuses it.
	setPath := "SET search_path TO " + pgx.Identifier{schema}.Sanitize()
	usersHook := cfg.AfterConnect
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		if usersHook != nil {
			if err := usersHook(ctx, conn); err != nil {
				return err
			}
		}
		_, err := conn.Exec(ctx, setPath)
		return err
	}
	return cfg
}

func newProvider(db *sql.DB, set migrations.Set) (*goose.Provider, error) {
	return goose.NewProvider(goose.DialectPostgres, db, set.FS(),
		goose.WithTableName(set.VersionTable()),
		// Without this, Go migrations that the host program registered for
		// itself would be run as ours.
		goose.WithDisableGlobalRegistry(true),
		// A version that the table lacks is applied, also where it has a later one.
		goose.WithAllowOutofOrder(true),
	)
}

func (t *target) up(ctx context.Context) (applied []Migration, err error) {
	if err := t.requireServer(ctx); err != nil {
		return nil, err
	}
	if err := t.createSchema(ctx); err != nil {
		return nil, err
	}
	if err := t.requireSchema(ctx); err != nil {
		return nil, err
	}
	err = t.locked(ctx, func() error {
		found, err := t.look(ctx)
		if err == nil {
			err = found.require()
		}
		if err != nil {
			return err
		}
		if !found.forGoose() {
			return found.requireAll()
		}
		if !found.tracked {
			if err := t.createVersions(ctx); err != nil {
				return err
			}
		}
		if slices.ContainsFunc(found.steps, func(s step) bool { return !s.Applied }) {
			if err := t.requireBase(ctx); err != nil {
				return err
			}
		}
		results, err := t.goose.Up(ctx)
		var partial *goose.PartialError
		if errors.As(err, &partial) {
			results = partial.Applied
		}
		for _, r := range results {
			applied = append(applied, migration(r.Source, true))
		}
		return found.foreign(err)
	})
	return applied, err
}

// createVersions creates the version table as goose does. goose itself tries for 3 s whatever the
// error is: a role that may not create tables would wait that long, and keep all others waiting for
// the lock.
func (t *target) createVersions(ctx context.Context) error {
	store, err := database.NewStore(database.DialectPostgres, t.set.VersionTable())
	if err != nil {
		return err
	}
	tx, err := t.db.BeginTx(ctx, nil)
	if err == nil {
		defer tx.Rollback()
		err = store.CreateVersionTable(ctx, tx)
	}
	if err == nil {
		err = store.Insert(ctx, tx, database.InsertRequest{Version: 0})
	}
	if err == nil {
		err = tx.Commit()
	}
	if err == nil || isDuplicate(err) {
		return nil // the application's own goose was faster; ours will see the table
	}
	return fmt.Errorf("create version table %s: %w", t.set.VersionTable(), err)
}

func (t *target) down(ctx context.Context) (undone *Migration, err error) {
	err = t.locked(ctx, func() error {
		newest, err := t.newest(ctx)
		if err != nil || newest == nil {
			return err
		}
		// goose.Down would take the one that was applied last.
		result, err := t.goose.ApplyVersion(ctx, newest.Version, false)
		if err != nil {
			return needed(err)
		}
		m := migration(result.Source, false)
		undone = &m
		return nil
	})
	return undone, err
}

// newest returns the migration that down takes back, if nothing forbids it.
func (t *target) newest(ctx context.Context) (*Migration, error) {
	found, err := t.look(ctx)
	if err != nil || !found.tracked {
		return nil, err
	}
	if !found.readable {
		return nil, fmt.Errorf("this role may not read %s", t.set.VersionTable())
	}
	if err := found.requireVersions(); err != nil {
		return nil, err
	}
	if newer := found.newer(); len(newer) > 0 {
		return nil, fmt.Errorf("a newer program applied version %d, which this one does not know: take it back with that one", newer[0].Version)
	}
	applied := slices.DeleteFunc(found.migrations(), func(m Migration) bool { return !m.Applied })
	if len(applied) == 0 {
		return nil, nil
	}
	if err := t.requireUnneeded(ctx, found.steps[0].first); err != nil {
		return nil, err
	}
	return &applied[len(applied)-1], nil
}

func (t *target) status(ctx context.Context) ([]Migration, error) {
	found, err := t.look(ctx)
	if err != nil {
		return nil, err
	}
	return found.migrations(), found.require()
}

// requireServer returns an error for servers before 14, which have no date_bin.
func (t *target) requireServer(ctx context.Context) error {
	const oldest = 14_00_00
	var version int
	if err := t.pool.QueryRow(ctx, "SELECT current_setting('server_version_num')::int4").Scan(&version); err != nil {
		return fmt.Errorf("read the server's version: %w", err)
	}
	if version < oldest {
		return fmt.Errorf("the server is PostgreSQL %d, and the oldest that the library runs on is %d", version/10_000, oldest/10_000)
	}
	return nil
}

// createSchema creates the configured schema if it is missing. It looks first: CREATE SCHEMA IF NOT
// EXISTS needs the right to create schemas even where the schema exists.
func (t *target) createSchema(ctx context.Context) error {
	if t.schema == "" {
		return nil
	}
	var exists bool
	err := t.pool.QueryRow(ctx,
		"SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1::text)", t.schema).Scan(&exists)
	if err == nil && !exists {
		_, err = t.pool.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS "+pgx.Identifier{t.schema}.Sanitize())
	}
	if err != nil && !isDuplicate(err) {
		return fmt.Errorf("create schema %q: %w", t.schema, err)
	}
	return nil
}

// isDuplicate reports whether another session created the schema or table first. IF NOT EXISTS does
// not cover that: it looks, then inserts into a unique index, waits there for the other
// transaction, and fails if that commits.
func isDuplicate(err error) bool {
	const duplicateSchema, duplicateTable, duplicateObject, uniqueViolation = "42P06", "42P07", "42710", "23505"
	return slices.Contains([]string{duplicateSchema, duplicateTable, duplicateObject, uniqueViolation}, intx.Code(err))
}

// requireSchema returns an error unless unqualified names mean the configured schema.
// current_schema passes over schemas that the role must not use.
func (t *target) requireSchema(ctx context.Context) error {
	var current *string
	if err := t.pool.QueryRow(ctx, "SELECT current_schema()::text").Scan(&current); err != nil {
		return fmt.Errorf("read search_path: %w", err)
	}
	switch {
	case t.schema == "" && current == nil:
		return errors.New("the connection's search_path names no schema that this role may use: set Config.Schema")
	case t.schema != "" && (current == nil || *current != t.schema):
		return fmt.Errorf("schema %q cannot be used: this role lacks the right (USAGE), or a hook of the pool sets another search_path", t.schema)
	}
	return nil
}

// lockID is the advisory lock by which callers of this package take turns in a database, in any
// schema: "rlimit" in ASCII. It differs from goose's default, for which the application's own
// migrations may be waiting.
const lockID int64 = 0x72_6c_69_6d_69_74

// tryEvery is the pause between two tries for a lock that was not available.
const tryEvery = time.Second

// locked runs f while no other caller of this package runs its own. It tries again while f fails
// because a lock was not available in time, until ctx ends. Between two tries it holds no lock.
func (t *target) locked(ctx context.Context, f func() error) error {
	var waited error
	for {
		err := t.inTurn(ctx, f)
		switch {
		case intx.Code(err) == intx.LockNotAvailable:
			waited = fmt.Errorf("another transaction, such as a dump, has locked what the migration changes: %w", err)
		case err != nil && waited != nil && ctx.Err() != nil:
			return fmt.Errorf("%w: %w", err, waited)
		default:
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), waited)
		case <-time.After(tryEvery):
		}
	}
}

// inTurn runs f while no other caller of this package, in any process, runs its own. A transaction
// beside the work holds the lock. goose's own lock belongs to a session: it can be left behind, and
// poolers in transaction mode lose it. The transaction is idle meanwhile, so it lifts the server's
// time-out for idle transactions.
func (t *target) inTurn(ctx context.Context, f func() error) error {
	tx, err := t.pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }() // it has nothing to commit
	if _, err := tx.Exec(ctx, "SELECT set_config('idle_in_transaction_session_timeout', '0', true), pg_advisory_xact_lock($1::bigint)", lockID); err != nil {
		return fmt.Errorf("wait for the lock: %w", err)
	}
	return f()
}

func migration(source *goose.Source, applied bool) Migration {
	return Migration{Version: source.Version, Name: path.Base(source.Path), Applied: applied}
}
