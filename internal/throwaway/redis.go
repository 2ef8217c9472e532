package throwaway

import (
	"context"
	"fmt"
	"net"
	"os/exec"
)

// Redis starts a Redis that keeps nothing on disk unless options say so, by a program in the PATH
// or in a file. Address is where it listens. The caller should close it.
func Redis(ctx context.Context, program string, options ...string) (address string, closer func() error, err error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return "", nil, err
	}
	port, err := freePort()
	if err != nil {
		return "", nil, err
	}
	p, err := startProgram(path, append([]string{"--bind", "127.0.0.1", "--port", port, "--save", ""}, options...)...)
	if err != nil {
		return "", nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	address = net.JoinHostPort("127.0.0.1", port)
	err = p.await(ctx, func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	if err != nil {
		return "", nil, fmt.Errorf("throwaway: Redis: %w", err)
	}
	return address, p.close, nil
}
