package pgstore

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
	"github.com/pgratelimit/ratelimit/internal/keyqueue"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Transactions of one process that take from one row queue before they begin, and before they
// hold a connection. They would queue for the row in any case, since it stays locked until
// COMMIT; but in PostgreSQL a transaction that waited has lost, since under SERIALIZABLE the
// row has changed since its snapshot (40001), and while it waits it keeps a connection from
// others. A limit with several shards has a place for each, so that every transaction has a
// shard of its own.

// runner runs callers' functions in transactions.
type runner struct {
	*base
	memory   *memory                    // nil without Config.Escrow
	turns    keyqueue.Queue[decide.Row] // with the number of shards, which differs while a new definition is rolled out
	meetings meetings                   // with transactions of other processes
}

func (r *runner) run(ctx context.Context, reserve bool, requests []ratelimit.Request, do func(pgx.Tx, ratelimit.Result) error) (result ratelimit.Result, err error) {
	if r == nil {
		return ratelimit.Result{}, (*base)(nil).usable()
	}
	requests = decide.Resolved(r.config.Catalog, requests)
	w := r.watch(ctx, decide.All.Observed(reserve), ratelimit.FormRunner, requests...)
	told := &result
	defer func() { w.Report(told, err) }() // also when the function panics
	if do == nil {
		return ratelimit.Result{}, errNilFunc
	}
	made, err := r.runModes(ctx, &w, reserve, requests, do)
	told = &made
	if err != nil && made.OK { // it was rolled back, so there is nothing to cancel
		return ratelimit.Result{}, err
	}
	return made, err
}

// runModes is run, and returns also a result that was rolled back.
func (r *runner) runModes(ctx context.Context, w *watch.Watch, reserve bool, requests []ratelimit.Request, do func(pgx.Tx, ratelimit.Result) error) (ratelimit.Result, error) {
	if decide.Moded(requests) {
		return r.runByMode(ctx, w, reserve, requests, do)
	}
	return r.runWatched(ctx, w, reserve, requests, false, do)
}

// runByMode is run of requests in modes. A limit that is in ModeShadow and refuses has been
// asked in vain before the function runs.
func (r *runner) runByMode(ctx context.Context, w *watch.Watch, reserve bool, requests []ratelimit.Request, do func(pgx.Tx, ratelimit.Result) error) (ratelimit.Result, error) {
	m, err := decide.NewModes(decide.All, r.Instant(), requests)
	if err != nil {
		return ratelimit.Result{}, err
	}
	var told ratelimit.Result
	result, err := m.Decide(func(left []ratelimit.Request) (ratelimit.Result, error) {
		result, err := r.runWatched(ctx, w, reserve, left, len(left) == 0, func(tx pgx.Tx, result ratelimit.Result) error {
			told = m.Report(result)
			return do(tx, told)
		})
		if errors.Is(err, ratelimit.ErrRefused) && !result.OK && result.Request.Limit != nil { // and not the function
			err = nil
		}
		return result, err
	})
	switch {
	case result.OK: // perhaps rolled back
		return told, err
	case err != nil:
		return result, err
	}
	told = m.Report(result)
	return told, told.Err()
}

