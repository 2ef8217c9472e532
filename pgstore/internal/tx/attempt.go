package tx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/memory"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// attempt is one run of a transaction.
type attempt struct {
	taker      *Taker
	contention *table.Lately
	call       *decide.Call
	shards     []int         // the shard of each limit that is reserved for this transaction
	claim      *memory.Claim // the tokens that are not taken from rows
	held       bool          // the claim covers all tokens, so no row is taken from
	do         Func
	queued     *Queued // the takes that travel with COMMIT; nil for an attempt that takes before the function
	level      pgx.TxIsoLevel

	conn        *pgxpool.Conn
	incarnation string // of the server; "" if it could not be read
	lockAll     bool   // decide on all rows of the limits, locked
	turn        turn
	work        *work // of an attempt whose takes travel with COMMIT
	result      ratelimit.Result
	taken       try
	met         bool // other transactions were at its rows
	failed      bool // the function returned an error
	ended       bool // the function has ended the transaction itself
}

// run takes, runs the function, and commits. It returns nil if and only if the function returned
// nil and the server has reported the commit.
func (a *attempt) run(ctx context.Context) error {
	lost, err := a.transact(ctx)
	if !lost {
		return err
	}
	if a.held {
		return fmt.Errorf("%w: %w", conn.ErrOutcomeUnknown, err)
	}
	if rolledBack := a.resolve(ctx, err); rolledBack != nil {
		return rolledBack
	}
	if a.work != nil {
		a.work.took = true
	}
	if a.failed {
		return fmt.Errorf("%w: %w", conn.ErrCommitted, err)
	}
	return nil
}

// transact runs the transaction on a connection. It gives the connection back before it returns,
// since reading the outcome may need the only one of the pool. lost reports that the connection was
// closed with the outcome unknown.
func (a *attempt) transact(ctx context.Context) (lost bool, err error) {
	pooled, err := a.taker.Pool.Acquire(ctx)
	if err != nil {
		return false, a.taker.Fault("acquire", err)
	}
	defer pooled.Release() // also when the function panics or ends its goroutine
	a.conn = pooled
	if !a.held { // a held attempt has no transaction ID by which to read its outcome
		if a.incarnation, err = incarnation(ctx, pooled); err != nil && pooled.Conn().IsClosed() {
			return false, a.notBegun(ctx, a.taker.Fault("ask the server", err))
		}
	}
	a.turn = a.turnOf(ctx)
	tx, err := a.begin(ctx)
	if a.turn.missed(err) {
		conn.End(ctx, tx)
		tx, err = a.begin(ctx)
	}
	doing, closed := false, false
	defer func() {
		if doing { // it panicked, or ended its goroutine
			a.ended = a.over() || a.lost() != nil
		}
		if tx != nil && !closed { // also if a statement has ended it: the function may have kept it
			conn.End(ctx, tx)
		}
		a.turn.leave(ctx)
	}()
	if err != nil {
		return false, a.notBegun(ctx, err)
	}
	if !a.result.OK {
		return false, a.result.Err()
	}
	doing = true
	err = a.do(tx, a.result)
	doing, a.failed, a.ended = false, err != nil, a.over()
	switch {
	case a.lost() != nil:
		return true, cmp.Or(err, a.lost())
	case a.failed:
		return a.again(ctx, tx, err)
	case a.conn.Conn().IsClosed():
		return false, fmt.Errorf("pgstore: the connection was lost before commit: %w", pgx.ErrTxClosed)
	case a.ended:
		return false, a.became(ctx)
	}
	if err := ctx.Err(); err != nil { // pgx would close the connection, which looks like a lost COMMIT
		return false, a.taker.Fault("commit", err)
	}
	if err = tx.Commit(ctx); err == nil || errors.Is(err, ratelimit.ErrRefused) {
		closed = true
		return false, err
	}
	if err = a.taker.Fault("commit", err); a.conn.Conn().IsClosed() && !intx.Answered(err) && !a.unbegun() {
		return true, err
	}
	return a.again(ctx, tx, err)
}

