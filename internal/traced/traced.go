// Package traced counts the statements that pgx sends.
package traced

import (
	"context"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
)

var (
	_ pgx.QueryTracer = (*Statements)(nil)
	_ pgx.BatchTracer = (*Statements)(nil)
)

// Statements counts those of the connections whose tracer it is. Its zero value is ready,
// and it is safe for concurrent use.
type Statements struct {
	queries, batches, batched atomic.Int64
}

// Queries returns how many were sent by themselves.
func (s *Statements) Queries() int64 { return s.queries.Load() }

// Batches returns how many batches were sent.
func (s *Statements) Batches() int64 { return s.batches.Load() }

// Sends returns how often something was sent: a statement by itself, or a batch.
func (s *Statements) Sends() int64 { return s.Queries() + s.Batches() }

// All returns how many there were, in batches too, BEGIN and COMMIT included.
func (s *Statements) All() int64 { return s.Queries() + s.batched.Load() }

// Reset begins to count anew.
func (s *Statements) Reset() {
	s.queries.Store(0)
	s.batches.Store(0)
	s.batched.Store(0)
}

// TraceQueryStart implements [pgx.QueryTracer].
func (s *Statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.queries.Add(1)
	return ctx
}

// TraceQueryEnd implements [pgx.QueryTracer].
func (*Statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchStart implements [pgx.BatchTracer].
func (s *Statements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	s.batches.Add(1)
	s.batched.Add(int64(data.Batch.Len()))
	return ctx
}

// TraceBatchQuery implements [pgx.BatchTracer].
func (*Statements) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements [pgx.BatchTracer].
func (*Statements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
