package pgstore

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// ResetTx forgets the limit's state for key inside tx: full again, debt and pause gone. A
// receipt from before a reset gives back tokens that the reset has given back already: do not
// cancel it.
func (s *Store) ResetTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string) (err error) {
	w := s.parts().watch(ctx, ratelimit.VerbReset, ratelimit.FormTx, ratelimit.Request{Limit: limit, Key: key})
	defer w.Told(&err)
	call, err := s.edit(tx, limit, key)
	if err != nil {
		return err
	}
	return s.reset(ctx, tx, &call)
}

// Reset is [Store.ResetTx] on its own.
func (s *Store) Reset(ctx context.Context, limit ratelimit.Limit, key string) (err error) {
	w := s.parts().watch(ctx, ratelimit.VerbReset, ratelimit.FormOwn, ratelimit.Request{Limit: limit, Key: key})
	defer w.Told(&err)
	return s.editOwn(ctx, limit, key, s.reset)
}

// reset deletes the rows of an edit's limit and key. Rows with tokens in the memories of
// processes are not deleted, but full less those.
func (s *Store) reset(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
	a := &call.Asks[0]
	left, err := s.table.Reset(ctx, tx, a.Of())
	if err == nil && len(left) > 0 {
		err = s.refillAll(ctx, tx, a, left)
	}
	if err != nil {
		return s.fault("reset", err)
	}
	s.changed(a.Of())
	s.memory.evict(a.Of())
	return nil
}

func (s *Store) refillAll(ctx context.Context, tx pgx.Tx, a *decide.Ask, shards []int32) error {
	var lock, write pgx.Batch
	given, now := make([]table.Taken, len(shards)), s.clock()
	for i, shard := range shards {
		c := a.Change(0, int(shard), 0)
		s.table.QueueTouch(&lock, &c, now, &given[i])
	}
	if err := tx.SendBatch(ctx, &lock).Close(); err != nil {
		return err
	}
	share := a.Definition.Shard()
	for i, shard := range shards {
		row, g := decide.Row{Key: a.Of(), Shard: int(shard)}, &given[i]
		if share.Forgets(outOf(g), g.At) {
			s.table.QueueRemove(&write, row)
			continue
		}
		s.table.QueuePut(&write, row, share.Full(a.Key, g.After, outOf(g), g.At))
	}
	return tx.SendBatch(ctx, &write).Close()
}

// CreditTx gives the request's count back to its limit inside tx, capped at the capacity, and
// returns the status then. To settle an estimate, or to give back all that a call took, use
// [Store.SettleTx] and [Store.CancelTx], which know the rows that it took from. A sharded limit
// is credited in the shard from which tx took last, or else where it has least; a sliding
// window in its oldest slots first. While the limit is paused, credited tokens are for
// reservations, and for other calls after the pause.
func (s *Store) CreditTx(ctx context.Context, tx pgx.Tx, r ratelimit.Request) (status ratelimit.Status, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbCredit, ratelimit.FormTx, r)
	defer w.Told(&err)
	if err := decide.BadCredit(r); err != nil {
		return ratelimit.Status{}, err
	}
	call, err := s.edit(tx, r.Limit, r.Key)
	if err != nil {
		return ratelimit.Status{}, err
	}
	return s.credit(ctx, tx, &call, r)
}

// Credit is [Store.CreditTx] on its own.
func (s *Store) Credit(ctx context.Context, r ratelimit.Request) (status ratelimit.Status, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbCredit, ratelimit.FormOwn, r)
	defer w.Told(&err)
	if err := decide.BadCredit(r); err != nil {
		return ratelimit.Status{}, err
	}
	err = s.editOwn(ctx, r.Limit, r.Key, func(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
		status, err = s.credit(ctx, tx, call, r)
		return err
	})
	if err != nil {
		return ratelimit.Status{}, err
	}
	return status, nil
}

