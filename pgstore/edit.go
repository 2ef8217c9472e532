package pgstore

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// ResetTx forgets the limit's state for key inside tx: full again, debt and pause gone. A
// receipt from before a reset gives back tokens that the reset has given back already: do not
// cancel it.
func (s *Store) ResetTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string) error {
	return s.edit(ctx, tx, ratelimit.VerbReset, nil, s.reset, ratelimit.Request{Limit: limit, Key: key})
}

// Reset is [Store.ResetTx] on its own.
func (s *Store) Reset(ctx context.Context, limit ratelimit.Limit, key string) error {
	return s.editOwn(ctx, ratelimit.VerbReset, nil, s.reset, ratelimit.Request{Limit: limit, Key: key})
}

// reset deletes the rows of an edit's limit and key. Rows with tokens in the memories of
// processes are not deleted, but full less those.
func (s *Store) reset(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
	a := &call.Demands[0]
	left, err := s.table.Reset(ctx, tx, a.KeyOf())
	if err == nil && len(left) > 0 {
		err = s.refillAll(ctx, tx, a, left)
	}
	if err != nil {
		return s.Fault("reset", err)
	}
	s.changed(a.KeyOf())
	s.memory.evict(a.KeyOf())
	return nil
}

// refillAll fills the rows of some shards of an ask, less the tokens of them that are out.
func (s *Store) refillAll(ctx context.Context, tx pgx.Tx, a *decide.Demand, shards []int32) error {
	changes := make([]decide.Change, len(shards))
	for i, shard := range shards {
		changes[i] = a.Change(0, int(shard), 0)
	}
	given, _, err := s.touch(ctx, tx, &pgx.Batch{}, changes)
	if err != nil {
		return err
	}
	var batch pgx.Batch
	share := a.Definition.Shard()
	for i := range given {
		g := &given[i].Taken
		if share.Forgets(g.Out, g.At) {
			s.table.QueueRemove(&batch, changes[i].Row)
			continue
		}
		s.table.QueuePut(&batch, changes[i].Row, share.Full(a.Key, g.After, g.Out, g.At))
	}
	return tx.SendBatch(ctx, &batch).Close()
}

// CreditTx gives the request's count back to its limit inside tx, capped at the capacity, and
// returns the status then. To settle an estimate, or to give back all that a call took, use
// [Store.SettleTx] and [Store.CancelTx], which know the rows that it took from. A sharded limit
// is credited in the shard from which tx took last, or else where it has least; a sliding
// window in its oldest slots first. While the limit is paused, credited tokens are for
// reservations, and for other calls after the pause.
func (s *Store) CreditTx(ctx context.Context, tx pgx.Tx, r ratelimit.Request) (status ratelimit.Status, err error) {
	err = s.edit(ctx, tx, ratelimit.VerbCredit, decide.BadCredit(r), s.crediting(r, &status), r)
	return status, err
}

// Credit is [Store.CreditTx] on its own.
func (s *Store) Credit(ctx context.Context, r ratelimit.Request) (status ratelimit.Status, err error) {
	if err := s.editOwn(ctx, ratelimit.VerbCredit, decide.BadCredit(r), s.crediting(r, &status), r); err != nil {
		return ratelimit.Status{}, err
	}
	return status, nil
}

// crediting returns the edit that gives r's count back, and sets the status then.
func (s *Store) crediting(r ratelimit.Request, status *ratelimit.Status) func(context.Context, pgx.Tx, *decide.Call) error {
	return func(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
		a := &call.Demands[0]
		states, at, err := s.credit(ctx, tx, a, r.Count)
		if err != nil {
			return s.Fault("credit", err)
		}
		s.changed(a.KeyOf())
		s.shards.Observe(a, states)
		*status = decide.Credited(r, states, at)
		return nil
	}
}

// credit gives n tokens back to the rows of an ask, and returns the states of those that are
// known then.
func (s *Store) credit(ctx context.Context, tx pgx.Tx, a *decide.Demand, n float64) (states []bucket.State, at time.Time, err error) {
	shard, counts := 0, []float64{n}
	if !a.Sharded() {
		states = make([]bucket.State, 1)
	} else if held, ok := s.heldBy(tx, a); ok {
		shard, states = held, s.shards.Cached(a, time.Time{})
	} else {
		if states, _, at, err = s.lockEach(ctx, tx, a); err != nil {
			return nil, at, err
		}
		counts = a.Fill(states, n, at)
	}
	given, err := s.give(ctx, tx, a, shard, counts)
	for i := range given {
		states[shard+i], at = given[i].Taken.After, given[i].Taken.At.UTC()
	}
	return states, at, err
}

