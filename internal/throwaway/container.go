package throwaway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// program is found by the go command in a checkout of the repository.
const program = "github.com/pgratelimit/ratelimit/internal/throwaway/container"

// container starts a server by way of the program in the directory container. That is a module
// of its own because its dependencies are many: here they would end up in the go.mod of every
// importer of the library. It is built on first use, hence only if an engine seems to run.
func container(ctx context.Context, findEngine func(context.Context) (string, error), opts Options) (*Server, error) {
	engine, err := findEngine(ctx)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("go", append([]string{"run", program}, settingArgs(opts)...)...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+engine)
	s, err := runProgram(ctx, cmd)
	if err != nil {
		return nil, fmt.Errorf("container at %s: %w", engine, err)
	}
	return s, nil
}

// runProgram runs a program that prints the URL of its server as one line, and
// stops the server when its stdin ends.
func runProgram(ctx context.Context, cmd *exec.Cmd) (*Server, error) {
	stdout, w := io.Pipe()
	cmd.Stdout = w
	// When the go command is killed, the program that it runs lives on with the
	// same stderr until it has cleaned up. That need not hold up the caller.
	cmd.WaitDelay = time.Second
	p, err := startProcess(cmd)
	if err != nil {
		return nil, err
	}
	go func() {
		<-p.done
		w.Close()
	}()

	line := make(chan string, 1)
	go func() {
		// At the end of the output the line is empty.
		text, _ := bufio.NewReader(stdout).ReadString('\n')
		line <- strings.TrimSpace(text)
		_, _ = io.Copy(io.Discard, stdout)
	}()

	select {
	case url := <-line:
		if url == "" {
			_ = p.close()
			return nil, startError(p)
		}
		s := &Server{URL: url, Source: "a container", process: p}
		return s.ready(ctx)
	case <-ctx.Done():
		_ = p.cmd.Process.Kill()
		_ = p.close()
		return nil, ctx.Err()
	}
}

// dockerHost returns the address of a container engine, in the form of the
// environment variable DOCKER_HOST, which is believed if it is set.
func dockerHost(ctx context.Context) (string, error) {
	if host := os.Getenv("DOCKER_HOST"); host != "" {
		return host, nil
	}
	for _, path := range engineSockets() {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err == nil {
			conn.Close()
			return "unix://" + path, nil
		}
	}
	return "", errors.New("DOCKER_HOST is not set, and no engine answers at the usual sockets")
}

func engineSockets() []string {
	home, _ := os.UserHomeDir()
	run := os.Getenv("XDG_RUNTIME_DIR")
	return slices.DeleteFunc([]string{
		"/var/run/docker.sock",
		filepath.Join(run, "docker.sock"),
		filepath.Join(home, ".docker/run/docker.sock"),
		filepath.Join(home, ".docker/desktop/docker.sock"),
		filepath.Join(home, ".orbstack/run/docker.sock"),
		filepath.Join(home, ".colima/default/docker.sock"),
		filepath.Join(home, ".rd/docker.sock"),
		filepath.Join(run, "podman/podman.sock"),
		"/run/podman/podman.sock",
	}, isRelative) // one of the variables is not set
}