func (s *Store) credit(ctx context.Context, tx pgx.Tx, call *decide.Call, r ratelimit.Request) (ratelimit.Status, error) {
	a := &call.Asks[0]
	view := decide.View{States: make([][]bucket.State, 1)}
	shard, counts := 0, []float64{r.Count}
	if a.Sharded() {
		var held bool
		if shard, held = s.shards.heldBy(tx, a); held {
			view.States = s.shards.known(call, time.Time{})
		} else {
			var err error
			if view, _, err = s.settled(ctx, tx, call); err != nil {
				return ratelimit.Status{}, s.fault("credit", err)
			}
			shard, counts = 0, a.Fill(view.States[0], r.Count, view.At)
		}
	} else {
		view.States[0] = make([]bucket.State, 1)
	}
	given, err := s.give(ctx, tx, a, shard, counts)
	if err != nil {
		return ratelimit.Status{}, s.fault("credit", err)
	}
	for i := range given {
		view.States[0][shard+i], view.At = given[i].After, given[i].At.UTC()
	}
	s.changed(a.Of())
	s.saw(call, view)
	return decide.Credited(r, view.States[0], view.At), nil
}

// give gives counts to shards of an ask, from the given one on, and returns the states of their
// rows then. A sliding window is given to in a second round trip, with the row locked.
func (s *Store) give(ctx context.Context, tx pgx.Tx, a *decide.Ask, shard int, counts []float64) ([]table.Taken, error) {
	var batch, second pgx.Batch
	changes, given := make([]decide.Change, len(counts)), make([]table.Taken, len(counts))
	now := s.clock()
	for i, n := range counts {
		c := &changes[i]
		*c = a.Change(0, shard+i, 0)
		s.table.QueueGive(&batch, c, n, c.Definition.Capacity, s.spent(ctx, &c.Definition, c.Key), now, &given[i])
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return nil, err
	}
	for i, n := range counts {
		if c := &changes[i]; c.Definition.Slotted() && !given[i].Made {
			given[i].After = c.Definition.CreditBeside(given[i].After, outOf(&given[i]), given[i].At, n)
			s.table.QueuePut(&second, c.Row, given[i].After)
		}
	}
	if second.Len() == 0 {
		return given, nil
	}
	return given, tx.SendBatch(ctx, &second).Close()
}

// settled locks all rows of an edit's limit and key, in order, and returns their states. It
// gives them 0 tokens rather than reads them, so it leaves no predicate locks under
// SERIALIZABLE.
func (s *Store) settled(ctx context.Context, q table.Querier, call *decide.Call) (view decide.View, outs []bucket.Out, err error) {
	a, now := &call.Asks[0], s.clock()
	var batch pgx.Batch
	given := make([]table.Taken, a.Definition.Shards)
	for shard := range given {
		c := a.Change(0, shard, 0)
		s.table.QueueTouch(&batch, &c, now, &given[shard])
	}
	if err := q.SendBatch(ctx, &batch).Close(); err != nil {
		return view, nil, err
	}
	view.States, outs = [][]bucket.State{make([]bucket.State, len(given))}, make([]bucket.Out, len(given))
	for shard := range given {
		view.States[0][shard], outs[shard] = given[shard].After, outOf(&given[shard])
		view.At = given[shard].At.UTC()
	}
	return view, outs, nil
}

// outOf returns the tokens that are out of a row that was given some.
func outOf(given *table.Taken) bucket.Out {
	return bucket.Out{Tokens: given.Ahead, Until: given.Until}
}

// PauseTx empties the limit's key inside tx; for a duration nothing is allowed and nothing is
// refilled. Debt stays, and so do a sliding window's slots. It is for a third party's 429 with
// Retry-After. The later of two pauses holds; PauseTx returns the instant at which it ends, on
// the database's clock.
//
// Tokens that are given back during the pause, by credit or cancel, can be taken when it is
// over and not before. A reservation during a pause is due when it is over or later. One that
// was made before keeps its instant, which may be within the pause: before acting on it, read
// the PausedUntil of its Status by [Store.Check]. Only [Store.ResumeTx] and [Store.ResetTx] end
// a pause early.
func (s *Store) PauseTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string, lasts time.Duration) (until time.Time, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbPause, ratelimit.FormTx, ratelimit.Request{Limit: limit, Key: key})
	defer w.Told(&err)
	if err := decide.BadPause(limit, lasts); err != nil {
		return time.Time{}, err
	}
	call, err := s.edit(tx, limit, key)
	if err != nil {
		return time.Time{}, err
	}
	return s.pause(ctx, tx, &call, lasts)
}

// Pause is [Store.PauseTx] on its own.
func (s *Store) Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (until time.Time, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbPause, ratelimit.FormOwn, ratelimit.Request{Limit: limit, Key: key})
	defer w.Told(&err)
	if err := decide.BadPause(limit, lasts); err != nil {
		return time.Time{}, err
	}
	err = s.editOwn(ctx, limit, key, func(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
		until, err = s.pause(ctx, tx, call, lasts)
		return err
	})
	if err != nil {
		return time.Time{}, err
	}
	return until, nil
}

