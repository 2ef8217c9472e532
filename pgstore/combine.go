package pgstore

import (
	"context"
	"errors"
	"hash/maphash"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
)

// Decisions on their own are combined: while one statement is under way, the
// calls that arrive gather, and the next statement decides all of them.
// Nothing waits for company. A call that meets no other is decided at once, on
// its caller's goroutine, by one UPDATE.
//
// Calls that gathered are decided by reading their rows, deciding in memory
// with the algebra of the root package, in the order of arrival, and writing
// each changed row back if it is still what was read. The write is what makes
// a decision: it changes one row at most once, whoever else is at work. Calls
// whose rows changed in between are decided again, this time under locks, and
// so are those that take from several rows, all or nothing.

// lanes is how many statements, and so how many connections, decide at a time.
// Calls for one limit and key share a lane.
const lanes = 2

// mostCombined bounds the calls that one statement decides.
const mostCombined = 1024

type combiner struct {
	seed  maphash.Seed
	lanes [lanes]lane
}

type lane struct {
	mu      sync.Mutex
	busy    bool
	waiting []*turn
}

// turn is a call that waits for its decision.
type turn struct {
	ctx   context.Context
	call  ratelimit.Call
	check bool
	rows  []int // where the rows of each ask begin, in the sheet of a round

	done   chan struct{} // closed once result or err are there
	result ratelimit.Result
	err    error
}

func (t *turn) finish(result ratelimit.Result, err error) {
	t.result, t.err = result, err
	close(t.done)
}

// decide decides a call on its own.
func (s *Store) decide(ctx context.Context, call ratelimit.Call, check bool) (ratelimit.Result, error) {
	if s.pool == nil {
		return ratelimit.Result{}, ErrNoPool
	}
	if !check {
		if result, ok := s.refusals.answer(call, s.clock()); ok {
			return result, ctx.Err()
		}
	}
	if err := s.work.begin(); err != nil {
		return ratelimit.Result{}, err
	}
	defer s.work.end()
	if s.config.Portable {
		return s.decidePortable(ctx, call, check)
	}
	l := s.combiner.lane(call)
	l.mu.Lock()
	if l.busy {
		t := &turn{ctx: ctx, call: call, check: check, done: make(chan struct{})}
		l.waiting = append(l.waiting, t)
		l.mu.Unlock()
		return t.wait()
	}
	l.busy = true
	l.mu.Unlock()
	defer s.next(l)
	return s.decideAlone(ctx, call, check)
}

// decidePortable decides a call with the statements of the caller's
// transaction. A single row needs none of its own.
func (s *Store) decidePortable(ctx context.Context, call ratelimit.Call, check bool) (result ratelimit.Result, err error) {
	switch {
	case check:
		err = s.own(ctx, func(q querier) error {
			result, err = s.checkCall(ctx, q, call)
			return err
		})
	case len(call.Asks) == 1 && !sharded(call):
		err = s.own(ctx, func(q querier) error {
			result, err = s.take(ctx, &scope{q: q, autocommit: true}, call)
			return err
		})
	default:
		err = s.ownTx(ctx, func(tx pgx.Tx) error {
			result, err = s.take(ctx, &scope{q: tx}, call)
			return err
		})
	}
	if err != nil {
		return ratelimit.Result{}, err
	}
	return result, nil
}

func (c *combiner) lane(call ratelimit.Call) *lane {
	first := call.Asks[0]
	return &c.lanes[maphash.Comparable(c.seed, limitKey{first.Definition.Name, first.Key})%lanes]
}

// wait returns early when the caller gives up. A call that has not been sent
// by then is not decided any more.
func (t *turn) wait() (ratelimit.Result, error) {
	select {
	case <-t.done:
		return t.result, t.err
	case <-t.ctx.Done():
		return ratelimit.Result{}, fault("decide", t.ctx.Err())
	}
}

// next hands the lane on to those who gathered meanwhile, if any.
func (s *Store) next(l *lane) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		l.busy = false
		return
	}
	s.work.more()
	go s.drain(l)
}

// drain decides what gathers in a lane until nothing does.
func (s *Store) drain(l *lane) {
	defer s.work.end()
	for {
		// Those who just got their answers may be about to ask again. Let them,
		// if they are ready to; it costs a lone caller nothing.
		runtime.Gosched()
		l.mu.Lock()
		n := min(len(l.waiting), mostCombined)
		if n == 0 {
			l.busy, l.waiting = false, nil
			l.mu.Unlock()
			return
		}
		turns := slices.Clone(l.waiting[:n])
		l.waiting = slices.Delete(l.waiting, 0, n)
		l.mu.Unlock()
		s.decideTogether(turns)
	}
}

