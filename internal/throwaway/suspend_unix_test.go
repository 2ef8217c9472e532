//go:build unix

package throwaway

import (
	"context"
	"errors"
	"testing"
	"time"
)

// A server that is suspended says nothing until it goes on, to those who are connected and
// to those who want to be.
func TestSuspend(t *testing.T) {
	long(t)
	t.Setenv("DATABASE_URL", "")
	s, err := Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	resume, err := s.Suspend(t.Context())
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() { answered <- ping(context.Background(), s.URL) }()
	select {
	case err := <-answered:
		t.Errorf("it answered: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	if err := resume(); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; err != nil {
		t.Errorf("it does not go on: %v", err)
	}
}

// Nobody's server is suspended.
func TestSuspendAnother(t *testing.T) {
	s := &Server{Source: "DATABASE_URL"}
	if _, err := s.Suspend(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("got %v, want %v", err, errors.ErrUnsupported)
	}
}