// PauseEachTx is [Store.PauseTx] for the limits and keys of several requests, all of them for
// the same duration, or on an error none; their counts do not matter. It returns the last of
// the instants at which their pauses end.
func (s *Store) PauseEachTx(ctx context.Context, tx pgx.Tx, requests []ratelimit.Request, lasts time.Duration) (until time.Time, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbPause, ratelimit.FormTx, requests...)
	defer w.Told(&err)
	if err := s.usableIn(tx); err != nil {
		return time.Time{}, err
	}
	calls, err := s.pauses(requests, lasts)
	if err != nil {
		return time.Time{}, err
	}
	return s.pauseEach(ctx, tx, calls, lasts)
}

// PauseEach is [Store.PauseEachTx] on its own, in one transaction.
func (s *Store) PauseEach(ctx context.Context, requests []ratelimit.Request, lasts time.Duration) (until time.Time, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbPause, ratelimit.FormOwn, requests...)
	defer w.Told(&err)
	if err := s.usable(); err != nil {
		return time.Time{}, err
	}
	calls, err := s.pauses(requests, lasts)
	if err != nil {
		return time.Time{}, err
	}
	var rows []decide.Row
	for i := range calls {
		rows = append(rows, calls[i].Asks[0].Rows()...)
	}
	err = s.ownTx(ctx, rows, func(ctx context.Context, tx pgx.Tx) error {
		until, err = s.pauseEach(ctx, tx, calls, lasts)
		return err
	})
	if err != nil {
		return time.Time{}, err
	}
	for i := range calls {
		s.changed(calls[i].Asks[0].Of()) // again, now that others see it
	}
	return until, nil
}

// pauses are the calls for limits that are to be paused, in the order of locking.
func (s *Store) pauses(requests []ratelimit.Request, lasts time.Duration) (calls []decide.Call, err error) {
	questions := slices.Clone(requests)
	for i := range questions {
		questions[i].Count = 0
	}
	call, err := s.call(false, questions)
	if err != nil {
		return nil, err
	}
	for i := range call.Asks {
		if err := decide.BadPause(call.Asks[i].Limit, lasts); err != nil {
			return nil, err
		}
		calls = append(calls, decide.Call{Asks: call.Asks[i : i+1]})
	}
	return calls, nil
}

func (s *Store) pauseEach(ctx context.Context, tx pgx.Tx, calls []decide.Call, lasts time.Duration) (until time.Time, err error) {
	for i := range calls {
		end, err := s.pause(ctx, tx, &calls[i], lasts)
		if err != nil {
			return time.Time{}, err
		}
		if end.After(until) {
			until = end
		}
	}
	return until, nil
}

func (s *Store) pause(ctx context.Context, tx pgx.Tx, call *decide.Call, lasts time.Duration) (until time.Time, err error) {
	err = s.change(ctx, tx, call, func(share *bucket.Definition, state bucket.State, _ bucket.Out, at time.Time) bucket.State {
		after := share.Pause(state, at, at.Add(lasts))
		until = after.Paused
		return after
	})
	s.memory.evict(call.Asks[0].Of()) // while the row is locked, so that nothing is prefetched before the pause is seen
	return until, err
}

// ResumeTx ends a pause that is not over, inside tx: the value stays, a token bucket fills from
// now on, and a fixed window has its own edges back. Without a pause it changes nothing.
func (s *Store) ResumeTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string) (err error) {
	w := s.parts().watch(ctx, ratelimit.VerbResume, ratelimit.FormTx, ratelimit.Request{Limit: limit, Key: key})
	defer w.Told(&err)
	call, err := s.edit(tx, limit, key)
	if err != nil {
		return err
	}
	return s.resume(ctx, tx, &call)
}

// Resume is [Store.ResumeTx] on its own.
func (s *Store) Resume(ctx context.Context, limit ratelimit.Limit, key string) (err error) {
	w := s.parts().watch(ctx, ratelimit.VerbResume, ratelimit.FormOwn, ratelimit.Request{Limit: limit, Key: key})
	defer w.Told(&err)
	return s.editOwn(ctx, limit, key, s.resume)
}

func (s *Store) resume(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
	key := call.Asks[0].Key
	return s.change(ctx, tx, call, func(share *bucket.Definition, state bucket.State, out bucket.Out, at time.Time) bucket.State {
		return share.ResumeBeside(key, state, out, at)
	})
}

