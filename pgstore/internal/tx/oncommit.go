package tx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// RunOnCommit runs do in a transaction, and takes for requests in the round trip of its COMMIT. It
// also returns a result whose transaction was rolled back.
func (r *Runner) RunOnCommit(ctx context.Context, w *watch.Watch, requests []ratelimit.Request, level pgx.TxIsoLevel, do func(pgx.Tx) error) (ratelimit.Result, error) {
	q := &Queued{taker: r.Taker, report: func(*ratelimit.Result, error) {}}
	if err := q.of(requests); err != nil {
		return refusedIn(err), err
	}
	u := run{Runner: r, watch: w, call: q.call, queued: q, level: level, do: func(tx pgx.Tx, _ ratelimit.Result) error { return do(tx) }}
	return u.run(ctx)
}

// refusedIn returns the result of a refusal; the zero Result of any other error.
func refusedIn(err error) (result ratelimit.Result) {
	var refused *ratelimit.RefusedError
	if errors.As(err, &refused) {
		result = refused.Result
	}
	return result
}

// beginOnCommit returns a transaction that begins with the function's first statement.
func (a *attempt) beginOnCommit(ctx context.Context) pgx.Tx {
	a.queued.call = *a.call
	a.taken = try{taker: a.taker, call: a.call, taken: make([]table.Taken, 1)}
	if a.result = a.queued.assumed(); a.claim != nil && a.claim.All() {
		a.answer(a.result)
	}
	a.work = &work{attempt: a, ctx: ctx, conn: a.conn.Conn()}
	return a.work
}

// work is the transaction of a function that runs before the takes. BEGIN and the question for the
// transaction's ID travel with the function's first statement, and the takes travel with COMMIT. If
// BEGIN failed, no later statement begins the transaction: the function may have ignored the error.
type work struct {
	attempt *attempt
	ctx     context.Context // of the attempt, for methods that have none
	conn    *pgx.Conn
	tx      pgx.Tx // nil before the first statement
	begun   bool   // the transaction's ID is known
	reading bool   // the results of the first statement are open
	ended   bool   // after Commit, Rollback, or a statement such as ROLLBACK
	took    bool   // the takes are committed
	lost    error  // of a COMMIT without an answer
}

// over reports whether the transaction has begun and ended.
func (w *work) over() bool {
	return w.begun && !w.reading && w.conn.PgConn().TxStatus() == 'I'
}

// send begins the transaction in the round trip of statements, whose results it returns.
func (w *work) send(ctx context.Context, statements ...*pgx.QueuedQuery) pgx.BatchResults {
	var batch pgx.Batch
	batch.BeginTx(pgx.TxOptions{IsoLevel: w.attempt.level})
	table.QueueXid(&batch, &w.attempt.taken.taken[0].Xid)
	xid := batch.QueuedQueries[1].Fn
	batch.QueuedQueries = append(batch.QueuedQueries, statements...)
	results := w.conn.SendBatch(ctx, &batch)
	w.tx, w.reading = results.Tx(), true
	if _, err := results.Exec(); err == nil {
		w.begun = xid(results) == nil
	}
	return &firstResults{results, w}
}

// begin begins the transaction in a round trip of its own, if no statement has begun it. If a
// statement such as ROLLBACK has ended it, begin fails. Otherwise later statements would commit
// without the takes.
func (w *work) begin(ctx context.Context) error {
	switch {
	case w.tx == nil:
		return w.send(ctx).Close()
	case !w.ended && w.over():
		w.end()
		return fmt.Errorf("pgstore: a statement of the function has ended the transaction: %w", pgx.ErrTxClosed)
	}
	return nil
}

// beginNow begins the transaction for methods that cannot return an error. If that fails it closes
// the connection.
func (w *work) beginNow() {
	err := w.begin(w.ctx)
	if w.ended { // the connection may belong to another caller by now
		return
	}
	if err != nil || !w.begun {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(w.ctx), conn.RollbackTime)
		defer cancel()
		_ = w.conn.Close(ctx)
	}
}

// first begins the transaction if no statement has. It returns the results of this statement if it
// was the first, or those of a failed BEGIN; otherwise nil.
func (w *work) first(ctx context.Context, sql string, args []any) pgx.BatchResults {
	if w.tx == nil && travels(sql, args) {
		return w.send(ctx, &pgx.QueuedQuery{SQL: sql, Arguments: args})
	}
	if err := w.begin(ctx); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err)
	}
	return nil
}

// travels reports whether pgx can send a statement in a batch: a single one, without options.
func travels(sql string, args []any) bool {
	sql = strings.TrimRight(sql, "; \t\r\n")
	return sql != "" && !strings.Contains(sql, ";") && !slices.ContainsFunc(args, func(arg any) bool {
		switch arg.(type) {
		case pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID:
			return true
		}
		return false
	})
}

