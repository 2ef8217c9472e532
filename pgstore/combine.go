package pgstore

import (
	"context"
	"errors"
	"hash/maphash"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
)

// Decisions on their own are combined: while one statement is under way, the
// calls that arrive gather, and the next statement decides all of them.
// Nothing waits for company. A call that meets no other is decided at once, on
// its caller's goroutine.
//
// Calls that gathered for one row are granted together, if there is enough for
// all of them, by one UPDATE, which is the same for one call and for many; see
// group. The others, and calls for several limits, are decided by reading
// their rows, deciding in memory with the algebra of the root package, in the
// order of arrival, and writing each changed row back if it is still what was
// read; see sheet. The write is what makes a decision: it changes one row at
// most once, whoever else is at work. Calls whose rows changed in between are
// decided again, this time under locks, and so are those that take from
// several rows, all or nothing.

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

	refusing bool // most of the last calls were refused; for whoever keeps the lane busy
}

// turn is a call that waits for its decision.
type turn struct {
	ctx     context.Context
	call    ratelimit.Call
	check   bool
	company *company // that is decided together, once it is; the lane's mu guards it

	// For the round that is under way.
	place int     // of the turn, among those of the round
	shard int     // to take from
	floor float64 // the lowest value to leave behind there
	rows  []int   // where the rows of each ask begin, in the sheet

	refused *found // what it was refused by, if it was read

	finished bool
	done     chan struct{} // closed once finished
	result   ratelimit.Result
	err      error
}

func (t *turn) finish(result ratelimit.Result, err error) {
	t.result, t.err, t.finished = result, err, true
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
	t := &turn{ctx: ctx, call: call, check: check, done: make(chan struct{})}
	l := s.combiner.lane(call)
	l.mu.Lock()
	if l.busy {
		l.waiting = append(l.waiting, t)
		l.mu.Unlock()
		return t.wait(l)
	}
	l.busy = true
	l.mu.Unlock()
	defer s.next(l)
	s.settleTurns(ctx, l, []*turn{t})
	return t.result, t.err
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
func (t *turn) wait(l *lane) (ratelimit.Result, error) {
	select {
	case <-t.done:
		return t.result, t.err
	case <-t.ctx.Done():
		l.mu.Lock()
		company := t.company
		l.mu.Unlock()
		company.leave()
		return ratelimit.Result{}, fault("decide", t.ctx.Err())
	}
}

// company is callers whose calls are decided together. One who gives up must
// not fail the others; when all have, it is cancelled.
type company struct {
	left   atomic.Int64
	cancel context.CancelFunc
}

func (c *company) leave() {
	if c != nil && c.left.Add(-1) == 0 {
		c.cancel()
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
		turns, ctx, cancel := l.gathered()
		if turns == nil {
			return
		}
		if len(turns) > 0 {
			s.settleTurns(ctx, l, turns)
		}
		cancel()
	}
}

// gathered returns the turns that are next, but for those whose callers have
// given up, and a context that is over when all callers have. If nobody waits
// it returns no turns, nil, and the lane is free.
func (l *lane) gathered() ([]*turn, context.Context, context.CancelFunc) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := min(len(l.waiting), mostCombined)
	if n == 0 {
		l.busy, l.waiting = false, nil
		return nil, nil, nil
	}
	turns := slices.Clone(l.waiting[:n])
	l.waiting = slices.Delete(l.waiting, 0, n)
	ctx, cancel := context.WithCancel(context.WithoutCancel(turns[0].ctx))
	turns = slices.DeleteFunc(turns, func(t *turn) bool { return t.ctx.Err() != nil })
	company := &company{cancel: cancel}
	company.left.Store(int64(len(turns)))
	for _, t := range turns {
		t.company = company
	}
	return turns, ctx, cancel
}

// settleTurns finishes every turn. If the database finds fault with a
// statement for many, each is decided by itself, so that only the one at
// fault fails.
func (s *Store) settleTurns(ctx context.Context, l *lane, turns []*turn) {
	rounds := []func(context.Context, []*turn) error{s.roundQuick, s.roundRead, s.roundLocked}
	if l.refusing {
		rounds = rounds[1:] // not worth an attempt
	}
	left := turns
	err := s.retry(ctx, func() error {
		for len(left) > 0 {
			round := rounds[0]
			rounds = rounds[min(1, len(rounds)-1):]
			err := round(ctx, left)
			left = slices.DeleteFunc(slices.Clone(left), func(t *turn) bool { return t.finished })
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		refused := 0
		for _, t := range turns {
			if !t.result.OK {
				refused++
			}
		}
		l.refusing = 2*refused > len(turns)
		return
	}
	var pgErr *pgconn.PgError
	if len(left) > 1 && errors.As(err, &pgErr) && !serialization(err) {
		for _, t := range left {
			s.settleTurns(ctx, l, []*turn{t})
		}
		return
	}
	for _, t := range left {
		t.finish(ratelimit.Result{}, err)
	}
}

// roundRead finishes turns, but for those that must be decided again.
func (s *Store) roundRead(ctx context.Context, turns []*turn) error {
	sh := newSheet(turns)
	if err := s.readSheet(ctx, s.pool, sh, false); err != nil {
		return fault("read", err)
	}
	if multiple := sh.decide(s, turns); multiple {
		return nil
	}
	// Two transactions, since one would lock rows out of order. When the second
	// fails, those whom the first served have been served.
	if err := s.insertRows(ctx, s.pool, sh); err != nil {
		return fault("write", err)
	}
	err := s.updateRows(ctx, s.pool, sh, false)
	sh.finish(s, turns)
	if err != nil {
		return fault("write", err)
	}
	return nil
}

// roundLocked is roundRead with all rows locked, in their one order, from the
// reading to the writing. Rows that are missing cannot be locked, so they are
// made first: full, which means the same.
func (s *Store) roundLocked(ctx context.Context, turns []*turn) error {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return fault("acquire", err)
	}
	defer conn.Release() // which closes a connection that is still in a transaction
	for {
		sh := newSheet(turns)
		if err := s.readSheet(ctx, conn, sh, true); err != nil {
			return fault("lock", err)
		}
		if sh.complete() {
			sh.decide(s, turns)
			if err := s.updateRows(ctx, conn, sh, true); err != nil {
				return fault("write", err)
			}
			sh.finish(s, turns)
			return nil
		}
		if _, err := conn.Exec(ctx, "ROLLBACK"); err != nil {
			return fault("roll back", err)
		}
		sh.fill()
		if err := s.insertRows(ctx, conn, sh); err != nil {
			return fault("write", err)
		}
	}
}