// begin begins a transaction and makes the call's takes, in one round trip if the rows that it
// tries first have enough. If they have not, it reads all shards outside of any transaction, where
// reading disturbs no other. Then it begins a new transaction, which takes from the shards that had
// enough. The caller must end the transaction, which may be there even with an error.
func (a *attempt) begin(ctx context.Context) (pgx.Tx, error) {
	b := a.taker
	if a.queued != nil {
		return a.beginOnCommit(ctx), nil
	}
	if a.held {
		return a.beginHeld(ctx)
	}
	if len(a.call.Demands) == 0 {
		return a.beginNoTake(ctx)
	}
	if a.lockAll {
		return a.beginLocked(ctx)
	}
	changes, ok := b.known.Guess(a.call, func(i int) int { return a.shards[i] })
	for round := 0; ; round++ {
		if ok {
			tx, err := a.try(ctx, changes)
			if err != nil || a.result.OK || a.lockAll { // decided on locked rows
				return tx, err
			}
			if err := tx.Rollback(ctx); err != nil {
				return tx, b.Fault("roll back", err)
			}
			a.turn.locks, a.turn.had = nil, 0 // the next one may take from other rows
		}
		view, err := b.Look(ctx, a.conn, &pgx.Batch{}, a.call, All)
		if err != nil {
			return nil, b.FaultOf("look at", a.call.Names(), err)
		}
		if changes, ok = a.call.Plan(view); !ok || round == rounds {
			a.answer(a.call.Refused(view))
			return nil, nil
		}
		if err := b.renew(ctx, a.conn, changes, view.At); err != nil {
			return nil, b.faultOf(a.call, err)
		}
	}
}

// try begins a transaction that tries changes. Afterwards a.result tells whether they were granted.
func (a *attempt) try(ctx context.Context, changes []decide.Change) (pgx.Tx, error) {
	if a.call.Divides(changes) { // as in Taker.takeSeveral
		a.lockAll = true
		a.turn = a.turnOf(ctx)
		return a.beginLocked(ctx)
	}
	tx, err := a.take(ctx, changes)
	if err != nil {
		return tx, a.taker.faultOf(a.call, err)
	}
	if a.taken.granted() {
		a.answer(a.taken.result(tx))
	}
	return tx, nil
}

// take begins a transaction and tries changes in it, in one round trip.
func (a *attempt) take(ctx context.Context, changes []decide.Change) (pgx.Tx, error) {
	a.taken = try{taker: a.taker, call: a.call, changes: changes, taken: make([]table.Taken, len(changes))}
	batch := a.turn.begin(ctx)
	now := a.taker.Clock()
	for i := range changes {
		a.taker.table.QueueTake(batch, a.call.Reserve, &changes[i], now, &a.taken.taken[i])
	}
	results := a.conn.SendBatch(ctx, batch)
	err := results.Close()
	return results.Tx(), err
}

// answer sets the attempt's result: result is what rows have granted, and the claim adds the rest.
func (a *attempt) answer(result ratelimit.Result) {
	if a.claim != nil {
		result = a.claim.Result(result)
	}
	a.result = result
}

// beginHeld begins a transaction for tokens that are held already. It sends BEGIN only, and does
// not read the transaction's ID, so its outcome cannot be read later.
func (a *attempt) beginHeld(ctx context.Context) (pgx.Tx, error) {
	tx, err := a.conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: a.taker.table.Level})
	if err != nil {
		return nil, a.taker.Fault("begin", err)
	}
	a.result = a.claim.Result(ratelimit.Result{})
	return tx, nil
}

// beginNoTake begins a transaction that takes nothing, and asks for its ID.
func (a *attempt) beginNoTake(ctx context.Context) (pgx.Tx, error) {
	a.taken = try{taker: a.taker, call: a.call, taken: make([]table.Taken, 1)}
	batch := a.turn.begin(ctx)
	table.QueueXid(batch, &a.taken.taken[0].Xid)
	results := a.conn.SendBatch(ctx, batch)
	if err := results.Close(); err != nil {
		return results.Tx(), a.taker.Fault("begin", err)
	}
	a.result.OK = true
	return results.Tx(), nil
}

// beginLocked begins a transaction that decides the call on its rows.
func (a *attempt) beginLocked(ctx context.Context) (pgx.Tx, error) {
	results := a.conn.SendBatch(ctx, a.turn.begin(ctx))
	tx := results.Tx()
	if err := results.Close(); err != nil {
		return tx, a.taker.Fault("begin", err)
	}
	result, taken, err := a.taker.takeLocked(ctx, tx, &pgx.Batch{}, a.call)
	if err == nil {
		a.taken = *taken
		a.answer(result)
	}
	return tx, err
}

