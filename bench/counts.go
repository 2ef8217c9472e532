package main

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
)

// counts are of what went to a server. Only one implementation runs at a time,
// so all connections share them.
type counts struct {
	trips      atomic.Int64 // writes to a connection: a client flushes when it goes on to wait
	statements atomic.Int64 // of PostgreSQL, BEGIN and COMMIT too
	retries    atomic.Int64 // transactions that PostgreSQL asked to run again
	through    string       // the address to connect to in the server's place, if there is network before it
}

type snapshot struct{ trips, statements, retries int64 }

func (c *counts) now() snapshot {
	return snapshot{c.trips.Load(), c.statements.Load(), c.retries.Load()}
}

func (s snapshot) minus(other snapshot) snapshot {
	return snapshot{s.trips - other.trips, s.statements - other.statements, s.retries - other.retries}
}

func (s *snapshot) add(other snapshot) {
	s.trips += other.trips
	s.statements += other.statements
	s.retries += other.retries
}

// tracer has pgx tell of each statement.
type tracer struct{ counts *counts }

func (t tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	t.counts.statements.Add(1)
	return ctx
}

func (t tracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	t.counts.statements.Add(int64(data.Batch.Len()))
	return ctx
}

func (tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)     {}
func (tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (tracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

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
