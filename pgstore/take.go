package pgstore

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// AllowTx takes what is asked from all the limits inside tx, or refuses and
// takes from none. What it takes is spent if and only if tx commits; rolling
// back, to a savepoint before it too, gives it back.
//
// A refusal is a [ratelimit.Result] that is not OK, not an error, and leaves
// tx usable. Errors are [ratelimit.ErrInvalid], [ratelimit.ErrNever],
// [ErrNotMigrated] and what PostgreSQL and pgx return, within reach of
// errors.As: under REPEATABLE READ and SERIALIZABLE a concurrent commit is a
// *pgconn.PgError with code 40001, and the transaction must be run again from
// its start, as [Store.AllowFunc] does.
//
// When granted it is one round trip. A row that was asked stays locked until tx
// ends, in vain too, so others who want the same row wait: take late, or commit
// soon. Do not decide on your own meanwhile: see [Store.Allow]. A call for several
// limits or shards leaves a savepoint open, so thousands of them in one transaction
// become slow.
func (s *Store) AllowTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.takeTx(ctx, tx, false, requests)
}

// ReserveTx is like [Store.AllowTx], but goes into debt if need be, down to
// each limit's MaxReserved. When the result is OK the work may run at its
// RetryAt: schedule it for then, in the same transaction, and do not ask
// again. If tx rolls back there is neither debt nor row.
func (s *Store) ReserveTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.takeTx(ctx, tx, true, requests)
}

// Allow is [Store.AllowTx] on its own: it is decided and durable when it
// returns, and stays spent whatever happens to the caller.
//
// It shares its statement with others', and waits with them for a row that a
// transaction has locked. So call it before a transaction of yours takes, or after
// that has ended: within, it may wait for somebody who waits for you, which
// PostgreSQL does not see, until the end of ctx.
func (s *Store) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.takeOwn(ctx, false, requests)
}

// Reserve is [Store.ReserveTx] on its own. [Store.Cancel] gives a reservation
// back that is not wanted any more.
func (s *Store) Reserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.takeOwn(ctx, true, requests)
}

func (s *Store) takeTx(ctx context.Context, tx pgx.Tx, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	call, err := ratelimit.NewCall(reserve, requests...)
	if err != nil {
		return ratelimit.Result{}, err
	}
	return s.take(ctx, &scope{q: tx, foreign: true}, call)
}

func (s *Store) takeOwn(ctx context.Context, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	call, err := ratelimit.NewCall(reserve, requests...)
	if err != nil {
		return ratelimit.Result{}, err
	}
	return s.decide(ctx, call, false)
}

// scope is where a call is decided.
type scope struct {
	q          querier
	autocommit bool // q is no transaction
	foreign    bool // q is the caller's transaction, whose snapshot is not touched without need

	// Of the runner, whose transaction begins with the call.
	begin  string  // what begins it, "" in all other scopes
	begun  bool    // it was sent
	shards []int   // to take from, by ask
	first  *first  // what became of the first take, if that was sent ahead
	xid    *string // the transaction's ID, once it has one

	undoable bool // there is something to undo when the call is refused
}

// batch begins a batch, and with the first of them the runner's transaction.
func (sc *scope) batch() *pgx.Batch {
	var batch pgx.Batch
	if sc.begin != "" && !sc.begun {
		batch.Queue(sc.begin)
		sc.begun = true
	}
	return &batch
}

const (
	savepointSQL  = `SAVEPOINT ratelimit_take`
	rollbackToSQL = `ROLLBACK TO SAVEPOINT ratelimit_take`
	releaseSQL    = `RELEASE SAVEPOINT ratelimit_take`
)

// mark comes before takes that a refusal must undo: of several rows, or of a
// shard. A take that is refused keeps its row locked, and who goes on to other
// rows must let go of it first, or two who do would deadlock. When all is
// granted the savepoint stays open rather than cost another round trip:
// whatever ends the transaction, or a savepoint around it, ends it too.
func (sc *scope) mark(batch *pgx.Batch) {
	if !sc.undoable && sc.begin == "" {
		batch.Queue(savepointSQL)
	}
	sc.undoable = true
}