// turnOf returns the turn of an attempt at its rows. After a turn that came too late, the attempt
// waits for none.
func (a *attempt) turnOf(ctx context.Context) turn {
	l := turn{table: a.taker.table, conn: a.conn, contention: a.contention, owed: a.turn.owed, left: a.turn.left}
	if a.held || l.left || a.queued != nil {
		return l
	}
	if locks := a.contention.Among(a.locks); len(locks) > 0 {
		if locks = a.taker.table.Lines(locks); len(locks) > 0 && ownSession(ctx, a.conn) {
			l.locks = locks
		}
	}
	return l
}

// locks returns the locks of the rows that an attempt asks first: one row of each limit, or all
// rows if it locks them all.
func (a *attempt) locks() (locks []int64) {
	for i := range a.call.Demands {
		rows := []decide.Row{{Key: a.call.Demands[i].KeyOf(), Shard: a.shards[i]}}
		if a.lockAll {
			rows = a.call.Demands[i].Rows()
		}
		for _, row := range rows {
			locks = append(locks, table.Lock(a.taker.Schema, row))
		}
	}
	return locks
}

// meet notes that other transactions were at the rows of an attempt.
func (a *attempt) meet() {
	a.met = true
	if !a.taker.table.PassesOver() { // a distributed table has no turns
		return
	}
	for _, lock := range a.locks() {
		a.contention.Note(lock, engine.Contended)
	}
}

// notBegun returns the error of a BEGIN. If the end of the context closed the connection, the error
// includes the context's.
func (a *attempt) notBegun(ctx context.Context, err error) error {
	if conn.Retriable(err) {
		a.meet()
	}
	if over := ctx.Err(); over != nil && a.conn.Conn().IsClosed() && !errors.Is(err, over) {
		return fmt.Errorf("%w: %w", err, over) // the context ended during an earlier statement, which closed the connection
	}
	return err
}

// over reports whether the attempt's connection is in no transaction any more.
func (a *attempt) over() bool {
	if a.work != nil {
		return a.work.over()
	}
	return a.conn.Conn().PgConn().TxStatus() == 'I'
}

// lost returns the error of a COMMIT without an answer that the function sent by Commit.
func (a *attempt) lost() error {
	if a.work == nil {
		return nil
	}
	return a.work.lost
}

// unbegun reports whether the function has sent nothing that began its transaction.
func (a *attempt) unbegun() bool { return a.work != nil && !a.work.begun }

// untaken reports whether a transaction ended without its takes.
func (a *attempt) untaken() bool { return a.work != nil && !a.work.took && len(a.call.Demands) > 0 }

// outcome returns the attempt's outcome where the error alone does not say.
func (a *attempt) outcome(err error) ratelimit.Outcome {
	switch {
	case errors.Is(err, conn.ErrCommitted) && !a.untaken():
		return ratelimit.OutcomeGranted
	case a.failed && a.result.OK && !conn.Retriable(err) && !conn.Done(err):
		return ratelimit.OutcomeRolledBack
	}
	return ""
}

// again returns the results of transact for an error of the function or of COMMIT. If the function
// has committed the take itself, no error may lead to another attempt, even if the function has
// begun another transaction since: its work would be done twice.
func (a *attempt) again(ctx context.Context, tx pgx.Tx, err error) (lost bool, _ error) {
	switch {
	case intx.InPart(err) && a.over():
		return false, fmt.Errorf("%w: %w", conn.ErrOutcomeUnknown, err)
	case !conn.Retriable(err) && !conn.Forgotten(err):
		if a.ended && !a.held && a.claim != nil && a.work == nil {
			_, _ = a.committed(ctx) // for memory
		}
		return false, err
	case a.held && a.ended:
		return false, fmt.Errorf("%w: the function ended the transaction itself: %w", conn.ErrOutcomeUnknown, err)
	case a.held: // nothing tells the outcome, nor whether the function has begun another transaction
		return false, err
	case a.unbegun():
		return false, err
	case !a.over():
		conn.End(ctx, tx)
	}
	if a.conn.Conn().IsClosed() {
		return true, err
	}
	committed, unknown := a.committed(ctx)
	switch {
	case unknown != nil:
		return false, fmt.Errorf("%w: %w", unknown, err)
	case committed:
		return false, fmt.Errorf("%w: %w", conn.ErrCommitted, err)
	}
	return false, err
}

