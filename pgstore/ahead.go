package pgstore

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
)

// When a transaction of the runner commits and another waits for its row, the
// BEGIN and the take of that one travel right behind the COMMIT, and the
// connection is handed on with them. A transaction in a queue so costs a round
// trip less, and the row stands still for one less.
//
// Two syncs keep the two apart: the COMMIT is answered before the take is looked
// at, and whatever becomes of one of them says nothing of the other.

// ahead is a transaction whose BEGIN and take were sent before its call had its
// turn.
type ahead struct {
	conn     *pgxpool.Conn
	pipeline *pgconn.Pipeline
	cancel   context.CancelFunc // gives up what is under way on the connection
	length   int                // transactions, one behind the other, on this connection
}

// mostAhead bounds how many transactions follow one another on a connection,
// for the sake of others who wait for one of the pool's.
const mostAhead = 32

// maySendAhead reports whether connections may be handed on past the pool: there
// is nothing that wants to see them come and go, or see every statement, and
// statements are prepared.
func maySendAhead(pool *pgxpool.Pool) bool {
	if pool == nil {
		return false
	}
	c := pool.Config()
	//lint:ignore SA1019 it is called for as long as it is there
	hooked := c.BeforeAcquire != nil || c.PrepareConn != nil || c.AfterRelease != nil
	return !hooked && c.ConnConfig.Tracer == nil && c.ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement
}

// commit commits tx. If somebody waits for its row, and nobody for a connection,
// it hands the connection on: then that is no longer the caller's, whatever the
// error.
func (s *Store) commit(ctx context.Context, conn *pgxpool.Conn, tx *transaction, p *pass) (handedOn bool, err error) {
	if !s.sendsAhead || p.length >= mostAhead || s.connecting.Load() > 0 || ctx.Err() != nil {
		return false, tx.Commit(ctx)
	}
	now := s.clock()
	var take part
	next := p.next(func(a ratelimit.Ask) (fits bool) {
		take, fits = s.guessPart(0, a, p.shards)
		return fits
	})
	if next == nil {
		return false, tx.Commit(ctx)
	}
	a, err := commitAhead(ctx, conn, tx, s.sql.of(&take.definition).first, take.takeArgs(now))
	if a != nil {
		a.length = p.length + 1
	}
	if !p.give(next, a) && a != nil {
		a.abandon()
	}
	return a != nil, err
}

// commitAhead commits tx, and has the next transaction begin behind it with a
// take. There is none if the connection is lost, or nothing can be sent.
func commitAhead(ctx context.Context, conn *pgxpool.Conn, tx *transaction, take string, args []any) (*ahead, error) {
	statements, err := prepare(ctx, tx.conn, commitSQL, beginSQL, take)
	var query pgx.ExtendedQueryBuilder
	if err == nil {
		err = query.Build(tx.conn.TypeMap(), statements[2], args)
	}
	if err != nil { // not of the commit, which will tell its own
		return nil, tx.Commit(ctx)
	}
	tx.closed = true
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	a := &ahead{conn: conn, pipeline: tx.conn.PgConn().StartPipeline(running), cancel: cancel}
	a.pipeline.SendQueryStatement(statements[0], nil, nil, nil)
	a.pipeline.SendPipelineSync()
	a.pipeline.SendQueryStatement(statements[1], nil, nil, nil)
	a.pipeline.SendQueryStatement(statements[2], query.ParamValues, query.ParamFormats, query.ResultFormats)
	lost, err := a.committed()
	if lost {
		_ = a.end() // which fails, too
		return nil, err
	}
	return a, err
}

// prepare prepares statements that pgx has not prepared on the connection yet.
func prepare(ctx context.Context, conn *pgx.Conn, texts ...string) ([]*pgconn.StatementDescription, error) {
	statements := make([]*pgconn.StatementDescription, len(texts))
	for i, text := range texts {
		var err error
		if statements[i], err = conn.Prepare(ctx, text, text); err != nil {
			return nil, err
		}
	}
	return statements, nil
}

// committed sends all, and reads what became of the COMMIT alone. The connection
// can be lost with or without an error of the COMMIT.
func (a *ahead) committed() (lost bool, err error) {
	if err := a.pipeline.Sync(); err != nil {
		return true, err
	}
	err = committed(a.result())
	_, syncErr := a.pipeline.GetResults()
	return syncErr != nil, err
}

// result reads what became of a statement that returns no rows.
func (a *ahead) result() (pgconn.CommandTag, error) {
	reader, err := a.reader()
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	return reader.Close()
}

func (a *ahead) reader() (*pgconn.ResultReader, error) {
	results, err := a.pipeline.GetResults()
	if err != nil {
		return nil, err
	}
	reader, ok := results.(*pgconn.ResultReader)
	if !ok {
		return nil, errors.New("the server does not answer")
	}
	return reader, nil
}

// first is what became of a take that was sent ahead.
type first struct {
	outcome outcome
	at      time.Time
	xid     *string
	err     error
}

// receive reads what became of the take, for the call whose it is.
func (a *ahead) receive(ctx context.Context) *first {
	stop := context.AfterFunc(ctx, a.cancel)
	defer stop()
	var f first
	if _, f.err = a.result(); f.err == nil {
		f.err = a.take(&f)
	}
	if err := a.end(); f.err == nil {
		f.err = err
	}
	return &f
}

func (a *ahead) take(f *first) error {
	reader, err := a.reader()
	if err != nil {
		return err
	}
	rows := pgx.RowsFromResultReader(a.conn.Conn().TypeMap(), reader)
	o := &f.outcome
	_, err = pgx.ForEachRow(rows, []any{&o.after.Value, &o.after.TS, &f.at, &f.xid}, func() error {
		o.taken = true
		return nil
	})
	return err
}

// end ends the pipeline, and closes the connection if it is not at its end.
func (a *ahead) end() error {
	err := a.pipeline.Close()
	a.cancel()
	return err
}

// abandon is for a call that gave up. The server rolls back what is under way.
func (a *ahead) abandon() {
	a.cancel()
	_ = a.end() // it was given up
	a.conn.Release()
}
