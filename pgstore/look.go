package pgstore

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// CheckTx is what [Store.AllowTx] would say, in tx and with what tx has done
// already. It takes, locks and writes nothing. Under SERIALIZABLE it reads
// the limits' rows, as any SELECT does, so a concurrent take of them can fail
// one of the two transactions with 40001.
func (s *Store) CheckTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.check(ctx, tx, false, requests)
}

// CheckReserveTx is to [Store.ReserveTx] what [Store.CheckTx] is to AllowTx.
func (s *Store) CheckReserveTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.check(ctx, tx, true, requests)
}

// Check is what [Store.Allow] would say. It takes, locks and writes nothing.
func (s *Store) Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.checkOwn(ctx, false, requests)
}

// CheckReserve is what [Store.Reserve] would say. It takes, locks and writes
// nothing.
func (s *Store) CheckReserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.checkOwn(ctx, true, requests)
}

func (s *Store) checkOwn(ctx context.Context, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	call, err := ratelimit.NewCall(reserve, requests...)
	if err != nil {
		return ratelimit.Result{}, err
	}
	return s.decide(ctx, call, true)
}

func (s *Store) check(ctx context.Context, tx pgx.Tx, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	call, err := ratelimit.NewCall(reserve, requests...)
	if err != nil {
		return ratelimit.Result{}, err
	}
	return s.checkCall(ctx, tx, call)
}

func (s *Store) checkCall(ctx context.Context, q querier, call ratelimit.Call) (ratelimit.Result, error) {
	found, err := s.read(ctx, &scope{q: q}, call)
	if err != nil {
		return ratelimit.Result{}, fault("check", err)
	}
	return found.result(call), nil
}

// found is the state of all shards of a call's limits, in the order of its
// asks, at one instant.
type found struct {
	states [][]ratelimit.State
	at     time.Time
}

// look finds the states by which a call is refused or tried again.
func (s *Store) look(ctx context.Context, sc *scope, call ratelimit.Call, last bool) (found, error) {
	if last && !sc.autocommit {
		return s.lock(ctx, sc, call)
	}
	if sc.foreign && sharded(call) {
		// Reading shards in the caller's transaction would make it conflict
		// with every other under SERIALIZABLE, so it is only done to refuse,
		// by what that transaction itself has done.
		f, ok, err := s.peek(ctx, sc, call)
		if err != nil {
			return found{}, err
		}
		if ok {
			if _, ok := f.plan(call); ok {
				return f, nil
			}
		}
	}
	return s.read(ctx, sc, call)
}

func sharded(call ratelimit.Call) bool {
	for _, a := range call.Asks {
		if a.Definition.Shards > 1 {
			return true
		}
	}
	return false
}

// peekWait bounds the wait for a connection to peek on. The caller holds one
// already, and a pool of callers who wait for a second one stands still.
const peekWait = 50 * time.Millisecond

// peek reads on a connection of its own; ok is false when none is free.
func (s *Store) peek(ctx context.Context, sc *scope, call ratelimit.Call) (f found, ok bool, err error) {
	if s.pool == nil {
		return found{}, false, nil
	}
	if err := s.rollback(ctx, sc); err != nil {
		return found{}, false, err
	}
	wait, cancel := context.WithTimeout(ctx, peekWait)
	defer cancel()
	conn, err := s.pool.Acquire(wait)
	if err != nil {
		return found{}, false, ctx.Err()
	}
	defer conn.Release()
	f, err = s.read(ctx, &scope{q: conn}, call)
	return f, err == nil, err
}

// read reads the states without locking them, and after giving back what the
// scope has taken in vain.
func (s *Store) read(ctx context.Context, sc *scope, call ratelimit.Call) (found, error) {
	now := s.clock()
	f := found{states: make([][]ratelimit.State, len(call.Asks))}
	rows := make([]struct {
		shards []int32
		values []float64
		ts     []time.Time
	}, len(call.Asks))
	batch := sc.batch()
	sc.undo(batch)
	for i, a := range call.Asks {
		row := &rows[i]
		batch.Queue(s.sql.states, a.Definition.Name, a.Key, now).QueryRow(func(r pgx.Row) error {
			return r.Scan(&row.shards, &row.values, &row.ts, &f.at)
		})
	}
	if err := sc.q.SendBatch(ctx, batch).Close(); err != nil {
		return found{}, err
	}
	f.at = f.at.UTC()
	for i, a := range call.Asks {
		fresh := a.Definition.Shard().Fresh(a.Key, f.at)
		f.states[i] = make([]ratelimit.State, a.Definition.Shards)
		for shard := range f.states[i] {
			f.states[i][shard] = fresh
		}
		for j, shard := range rows[i].shards {
			if int(shard) < a.Definition.Shards {
				f.states[i][shard] = ratelimit.State{Value: rows[i].values[j], TS: rows[i].ts[j]}
			}
		}
	}
	s.noteAll(call, f)
	return f, nil
}

func (s *Store) noteAll(call ratelimit.Call, f found) {
	for i, a := range call.Asks {
		if a.Definition.Shards > 1 {
			for shard, state := range f.states[i] {
				s.shards.note(a, shard, state)
			}
		}
	}
}

// lock takes nothing from every shard of every limit, in order and behind a
// savepoint: what it finds stays so until the savepoint or transaction ends.
// A taking of nothing is not a read, so it makes no predicate locks either.
func (s *Store) lock(ctx context.Context, sc *scope, call ratelimit.Call) (found, error) {
	batch := sc.batch()
	sc.undo(batch)
	sc.mark(batch)
	if err := sc.q.SendBatch(ctx, batch).Close(); err != nil {
		return found{}, err
	}
	parts := everyRow(call)
	outcomes, at, err := s.force(ctx, sc.q, parts)
	if err != nil {
		return found{}, err
	}
	f := found{states: make([][]ratelimit.State, len(call.Asks)), at: at}
	for i, p := range parts {
		f.states[p.ask] = append(f.states[p.ask], outcomes[i].after)
	}
	return f, nil
}

// plan spreads every ask of the call over its shards; false if one is short.
func (f found) plan(call ratelimit.Call) ([]part, bool) {
	parts := make([]part, 0, len(call.Asks))
	for i, a := range call.Asks {
		if a.Definition.Shards == 1 {
			if _, ok := a.Definition.Take(f.states[i][0], f.at, a.Count, a.Floor); !ok {
				return nil, false
			}
			p := newPart(i, a, 0, a.Count)
			p.origin = f.states[i][0].TS
			parts = append(parts, p)
			continue
		}
		counts, ok := a.Spread(f.at, f.states[i])
		if !ok {
			return nil, false
		}
		for shard, count := range counts {
			if count > 0 || a.Count == 0 && shard == 0 {
				p := newPart(i, a, shard, count)
				p.origin = f.states[i][shard].TS // for a row whose ticks are its own
				parts = append(parts, p)
			}
		}
	}
	return parts, true
}

// result is what the call would get.
func (f found) result(call ratelimit.Call) ratelimit.Result {
	statuses := make([]ratelimit.Status, len(call.Asks))
	for i, a := range call.Asks {
		statuses[i] = a.FoundAmong(f.states[i], f.at)
	}
	return call.Result(f.at, statuses)
}

// refusal is result for a call that was refused. When others were faster each
// time, there may be enough by what was seen last; then it is worth asking
// again at once.
func (f found) refusal(call ratelimit.Call) ratelimit.Result {
	result := f.result(call)
	if result.OK {
		result.OK = false
		result.RetryAfter = max(result.RetryAfter, time.Microsecond)
		result.RetryAt = result.At.Add(result.RetryAfter)
	}
	return result
}
