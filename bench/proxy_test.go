package main

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"
)

// echo starts a server that sends back what it gets, and ends when its client
// does.
func echo(t *testing.T) (address string) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	return l.Addr().String()
}

// through connects to a server through a proxy.
func through(t *testing.T, target string, network time.Duration) (*proxy, *net.TCPConn) {
	t.Helper()
	p, err := startProxy(target, network)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.close() })
	conn, err := net.Dial("tcp", p.address())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	return p, conn.(*net.TCPConn)
}

// roundTrip sends one byte and waits for it.
func roundTrip(t *testing.T, conn net.Conn) time.Duration {
	t.Helper()
	start := time.Now()
	if _, err := conn.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return time.Since(start)
}

func TestProxyDelays(t *testing.T) {
	const network = 20 * time.Millisecond
	_, conn := through(t, echo(t), network)
	for range 5 {
		if got := roundTrip(t, conn); got < network {
			t.Errorf("got a round trip of %v, want at least %v", got, network)
		}
	}
}

// TestProxyPassesOn sends more chunks than could come one after the other, each
// with a delay of its own: they would take more than 20 s.
func TestProxyPassesOn(t *testing.T) {
	const network, most = 40 * time.Millisecond, 10 * time.Second
	want := make([]byte, 1024*mostRead)
	random := rand.NewChaCha8([32]byte{})
	_, _ = random.Read(want)
	_, conn := through(t, echo(t), network)

	start := time.Now()
	go func() {
		_, _ = conn.Write(want)
		_ = conn.CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("got %d bytes, want the %d that were sent", len(got), len(want))
	}
	if elapsed := time.Since(start); elapsed > most {
		t.Errorf("took %v, want at most %v", elapsed, most)
	}
}

func TestProxyCloses(t *testing.T) {
	p, conn := through(t, echo(t), time.Millisecond)
	roundTrip(t, conn)
	if err := p.close(); err != nil {
		t.Error(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("reading gave %v, want that the connection was closed", err)
	}
	if conn, err := net.Dial("tcp", p.address()); err == nil {
		conn.Close()
		t.Error("it still listens")
	}
}

func TestProxyWithoutServer(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	_, conn := through(t, l.Addr().String(), time.Millisecond)
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("reading gave %v, want that the connection was closed", err)
	}
}

func TestTimer(t *testing.T) {
	timer, err := newTimer()
	if err != nil {
		t.Fatal(err)
	}
	defer timer.close()
	for _, want := range []time.Duration{-time.Second, 0, time.Nanosecond, 300 * time.Microsecond, 5 * time.Millisecond} {
		start := time.Now()
		if err := timer.sleep(want); err != nil {
			t.Fatal(err)
		}
		if got := time.Since(start); got < want {
			t.Errorf("slept %v, want at least %v", got, want)
		}
	}
}
