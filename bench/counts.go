package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/traced"
)

// counts are of the traffic to a server. Only one implementation runs at a time, so all
// connections share them.
type counts struct {
	trips      atomic.Int64      // writes to a connection: a client flushes when it goes on to wait
	statements traced.Statements // of PostgreSQL
	retries    atomic.Int64      // transactions that PostgreSQL asked to run again
	late       time.Duration     // of every answer, as over a network
}

type snapshot struct{ Trips, Statements, Retries int64 }

func (c *counts) now() snapshot {
	return snapshot{c.trips.Load(), c.statements.All(), c.retries.Load()}
}

func (s snapshot) minus(other snapshot) snapshot {
	return snapshot{s.Trips - other.Trips, s.Statements - other.Statements, s.Retries - other.Retries}
}

func (s *snapshot) add(other snapshot) {
	s.Trips += other.Trips
	s.Statements += other.Statements
	s.Retries += other.Retries
}

// countingConn keeps all else that a *net.TCPConn can do, as clients look for
// some of it.
type countingConn struct {
	*net.TCPConn
	counts *counts
}

func (c countingConn) Write(b []byte) (int, error) {
	c.counts.trips.Add(1)
	return c.TCPConn.Write(b)
}

// dial returns a connection by TCP that counts.
func (c *counts) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		conn.Close()
		return nil, fmt.Errorf("%s %s is not TCP, which the comparison is over", network, address)
	}
	counting := countingConn{tcp, c}
	if c.late == 0 {
		return counting, nil
	}
	client, near := net.Pipe()
	go func() {
		defer counting.Close()
		_, _ = io.Copy(struct{ io.Writer }{counting}, near) // until one side has closed
	}()
	go deliver(near, counting, c.late)
	return client, nil
}

// deliver passes on what src sends, and its end, when it is late: what is under way does not delay
// what comes later.
func deliver(dst, src net.Conn, late time.Duration) {
	type chunk struct {
		bytes []byte
		due   time.Time
	}
	sent := make(chan chunk, 1024)
	go func() {
		defer close(sent)
		buffer := make([]byte, 32<<10)
		for {
			n, err := src.Read(buffer)
			sent <- chunk{bytes.Clone(buffer[:n]), time.Now().Add(late)}
			if err != nil {
				return
			}
		}
	}()
	defer dst.Close()
	for c := range sent {
		time.Sleep(time.Until(c.due))
		_, _ = dst.Write(c.bytes) // it fails when the client has closed
	}
}
