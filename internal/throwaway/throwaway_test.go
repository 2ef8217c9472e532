package throwaway

import (
	"bufio"
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
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// childVariable tells the test binary to be the child of TestParentKilled.
const childVariable = "RATELIMIT_THROWAWAY_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		if err := child(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// child starts a server, prints its URL, and waits to be killed.
func child() error {
	s, err := startLocal(context.Background(), Options{})
	if err != nil {
		return err
	}
	fmt.Println(s.URL)
	select {}
}

// long leaves a test out with -short: one that runs initdb, or starts several servers.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("left out with -short")
	}
}

// startLocal starts a server from binaries, whatever DATABASE_URL says.
func startLocal(ctx context.Context, opts Options) (*Server, error) {
	return start(ctx, opts, machine{binDirs: binDirs, dockerHost: noEngine})
}

func noEngine(context.Context) (string, error) {
	return "", errors.New("no engine in this test")
}

func noBinaries(context.Context) []string { return nil }

func mustStartLocal(t *testing.T, opts Options) *Server {
	t.Helper()
	s, err := startLocal(t.Context(), opts)
	must(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// show returns a configuration parameter of the server.
func show(t *testing.T, serverURL, parameter string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), serverURL)
	must(t, err)
	defer conn.Close(context.Background())
	var value string
	must(t, conn.QueryRow(t.Context(), "SHOW "+parameter).Scan(&value))
	return value
}

// ask returns the first value that a statement answers, or nothing.
func ask(t *testing.T, s *Server, sql string) (answer string, err error) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL)
	if err != nil {
		return "", err
	}
	defer conn.Close(context.Background())
	err = conn.QueryRow(t.Context(), sql).Scan(&answer)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return answer, err
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestStartAndClose(t *testing.T) {
	t.Parallel()
	s, err := startLocal(t.Context(), Options{})
	must(t, err)
	dir := filepath.Dir(show(t, s.URL, "data_directory"))
	if !exists(dir) {
		t.Errorf("%s does not exist while the server runs", dir)
	}
	if !strings.HasPrefix(s.Source, "PostgreSQL 1") {
		t.Errorf("source %q", s.Source)
	}

	// A client that stays must not hold up Close.
	conn, err := pgx.Connect(t.Context(), s.URL)
	must(t, err)
	defer conn.Close(t.Context())
	var one int
	if err := conn.QueryRow(t.Context(), "SELECT 1").Scan(&one); err != nil || one != 1 {
		t.Errorf("SELECT 1: %d, %v", one, err)
	}

	for range 2 {
		must(t, s.Close())
	}
	if exists(dir) {
		t.Errorf("%s still exists", dir)
	}
	if ping(t.Context(), s.URL) == nil {
		t.Error("the server still answers")
	}
}

func TestParentKilled(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"=1")
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Wait() })

	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("the child printed no URL: %v", err)
	}
	serverURL := strings.TrimSpace(line)
	dir := filepath.Dir(show(t, serverURL, "data_directory"))

	// A client that stays must not keep the server alive.
	conn, err := pgx.Connect(t.Context(), serverURL)
	must(t, err)
	defer conn.Close(t.Context())

	must(t, cmd.Process.Kill())
	killed := time.Now()
	for listens(t, serverURL) || exists(dir) {
		if time.Since(killed) > 20*time.Second {
			t.Fatalf("after %v: listens %v, directory exists %v", time.Since(killed), listens(t, serverURL), exists(dir))
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Logf("all gone after %v", time.Since(killed))
}

// publicTempDir is t.TempDir for servers that run as another user, in memory where it can be.
func publicTempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(FastDir(), "throwaway-test")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o777))
	return dir
}

func empty(t *testing.T, dir string) bool {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	return len(entries) == 0
}

