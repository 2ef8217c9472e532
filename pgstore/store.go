package pgstore

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/wait"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/edit"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/known"
	"github.com/pgratelimit/ratelimit/pgstore/internal/memory"
	"github.com/pgratelimit/ratelimit/pgstore/internal/permits"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
	"github.com/pgratelimit/ratelimit/pgstore/internal/tx"
)

// Store is limits in PostgreSQL. It is safe for concurrent use, and any number
// of processes may share the table. Without Config.Escrow it owns no goroutine that outlives a call
// and no connection, so it need not be closed; see [Store.Close] for when to.
type Store struct {
	conn     *conn.Conn
	config   Config
	table    *table.Table
	known    *known.Known
	engine   *engine.Engine
	memory   *memory.Memory // nil without Config.Escrow
	taker    *tx.Taker
	runner   *tx.Runner
	editor   *edit.Editor
	permits  *permits.Permits
	observer *watch.Observer // nil without Config.Observe
}

// New makes a Store. A nil pool is enough for the verbs that take a transaction; a nil config means
// the defaults. The table must be there at the first call: see packages migrations and migrate, and
// [Store.Ready].
func New(pool *pgxpool.Pool, config *Config) (*Store, error) {
	if config == nil {
		config = &Config{}
	}
	if err := config.validate(); err != nil {
		return nil, err
	}
	c := *config
	c.RetryBudget = cmp.Or(c.RetryBudget, 10*time.Second)
	c.Timeout = cmp.Or(c.Timeout, conn.DefaultTimeout)
	db := &conn.Conn{Pool: pool, Schema: c.Schema, Portable: c.Portable, Timeout: c.Timeout, RetryBudget: c.RetryBudget, Now: c.Clock}
	db.Open()
	s := &Store{conn: db, config: c, known: &known.Known{}, observer: watch.New(c.Observe, conn.Class)}
	s.table = table.New(c.Schema, c.Portable, db.Silence())
	s.engine = engine.New(db, s.table, s.known, s.observer != nil)
	if c.Escrow > 0 && pool != nil {
		s.memory = memory.New(db, s.table, s.known, s.engine, c.Escrow)
	}
	s.taker = tx.NewTaker(db, s.table, s.known)
	s.runner = tx.NewRunner(s.taker, s.memory)
	s.editor = edit.New(db, s.table, s.known, s.memory, s.taker)
	s.permits = permits.New(db, s.table)
	return s, nil
}

// Close waits until the decisions on their own that are under way have ended, also those that wait
// for a row. Then it gives back the tokens prefetched by Config.Escrow. New decisions on their own
// return [ErrClosed], unless memory refuses them. Without Config.Escrow it need not be called.
// Close the pool after it. The verbs that take a transaction go on working.
func (s *Store) Close() {
	if s.usable() == nil {
		s.conn.Work.Close()
		s.table.Close()
		s.memory.Close()
	}
}

// Pool returns the pool that New was given, or nil.
func (s *Store) Pool() *pgxpool.Pool {
	if s.usable() != nil {
		return nil
	}
	return s.conn.Pool
}

// Schema returns Config.Schema.
func (s *Store) Schema() string { return s.config.Schema }

// Portable returns Config.Portable.
func (s *Store) Portable() bool { return s != nil && s.config.Portable }

// usable returns an error if the Store was not made by New.
func (s *Store) usable() error {
	if s == nil || s.conn == nil {
		return &ratelimit.FieldError{Field: "Store", Value: nil, Reason: "must come from pgstore.New"}
	}
	return nil
}

// usableIn returns an error if the Store was not made by New, or if tx is nil.
func (s *Store) usableIn(tx pgx.Tx) error {
	if err := s.usable(); err != nil {
		return err
	}
	return conn.UsableIn(tx)
}

// alone runs do on the pool, each statement a transaction of its own.
func (s *Store) alone(ctx context.Context, doing string, do func(context.Context) error) error {
	if err := s.usable(); err != nil {
		return err
	}
	return s.conn.Standalone(ctx, doing, do)
}

// watch watches a verb, if the Store is observed.
func (s *Store) watch(ctx context.Context, verb ratelimit.Verb, form ratelimit.Form, requests ...ratelimit.Request) (w watch.Watch) {
	if s == nil || s.observer == nil {
		return w
	}
	return s.observer.Begin(ctx, verb, form, requests)
}