// give gives counts to shards of an ask, from the given one on, and returns the states of their
// rows then. A sliding window is given to in a second round trip, with the row locked.
func (s *Store) give(ctx context.Context, tx pgx.Tx, a *decide.Demand, shard int, counts []float64) ([]table.Give, error) {
	var batch pgx.Batch
	changes, gives := make([]decide.Change, len(counts)), make([]table.Give, len(counts))
	for i, n := range counts {
		c := &changes[i]
		*c = a.Change(0, shard+i, 0)
		gives[i] = table.Give{Change: c, Tokens: n, Most: c.Definition.Capacity, Spent: s.spent(ctx, &c.Definition, c.Key)}
	}
	if _, err := s.table.Give(ctx, tx, &pgx.Batch{}, gives, s.Clock()); err != nil {
		return nil, err
	}
	for i, n := range counts {
		if g := &gives[i]; !g.Given && !g.Taken.Made {
			g.Taken.After = g.Definition.CreditBeside(g.Taken.After, g.Taken.Out, g.Taken.At, n)
			s.table.QueuePut(&batch, g.Row, g.Taken.After)
		}
	}
	if batch.Len() == 0 {
		return gives, nil
	}
	return gives, tx.SendBatch(ctx, &batch).Close()
}

// lockEach locks all rows of an ask, in order, and returns their states, and their tokens that are
// out.
func (s *Store) lockEach(ctx context.Context, q table.Querier, a *decide.Demand) (states []bucket.State, outs []bucket.Out, at time.Time, err error) {
	changes := make([]decide.Change, a.Definition.Shards)
	for shard := range changes {
		changes[shard] = a.Change(0, shard, 0)
	}
	given, at, err := s.touch(ctx, q, &pgx.Batch{}, changes)
	for i := range given {
		states, outs = append(states, given[i].Taken.After), append(outs, given[i].Taken.Out)
	}
	return states, outs, at, err
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
	return s.PauseEachTx(ctx, tx, []ratelimit.Request{{Limit: limit, Key: key}}, lasts)
}

// Pause is [Store.PauseTx] on its own.
func (s *Store) Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (until time.Time, err error) {
	return s.PauseEach(ctx, []ratelimit.Request{{Limit: limit, Key: key}}, lasts)
}

// PauseEachTx is [Store.PauseTx] for the limits and keys of several requests, all of them for
// the same duration, or on an error none; their counts do not matter. It returns the last of
// the instants at which their pauses end.
func (s *Store) PauseEachTx(ctx context.Context, tx pgx.Tx, requests []ratelimit.Request, lasts time.Duration) (until time.Time, err error) {
	if err := s.edit(ctx, tx, ratelimit.VerbPause, badPause(requests, lasts), s.pausing(lasts, &until), requests...); err != nil {
		return time.Time{}, err
	}
	return until, nil
}

// PauseEach is [Store.PauseEachTx] on its own, in one transaction.
func (s *Store) PauseEach(ctx context.Context, requests []ratelimit.Request, lasts time.Duration) (until time.Time, err error) {
	if err := s.editOwn(ctx, ratelimit.VerbPause, badPause(requests, lasts), s.pausing(lasts, &until), requests...); err != nil {
		return time.Time{}, err
	}
	return until, nil
}

// badPause is the error of requests that cannot be paused for a time.
func badPause(requests []ratelimit.Request, lasts time.Duration) error {
	if len(requests) == 0 { // which is not a matter of the time
		return nil
	}
	return decide.BadPause(requests[0].Limit, lasts)
}

// pausing returns the edit that pauses, and sets until to the latest end.
func (s *Store) pausing(lasts time.Duration, until *time.Time) func(context.Context, pgx.Tx, *decide.Call) error {
	return func(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
		*until = time.Time{}
		for i := range call.Demands {
			a := &call.Demands[i]
			err := s.change(ctx, tx, a, func(share *bucket.Definition, state bucket.State, _ bucket.Out, at time.Time) bucket.State {
				after := share.Pause(state, at, at.Add(lasts))
				if after.Paused.After(*until) {
					*until = after.Paused
				}
				return after
			})
			s.memory.evict(a.KeyOf()) // while the row is locked, so that nothing is prefetched before the pause is seen
			if err != nil {
				return err
			}
		}
		return nil
	}
}

// ResumeTx ends a pause that is not over, inside tx: the value stays, a token bucket fills from
// now on, and a fixed window has its own edges back. Without a pause it changes nothing.
func (s *Store) ResumeTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string) error {
	return s.edit(ctx, tx, ratelimit.VerbResume, nil, s.resume, ratelimit.Request{Limit: limit, Key: key})
}

// Resume is [Store.ResumeTx] on its own.
func (s *Store) Resume(ctx context.Context, limit ratelimit.Limit, key string) error {
	return s.editOwn(ctx, ratelimit.VerbResume, nil, s.resume, ratelimit.Request{Limit: limit, Key: key})
}

