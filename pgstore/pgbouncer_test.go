package pgstore_test

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// TestPgBouncer runs the same histories as TestQueryExecModes through PgBouncer
// in transaction pooling, which changes the server connection after every
// transaction, in pgx's modes that prepare nothing on it.
func TestPgBouncer(t *testing.T) {
	address := startPgBouncer(t)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) {
				c.ConnConfig.Host, c.ConnConfig.Port = address.IP.String(), uint16(address.Port)
				c.ConnConfig.Fallbacks, c.ConnConfig.TLSConfig = nil, nil
				c.ConnConfig.DefaultQueryExecMode = mode
			}))
			runHistories(t, db, 9100, 2)
		})
	}
}

// startPgBouncer puts a PgBouncer in front of the tests' server.
func startPgBouncer(t *testing.T) *net.TCPAddr {
	t.Helper()
	binary := findPgBouncer(t)
	server, err := pgx.ParseConfig(pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().(*net.TCPAddr)
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(t.TempDir(), "pgbouncer.ini")
	if err := os.WriteFile(config, fmt.Appendf(nil, `[databases]
* = host=%s port=%d user=%s password='%s'
[pgbouncer]
listen_addr = %s
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 8
ignore_startup_parameters = search_path
`, server.Host, server.Port, server.User, server.Password, address.IP, address.Port), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{config}
	if os.Geteuid() == 0 { // which it refuses to run as
		args = []string{"-u", "nobody", config}
	}
	var log bytes.Buffer
	cmd := exec.CommandContext(t.Context(), binary, args...)
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if conn, err := net.Dial("tcp", address.String()); err == nil {
			conn.Close()
			break
		}
		if len(ended) > 0 || time.Now().After(deadline) {
			t.Fatalf("PgBouncer does not listen: %s", &log)
		}
	}
	t.Cleanup(func() { <-ended }) // t.Context ends before
	return address
}

func findPgBouncer(t *testing.T) string {
	t.Helper()
	candidates := []string{"pgbouncer", "/usr/sbin/pgbouncer"} // Debian's, which is not in everybody's PATH
	i := slices.IndexFunc(candidates, func(name string) bool {
		_, err := exec.LookPath(name)
		return err == nil
	})
	if i < 0 {
		t.Skip("there is no pgbouncer here: apt-get install pgbouncer")
	}
	return candidates[i]
}