// AllowTx takes the count of each request from its limit inside tx, or refuses and takes from
// none. The tokens are spent if and only if tx commits; rolling back, to a savepoint before it
// too, gives them back.
//
// A refusal is a [ratelimit.Result] that is not OK, not an error, and leaves tx usable. Errors are
// [ratelimit.ErrInvalid], [ratelimit.ErrExceedsCapacity], [ErrNotMigrated] and those of PostgreSQL
// and pgx, for errors.As. Under REPEATABLE READ and SERIALIZABLE a concurrent commit is a
// *pgconn.PgError with code 40001. The transaction must then be run again from its start, as
// [Store.AllowFunc] does.
//
// When granted it is one round trip. The row stays locked until tx ends, also after a refusal,
// so other transactions wait for it: take late, or commit soon. The wait is bounded by ctx, and
// by the server's lock_timeout and statement_timeout. A call for a limit with shards leaves a
// savepoint open, so thousands of them in one transaction become slow.
func (s *Store) AllowTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decideTx(ctx, tx, decide.All, false, requests)
}

// ReserveTx is like [Store.AllowTx], but goes into debt if need be, down to
// each limit's MaxReserved. When the result is OK the work may run at its
// RetryAt: schedule it for then, in the same transaction, and do not ask
// again. If tx rolls back there is neither debt nor row.
//
// A limit without MaxReserved accepts unlimited debt: nothing is refused, and a flood of
// reservations is put off further and further. Set MaxReserved to the tokens refilled in the
// longest time that a job may wait.
func (s *Store) ReserveTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decideTx(ctx, tx, decide.All, true, requests)
}

// CheckTx returns the result that [Store.AllowTx] would return, in tx and with its changes so
// far. It takes, locks and writes nothing. Under SERIALIZABLE it reads the limits' rows, as any
// SELECT does, so a concurrent take of them can fail one of the two transactions with 40001.
func (s *Store) CheckTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decideTx(ctx, tx, decide.Look, false, requests)
}

// CheckReserveTx returns the result that [Store.ReserveTx] would return. It is otherwise
// [Store.CheckTx].
func (s *Store) CheckReserveTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decideTx(ctx, tx, decide.Look, true, requests)
}

// Allow is [Store.AllowTx] on its own: it is decided and durable when it returns, and stays
// spent even if the caller fails. After an error it may be spent, and is not granted.
//
// It shares its statement with other calls. If a transaction has the row locked, it waits until its
// context ends, or without a deadline for Config.Timeout; the error is then [ErrLocked]. So it ends
// even if the caller's own transaction has the row. Calls for other rows do not wait.
func (s *Store) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decide(ctx, decide.All, false, requests)
}

// Reserve is [Store.ReserveTx] on its own. [Store.Cancel] gives a reservation back. It waits for a
// locked row as [Store.Allow] does.
func (s *Store) Reserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decide(ctx, decide.All, true, requests)
}

// Check returns the result that [Store.Allow] would return. It takes, locks and writes nothing,
// and waits for no row.
func (s *Store) Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decide(ctx, decide.Look, false, requests)
}

// CheckReserve returns the result that [Store.Reserve] would return. It takes, locks and writes
// nothing, and waits for no row.
func (s *Store) CheckReserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decide(ctx, decide.Look, true, requests)
}

// TakeTx is [Store.AllowTx] for callers that want an error unless it is granted: a refusal is
// [ratelimit.ErrRefused], as a *[ratelimit.RefusedError] with the result. It is the shortest
// form, and safe: a caller that returns the error does not go on without tokens.
func (s *Store) TakeTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) error {
	_, err := ratelimit.Granted(s.AllowTx(ctx, tx, requests...))
	return err
}

// Take is [Store.TakeTx] on its own.
func (s *Store) Take(ctx context.Context, requests ...ratelimit.Request) error {
	_, err := ratelimit.Granted(s.Allow(ctx, requests...))
	return err
}

// AllowAtMostTx takes, inside tx, as many whole tokens as there are, up to the request's count, and
// returns their number in the result's Taken. It is refused when there is less than one; RetryAfter
// is then the time until there is one. It is for a scheduler that asks how many of 100 jobs it may
// start now. A count below 1 is [ratelimit.ErrInvalid]. The count's fraction is dropped, and a
// count above the capacity takes the tokens available. Of a limit without shards it is two round
// trips when granted, and one when refused. In all else it is [Store.AllowTx].
func (s *Store) AllowAtMostTx(ctx context.Context, tx pgx.Tx, r ratelimit.Request) (ratelimit.Result, error) {
	return s.decideTx(ctx, tx, decide.AtMost, false, []ratelimit.Request{r})
}

// AllowAtMost is [Store.AllowAtMostTx] on its own: three round trips when granted.
func (s *Store) AllowAtMost(ctx context.Context, r ratelimit.Request) (ratelimit.Result, error) {
	return s.decide(ctx, decide.AtMost, false, []ratelimit.Request{r})
}

