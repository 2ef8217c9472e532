//go:build !unix

package throwaway

import (
	"errors"
	"os/exec"
)

func detach(*exec.Cmd) {}

// dropRoot fails, as there is no shell to run the supervisor.
func dropRoot(*exec.Cmd) error {
	return errors.New("local servers are started on Unix only")
}
