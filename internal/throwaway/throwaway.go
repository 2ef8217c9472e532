// Package throwaway finds or starts a PostgreSQL server for examples, tests
// and benchmarks, so that all of them run on a fresh checkout with one command.
//
// A server that it starts belongs to the process: it holds no data before, it
// leaves none behind, and it ends with the process even if that is killed.
package throwaway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// BinVariable is the environment variable that names the only directory searched for
// server binaries, where [Options] do not.
const BinVariable = "RATELIMIT_POSTGRES_BIN"

// pingTimeout bounds one attempt to connect to a server.
const pingTimeout = 10 * time.Second

// Server is a PostgreSQL server that answers.
type Server struct {
	// URL is the connection string for pgx.Connect and most other programs. Its user is a
	// superuser, unless the URL was given by DATABASE_URL.
	URL string
	// Source says in words where the server came from.
	Source string
	// Here is whether its processes are this machine's, and were started by this one.
	Here bool

	process *process // nil if the server is not ours to stop
}

// Close stops the server and removes its data, if Start started it. Connections that are still
// open are broken. Further calls return the error of the first.
func (s *Server) Close() error {
	if s.process == nil {
		return nil
	}
	if err := s.process.close(); err != nil {
		return fmt.Errorf("throwaway: stopping %s: %w", s.Source, err)
	}
	return nil
}

// ready returns the server once it answers.
func (s *Server) ready(ctx context.Context) (*Server, error) {
	if err := s.process.await(ctx, func(ctx context.Context) error { return ping(ctx, s.URL) }); err != nil {
		return nil, err
	}
	return s, nil
}

// Postmaster returns the ID of the server's first process.
func (s *Server) Postmaster(ctx context.Context) (pid int, err error) {
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		return 0, fmt.Errorf("throwaway: looking for the first process: %w", err)
	}
	defer conn.Close(ctx)
	var text string
	if err := conn.QueryRow(ctx, "SELECT pg_read_file('postmaster.pid')").Scan(&text); err != nil {
		return 0, fmt.Errorf("throwaway: looking for the first process: %w", err)
	}
	line, _, _ := strings.Cut(text, "\n")
	return strconv.Atoi(line)
}

// Options are wishes for a server that has yet to be started. A server named by
// DATABASE_URL is taken as it is.
type Options struct {
	// Fsync asks for the durability that PostgreSQL has by default. Without it
	// commits do not wait for the disk, and the data is in memory where a local server has
	// a file system for that with enough room, unless TMPDIR names another directory: right
	// for tests, wrong for benchmarks.
	Fsync bool
	// Settings are configuration parameters of the server, such as
	// max_connections, which is 200 otherwise. The address and the port are not
	// among them.
	Settings map[string]string
	// Restart has a server that ends, as when it is killed, started again on its
	// data, until it is closed. A server in a container is not.
	Restart bool
	// StandbyOf, if set, is the URL of a server that StartWith started, of which the
	// new one is to be a standby. The error is exec.ErrNotFound where there is no
	// pg_basebackup. It is for local servers only.
	StandbyOf string
}

// Start is StartWith without options.
func Start(ctx context.Context) (*Server, error) {
	return StartWith(ctx, Options{})
}

// StartWith returns the first of these that is available:
//
//   - the server that the environment variable DATABASE_URL names, which must
//     answer if the variable is set;
//   - a new server from the newest binaries of PostgreSQL 14 to 18 found on
//     this machine (or in the directory that BinVariable names), listening on the loopback interface only;
//   - a new server in a container.
//
// Otherwise the error says how to provide each of them. The context bounds the start only. The
// caller should Close the server.
func StartWith(ctx context.Context, opts Options) (*Server, error) {
	return start(ctx, opts, machine{databaseURL: os.Getenv("DATABASE_URL"), binDirs: binDirs, dockerHost: dockerHost})
}

// machine is the environment of start. Tests replace it.
type machine struct {
	databaseURL string
	// binDirs lists directories that may hold server binaries.
	binDirs func(context.Context) []string
	// dockerHost returns the address of a container engine that seems to run.
	dockerHost func(context.Context) (string, error)
}

func start(ctx context.Context, opts Options, m machine) (*Server, error) {
	if m.databaseURL != "" {
		return external(ctx, m.databaseURL)
	}
	s, localErr := local(ctx, m.binDirs(ctx), opts)
	if localErr == nil || opts.StandbyOf != "" {
		return s, localErr
	}
	s, containerErr := container(ctx, m.dockerHost, opts)
	if containerErr == nil {
		return s, nil
	}
	return nil, fmt.Errorf(`throwaway: no PostgreSQL server to be had; any one of these will do:
- set DATABASE_URL to the URL of a running server
  (it is not set)
- install the server binaries of PostgreSQL %d to %d, such as with "apt-get install postgresql" or "brew install postgresql"
  (%w)
- start Docker, or another container engine with Docker's interface
  (%w)`, minMajor, maxMajor, localErr, containerErr)
}

// external checks the server that DATABASE_URL names. The variable names the server explicitly,
// so start does not fall back to another one.
func external(ctx context.Context, url string) (*Server, error) {
	if _, err := pgx.ParseConfig(url); err != nil {
		// The cause may quote part of the password.
		return nil, errors.New("throwaway: DATABASE_URL is not a valid PostgreSQL URL (not shown, as it may hold a password)")
	}
	if err := ping(ctx, url); err != nil {
		return nil, fmt.Errorf("throwaway: the server that DATABASE_URL names does not answer: %w", err)
	}
	return &Server{URL: url, Source: "DATABASE_URL"}, nil
}

// ping connects once.
func ping(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return conn.Ping(ctx)
}

// settingArgs returns the arguments with which postgres takes the options.
func settingArgs(opts Options) []string {
	settings := map[string]string{
		"fsync":           "off",
		"max_connections": "200",
	}
	if opts.Fsync {
		settings["fsync"] = "on"
	}
	maps.Copy(settings, opts.Settings)

	var args []string
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", name+"="+settings[name])
	}
	return args
}
