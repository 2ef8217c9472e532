package main

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/pgratelimit/ratelimit/internal/traced"
)

// counts are of the traffic to a server. Only one implementation runs at a time, so all
// connections share them.
type counts struct {
	trips      atomic.Int64      // writes to a connection: a client flushes when it goes on to wait
	statements traced.Statements // of PostgreSQL
	retries    atomic.Int64      // transactions that PostgreSQL asked to run again
	through    string            // the address to connect to in the server's place, if there is network before it
}

type snapshot struct{ trips, statements, retries int64 }

func (c *counts) now() snapshot {
	return snapshot{c.trips.Load(), c.statements.All(), c.retries.Load()}
}

func (s snapshot) minus(other snapshot) snapshot {
	return snapshot{s.trips - other.trips, s.statements - other.statements, s.retries - other.retries}
}

func (s *snapshot) add(other snapshot) {
	s.trips += other.trips
	s.statements += other.statements
	s.retries += other.retries
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
	if c.through != "" {
		address = c.through
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		conn.Close()
		return nil, fmt.Errorf("%s %s is not TCP, which the comparison is over", network, address)
	}
	return countingConn{tcp, c}, nil
}