// AllowFirstTx takes, inside tx, from the first limit that can grant its request, and from no
// other, in one decision. So a customer has a bucket of its own, a guaranteed minimum, and borrows
// from a shared one when that is short.
//
// The result is about the limit that granted, which its Request names. When all refuse, Each has
// all of them, and RetryAfter is the shortest wait. A request that its limit can never grant is
// passed over; if all are, the error is [ratelimit.ErrExceedsCapacity]. Two requests for one limit
// and key are [ratelimit.ErrInvalid].
//
// A grant by the first limit is one round trip, and touches no row of the others. If it refuses,
// the rows of all are locked until tx ends, in the one order of all calls. In all else it is
// [Store.AllowTx].
func (s *Store) AllowFirstTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decideTx(ctx, tx, decide.First, false, requests)
}

// AllowFirst is [Store.AllowFirstTx] on its own.
func (s *Store) AllowFirst(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decide(ctx, decide.First, false, requests)
}

// Wait reserves for all requests, sleeps until the reservation is due, and returns its result. It
// is for the loop of a worker. It may return a little late, and never early. If a limit was paused
// meanwhile, it sleeps until the pause is over.
//
// If ctx ends first, the reservation is given back. If the deadline of ctx is nearer than the wait,
// that is at once. The error is then a [*ratelimit.WaitError], which has the wait, and is also the
// error of ctx. A refusal, which only limits with a MaxReserved make, is [ratelimit.ErrRefused].
// Config.Timeout bounds its statements and not its sleep.
//
// A process that is killed while it sleeps has spent the tokens. [Store.Close] ends waits, and
// returns when they have given back: their error is then a WaitError that is [ErrClosed].
//
// Do not call it while you hold a transaction open.
func (s *Store) Wait(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if err := s.usable(); err != nil {
		return ratelimit.Result{}, err
	}
	inner, end, err := s.conn.Work.BeginSpan(ctx)
	if err != nil {
		return ratelimit.Result{}, err
	}
	defer end()
	result, err := wait.Wait(inner, s, requests...)
	var ended *ratelimit.WaitError
	if ctx.Err() == nil && errors.Is(err, context.Canceled) && errors.As(err, &ended) {
		ended.Err = conn.ErrClosed
	}
	return result, err
}

// AllowFunc takes for requests, runs do in the same transaction, and commits: the tokens are spent
// if and only if the work of do is committed. The transaction is SERIALIZABLE, or with
// [Config.Portable] READ COMMITTED. do must use tx for all its work, return the errors of tx, and
// leave COMMIT and ROLLBACK to AllowFunc.
//
// A refusal is an error, [ratelimit.ErrRefused], with its result, and do does not run. Errors and
// panics of do roll everything back, and are passed on. On 40001 and 40P01 everything runs again,
// do included, until the deadline of ctx, or without one until Config.RetryBudget is over. If the
// outcome of COMMIT cannot be found out, the error is [ErrOutcomeUnknown]. More:
// https://github.com/pgratelimit/ratelimit/blob/main/docs/transactions.md#the-runner.
func (s *Store) AllowFunc(ctx context.Context, requests []ratelimit.Request, do func(tx pgx.Tx, result ratelimit.Result) error) (ratelimit.Result, error) {
	return s.run(ctx, false, requests, do)
}

// ReserveFunc is [Store.AllowFunc] with a reservation: do schedules its work
// for the result's RetryAt.
func (s *Store) ReserveFunc(ctx context.Context, requests []ratelimit.Request, do func(tx pgx.Tx, result ratelimit.Result) error) (ratelimit.Result, error) {
	return s.run(ctx, true, requests, do)
}

// AllowOnCommit runs do in a transaction, and takes for requests in the round trip of its COMMIT, so
// that rows are locked for one round trip. BEGIN travels with the first statement of do. An empty level
// is that of AllowFunc; READ COMMITTED is enough for a limit.
//
// do runs before the decision, so it gets no Result. (Tokens from memory, by Config.Escrow, are
// claimed before do.) A refusal rolls its work back. The error, attempts and deadline are those of
// [Store.AllowFunc]. Limits and modes are those of [Store.QueueTake].
//
// Leave COMMIT to the runner, or call tx.Commit, which takes as well. If do sends COMMIT as a statement,
// nothing is taken, and that is an error. Refusals are costly, and so is one hot key at SERIALIZABLE: see
// https://github.com/pgratelimit/ratelimit/blob/main/docs/transactions.md#in-the-round-trip-of-your-work.
func (s *Store) AllowOnCommit(ctx context.Context, requests []ratelimit.Request, level pgx.TxIsoLevel, do func(tx pgx.Tx) error) (ratelimit.Result, error) {
	if err := s.usable(); err != nil {
		return ratelimit.Result{}, err
	}
	switch level {
	case "":
		level = s.table.Level
	case pgx.RepeatableRead, pgx.ReadCommitted, pgx.ReadUncommitted, s.table.Level:
	default:
		return ratelimit.Result{}, &ratelimit.FieldError{Field: "IsoLevel", Value: level, Reason: "must be one of pgx's, or empty, and not SERIALIZABLE with Config.Portable"}
	}
	return s.runWatched(ctx, false, requests, do == nil, func(w *watch.Watch, requests []ratelimit.Request) (ratelimit.Result, error) {
		return s.runner.RunOnCommit(ctx, w, requests, level, do)
	})
}