// undo gives back what came after the mark, and frees the rows. In a
// transaction that began with the call nothing came before it, so that begins
// again, with a new snapshot.
func (sc *scope) undo(batch *pgx.Batch) {
	switch {
	case !sc.undoable:
		return
	case sc.begin != "":
		batch.Queue("ROLLBACK")
		batch.Queue(sc.begin)
	default:
		batch.Queue(rollbackToSQL)
		batch.Queue(releaseSQL)
	}
	sc.undoable = false
}

func (s *Store) rollback(ctx context.Context, sc *scope) error {
	if !sc.undoable {
		return nil
	}
	batch := sc.batch()
	sc.undo(batch)
	if err := sc.q.SendBatch(ctx, batch).Close(); err != nil {
		return fault("roll back", err)
	}
	return nil
}

// outcome is what became of a part.
type outcome struct {
	after ratelimit.State
	taken bool
}

// scan reads a row that a take returned, if it did.
func (o *outcome) scan(row pgx.Row, more ...any) error {
	err := row.Scan(append([]any{&o.after.Value, &o.after.TS}, more...)...)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	o.taken = err == nil
	return err
}

// rounds bounds how often a call looks again because others changed a row
// between its looking and its taking. The last round looks under locks.
const rounds = 4

// take decides a call. It tries the rows that most likely have enough without
// looking at them. Only when one refuses does it look, at all shards of all
// its limits, and refuses by what it sees or tries what it sees.
func (s *Store) take(ctx context.Context, sc *scope, call ratelimit.Call) (ratelimit.Result, error) {
	if parts, ok := s.guess(call, sc.shards); ok {
		if result, ok, err := s.try(ctx, sc, call, parts); ok || err != nil {
			return result, err
		}
	}
	for round := 1; ; round++ {
		found, err := s.look(ctx, sc, call, round == rounds)
		if err != nil {
			return ratelimit.Result{}, fault("look", err)
		}
		if parts, ok := found.plan(call); ok {
			if result, ok, err := s.try(ctx, sc, call, parts); ok || err != nil {
				return result, err
			}
			if round < rounds {
				continue
			}
		}
		return found.refusal(call), s.rollback(ctx, sc)
	}
}

// guess names one row for each of the call's limits, in the given shards if
// any; false if a count fits no single shard.
func (s *Store) guess(call ratelimit.Call, shards []int) ([]part, bool) {
	parts := make([]part, len(call.Asks))
	for i, a := range call.Asks {
		var ok bool
		if parts[i], ok = s.guessPart(i, a, shards); !ok {
			return nil, false
		}
	}
	return parts, true
}

func (s *Store) guessPart(i int, a ratelimit.Ask, shards []int) (part, bool) {
	p := newPart(i, a, 0, a.Count)
	if a.Definition.Shards == 1 {
		return p, true
	}
	if a.Count > p.definition.Capacity {
		return part{}, false
	}
	p.floor = 0 // debt only when no shard has enough, which is not known yet
	if shards != nil {
		p.shard = shards[i]
	} else {
		p.shard = s.shards.choose(a, upTo(a.Definition.Shards))
	}
	return p, true
}

