// Package demo is the part that the examples share and that is no lesson: how they
// start and end, the claims that they check, and a database to play in.
package demo

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrate"
)

// Main is the main function of the example of that name. Ctrl-C ends the context
// and not the program, so that run gets to clean up. If run fails, so does the
// program.
func Main(name string, run func(ctx context.Context, out io.Writer) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(1)
	}
}

// Claim prints a promise, or is an error if that does not hold.
func Claim(out io.Writer, holds bool, format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	if !holds {
		return fmt.Errorf("a promise does not hold: %s", text)
	}
	fmt.Fprintln(out, "   ok:", text)
	return nil
}

// maxConns is enough for transactions to meet, and bearable for a server that
// others use as well.
const maxConns = 16

// cleanupTimeout bounds Close, which runs after Ctrl-C too.
const cleanupTimeout = 10 * time.Second

// DB is a schema of the example's own, with the table of the limits in it.
type DB struct {
	Pool   *pgxpool.Pool // its search_path is Schema
	Schema string        // a random name, which needs no quoting
	Source string        // where the server came from, in words

	server *throwaway.Server
}

// Database makes a schema on the server that DATABASE_URL names, or else on one
// that it starts, and puts the table of the limits there. The caller must Close
// the DB.
func Database(ctx context.Context) (*DB, error) {
	server, err := throwaway.Start(ctx)
	if err != nil {
		return nil, err
	}
	db := &DB{Schema: "example_" + strings.ToLower(rand.Text()), Source: server.Source, server: server}
	if err := db.open(ctx); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

func (db *DB) open(ctx context.Context) error {
	config, err := pgxpool.ParseConfig(db.server.URL)
	if err != nil {
		return fmt.Errorf("parse the database's URL: %w", err)
	}
	config.MaxConns = maxConns
	config.ConnConfig.RuntimeParams["search_path"] = db.Schema
	if db.Pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return fmt.Errorf("open a pool: %w", err)
	}
	_, err = migrate.Up(ctx, db.Pool, &migrate.Config{Schema: db.Schema})
	return err
}

// Close drops the schema, closes the pool, and stops the server if Database
// started it. All connections must be back in the pool.
func (db *DB) Close() error {
	var dropErr error
	if db.Pool != nil {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		sql := "DROP SCHEMA IF EXISTS " + pgx.Identifier{db.Schema}.Sanitize() + " CASCADE"
		if _, err := db.Pool.Exec(ctx, sql); err != nil {
			dropErr = fmt.Errorf("drop schema %s: %w", db.Schema, err)
		}
		db.Pool.Close()
	}
	return errors.Join(dropErr, db.server.Close())
}