// decide decides the requests of a verb on their own.
func (s *Store) decide(ctx context.Context, verb decide.Verb, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	if err := s.usable(); err != nil {
		return ratelimit.Result{}, err
	}
	if s.observer == nil {
		return s.decideWatched(ctx, nil, verb, reserve, requests)
	}
	var w watch.Watch // its time begins only if memory does not answer
	w.BeginLater(s.observer, ctx, verb.Observed(reserve), ratelimit.FormOwn, requests)
	result, err := s.decideWatched(ctx, &w, verb, reserve, requests)
	w.Report(&result, err)
	return result, err
}

func (s *Store) decideWatched(ctx context.Context, w *watch.Watch, verb decide.Verb, reserve bool, requests []ratelimit.Request) (result ratelimit.Result, err error) {
	var p *engine.Pending
	plain := false
	if s.memory == nil {
		p = engine.NewPending()
		p.Call, plain = s.known.Definitions.Plain(verb, reserve, p.One[:0], requests)
	}
	if !plain && decide.Moded(requests) {
		if err := ctx.Err(); err != nil {
			return ratelimit.Result{}, err
		}
		return decide.ByMode(verb, s.conn.Instant(), requests, func(left []ratelimit.Request) (ratelimit.Result, error) {
			return s.decideWatched(ctx, w, verb, reserve, left)
		})
	}
	if s.memory != nil && verb == decide.All {
		return s.memory.Decide(ctx, w, reserve, requests)
	}
	if p == nil {
		p = &engine.Pending{}
	}
	if p.Check = verb == decide.Look; !plain {
		if p.Call, err = s.known.Definitions.Call(verb, reserve, p.One[:0], requests); err != nil {
			return ratelimit.Result{}, err
		}
	}
	if result, err = s.engine.Decide(ctx, w, p); err == nil && s.memory == nil {
		p.Free()
	}
	return result, err
}

// decideTx decides the requests of a verb in tx.
func (s *Store) decideTx(ctx context.Context, tx pgx.Tx, verb decide.Verb, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	if err := s.usable(); err != nil {
		return ratelimit.Result{}, err
	}
	if s.observer == nil {
		return s.taker.Decide(ctx, tx, verb, reserve, requests)
	}
	w := s.observer.Begin(ctx, verb.Observed(reserve), ratelimit.FormTx, requests)
	result, err := s.taker.Decide(ctx, tx, verb, reserve, requests)
	w.Report(&result, err)
	return result, err
}

// run runs do in a transaction of the runner that takes first.
func (s *Store) run(ctx context.Context, reserve bool, requests []ratelimit.Request, do tx.Func) (ratelimit.Result, error) {
	return s.runWatched(ctx, reserve, requests, do == nil, func(w *watch.Watch, requests []ratelimit.Request) (ratelimit.Result, error) {
		return s.runner.Run(ctx, w, reserve, requests, do)
	})
}

// runWatched runs the runner. noFunc reports that the caller's function is nil.
func (s *Store) runWatched(ctx context.Context, reserve bool, requests []ratelimit.Request, noFunc bool, run func(*watch.Watch, []ratelimit.Request) (ratelimit.Result, error)) (result ratelimit.Result, err error) {
	if err := s.usable(); err != nil {
		return ratelimit.Result{}, err
	}
	if s.config.Catalog != nil {
		requests = decide.Resolved(s.config.Catalog, requests)
	}
	var w watch.Watch
	observed := &result
	if s.observer != nil {
		w = s.observer.Begin(ctx, decide.All.Observed(reserve), ratelimit.FormRunner, requests)
		defer func() { w.Report(observed, err) }() // also when the function panics
	}
	if noFunc {
		return ratelimit.Result{}, errNilFunc
	}
	ran, err := run(&w, requests)
	observed = &ran
	if err != nil && ran.OK { // it was rolled back, so there is nothing to cancel
		return ratelimit.Result{}, err
	}
	return ran, err
}
