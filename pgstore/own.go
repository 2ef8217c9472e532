package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
)

// own runs decide on the pool, each statement a transaction of its own.
func (s *Store) own(ctx context.Context, decide func(querier) error) error {
	if s.pool == nil {
		return ErrNoPool
	}
	return s.retry(ctx, func() error { return decide(s.pool) })
}

// ownTx runs decide in a transaction of its own. READ COMMITTED is enough: a
// take is right at every isolation level, and here nobody asks it again.
func (s *Store) ownTx(ctx context.Context, decide func(pgx.Tx) error) error {
	if s.pool == nil {
		return ErrNoPool
	}
	return s.retry(ctx, func() error {
		tx, err := s.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
		if err != nil {
			return fault("begin", err)
		}
		defer rollback(ctx, tx)
		if err := decide(tx); err != nil {
			return err
		}
		if err := tx.Commit(ctx); err != nil {
			return fault("commit", err)
		}
		return nil
	})
}

// rollback ends tx, if it has not ended, even when ctx is over. It is deferred,
// so that it also comes when a caller's function panics or ends its goroutine.
// Its error is of no use: a transaction that cannot be rolled back has lost its
// connection, and with it all that it did.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = tx.Rollback(ctx)
}

const (
	firstPause   = 2 * time.Millisecond
	longestPause = 250 * time.Millisecond
)

// retry runs attempt until PostgreSQL does not ask for another, with full
// jitter in between (Brooker, "Exponential Backoff And Jitter", 2015), until
// the context's deadline, or for the retry budget if it has none. An error
// because ctx is over has what PostgreSQL said last within reach too.
func (s *Store) retry(ctx context.Context, attempt func() error) error {
	end, hasDeadline := ctx.Deadline()
	if !hasDeadline {
		end = time.Now().Add(s.config.RetryBudget)
	}
	var last error // that asked for another attempt
	limit := firstPause
	for n := 1; ; n++ {
		err := attempt()
		if !serialization(err) {
			if last != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
				return fmt.Errorf("pgstore: gave up after %d attempts: %w: %w", n, err, last)
			}
			return err
		}
		last = err
		pause := time.Duration(rand.Int64N(int64(limit)))
		if time.Until(end) <= pause {
			if hasDeadline {
				err = fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
			}
			return fmt.Errorf("pgstore: gave up after %d attempts: %w", n, err)
		}
		limit = min(2*limit, longestPause)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("pgstore: gave up after %d attempts: %w: %w", n, ctx.Err(), err)
		}
	}
}

// AllowFunc takes what is asked from all the limits and runs do in the same
// SERIALIZABLE transaction, and commits: what is taken is spent if and only if
// the work of do is there. It is for do to use tx for all its work.
//
// A refusal runs nothing and is an error, [ratelimit.ErrRefused]; the result
// is returned with it, and is in the *[ratelimit.RefusedError]. An error of do
// rolls everything back and comes back as it is, and so does a panic.
//
// When PostgreSQL asks for it, with 40001 or 40P01, all of it runs again, do
// included, with full jitter in between, until the deadline of ctx, or for
// Config.RetryBudget if it has none. So do must have no effect but through tx,
// and must pass on the errors that tx gives it. Any other fault is returned at
// once. When the connection is lost during the commit, a new one asks the server
// what became of the transaction: if it was committed there is no error. Only
// if that cannot be found out either is the error [ErrOutcomeUnknown].
//
// Transactions of one process that take from the same row queue before they
// begin and before they take a connection from the pool, in order of arrival;
// with several shards, each has one of its own. One that waits for its turn has
// its BEGIN and its take sent behind the COMMIT before it, on that connection,
// unless the pool has hooks (PrepareConn, BeforeAcquire, AfterRelease) or a tracer,
// or does not prepare statements.
func (s *Store) AllowFunc(ctx context.Context, requests []ratelimit.Request, do func(tx pgx.Tx, result ratelimit.Result) error) (ratelimit.Result, error) {
	return s.run(ctx, false, requests, do)
}

// ReserveFunc is [Store.AllowFunc] with a reservation: do schedules its work
// for the result's RetryAt.
func (s *Store) ReserveFunc(ctx context.Context, requests []ratelimit.Request, do func(tx pgx.Tx, result ratelimit.Result) error) (ratelimit.Result, error) {
	return s.run(ctx, true, requests, do)
}