func (w *work) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if results := w.first(ctx, sql, args); results != nil {
		tag, err := results.Exec()
		return tag, cmp.Or(err, results.Close())
	}
	return w.tx.Exec(ctx, sql, args...)
}

func (w *work) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if results := w.first(ctx, sql, args); results != nil {
		rows, err := results.Query()
		if err != nil {
			_ = results.Close() // the same error
		}
		return &firstRows{Rows: rows, results: results}, err
	}
	return w.tx.Query(ctx, sql, args...)
}

func (w *work) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if results := w.first(ctx, sql, args); results != nil {
		return &firstRow{results.QueryRow(), results}
	}
	return w.tx.QueryRow(ctx, sql, args...)
}

func (w *work) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	begins := pgx.FailedBatchResults(b, pgx.ErrTxClosed).Tx() != nil // the batch begins a transaction itself, which is an error in a transaction
	if w.tx == nil && b.Len() > 0 && !begins {
		return w.send(ctx, b.QueuedQueries...)
	}
	if err := w.begin(ctx); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	return w.tx.SendBatch(ctx, b)
}

func (w *work) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := w.begin(ctx); err != nil {
		return nil, err
	}
	return w.tx.Begin(ctx)
}

func (w *work) CopyFrom(ctx context.Context, name pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	if err := w.begin(ctx); err != nil {
		return 0, err
	}
	return w.tx.CopyFrom(ctx, name, columns, rows)
}

func (w *work) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := w.begin(ctx); err != nil {
		return nil, err
	}
	return w.tx.Prepare(ctx, name, sql)
}

func (w *work) LargeObjects() pgx.LargeObjects {
	w.beginNow()
	return w.tx.LargeObjects()
}

func (w *work) Conn() *pgx.Conn {
	w.beginNow()
	return w.conn
}

func (w *work) Rollback(ctx context.Context) error {
	tx := w.tx
	w.end()
	if tx == nil {
		return nil
	}
	return tx.Rollback(ctx)
}

// end makes all later statements fail.
func (w *work) end() {
	w.ended = true
	var batch pgx.Batch
	batch.BeginTx(pgx.TxOptions{})
	w.tx = pgx.FailedBatchResults(&batch, pgx.ErrTxClosed).Tx()
}

// Commit implements pgx.Tx. It takes, and commits if everything was granted.
func (w *work) Commit(ctx context.Context) error {
	if err := w.begin(ctx); err != nil {
		return err
	}
	a, status := w.attempt, w.conn.PgConn().TxStatus()
	switch {
	case w.ended || w.over():
		return pgx.ErrTxClosed
	case !w.begun || status == 'E':
		conn.End(ctx, w)
		return pgx.ErrTxCommitRollback
	}
	var batch pgx.Batch
	a.queued.put(&batch)
	batch.Queue("COMMIT").Exec(func(tag pgconn.CommandTag) error {
		if tag.String() == "ROLLBACK" {
			return pgx.ErrTxCommitRollback
		}
		return nil
	})
	err := w.conn.SendBatch(ctx, &batch).Close()
	if err != nil && !w.over() {
		conn.End(ctx, w)
	}
	if err != nil && w.conn.IsClosed() && !intx.Answered(err) {
		w.lost = err
	}
	w.end()
	w.took, a.met = err == nil, conn.Retriable(err)
	switch refused := refusedIn(err); {
	case a.queued.Result.OK:
		a.answer(a.queued.Result)
	case refused.Request.Limit != nil:
		a.result = refused
	}
	return err
}

// firstResults holds the results of the function's first statements, without those of BEGIN and the
// ID.
type firstResults struct {
	pgx.BatchResults
	work *work
}

// Tx returns nil, since the function's batch began no transaction.
func (r *firstResults) Tx() pgx.Tx { return nil }

// Close closes the results, so that the connection can be used again.
func (r *firstResults) Close() error {
	err := r.BatchResults.Close()
	r.work.reading = false
	return err
}

// firstRows holds the rows of the first statement. Closing them closes the results.
type firstRows struct {
	pgx.Rows
	results pgx.BatchResults
	err     error // of closing the results
}

func (r *firstRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *firstRows) Scan(into ...any) error { return r.ended(r.Rows.Scan(into...)) }

func (r *firstRows) Values() ([]any, error) {
	values, err := r.Rows.Values()
	return values, r.ended(err)
}

// ended closes the results after an error, as pgx closes the rows.
func (r *firstRows) ended(err error) error {
	if err != nil {
		r.Close()
	}
	return err
}

func (r *firstRows) Close() {
	r.Rows.Close()
	r.err = r.results.Close()
}

func (r *firstRows) Err() error { return cmp.Or(r.Rows.Err(), r.err) }

// firstRow holds the row of the first statement.
type firstRow struct {
	row     pgx.Row
	results pgx.BatchResults
}

func (r *firstRow) Scan(into ...any) error { return cmp.Or(r.row.Scan(into...), r.results.Close()) }