func upTo(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

func newPart(ask int, a ratelimit.Ask, shard int, count float64) part {
	return part{
		ask: ask, definition: a.Definition.Shard(), key: a.Key, shard: shard, count: count,
		floor: a.Floor / float64(a.Definition.Shards), origin: a.Definition.Origin(a.Key),
	}
}

// try takes all parts or none, in one round trip.
func (s *Store) try(ctx context.Context, sc *scope, call ratelimit.Call, parts []part) (ratelimit.Result, bool, error) {
	var (
		outcomes []outcome
		at       time.Time
		err      error
	)
	switch {
	case len(parts) > 1, sharded(call) && sc.begin == "":
		outcomes, at, err = s.takeAll(ctx, sc, parts)
	case sc.begin != "":
		outcomes = make([]outcome, 1)
		outcomes[0], at, err = s.takeFirst(ctx, sc, sharded(call), &parts[0])
	default:
		outcomes = make([]outcome, 1)
		outcomes[0], at, err = s.takeOne(ctx, sc.q, call, &parts[0])
	}
	if err != nil {
		return ratelimit.Result{}, false, fault("take", err)
	}
	for _, o := range outcomes {
		if !o.taken {
			return ratelimit.Result{}, false, nil
		}
	}
	return s.granted(call, parts, outcomes, at), true, nil
}

// takeOne takes one part.
func (s *Store) takeOne(ctx context.Context, q querier, call ratelimit.Call, p *part) (o outcome, at time.Time, err error) {
	now := s.clock()
	if s.config.Portable && p.definition.Kind == ratelimit.KindTokenBucket && !call.Reserve {
		// The bare upsert, which Citus runs several times faster than one in a
		// CTE. The row's ts stands for the instant: it is that, but after a
		// pause or when the clock went back.
		err = o.scan(q.QueryRow(ctx, s.sql.of(&p.definition).bare, p.takeArgs(now)...))
		at = o.after.TS
		if now != nil {
			at = *now
		}
	} else {
		err = o.scan(q.QueryRow(ctx, s.sql.of(&p.definition).at, p.takeArgs(now)...), &at)
	}
	return o, at, err
}

// takeFirst takes one part in the transaction that it begins.
func (s *Store) takeFirst(ctx context.Context, sc *scope, shard bool, p *part) (o outcome, at time.Time, err error) {
	batch := sc.batch()
	if shard {
		sc.mark(batch)
	}
	if f := sc.first; f != nil {
		sc.first = nil
		return f.outcome, f.at, f.err
	}
	batch.Queue(s.sql.of(&p.definition).first, p.takeArgs(s.clock())...).QueryRow(func(row pgx.Row) error {
		return o.scan(row, &at, &sc.xid)
	})
	err = sc.q.SendBatch(ctx, batch).Close()
	return o, at, err
}

// takeAll takes parts in one batch, so that it can be undone.
func (s *Store) takeAll(ctx context.Context, sc *scope, parts []part) ([]outcome, time.Time, error) {
	now := s.clock()
	batch := sc.batch()
	sc.mark(batch)
	outcomes := make([]outcome, len(parts))
	for i := range parts {
		s.queueTake(batch, now, &parts[i], &outcomes[i])
	}
	var at time.Time
	batch.Queue(clockSQL, now).QueryRow(func(row pgx.Row) error { return row.Scan(&at, &sc.xid) })
	if err := sc.q.SendBatch(ctx, batch).Close(); err != nil {
		return nil, time.Time{}, err
	}
	return outcomes, at, nil
}

func (s *Store) queueTake(batch *pgx.Batch, now *time.Time, p *part, o *outcome) {
	batch.Queue(s.sql.of(&p.definition).bare, p.takeArgs(now)...).QueryRow(func(row pgx.Row) error {
		return o.scan(row)
	})
}

// granted is the result of a call whose parts were all taken.
func (s *Store) granted(call ratelimit.Call, parts []part, outcomes []outcome, at time.Time) ratelimit.Result {
	at = at.UTC()
	statuses := make([]ratelimit.Status, len(call.Asks))
	first := 0
	for i, a := range call.Asks {
		last := first + 1
		for last < len(parts) && parts[last].ask == i {
			last++
		}
		if a.Definition.Shards == 1 {
			statuses[i] = a.Taken(outcomes[first].after, at)
		} else {
			statuses[i] = s.shards.taken(a, parts[first:last], outcomes[first:last], at)
		}
		s.refusals.drop(limitKey{a.Definition.Name, a.Key})
		first = last
	}
	result := call.Result(at, statuses)
	result.Receipt = ratelimit.NewReceipt(payments(call, parts))
	return result
}

func payments(call ratelimit.Call, parts []part) []ratelimit.Payment {
	paid := make([]ratelimit.Payment, len(parts))
	for i, p := range parts {
		paid[i] = ratelimit.Payment{Limit: call.Asks[p.ask].Limit, Key: p.key, Shard: p.shard, Tokens: p.count}
	}
	return paid
}