func (s *Store) resume(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
	a := &call.Demands[0]
	return s.change(ctx, tx, a, func(share *bucket.Definition, state bucket.State, out bucket.Out, at time.Time) bucket.State {
		return share.ResumeBeside(a.Key, state, out, at)
	})
}

// change changes all rows of an ask.
func (s *Store) change(ctx context.Context, tx pgx.Tx, a *decide.Demand, to func(*bucket.Definition, bucket.State, bucket.Out, time.Time) bucket.State) error {
	states, outs, at, err := s.lockEach(ctx, tx, a)
	if err != nil {
		return s.Fault("edit", err)
	}
	var batch pgx.Batch
	for shard, state := range states {
		states[shard] = to(a.Definition.Shard(), state, outs[shard], at)
		s.table.QueuePut(&batch, decide.Row{Key: a.KeyOf(), Shard: shard}, states[shard])
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return s.Fault("edit", err)
	}
	s.changed(a.KeyOf())
	s.shards.Observe(a, states)
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
	old, err := s.question(ratelimit.Request{Limit: from, Key: key})
	if err != nil {
		return err
	}
	renewed, err := s.question(ratelimit.Request{Limit: to, Key: key})
	if err != nil {
		return err
	}
	before, after := &old.Demands[0], &renewed.Demands[0]
	a, b := before.Definition, after.Definition
	if a.Shards = b.Shards; a != b {
		return &ratelimit.FieldError{Limit: b.Name, Field: "Limit", Value: b, Reason: "must differ in nothing but Shards"}
	}
	err = s.ownTx(ctx, append(before.Rows(), after.Rows()...), func(ctx context.Context, tx pgx.Tx) error {
		if err := s.reshard(ctx, tx, before, after); err != nil {
			return s.Fault("reshard", err)
		}
		return nil
	})
	s.changed(after.KeyOf())
	s.memory.evict(after.KeyOf())
	return err
}

func (s *Store) reshard(ctx context.Context, tx pgx.Tx, before, after *decide.Demand) error {
	states, outs, at, err := s.lockEach(ctx, tx, before)
	if err != nil {
		return err
	}
	n := after.Definition.Shards
	share, empty := before.Definition.Share(states, at, n)
	var batch pgx.Batch
	for shard := range max(n, len(states)) {
		state := share
		if shard >= n {
			state = empty
		} else if shard < len(states) {
			state = after.Definition.Shard().Bounded(share, states[shard], outs[shard], at)
		}
		s.table.QueuePut(&batch, decide.Row{Key: after.KeyOf(), Shard: shard}, state)
	}
	return tx.SendBatch(ctx, &batch).Close()
}

// edit runs do in tx, for a call that asks nothing of the limits and keys of requests, unless
// they are invalid. Their counts do not matter.
func (s *Store) edit(ctx context.Context, tx pgx.Tx, verb ratelimit.Verb, invalid error, do func(context.Context, pgx.Tx, *decide.Call) error, requests ...ratelimit.Request) error {
	return s.editWatched(ctx, verb, ratelimit.FormTx, cmp.Or(invalid, s.usableIn(tx)), requests, func(call *decide.Call) error { return do(ctx, tx, call) })
}

// editOwn is edit in a transaction of its own.
func (s *Store) editOwn(ctx context.Context, verb ratelimit.Verb, invalid error, do func(context.Context, pgx.Tx, *decide.Call) error, requests ...ratelimit.Request) error {
	return s.editWatched(ctx, verb, ratelimit.FormOwn, cmp.Or(invalid, s.usable()), requests, func(call *decide.Call) error {
		var rows []decide.Row
		for i := range call.Demands {
			rows = append(rows, call.Demands[i].Rows()...)
		}
		err := s.ownTx(ctx, rows, func(ctx context.Context, tx pgx.Tx) error { return do(ctx, tx, call) })
		for i := range call.Demands {
			s.changed(call.Demands[i].KeyOf()) // again, now that others see it
		}
		return err
	})
}

// editWatched runs do for the call of an edit, unless that is invalid.
func (s *Store) editWatched(ctx context.Context, verb ratelimit.Verb, form ratelimit.Form, invalid error, requests []ratelimit.Request, do func(*decide.Call) error) (err error) {
	w := s.parts().watch(ctx, verb, form, requests...)
	defer w.ReportError(&err)
	if invalid != nil {
		return invalid
	}
	call, err := s.question(requests...)
	if err != nil {
		return err
	}
	return do(&call)
}

// question returns the call that asks nothing of the limits and keys of requests.
func (s *Store) question(requests ...ratelimit.Request) (decide.Call, error) {
	questions := slices.Clone(requests)
	for i := range questions {
		questions[i].Count = 0
	}
	return s.call(decide.All, false, questions)
}
