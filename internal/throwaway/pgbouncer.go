package throwaway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// pgBouncers are where it is to be found: Debian's is not in everybody's PATH.
var pgBouncers = []string{"pgbouncer", "/usr/sbin/pgbouncer"}

// PgBouncer starts a PgBouncer in transaction pooling in front of the server with a URL,
// with so many connections to it. The result's URL is that of the same database through
// it; the admin console is its database pgbouncer. Where there is no PgBouncer, the error
// is exec.ErrNotFound. The caller should Close it.
func PgBouncer(ctx context.Context, serverURL string, conns int) (*Server, error) {
	i := slices.IndexFunc(pgBouncers, func(name string) bool { _, err := exec.LookPath(name); return err == nil })
	if i < 0 {
		return nil, fmt.Errorf("pgbouncer: %w", exec.ErrNotFound)
	}
	server, err := pgx.ParseConfig(serverURL)
	if err != nil {
		return nil, errors.New("throwaway: not a server's URL (not shown, as it may hold a password)")
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "ratelimit-pgbouncer")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) // once it has read it
	config := filepath.Join(dir, "pgbouncer.ini")
	if err := os.WriteFile(config, bouncerConfig(server, port, conns), 0o600); err != nil {
		return nil, err
	}
	args := []string{"-q", config}
	if os.Geteuid() == 0 { // which it refuses to run as
		args = []string{"-q", "-u", "nobody", config}
	}
	p, err := startProgram(pgBouncers[i], args...)
	if err != nil {
		return nil, err
	}
	through := url.URL{
		Scheme: "postgres", User: url.User(server.User), Host: net.JoinHostPort("127.0.0.1", port),
		Path: "/" + server.Database, RawQuery: "sslmode=disable",
	}
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	s, err := (&Server{URL: through.String(), Source: "PgBouncer", process: p}).ready(ctx)
	if err != nil {
		return nil, fmt.Errorf("throwaway: PgBouncer: %w: %s", err, &p.stderr)
	}
	return s, nil
}

func bouncerConfig(server *pgx.ConnConfig, port string, conns int) []byte {
	// A quote in a value is written twice.
	quoted := func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
	password := ""
	if server.Password != "" { // PgBouncer takes an empty one for a fault
		password = "password=" + quoted(server.Password)
	}
	return fmt.Appendf(nil, `[databases]
* = host=%s port=%d user=%s %s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %s
unix_socket_dir =
auth_type = any
admin_users = %s
pool_mode = transaction
default_pool_size = %d
max_client_conn = 1000
server_tls_sslmode = disable
ignore_startup_parameters = search_path
`, server.Host, server.Port, quoted(server.User), password, port, server.User, conns)
}
