package main

import (
	"bufio"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// serving is the program while it serves its page.
type serving struct {
	*testing.T
	url  string
	cmd  *exec.Cmd
	text *bufio.Reader // of standard error
}

// serve starts the program on a world's database, and waits until it serves.
func (w *world) serve(args ...string) *serving {
	w.Helper()
	s := &serving{T: w.T, cmd: exec.CommandContext(w.Context(), os.Args[0], append([]string{"serve", "--schema", w.db.Schema}, args...)...)}
	s.cmd.Env = append(os.Environ(), asProgram+"=1", "DATABASE_URL="+w.db.URL)
	stdout, err := s.cmd.StdoutPipe()
	w.must(err)
	stderr, err := s.cmd.StderrPipe()
	w.must(err)
	w.must(s.cmd.Start())
	w.Cleanup(func() { _ = s.cmd.Process.Kill() })
	s.text = bufio.NewReader(stderr)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		rest, _ := io.ReadAll(s.text)
		w.Fatalf("%v: %s", err, rest)
	}
	s.url = strings.TrimSuffix(strings.TrimSpace(line), "/")
	return s
}

// get returns a page's status and text, as a browser that believes the server to have a name.
func (s *serving) get(host, path, token string) (status int, text string) {
	s.Helper()
	request, err := http.NewRequestWithContext(s.Context(), http.MethodGet, s.url+path, nil)
	must(s, err)
	request.Host = host
	if token != "" {
		request.SetBasicAuth("", token)
	}
	response, err := http.DefaultClient.Do(request)
	must(s, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	must(s, err)
	return response.StatusCode, string(body)
}

// stop interrupts the program, which then ends well.
func (s *serving) stop() {
	s.Helper()
	must(s, s.cmd.Process.Signal(syscall.SIGINT))
	if _, err := io.ReadAll(s.text); err != nil && !errors.Is(err, os.ErrClosed) {
		s.Fatal(err)
	}
	if err := s.cmd.Wait(); err != nil {
		s.Fatalf("after an interrupt: %v", err)
	}
}

func TestServe(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.take(api, "alice", 20)
	s := w.serve("--listen", "127.0.0.1:0", "--prefix", "/limits")
	if status, page := s.get("", "/key?name=api&key=alice", ""); status != 200 || !strings.Contains(page, "refused: 1 wanted, 0") {
		t.Errorf("got %d:\n%s", status, page)
	}
	if status, _ := s.get("evil.example", "/", ""); status != 421 {
		t.Errorf("under a name that a stranger gave this address: got %d", status)
	}
	s.stop()
}

// What others can reach wants a token, which is made up if none is given.
func TestServeOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serve("--listen", "0.0.0.0:0")
	line, err := s.text.ReadString('\n')
	w.must(err)
	token, ok := strings.CutPrefix(strings.TrimSpace(line), "token: ")
	if !ok || len(token) < 20 {
		t.Fatalf("got %q, want a token", line)
	}
	s.url = strings.Replace(s.url, "0.0.0.0", "127.0.0.1", 1)
	if status, _ := s.get("", "/", ""); status != 401 {
		t.Errorf("without the token: got %d", status)
	}
	if status, _ := s.get("limits.example", "/", token); status != 200 {
		t.Errorf("with the token: got %d", status)
	}
	s.stop()
}

func TestServeBadArguments(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.program("serve", "--listen", "nowhere").wantStatus(t, 2, "listen at nowhere")
	w.program("serve", "--listen", "127.0.0.1:0", "--prefix", "limits").wantStatus(t, 2, "Prefix")
}