// change changes all rows of an edit's limit and key.
func (s *Store) change(ctx context.Context, tx pgx.Tx, call *decide.Call, to func(*bucket.Definition, bucket.State, bucket.Out, time.Time) bucket.State) error {
	view, outs, err := s.settled(ctx, tx, call)
	if err != nil {
		return s.fault("edit", err)
	}
	a := &call.Asks[0]
	var batch pgx.Batch
	for shard, state := range view.States[0] {
		view.States[0][shard] = to(a.Definition.Shard(), state, outs[shard], view.At)
		s.table.QueuePut(&batch, decide.Row{Key: a.Of(), Shard: shard}, view.States[0][shard])
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return s.fault("edit", err)
	}
	s.changed(a.Of())
	s.saw(call, view)
	return nil
}

// Reshard changes a live limit and key from one number of shards to another: the tokens of all
// old rows together, debt and pause included, are in equal parts in the new rows afterwards.
// The definitions may differ in Shards only. It is one transaction; callers wait for it, or try
// again.
//
// While processes with the old definition and with the new one are at work,
// each counts tokens in for its own number of rows, so the limit can be
// exceeded by up to its rate. To be exact, [Store.Pause] the limit for as long
// as the roll-out takes, and call Reshard in the meantime.
//
// A receipt from before goes back to the shards that it took from, as far as there is room in
// them now. So a settlement or cancellation after Reshard can give back less, and never more.
func (s *Store) Reshard(ctx context.Context, from, to ratelimit.Limit, key string) error {
	if err := s.usable(); err != nil {
		return err
	}
	old, err := s.call(false, []ratelimit.Request{{Limit: from, Key: key}})
	if err != nil {
		return err
	}
	renewed, err := s.call(false, []ratelimit.Request{{Limit: to, Key: key}})
	if err != nil {
		return err
	}
	a, b := old.Asks[0].Definition, renewed.Asks[0].Definition
	if a.Shards = b.Shards; a != b {
		return &ratelimit.FieldError{Limit: b.Name, Field: "Limit", Value: b, Reason: "must differ in nothing but Shards"}
	}
	err = s.ownTx(ctx, append(old.Asks[0].Rows(), renewed.Asks[0].Rows()...), func(ctx context.Context, tx pgx.Tx) error { return s.reshard(ctx, tx, &old, &renewed) })
	s.changed(renewed.Asks[0].Of())
	s.memory.evict(renewed.Asks[0].Of())
	return err
}

func (s *Store) reshard(ctx context.Context, tx pgx.Tx, old, renewed *decide.Call) error {
	view, outs, err := s.settled(ctx, tx, old)
	if err != nil {
		return s.fault("reshard", err)
	}
	states, n := view.States[0], renewed.Asks[0].Definition.Shards
	share, empty := old.Asks[0].Definition.Share(states, view.At, n)
	var batch pgx.Batch
	for shard := range max(n, len(states)) {
		state := share
		if shard >= n {
			state = empty
		} else if shard < len(states) {
			state = renewed.Asks[0].Definition.Shard().Bounded(share, states[shard], outs[shard], view.At)
		}
		s.table.QueuePut(&batch, decide.Row{Key: renewed.Asks[0].Of(), Shard: shard}, state)
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return s.fault("reshard", err)
	}
	return nil
}

// edit is a call that asks nothing of a limit and key, for a verb in tx that cannot
// be refused.
func (s *Store) edit(tx pgx.Tx, limit ratelimit.Limit, key string) (decide.Call, error) {
	if err := s.usableIn(tx); err != nil {
		return decide.Call{}, err
	}
	return s.call(false, []ratelimit.Request{{Limit: limit, Key: key}})
}

// editOwn runs change in a transaction of its own.
func (s *Store) editOwn(ctx context.Context, limit ratelimit.Limit, key string, change func(context.Context, pgx.Tx, *decide.Call) error) error {
	if err := s.usable(); err != nil {
		return err
	}
	call, err := s.call(false, []ratelimit.Request{{Limit: limit, Key: key}})
	if err != nil {
		return err
	}
	if err := s.ownTx(ctx, call.Asks[0].Rows(), func(ctx context.Context, tx pgx.Tx) error { return change(ctx, tx, &call) }); err != nil {
		return err
	}
	s.changed(call.Asks[0].Of()) // again, now that others see it
	return nil
}