// runWatched is run of requests that are all enforced; if there are none, and need be none, of
// a transaction that takes nothing. It returns also a grant that was rolled back.
func (r *runner) runWatched(ctx context.Context, w *watch.Watch, reserve bool, requests []ratelimit.Request, free bool, do func(pgx.Tx, ratelimit.Result) error) (result ratelimit.Result, err error) {
	bounded := ctx
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		bounded, cancel = context.WithTimeout(ctx, r.RetryBudget)
		defer cancel()
	}
	var call decide.Call
	c := r.memory.claimSeen(reserve, requests)
	if c.none() {
		if !free {
			if call, err = r.call(decide.All, reserve, requests); err != nil {
				return ratelimit.Result{}, err
			}
		}
		if r.Pool == nil {
			return ratelimit.Result{}, conn.ErrNoPool
		}
	}
	spent := false
	defer func() { // also when the function panics or ends its goroutine
		c.end(spent)
	}()
	rows := &call // which the transaction takes
	err = r.RetryCounted(ctx, func() { w.Retries++ }, func() error {
		var places []int
		var leave func()
		for again := true; ; again = false {
			if c.none() { // nothing was held; by now it may be worth prefetching
				r.heed(&call)
				if c, result, err = r.memory.claimFor(bounded, &call); err != nil || result.Request.Limit != nil {
					return cmp.Or(err, result.Err())
				}
			}
			if !c.none() {
				rows = &c.rest
			}
			var waited bool
			begun := time.Now()
			if places, leave, waited, err = r.queue(bounded, rows); err != nil {
				return r.Fault("wait", err)
			}
			if waited {
				w.Queued += time.Since(begun)
			}
			if !again || !waited || !c.none() || !r.memory.worth(&call) {
				break
			}
			leave() // the tokens that it waited for are worth prefetching now
		}
		defer leave()
		a := attempt{base: r.base, meetings: &r.meetings, call: rows, places: places, whole: rows.OnLockedRows(), claim: c, do: do}
		done := false
		defer func() {
			if done = done || a.ended; !done {
				receipt.RolledBack(a.result.Receipt)
			}
			spent = spent || done
			if a.ended && w.Became == ratelimit.OutcomeRolledBack { // by the function, perhaps by COMMIT
				w.Became = ratelimit.OutcomeUnknown
			}
		}()
		w.Became = ratelimit.OutcomeRolledBack // unless the function returns
		err = a.run(bounded)
		w.Became = a.told(err)
		if a.met {
			r.contended(rows)
		}
		result, done = a.result, err == nil || conn.Done(err)
		return err
	})
	if err == nil && result.OK {
		receipt.Committed(result.Receipt)
		for i := range rows.Demands { // again, now that others see it
			r.cache.Changed(rows.Demands[i].KeyOf())
		}
	}
	return result, err
}

// told is the outcome of an attempt that ended with an error, if that does not tell.
func (a *attempt) told(err error) ratelimit.Outcome {
	switch {
	case errors.Is(err, conn.ErrCommitted):
		return ratelimit.OutcomeGranted
	case a.failed && !conn.Retriable(err) && !conn.Done(err):
		return ratelimit.OutcomeRolledBack
	}
	return ""
}

// heed notes that others were met lately at the rows of a call, before it meets them again.
func (r *runner) heed(call *decide.Call) {
	if r.memory == nil {
		return
	}
	for i := range call.Demands {
		row := decide.Row{Key: call.Demands[i].KeyOf()}
		locks := func() []int64 { return []int64{table.Lock(r.Schema, row)} }
		if len(r.meetings.lately(locks)) > 0 {
			r.cache.Of(&call.Demands[i]).Contended()
		}
	}
}

// contended notes that others took from the rows of a call at the same time, and are done: calls
// that prefetch need not find that out again.
func (r *runner) contended(rows *decide.Call) {
	for i := range rows.Demands {
		if entry := r.cache.Of(&rows.Demands[i]); entry.Prefetches() {
			entry.Contended()
			r.memory.engine.shared(decide.Row{Key: rows.Demands[i].KeyOf()})
		}
	}
}

// queue waits until each of the call's limits has a place for it, and reports whether it had
// to. All calls wait in one order, so none waits for one that waits for it.
func (r *runner) queue(ctx context.Context, call *decide.Call) (places []int, leave func(), waited bool, err error) {
	keyOf := func(i int) decide.Row {
		return decide.Row{Key: call.Demands[i].KeyOf(), Shard: call.Demands[i].Definition.Shards}
	}
	leave = func() {
		for i, place := range places {
			r.turns.Leave(keyOf(i), place)
		}
	}
	for i := range call.Demands {
		a := &call.Demands[i]
		free := false
		place, err := r.turns.Enter(ctx, keyOf(i), a.Definition.Shards, func(places []int) int {
			free = true
			return r.shards.Choose(a, places)
		})
		if !free {
			waited = true
			r.cache.Of(a).Contended()
		}
		if err != nil {
			leave()
			return nil, nil, waited, err
		}
		places = append(places, place)
	}
	return places, leave, waited, nil
}

