package pgstore

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// ResetTx forgets the limit's state for key inside tx: full again, debt and pause
// gone. A receipt from before a reset gives back what the reset has given back
// already: do not cancel it.
func (s *Store) ResetTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string) error {
	call, err := s.edit(tx, limit, key)
	if err != nil {
		return err
	}
	return s.reset(ctx, tx, call.Asks[0].Of())
}

// Reset is [Store.ResetTx] on its own.
func (s *Store) Reset(ctx context.Context, limit ratelimit.Limit, key string) error {
	return s.editOwn(ctx, limit, key, func(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
		return s.reset(ctx, tx, call.Asks[0].Of())
	})
}

func (s *Store) reset(ctx context.Context, q table.Querier, key decide.Key) error {
	if err := s.table.Reset(ctx, q, key); err != nil {
		return s.fault("reset", err)
	}
	s.hints.changed(key)
	return nil
}

// CreditTx gives the request's count back to its limit inside tx, capped at
// the capacity, and says what there is then. It is for settling an estimate:
// reserve 1,000 tokens, use 640, credit 360. To give back all that a call
// took, use [Store.CancelTx]. A sharded limit is credited in the shard from which
// tx took last, or else where it has least; a sliding window in its oldest slots first. While the limit is paused, what is
// credited is there for reservations, and for the rest after the pause.
func (s *Store) CreditTx(ctx context.Context, tx pgx.Tx, r ratelimit.Request) (ratelimit.Status, error) {
	if err := r.Validate(); err != nil {
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
	if err := r.Validate(); err != nil {
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
	view := decide.View{States: make([][]ratelimit.State, 1)}
	shard, counts := 0, []float64{r.Count}
	if a.Sharded() {
		var held bool
		if shard, held = s.hints.shards.heldBy(tx, a); held {
			view.States = s.hints.shards.known(call, time.Time{})
		} else {
			var err error
			if view, err = s.settled(ctx, tx, call); err != nil {
				return ratelimit.Status{}, s.fault("credit", err)
			}
			shard, counts = 0, a.Fill(view.States[0], r.Count, view.At)
		}
	} else {
		view.States[0] = make([]ratelimit.State, 1)
	}
	gifts := make([]gift, len(counts))
	for i, n := range counts {
		c := a.Change(0, shard+i, -n)
		gifts[i] = gift{Change: c, most: c.Definition.Capacity, slots: c.Definition.Credit}
	}
	given, err := s.give(ctx, tx, gifts)
	if err != nil {
		return ratelimit.Status{}, s.fault("credit", err)
	}
	for i := range given {
		view.States[0][shard+i], view.At = given[i].After, given[i].At.UTC()
	}
	s.hints.changed(a.Of())
	s.hints.saw(call, view)
	return decide.Credited(r, view.States[0], view.At), nil
}

// gift is what a change gives back to its row, which fills it no further than to most.
// What is given back to slots needs them read: slots says how.
type gift struct {
	decide.Change
	most  float64
	slots func(s ratelimit.State, now time.Time, n float64) ratelimit.State
}

// give makes gifts, and returns what is in their rows then. Slots are given to in a
// second round trip, with the row locked.
func (s *Store) give(ctx context.Context, tx pgx.Tx, gifts []gift) ([]table.Taken, error) {
	var batch, second pgx.Batch
	given := make([]table.Taken, len(gifts))
	now := s.clock()
	for i := range gifts {
		g := &gifts[i]
		s.table.QueueGive(&batch, &g.Change, -g.Count, g.most, now, &given[i])
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return nil, err
	}
	for i := range gifts {
		if g := &gifts[i]; g.Definition.Kind == ratelimit.KindSlidingWindow && !given[i].Made {
			given[i].After = g.slots(given[i].After, given[i].At, -g.Count)
			s.table.QueuePut(&second, g.Row, given[i].After)
		}
	}
	if second.Len() == 0 {
		return given, nil
	}
	return given, tx.SendBatch(ctx, &second).Close()
}

// settled locks all rows of an edit's limit and key, in order, and returns what is
// in them. It gives them nothing rather than reads them, so it leaves no predicate
// locks under SERIALIZABLE.
func (s *Store) settled(ctx context.Context, q table.Querier, call *decide.Call) (decide.View, error) {
	a, now := &call.Asks[0], s.clock()
	var batch pgx.Batch
	given := make([]table.Taken, a.Definition.Shards)
	for shard := range given {
		c := a.Change(0, shard, 0)
		s.table.QueueGive(&batch, &c, 0, 0, now, &given[shard])
	}
	if err := q.SendBatch(ctx, &batch).Close(); err != nil {
		return decide.View{}, err
	}
	view := decide.View{States: [][]ratelimit.State{make([]ratelimit.State, len(given))}}
	for shard := range given {
		view.States[0][shard] = given[shard].After
		view.At = given[shard].At.UTC()
	}
	return view, nil
}

// CancelTx gives back, inside tx, exactly what the result's call took, to the
// shards that it came from, and to the slots of a sliding window, which has it back
// already when no window holds the slot any more. It reports false, and does nothing, when the result
// took nothing, was cancelled before, or was taken in a transaction that was rolled
// back. If the server has crashed or was started anew since a transaction of the caller's
// took, nobody knows whether it was committed: that is [ErrOutcomeUnknown]. A result that was taken in another transaction that has not ended cannot be
// cancelled yet: that is [ratelimit.ErrInvalid].
//
// A cancellation that was rolled back with its transaction did not happen, and
// can be made again. (After a roll-back to a savepoint in the same transaction
// it can not: the tokens then stay spent.)
func (s *Store) CancelTx(ctx context.Context, tx pgx.Tx, result ratelimit.Result) (cancelled bool, err error) {
	if err := s.usableIn(tx); err != nil || result.Receipt == nil {
		return false, err
	}
	return s.cancel(ctx, tx, result.Receipt)
}

// Cancel is [Store.CancelTx] on its own.
func (s *Store) Cancel(ctx context.Context, result ratelimit.Result) (cancelled bool, err error) {
	if err := s.usable(); err != nil || result.Receipt == nil {
		return false, err
	}
	changes := s.seen.Refund(result.Receipt)
	rows := make([]decide.Row, len(changes))
	for i := range changes {
		rows[i] = changes[i].Row
	}
	err = s.ownTx(ctx, rows, func(ctx context.Context, tx pgx.Tx) error {
		cancelled, err = s.cancel(ctx, tx, result.Receipt)
		return err
	})
	if err != nil {
		return false, err
	}
	s.changedBy(result.Receipt) // again, now that others see it
	return cancelled, nil
}

func (s *Store) cancel(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt) (cancelled bool, err error) {
	// The receipt is marked with the transaction that gave back, so that a later
	// call can ask what became of it.
	err = receipt.Redeem(ctx, r, func(before string) (xid string, err error) {
		if owed, err := s.owed(ctx, tx, r, before); err != nil || !owed {
			return before, err
		}
		if err := s.refund(ctx, tx, r); err != nil {
			return before, err
		}
		cancelled = true
		err = tx.QueryRow(ctx, `SELECT pg_current_xact_id()::text`).Scan(&xid)
		return xid, err
	})
	if err != nil {
		return false, s.fault("cancel", err)
	}
	return cancelled, nil
}

// owed reports whether a receipt's tokens are to be given back: what took them was
// not rolled back, and what gave them back before, if anything, was.
func (s *Store) owed(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt, before string) (bool, error) {
	if before != "" {
		became, err := table.Outcome(ctx, tx, before, false)
		if err != nil || became != table.Aborted {
			return false, err
		}
	}
	taker := receipt.Taker(r)
	if taker == "" {
		return true, nil
	}
	own := receipt.Conn(r) == any(tx.Conn())
	became, err := table.Outcome(ctx, tx, taker, own)
	if err != nil || became == table.Aborted {
		return false, err
	}
	if became == table.Committed && !own && s.config.Clock == nil {
		// A crash gives IDs out again, so this may be somebody else's.
		if same, err := table.UpSince(ctx, tx, receipt.At(r)); err != nil || !same {
			return false, errors.Join(err, ErrOutcomeUnknown)
		}
	}
	if became == table.InProgress && !own {
		return false, &ratelimit.FieldError{Field: "Result", Value: taker, Reason: "was taken in a transaction that has not ended"}
	}
	return true, nil
}

// refund gives back what a receipt says was paid.
func (s *Store) refund(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt) error {
	changes, err := s.refunds(ctx, tx, r)
	if err != nil {
		return err
	}
	gifts := make([]gift, len(changes))
	for i, c := range changes {
		gifts[i] = gift{Change: c, most: math.MaxFloat64, slots: func(state ratelimit.State, now time.Time, n float64) ratelimit.State {
			return c.Definition.Refund(state, now, n, c.Slot)
		}}
	}
	given, err := s.give(ctx, tx, gifts)
	if err != nil {
		return err
	}
	var made pgx.Batch // there was no row: full, perhaps by a definition that is not known here
	for i, g := range given {
		if g.Made {
			s.table.QueueRemove(&made, changes[i].Row)
		}
	}
	if err := tx.SendBatch(ctx, &made).Close(); err != nil {
		return err
	}
	s.changedBy(r)
	return nil
}

// refunds is the changes that give back what a receipt says was paid. The portable
// form looks for their rows first, as its statement does not tell which it has made.
func (s *Store) refunds(ctx context.Context, tx pgx.Tx, r *ratelimit.Receipt) ([]decide.Change, error) {
	changes := s.seen.Refund(r)
	if !s.config.Portable {
		return changes, nil
	}
	rows := table.Rows{Rows: make([]decide.Row, len(changes))}
	for i := range changes {
		rows.Rows[i] = changes[i].Row
	}
	if err := s.table.FindEach(ctx, tx, &rows); err != nil {
		return nil, err
	}
	var there []decide.Change
	for i := range changes {
		if rows.Found[i] {
			there = append(there, changes[i])
		}
	}
	return there, nil
}

// PauseTx lets nothing be allowed and nothing come in to the limit's key for a
// duration, inside tx, and what is there is gone; debt stays, and so does what a sliding
// window's slots hold. It is for a third party's 429 with Retry-After. The later of two pauses holds; PauseTx returns the
// instant at which it ends, on the database's clock.
//
// A pause holds: what is given back meanwhile, by credit or cancel, is there when it
// is over and not before. A reservation during a pause is due when it is over or
// later. One that was made before keeps the instant that it was told, which may be
// within the pause: whoever is about to act on it looks first, by [Store.Check], at
// the PausedUntil of its Status. Only
// [Store.ResumeTx] and [Store.ResetTx] end a pause early.
func (s *Store) PauseTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string, lasts time.Duration) (until time.Time, err error) {
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

func (s *Store) pause(ctx context.Context, tx pgx.Tx, call *decide.Call, lasts time.Duration) (until time.Time, err error) {
	err = s.change(ctx, tx, call, func(share ratelimit.Definition, state ratelimit.State, at time.Time) ratelimit.State {
		after := share.Pause(state, at, at.Add(lasts))
		until = after.Paused
		return after
	})
	return until, err
}

// ResumeTx ends a pause that is not over, inside tx: what is there stays, a token
// bucket fills from now on, and a fixed window has its own edges back. Without a
// pause it changes nothing.
func (s *Store) ResumeTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string) error {
	call, err := s.edit(tx, limit, key)
	if err != nil {
		return err
	}
	return s.resume(ctx, tx, &call)
}

// Resume is [Store.ResumeTx] on its own.
func (s *Store) Resume(ctx context.Context, limit ratelimit.Limit, key string) error {
	return s.editOwn(ctx, limit, key, s.resume)
}

func (s *Store) resume(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
	key := call.Asks[0].Key
	return s.change(ctx, tx, call, func(share ratelimit.Definition, state ratelimit.State, at time.Time) ratelimit.State {
		return share.Resume(key, state, at)
	})
}

// change changes all rows of an edit's limit and key.
func (s *Store) change(ctx context.Context, tx pgx.Tx, call *decide.Call, to func(ratelimit.Definition, ratelimit.State, time.Time) ratelimit.State) error {
	view, err := s.settled(ctx, tx, call)
	if err != nil {
		return s.fault("edit", err)
	}
	a := &call.Asks[0]
	var batch pgx.Batch
	for shard, state := range view.States[0] {
		view.States[0][shard] = to(a.Definition.Shard(), state, view.At)
		s.table.QueuePut(&batch, decide.Row{Key: a.Of(), Shard: shard}, view.States[0][shard])
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return s.fault("edit", err)
	}
	s.hints.changed(a.Of())
	s.hints.saw(call, view)
	return nil
}

// Reshard changes a live limit and key from one number of shards to another:
// what all old rows hold together, debt and pause included, is in equal parts
// in the new rows afterwards. The definitions may differ in Shards only. It is
// one transaction; callers wait for it, or try again.
//
// While processes with the old definition and with the new one are at work,
// each counts tokens in for its own number of rows, so the limit can be
// exceeded by up to its rate. To be exact, [Store.Pause] the limit for as long
// as the roll-out takes, and call Reshard in the meantime.
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
	s.hints.changed(renewed.Asks[0].Of())
	return err
}

func (s *Store) reshard(ctx context.Context, tx pgx.Tx, old, renewed *decide.Call) error {
	view, err := s.settled(ctx, tx, old)
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
	s.hints.changed(call.Asks[0].Of()) // again, now that others see it
	return nil
}

// changedBy forgets what is remembered of the limits that a receipt names.
func (s *Store) changedBy(r *ratelimit.Receipt) {
	for _, p := range receipt.Payments(r) {
		s.hints.changed(decide.Key{Name: p.Name, Key: p.Key})
	}
}