func (s *Store) run(ctx context.Context, reserve bool, requests []ratelimit.Request, do func(pgx.Tx, ratelimit.Result) error) (result ratelimit.Result, err error) {
	if s.pool == nil {
		return ratelimit.Result{}, ErrNoPool
	}
	call, err := ratelimit.NewCall(reserve, requests...)
	if err != nil {
		return ratelimit.Result{}, err
	}
	err = s.retry(ctx, func() error {
		pass, err := s.gates.enter(ctx, call, &s.shards)
		if err != nil {
			return fault("wait", err)
		}
		defer pass.leave()
		result, err = s.attempt(ctx, call, pass, do)
		if failed, ok := err.(*failedCommit); ok {
			return s.resolve(ctx, failed)
		}
		return err
	})
	if err != nil && result.OK { // it was rolled back, so there is nothing to cancel
		return ratelimit.Result{}, err
	}
	return result, err
}

const (
	beginSQL  = "BEGIN ISOLATION LEVEL SERIALIZABLE"
	commitSQL = "COMMIT"
)

// attempt runs the transaction once. Its BEGIN travels with the take.
func (s *Store) attempt(ctx context.Context, call ratelimit.Call, p *pass, do func(pgx.Tx, ratelimit.Result) error) (ratelimit.Result, error) {
	sc := &scope{foreign: true, shards: p.shards, begin: beginSQL}
	conn, err := s.connect(ctx, p, sc)
	if err != nil {
		return ratelimit.Result{}, fault("acquire", err)
	}
	handedOn := false
	defer func() {
		if !handedOn {
			conn.Release()
		}
	}()
	tx := &transaction{conn: conn.Conn()}
	defer tx.end(ctx)
	result, err := s.take(ctx, sc, call)
	if err != nil {
		return ratelimit.Result{}, err
	}
	if err := result.Err(); err != nil {
		return result, err
	}
	if err := do(tx, result); err != nil {
		return result, err
	}
	if handedOn, err = s.commit(ctx, conn, tx, p); err != nil {
		return result, &failedCommit{fault("commit", err), sc.xid}
	}
	return result, nil
}

// connect takes a connection, the one on which the transaction has begun if it
// has. If that is lost nothing has happened, and another will do.
func (s *Store) connect(ctx context.Context, p *pass, sc *scope) (conn *pgxpool.Conn, err error) {
	if a := p.ahead; a != nil {
		p.ahead = nil
		first := a.receive(ctx)
		if !a.conn.Conn().IsClosed() {
			sc.q, sc.begun, sc.first, sc.xid, p.length = a.conn, true, first, first.xid, a.length
			return a.conn, nil
		}
		a.conn.Release()
	}
	s.connecting.Add(1)
	defer s.connecting.Add(-1)
	if conn, err = s.pool.Acquire(ctx); err == nil {
		sc.q = conn
	}
	return conn, err
}

// failedCommit is a COMMIT that failed, and whose.
type failedCommit struct {
	error
	xid *string
}

// resolve finds out what became of a transaction whose COMMIT failed: nil if
// it was committed all the same. The server's own answer leaves no doubt; a
// lost connection does, so a new one asks. None may be held by then, or a pool
// of one would have no other.
func (s *Store) resolve(ctx context.Context, commit *failedCommit) error {
	failed, xid := commit.error, commit.xid
	var pgErr *pgconn.PgError
	if errors.Is(failed, pgx.ErrTxCommitRollback) || errors.Is(failed, pgx.ErrTxClosed) ||
		errors.As(failed, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" {
		return failed
	}
	if xid == nil {
		return fmt.Errorf("%w: %w", ErrOutcomeUnknown, failed)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.config.RetryBudget)
	defer cancel()
	for {
		var status *string
		err := s.pool.QueryRow(ctx, `SELECT pg_xact_status($1::text::xid8)`, *xid).Scan(&status)
		switch {
		case err == nil && status != nil && *status == "committed":
			return nil
		case err == nil && status != nil && *status == "aborted":
			return fmt.Errorf("pgstore: the transaction was rolled back: %w", failed)
		case err == nil && status == nil || ctx.Err() != nil:
			return fmt.Errorf("%w: %w", ErrOutcomeUnknown, failed)
		}
		select { // still in progress, or no server yet
		case <-time.After(firstPause):
		case <-ctx.Done():
		}
	}
}
