//go:build unix

package pgtest

import (
	"errors"
	"testing"
)

// Suspend stops the whole server, as when its machine stands still, until resume is called.
// It skips a test of a server that the test did not start.
func Suspend(tb testing.TB) (resume func()) {
	tb.Helper()
	if err := start(); err != nil {
		tb.Fatal(err)
	}
	goOn, err := started.Load().Suspend(tb.Context())
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		tb.Skip(err)
	case err != nil:
		tb.Fatal(err)
	}
	return func() {
		tb.Helper()
		if err := goOn(); err != nil {
			tb.Error(err)
		}
	}
}