// attempt is one run of a transaction.
type attempt struct {
	base     *base
	meetings *meetings
	call     *decide.Call
	places   []int  // the shard of each limit that is this transaction's alone
	claim    *claim // the tokens that are not taken from rows
	do       func(pgx.Tx, ratelimit.Result) error

	conn        *pgxpool.Conn
	incarnation string // of the server, as far as it could be read
	whole       bool   // it is decided on all rows of its limits, locked
	line        line
	result      ratelimit.Result
	taken       try
	met         bool // it met others at its rows
	failed      bool // the function returned an error
	ended       bool // the function has ended the transaction itself
}

// run takes, runs the function, and commits. It tells no error if and only if the
// function did not, and the server has said that the transaction is committed.
func (a *attempt) run(ctx context.Context) error {
	lost, err := a.transact(ctx)
	if !lost {
		return err
	}
	if a.claim.all() {
		return fmt.Errorf("%w: %w", conn.ErrOutcomeUnknown, err)
	}
	if rolledBack := a.resolve(ctx, err); rolledBack != nil {
		return rolledBack
	}
	if a.failed {
		return fmt.Errorf("%w: %w", conn.ErrCommitted, err)
	}
	return nil
}

// transact runs the transaction on a connection of its own, which it has given back then, or a
// pool of one would have no other to ask on. A transaction is lost if its outcome is unknown,
// since its connection is closed.
func (a *attempt) transact(ctx context.Context) (lost bool, err error) {
	pooled, err := a.base.Pool.Acquire(ctx)
	if err != nil {
		return false, a.base.Fault("acquire", err)
	}
	defer pooled.Release() // also when the function panics or ends its goroutine
	a.conn = pooled
	if !a.claim.all() { // whose outcome cannot be read
		a.incarnation = incarnation(ctx, pooled)
	}
	a.line = a.standing(ctx)
	tx, err := a.begin(ctx)
	doing := false
	defer func() {
		if doing { // it panicked, or ended its goroutine
			a.ended = a.over()
		}
		if tx != nil && !a.over() {
			conn.End(ctx, tx)
		}
		a.line.leave(ctx)
	}()
	if err != nil {
		if conn.Retriable(err) {
			a.meet()
		}
		if over := ctx.Err(); over != nil && a.conn.Conn().IsClosed() && !errors.Is(err, over) {
			err = fmt.Errorf("%w: %w", err, over) // a statement before, for which the connection was closed
		}
		return false, err
	}
	if err := a.result.Err(); err != nil {
		return false, err
	}
	doing = true
	err = a.do(tx, a.result)
	doing, a.failed, a.ended = false, err != nil, a.over()
	switch {
	case a.failed:
		return a.again(ctx, tx, err)
	case a.conn.Conn().IsClosed():
		return false, fmt.Errorf("pgstore: the connection was lost before commit: %w", pgx.ErrTxClosed)
	case a.ended:
		return false, a.became(ctx)
	}
	if err := ctx.Err(); err != nil { // pgx would close the connection, which looks as if COMMIT was lost
		return false, a.base.Fault("commit", err)
	}
	if err = tx.Commit(ctx); err == nil {
		return false, nil
	}
	if err = a.base.Fault("commit", err); a.conn.Conn().IsClosed() && !conn.Answered(err) {
		return true, err
	}
	return a.again(ctx, tx, err)
}

// over reports whether there is no transaction any more on the attempt's connection.
func (a *attempt) over() bool { return a.conn.Conn().PgConn().TxStatus() == 'I' }

