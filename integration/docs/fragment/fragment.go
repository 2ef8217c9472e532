// Package fragment runs what stands in pages of documentation: fragments of Go, whole
// programs, SQL and shell. The code that uses it is generated, by the tests of its parent.
package fragment

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

const (
	startTimeout = 5 * time.Minute  // an image may have to be pulled
	timeout      = 20 * time.Second // of each piece
	template     = "pages"          // the database of which pages get copies
)

//go:embed preamble.sql
var preamble string

var server *throwaway.Server

// Main runs the tests on a server of their own, whatever DATABASE_URL says: pages make
// databases and roles.
func Main(m *testing.M) {
	os.Unsetenv("DATABASE_URL")
	code, err := start(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func start(m *testing.M) (code int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if server, err = throwaway.Start(ctx); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	if err := makeTemplate(ctx); err != nil {
		return 1, fmt.Errorf("making the database of which pages get copies: %w", err)
	}
	return m.Run(), nil
}

// makeTemplate makes a database with the tables of the library, of River, and of preamble.
func makeTemplate(ctx context.Context) error {
	if err := admin(ctx, "CREATE DATABASE "+template); err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, databaseURL(template))
	if err != nil {
		return err
	}
	defer pool.Close()
	for _, set := range []migrations.Set{"", migrations.River} {
		if _, err := migrate.Up(ctx, pool, &migrate.Config{Set: set}); err != nil {
			return err
		}
	}
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	if err != nil {
		return err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return err
	}
	_, err = pool.Exec(ctx, preamble)
	return err
}

// admin runs a statement on the server's first database.
func admin(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, server.URL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

func databaseURL(name string) string {
	u, err := url.Parse(server.URL)
	if err != nil {
		panic(err) // the server's own
	}
	u.Path = "/" + name
	return u.String()
}

// Page is a page that is run, from its top to its end, on a database of its own.
type Page struct {
	t     *testing.T
	pool  *pgxpool.Pool
	store *pgstore.Store
	name  string
	empty int // databases without tables so far
}

// New returns a Page. Its name is that of its database.
func New(t *testing.T, name string) *Page {
	p := &Page{t: t, name: name}
	if err := admin(t.Context(), fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", name, template)); err != nil {
		t.Fatal(err)
	}
	var err error
	if p.pool, err = pgxpool.New(t.Context(), databaseURL(name)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.pool.Close)
	if p.store, err = pgstore.New(p.pool, nil); err != nil {
		t.Fatal(err)
	}
	return p
}

// Func is a fragment of Go. The parameters are what fragments may use besides what they
// and the preamble declare.
type Func func(t *testing.T, ctx context.Context, pool *pgxpool.Pool, store *pgstore.Store, tx pgx.Tx, databaseURL string, w http.ResponseWriter, r *http.Request) error

// piece runs a piece of the page.
func (p *Page) piece(at string, do func(ctx context.Context, t *testing.T)) {
	p.t.Run(at, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		defer cancel()
		do(ctx, t)
	})
}

// Go runs a fragment. It must return no error; then its transaction is committed. Unless
// output is empty, it must print that.
func (p *Page) Go(at, output string, do Func) {
	p.piece(at, func(ctx context.Context, t *testing.T) {
		printed, err := captured(func() error {
			return pgx.BeginFunc(ctx, p.pool, func(tx pgx.Tx) error {
				return do(t, ctx, p.pool, p.store, tx, databaseURL(p.name), httptest.NewRecorder(), httptest.NewRequest("POST", "/orders", nil))
			})
		})
		if err != nil {
			t.Errorf("%s: %v", at, err)
		}
		wantOutput(t, at, printed, output)
	})
}

// Test runs a test that stands in a page.
func (p *Page) Test(at string, test func(*testing.T)) { p.t.Run(at, test) }

// SQL runs statements.
func (p *Page) SQL(at, text string) {
	p.piece(at, func(ctx context.Context, t *testing.T) {
		if _, err := p.pool.Exec(ctx, text, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Errorf("%s: %v", at, err)
		}
	})
}

// Python runs a program on the page's database, which must succeed, and print output. It is
// skipped where no interpreter has psycopg.
func (p *Page) Python(at, text, output string) {
	p.piece(at, func(ctx context.Context, t *testing.T) {
		for _, python := range []string{"python3", "/usr/bin/python3"} { // the system's, if another is before it
			if exec.CommandContext(ctx, python, "-c", "import psycopg").Run() != nil {
				continue
			}
			runs(t, at, output, databaseURL(p.name), exec.CommandContext(ctx, python, "-c", text))
			return
		}
		t.Skip("no Python with psycopg on this machine")
	})
}

// JSON reads definitions of limits.
func (p *Page) JSON(at, text string) {
	p.t.Run(at, func(t *testing.T) {
		var definitions []ratelimit.Definition
		if err := json.Unmarshal([]byte(text), &definitions); err != nil {
			t.Errorf("%s: %v", at, err)
		}
	})
}

// Program runs a program, which must succeed on an empty database, and print output.
func (p *Page) Program(at, file, output string) {
	p.piece(at, func(ctx context.Context, t *testing.T) {
		runs(t, at, output, p.emptyDatabase(t), exec.CommandContext(ctx, file))
	})
}

// runs runs a program on a database. It must succeed, and print output.
func runs(t *testing.T, at, output, database string, cmd *exec.Cmd) {
	t.Helper()
	cmd.Env = append(os.Environ(), "DATABASE_URL="+database)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Errorf("%s: %v\n%s", at, err, &stderr)
	}
	wantOutput(t, at, stdout.String(), output)
}

// Shell runs commands with bash, in an empty directory, behind a prologue. DATABASE_URL is
// that of an empty database. If they name it, a store must be ready on it afterwards.
func (p *Page) Shell(at, prologue, text string) {
	p.piece(at, func(ctx context.Context, t *testing.T) {
		usesDatabase := strings.Contains(text, "DATABASE_URL")
		cmd := exec.CommandContext(ctx, "bash", "-c", "set -euo pipefail\n"+prologue+"\n"+text)
		cmd.Dir, cmd.Env = t.TempDir(), os.Environ()
		var target string
		if usesDatabase {
			target = p.emptyDatabase(t)
			cmd.Env = append(cmd.Env, "DATABASE_URL="+target)
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", at, err, out)
		}
		if usesDatabase {
			wantReady(ctx, t, at, target)
		}
	})
}

func wantReady(ctx context.Context, t *testing.T, at, target string) {
	t.Helper()
	pool, err := pgxpool.New(ctx, target)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Ready(ctx); err != nil {
		t.Errorf("%s: after that no store is ready: %v", at, err)
	}
}

// emptyDatabase makes a database without tables, and returns its URL.
func (p *Page) emptyDatabase(t *testing.T) string {
	t.Helper()
	p.empty++
	name := fmt.Sprintf("%s_%d", p.name, p.empty)
	if err := admin(t.Context(), "CREATE DATABASE "+name); err != nil {
		t.Fatal(err)
	}
	return databaseURL(name)
}

// captured runs do and returns what it printed.
func captured(do func() error) (printed string, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return "", err
	}
	stdout := os.Stdout
	os.Stdout = w
	all := make(chan string)
	go func() {
		text, _ := io.ReadAll(r)
		all <- string(text)
	}()
	defer func() {
		os.Stdout = stdout
		w.Close()
		printed = <-all
	}()
	return "", do()
}

func wantOutput(t *testing.T, at, got, want string) {
	t.Helper()
	if want != "" && strings.TrimSpace(got) != strings.TrimSpace(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", at, got, want)
	}
}