// decideAlone decides one call.
func (s *Store) decideAlone(ctx context.Context, call ratelimit.Call, check bool) (result ratelimit.Result, err error) {
	if !check && len(call.Asks) == 1 {
		result, ok, err := s.takeQuick(ctx, call)
		if ok || err != nil && !serialization(err) {
			return result, err
		}
	}
	t := &turn{ctx: ctx, call: call, check: check, done: make(chan struct{})}
	s.settleTurns(ctx, []*turn{t})
	return t.result, t.err
}

// takeQuick takes from the one row that most likely has enough. It neither
// writes nor locks anything unless it takes.
func (s *Store) takeQuick(ctx context.Context, call ratelimit.Call) (result ratelimit.Result, ok bool, err error) {
	parts, ok := s.guess(call, nil)
	if !ok {
		return ratelimit.Result{}, false, nil
	}
	var (
		o  outcome
		at time.Time
	)
	err = s.pool.QueryRow(ctx, s.sql.takeQuick, parts[0].quickArgs(s.clock())...).Scan(&o.after.Value, &o.after.TS, &at)
	if errors.Is(err, pgx.ErrNoRows) {
		return ratelimit.Result{}, false, nil
	}
	if err != nil {
		return ratelimit.Result{}, false, fault("take", err)
	}
	return s.granted(call, parts, []outcome{o}, at), true, nil
}

// decideTogether decides the turns whose callers are still there.
func (s *Store) decideTogether(turns []*turn) {
	turns = slices.DeleteFunc(turns, func(t *turn) bool { return t.ctx.Err() != nil })
	if len(turns) == 0 {
		return
	}
	ctx, stop := untilAllGone(turns)
	defer stop()
	s.settleTurns(ctx, turns)
}

// untilAllGone is a context that is over when those of all turns are: one
// caller who gives up must not fail the others.
func untilAllGone(turns []*turn) (context.Context, func()) {
	for _, t := range turns {
		if t.ctx.Done() == nil {
			return context.WithoutCancel(t.ctx), func() {}
		}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(turns[0].ctx))
	var left atomic.Int64
	left.Store(int64(len(turns)))
	stops := make([]func() bool, len(turns))
	for i, t := range turns {
		stops[i] = context.AfterFunc(t.ctx, func() {
			if left.Add(-1) == 0 {
				cancel()
			}
		})
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		cancel()
	}
}

// settleTurns finishes every turn. If the database finds fault with a
// statement for many, each is decided by itself, so that only the one at
// fault fails.
func (s *Store) settleTurns(ctx context.Context, turns []*turn) {
	locked := false
	err := s.retry(ctx, func() error {
		for len(turns) > 0 {
			var err error
			if turns, err = s.round(ctx, turns, locked); err != nil {
				return err
			}
			locked = true
		}
		return nil
	})
	if err == nil {
		return
	}
	var pgErr *pgconn.PgError
	if len(turns) > 1 && errors.As(err, &pgErr) && !serialization(err) {
		for _, t := range turns {
			s.settleTurns(ctx, []*turn{t})
		}
		return
	}
	for _, t := range turns {
		t.finish(ratelimit.Result{}, err)
	}
}

// round decides turns once, and returns those that are not finished, in their
// order: they must be decided again, under locks.
func (s *Store) round(ctx context.Context, turns []*turn, locked bool) (left []*turn, err error) {
	if locked {
		return s.roundLocked(ctx, turns)
	}
	sh := newSheet(turns)
	if err := s.readSheet(ctx, s.pool, sh, false); err != nil {
		return turns, fault("read", err)
	}
	if multiple := sh.decide(s, turns); multiple {
		return turns, nil
	}
	// Two transactions, since one would lock rows out of order. When the second
	// fails, those whom the first served have been served.
	if err := s.insertRows(ctx, s.pool, sh); err != nil {
		return turns, fault("write", err)
	}
	if err := s.updateRows(ctx, s.pool, sh, false); err != nil {
		return sh.finish(turns), fault("write", err)
	}
	return sh.finish(turns), nil
}

// roundLocked is round with all rows locked, in their one order, from the
// reading to the writing. Rows that are missing cannot be locked, so they are
// made first: full, which means the same.
func (s *Store) roundLocked(ctx context.Context, turns []*turn) (left []*turn, err error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return turns, fault("acquire", err)
	}
	defer conn.Release() // which closes a connection that is still in a transaction
	for {
		sh := newSheet(turns)
		if err := s.readSheet(ctx, conn, sh, true); err != nil {
			return turns, fault("lock", err)
		}
		if sh.complete() {
			sh.decide(s, turns)
			if err := s.updateRows(ctx, conn, sh, true); err != nil {
				return turns, fault("write", err)
			}
			return sh.finish(turns), nil
		}
		if _, err := conn.Exec(ctx, "ROLLBACK"); err != nil {
			return turns, fault("roll back", err)
		}
		sh.fill()
		if err := s.insertRows(ctx, conn, sh); err != nil {
			return turns, fault("write", err)
		}
	}
}