// again returns the results of transact for an error of the function or of COMMIT. An error
// that asks for another attempt does so in vain if the function has committed the take itself,
// even if it has begun another since: then its work would be done twice.
func (a *attempt) again(ctx context.Context, tx pgx.Tx, err error) (lost bool, _ error) {
	switch {
	case !conn.Retriable(err) && !conn.Forgotten(err):
		return false, err
	case a.claim.all() && a.ended:
		return false, fmt.Errorf("%w: the function ended the transaction itself: %w", conn.ErrOutcomeUnknown, err)
	case a.claim.all(): // nobody can ask, and a function that has begun another is not found out
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

// became is the error of a function that has ended the transaction itself: none if
// that was committed.
func (a *attempt) became(ctx context.Context) error {
	if a.claim.all() {
		return fmt.Errorf("%w: the function ended the transaction itself: %w", conn.ErrOutcomeUnknown, pgx.ErrTxClosed)
	}
	committed, err := a.committed(ctx)
	if err == nil && !committed {
		err = fmt.Errorf("pgstore: the function rolled the transaction back itself: %w", pgx.ErrTxClosed)
	}
	return err
}

// committed reports, on the connection of a transaction that is over, whether it was
// committed, also when ctx is over.
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
	return became == table.Committed, nil
}

// begin begins a transaction that has made the call's takes, in one round trip if the rows that
// most likely have enough do. When one does not, all shards are looked at, outside of any
// transaction, so that reading them disturbs no other; and then a new one tries the shards that
// had enough. The transaction may be there with an error, too, and is for the caller to end.
func (a *attempt) begin(ctx context.Context) (pgx.Tx, error) {
	b := a.base
	if a.claim.all() {
		return a.beginHeld(ctx)
	}
	if len(a.call.Demands) == 0 {
		return a.beginFree(ctx)
	}
	if a.whole {
		return a.beginLocked(ctx)
	}
	changes, ok := b.guess(a.call, func(i int) int { return a.places[i] })
	for round := 0; ; round++ {
		if ok {
			tx, err := a.try(ctx, changes)
			if err != nil || a.result.OK || a.whole { // decided on locked rows
				return tx, err
			}
			if err := tx.Rollback(ctx); err != nil {
				return tx, b.Fault("roll back", err)
			}
			a.line.locks = nil // the next one may take from other rows
		}
		view, err := b.look(ctx, a.conn, &pgx.Batch{}, a.call, all)
		if err != nil {
			return nil, b.Fault("look", err)
		}
		if changes, ok = a.call.Plan(view); !ok || round == rounds {
			a.tell(a.call.Refused(view))
			return nil, nil
		}
		if err := b.renew(ctx, a.conn, changes, view.At); err != nil {
			return nil, b.Fault("renew", err)
		}
	}
}

// try begins a transaction that has made changes, if it could; that it tells.
func (a *attempt) try(ctx context.Context, changes []decide.Change) (pgx.Tx, error) {
	if a.call.Divides(changes) { // which is decided as in base.takeSeveral
		a.whole = true
		a.line = a.standing(ctx)
		return a.beginLocked(ctx)
	}
	tx, err := a.take(ctx, changes)
	if err != nil {
		return tx, a.base.Fault("take", err)
	}
	if a.taken.granted() {
		a.tell(a.taken.result(tx))
	}
	return tx, nil
}

// tell makes the result of the rows that of the call.
func (a *attempt) tell(result ratelimit.Result) {
	if !a.claim.none() {
		result = a.claim.result(result)
	}
	a.result = result
}

// beginHeld begins a transaction with tokens that are held already. It asks the server for
// nothing, not even for the transaction's ID, without which its outcome cannot be read later.
func (a *attempt) beginHeld(ctx context.Context) (pgx.Tx, error) {
	tx, err := a.conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable})
	if err != nil {
		return nil, a.base.Fault("begin", err)
	}
	a.result = a.claim.result(ratelimit.Result{})
	return tx, nil
}

// beginFree begins a transaction that takes nothing, whose ID is asked for.
func (a *attempt) beginFree(ctx context.Context) (pgx.Tx, error) {
	a.taken = try{base: a.base, call: a.call, taken: make([]table.Taken, 1)}
	batch := a.line.begin()
	table.QueueXid(batch, &a.taken.taken[0].Xid)
	results := a.conn.SendBatch(ctx, batch)
	if err := results.Close(); err != nil {
		return results.Tx(), a.base.Fault("begin", err)
	}
	a.result.OK = true
	return results.Tx(), nil
}

// beginLocked begins a transaction that decides the call on its rows.
func (a *attempt) beginLocked(ctx context.Context) (pgx.Tx, error) {
	results := a.conn.SendBatch(ctx, a.line.begin())
	tx := results.Tx()
	if err := results.Close(); err != nil {
		return tx, a.base.Fault("begin", err)
	}
	result, taken, err := a.base.takeLocked(ctx, tx, &pgx.Batch{}, a.call)
	if err == nil {
		a.taken = *taken
		a.tell(result)
	}
	return tx, err
}