// became returns the error of a function that has ended the transaction itself: nil if it committed
// with its takes.
func (a *attempt) became(ctx context.Context) error {
	if a.held {
		return fmt.Errorf("%w: the function ended the transaction itself: %w", conn.ErrOutcomeUnknown, pgx.ErrTxClosed)
	}
	committed, err := a.committed(ctx)
	switch {
	case err != nil:
		return err
	case !committed:
		return fmt.Errorf("pgstore: the function rolled the transaction back itself: %w", pgx.ErrTxClosed)
	case a.untaken():
		return fmt.Errorf("%w, and nothing was taken: %w", conn.ErrCommitted, pgx.ErrTxClosed)
	}
	return nil
}

// committed reports whether a transaction was committed. It asks on the transaction's connection,
// even after ctx has ended. If the function has rolled it back, what memory gave for it goes back.
func (a *attempt) committed(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.RollbackTime)
	defer cancel()
	ask := func() (string, error) { return table.Outcome(ctx, a.conn, a.taken.taken[0].Xid, true) }
	became, err := ask()
	if conn.Forgotten(err) { // pgx prepares it again
		became, err = ask()
	}
	if err != nil {
		return false, fmt.Errorf("%w: %w", conn.ErrOutcomeUnknown, err)
	}
	a.ended = a.ended && became != table.Aborted // it may be prepared
	return became == table.Committed, nil
}

// incarnationKey is the key under which a connection keeps its server's incarnation.
const incarnationKey = "ratelimit.incarnation"

// incarnation returns the incarnation of a connection's server. It reads it once for each
// connection. After an error it returns "", which no server has.
func incarnation(ctx context.Context, conn *pgxpool.Conn) (known string, err error) {
	data := conn.Conn().PgConn().CustomData()
	known, ok := data[incarnationKey].(string)
	if !ok {
		if known, err = table.Server(ctx, conn); err == nil {
			data[incarnationKey] = known
		}
	}
	return known, err
}

const (
	askPause = 5 * time.Millisecond // the first pause before the server is asked again
	askSlow  = time.Second          // the longest such pause
	askLong  = time.Second          // how long to ask, even after the deadline
)

// resolve reads the outcome of a transaction with a lost COMMIT. It returns nil if the transaction
// was committed.
func (a *attempt) resolve(ctx context.Context, lost error) error {
	left := askLong
	if deadline, ok := ctx.Deadline(); ok {
		left += max(0, time.Until(deadline))
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), left)
	defer cancel()
	unknown := fmt.Errorf("%w: %w", conn.ErrOutcomeUnknown, lost)
	for pause := askPause; ; pause = min(2*pause, askSlow) {
		became, err := a.readOutcome(ctx)
		switch {
		case err == nil && became == table.Committed:
			return nil
		case err == nil && became == table.Aborted:
			return fmt.Errorf("pgstore: the transaction was rolled back: %w", lost)
		case err == nil && became == table.Forgotten:
			return unknown
		}
		if conn.Sleep(ctx, pause) != nil { // it is still in progress, or there is no server yet
			return unknown
		}
	}
}

// readOutcome reads the outcome of the transaction on a new connection.
//
// A commit is believed only in the same incarnation of the same server. If the server crashed, an
// open transaction may have left nothing in the log. Then its ID is given to another transaction,
// which may commit. In another incarnation the row itself is read. It proves the commit if no
// transaction has written it since.
func (a *attempt) readOutcome(ctx context.Context) (became string, err error) {
	xid := a.taken.taken[0].Xid
	err = a.taker.Pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		if became, err = table.Outcome(ctx, conn, xid, false); err != nil || became != table.Committed {
			return err
		}
		now, err := table.Server(ctx, conn)
		if err == nil && now != "" && now == a.incarnation {
			return nil
		}
		wrote := false
		if err == nil && len(a.taken.changes) > 0 {
			wrote, err = a.taker.table.Wrote(ctx, conn, &a.taken.changes[0], xid)
		}
		if err == nil && !wrote {
			became = table.Forgotten
		}
		return err
	})
	return became, err
}