// listens reports whether anything listens at the URL's host and port.
func listens(t *testing.T, serverURL string) bool {
	t.Helper()
	u, err := url.Parse(serverURL)
	must(t, err)
	conn, err := net.Dial("tcp", u.Host)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

func TestDatabaseURL(t *testing.T) {
	t.Parallel()
	running := mustStartLocal(t, Options{})
	s, err := start(t.Context(), Options{}, machine{databaseURL: running.URL})
	must(t, err)
	if s.URL != running.URL || s.Source != "DATABASE_URL" {
		t.Errorf("got %+v", s)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := ping(t.Context(), running.URL); err != nil {
		t.Errorf("Close stopped a server that is not its own: %v", err)
	}
}

func TestBadDatabaseURL(t *testing.T) {
	t.Parallel()
	running, err := url.Parse(mustStartLocal(t, Options{}).URL)
	must(t, err)
	running.User = url.UserPassword("postgres", "hunter2")

	for name, databaseURL := range map[string]string{
		"wrong password":  running.String(),
		"nobody listens":  "postgres://user:hunter2@127.0.0.1:1/db",
		"keywords":        "host=127.0.0.1 port=1 password=hunter2",
		"no host":         "postgres://user:hunter2@:port/db",
		"slash unescaped": "postgres://user:hunter2/hunter2@127.0.0.1/db",
		"bad setting":     "postgres://user:hunter2@127.0.0.1/db?sslmode=perhaps",
		"bad keywords":    "host=127.0.0.1 password='hunter2",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := start(t.Context(), Options{}, machine{databaseURL: databaseURL})
			if err == nil {
				t.Fatal("no error")
			}
			if !strings.Contains(err.Error(), "DATABASE_URL") {
				t.Errorf("the variable is not named: %v", err)
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the password is shown: %v", err)
			}
		})
	}
}

func TestNothingFound(t *testing.T) {
	t.Parallel()
	_, err := start(t.Context(), Options{}, machine{binDirs: noBinaries, dockerHost: noEngine})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"DATABASE_URL", "apt-get install postgresql", "brew install", "14 to 18", "found none", "Docker", "no engine in this test"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing from: %v", want, err)
		}
	}
}

// fakeBinaries makes a directory of server binaries that know their version
// and nothing else.
func fakeBinaries(t *testing.T, version string) string {
	t.Helper()
	dir := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\necho 'postgres (PostgreSQL) %s'\n", version)
	// A program that another test starts meanwhile would hold the file open for
	// writing, and the kernel runs no such file ("text file busy", golang/go#22315).
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	for _, name := range []string{"initdb", "postgres"} {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
	}
	return dir
}

func TestNewest(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		versions []string
		want     string
	}{
		{[]string{"15.9", "15.18 (Debian 15.18-0+deb12u1)", "14.30"}, "15.18"},
		{[]string{"17.5", "18beta1", "19.0", "9.6.24"}, "18beta1"},
		{[]string{"18rc1", "18.1", "18beta1"}, "18.1"},
		{[]string{"14.0"}, "14.0"},
	} {
		dirs := []string{t.TempDir()} // holds no binaries
		for _, version := range test.versions {
			dirs = append(dirs, fakeBinaries(t, version))
		}
		inst, err := newest(t.Context(), dirs)
		if err != nil || inst.version != test.want {
			t.Errorf("%q: got %q, %v", test.versions, inst.version, err)
		}
	}
}

// The directory that is named is the only one searched.
func TestBinDir(t *testing.T) {
	t.Setenv(BinVariable, "/by/variable")
	if got := binDirs(t.Context()); !slices.Equal(got, []string{"/by/variable"}) {
		t.Errorf("got %q", got)
	}
}

func TestUnsupportedBinaries(t *testing.T) {
	t.Parallel()
	dirs := []string{fakeBinaries(t, "13.4"), fakeBinaries(t, "")}
	_, err := start(t.Context(), Options{}, machine{
		binDirs:    func(context.Context) []string { return dirs },
		dockerHost: noEngine,
	})
	for _, want := range []string{"passed over", "PostgreSQL 13.4 from " + dirs[0], dirs[1]} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing from: %v", want, err)
		}
	}
}

func TestStartFails(t *testing.T) {
	t.Parallel()
	_, err := startLocal(t.Context(), Options{Settings: map[string]string{"no_such_parameter": "1"}})
	if err == nil || !strings.Contains(err.Error(), `unrecognized configuration parameter "no_such_parameter"`) {
		t.Errorf("the server's message is missing from: %v", err)
	}
}

func TestPortTaken(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	go func() { // answer, as a server would that is not PostgreSQL
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	inst, err := newest(t.Context(), binDirs(t.Context()))
	must(t, err)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	if _, err := inst.startOn(t.Context(), port, Options{}); !errors.Is(err, errPortTaken) {
		t.Errorf("got %v, want errPortTaken", err)
	}
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