// take begins a transaction and tries changes in it, in one round trip.
func (a *attempt) take(ctx context.Context, changes []decide.Change) (pgx.Tx, error) {
	a.taken = try{base: a.base, call: a.call, changes: changes, taken: make([]table.Taken, len(changes))}
	batch := a.line.begin()
	now := a.base.Clock()
	for i := range changes {
		a.base.table.QueueTake(batch, a.call.Reserve, &changes[i], now, &a.taken.taken[i])
	}
	results := a.conn.SendBatch(ctx, batch)
	err := results.Close()
	return results.Tx(), err
}

// incarnationKey is where a connection keeps the incarnation of the server that it is to.
const incarnationKey = "ratelimit.incarnation"

// incarnation returns that, which is read once for each connection; "" if it cannot be.
func incarnation(ctx context.Context, conn *pgxpool.Conn) string {
	data := conn.Conn().PgConn().CustomData()
	known, ok := data[incarnationKey].(string)
	if !ok {
		var err error
		if known, err = table.Server(ctx, conn); err == nil { // without it, nothing is taken for committed
			data[incarnationKey] = known
		}
	}
	return known
}

const (
	askPause = 5 * time.Millisecond // before the server is asked again, at first
	askSlow  = time.Second          // and later
	askLong  = time.Second          // for how long, after the deadline too
)

// resolve reads the outcome of a transaction with a lost COMMIT: no error if it was committed
// all the same.
func (a *attempt) resolve(ctx context.Context, lost error) error {
	left := askLong
	if deadline, ok := ctx.Deadline(); ok {
		left += max(0, time.Until(deadline))
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), left)
	defer cancel()
	unknown := fmt.Errorf("%w: %w", conn.ErrOutcomeUnknown, lost)
	for pause := askPause; ; pause = min(2*pause, askSlow) {
		became, err := a.outcome(ctx)
		switch {
		case err == nil && became == table.Committed:
			return nil
		case err == nil && became == table.Aborted:
			return fmt.Errorf("pgstore: the transaction was rolled back: %w", lost)
		case err == nil && became == table.Forgotten:
			return unknown
		}
		if conn.Sleep(ctx, pause) != nil { // it is in progress still, or there is no server yet
			return unknown
		}
	}
}

// outcome reads, on a new connection, the outcome of the transaction.
//
// A commit is believed only in the same incarnation of the same server. A transaction that was
// open when the server crashed may have left nothing in the log, and then its ID is given out
// again, to another that may commit. In another incarnation the row itself is read, which
// proves the commit if no transaction has written it since.
func (a *attempt) outcome(ctx context.Context) (became string, err error) {
	xid := a.taken.taken[0].Xid
	err = a.base.Pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		if became, err = table.Outcome(ctx, conn, xid, false); err != nil || became != table.Committed {
			return err
		}
		now, err := table.Server(ctx, conn)
		if err == nil && now != "" && now == a.incarnation {
			return nil
		}
		wrote := false
		if err == nil && len(a.taken.changes) > 0 {
			wrote, err = a.base.table.Wrote(ctx, conn, &a.taken.changes[0], xid)
		}
		if err == nil && !wrote {
			became = table.Forgotten
		}
		return err
	})
	return became, err
}

// standing returns the place of an attempt in the lines of its rows.
func (a *attempt) standing(ctx context.Context) line {
	l := line{conn: a.conn, meetings: a.meetings}
	if a.claim.all() {
		return l
	}
	if locks := a.meetings.lately(a.locks); len(locks) > 0 && ownSession(ctx, a.conn) {
		l.locks = locks
	}
	return l
}

// locks returns the locks of the rows that an attempt asks first: one of each limit, or if
// they are decided on when they are locked, all.
func (a *attempt) locks() (locks []int64) {
	for i := range a.call.Demands {
		rows := []decide.Row{{Key: a.call.Demands[i].KeyOf(), Shard: a.places[i]}}
		if a.whole {
			rows = a.call.Demands[i].Rows()
		}
		for _, row := range rows {
			locks = append(locks, table.Lock(a.base.Schema, row))
		}
	}
	return locks
}

// meet notes that an attempt met others at its rows.
func (a *attempt) meet() {
	a.met = true
	if !a.base.table.PassesOver() { // which has no lines
		return
	}
	for _, lock := range a.locks() {
		a.meetings.met(lock)
	}
}
