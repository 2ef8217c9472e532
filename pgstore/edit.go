package pgstore

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// ResetTx forgets the request's limit and key inside tx: full again, debt and
// pause gone. The request's count does not matter.
func (s *Store) ResetTx(ctx context.Context, tx pgx.Tx, r ratelimit.Request) error {
	return s.reset(ctx, tx, r)
}

// Reset is [Store.ResetTx] on its own.
func (s *Store) Reset(ctx context.Context, r ratelimit.Request) error {
	return s.own(ctx, func(q querier) error { return s.reset(ctx, q, r) })
}

func (s *Store) reset(ctx context.Context, q querier, r ratelimit.Request) error {
	if err := r.Validate(); err != nil {
		return err
	}
	name := r.Limit.Definition().Name
	if _, err := q.Exec(ctx, s.sql.reset, name, r.Key); err != nil {
		return fault("reset", err)
	}
	s.changed(r)
	return nil
}

// CreditTx gives the request's count back to its limit inside tx, capped at
// the capacity, and says what there is then. It is for settling an estimate:
// reserve 1,000 tokens, use 640, credit 360. To give back all that a call
// took, use [Store.CancelTx]. A sharded limit is credited where it has least.
func (s *Store) CreditTx(ctx context.Context, tx pgx.Tx, r ratelimit.Request) (ratelimit.Status, error) {
	return s.credit(ctx, tx, r)
}

// Credit is [Store.CreditTx] on its own.
func (s *Store) Credit(ctx context.Context, r ratelimit.Request) (status ratelimit.Status, err error) {
	err = s.ownTx(ctx, func(tx pgx.Tx) error {
		status, err = s.credit(ctx, tx, r)
		return err
	})
	if err != nil {
		return ratelimit.Status{}, err
	}
	s.changed(r) // again, now that others see it
	return status, nil
}

func (s *Store) credit(ctx context.Context, tx pgx.Tx, r ratelimit.Request) (ratelimit.Status, error) {
	call, err := editCall(r)
	if err != nil {
		return ratelimit.Status{}, err
	}
	ask := call.Asks[0]
	parts := []part{newPart(0, ask, 0, -r.Count)}
	var states []ratelimit.State
	if ask.Definition.Shards > 1 {
		if parts, states, err = s.creditParts(ctx, tx, call, r.Count); err != nil {
			return ratelimit.Status{}, fault("credit", err)
		}
	}
	outcomes, at, err := s.force(ctx, tx, parts)
	if err != nil {
		return ratelimit.Status{}, fault("credit", err)
	}
	if states == nil {
		states = make([]ratelimit.State, 1)
	}
	for i, p := range parts {
		states[p.shard] = outcomes[i].after
	}
	s.changed(r)
	return ratelimit.Credited(r, states, at), nil
}

// creditParts spreads a credit over the shards, by what they hold under lock.
func (s *Store) creditParts(ctx context.Context, tx pgx.Tx, call ratelimit.Call, count float64) ([]part, []ratelimit.State, error) {
	outcomes, _, err := s.force(ctx, tx, everyRow(call))
	if err != nil {
		return nil, nil, err
	}
	states := make([]ratelimit.State, len(outcomes))
	values := make([]float64, len(outcomes))
	for i, o := range outcomes {
		states[i], values[i] = o.after, o.after.Value
	}
	var parts []part
	for shard, n := range call.Asks[0].Definition.Fill(values, count) {
		if n > 0 {
			parts = append(parts, newPart(0, call.Asks[0], shard, -n))
		}
	}
	return parts, states, nil
}

// CancelTx gives back, inside tx, exactly what the result's call took, to the
// shards that it came from, each capped at its capacity. It reports false, and
// does nothing, when the result took nothing or was cancelled before.
//
// A cancellation that was rolled back with its transaction did not happen, and
// can be made again. (After a roll-back to a savepoint in the same transaction
// it can not: the tokens then stay spent.)
func (s *Store) CancelTx(ctx context.Context, tx pgx.Tx, result ratelimit.Result) (cancelled bool, err error) {
	if result.Receipt == nil {
		return false, nil
	}
	// The receipt is marked with the transaction that gave back, so that a later
	// call can ask what became of it.
	err = result.Receipt.Redeem(func(before string) (xid string, err error) {
		if before != "" {
			var aborted bool
			err := tx.QueryRow(ctx, `SELECT coalesce(pg_xact_status($1::text::xid8) = 'aborted', false)`, before).Scan(&aborted)
			if err != nil || !aborted {
				return before, err
			}
		}
		if _, _, err := s.force(ctx, tx, paidParts(result.Receipt.Payments())); err != nil {
			return "", err
		}
		s.changedBy(result)
		cancelled = true
		err = tx.QueryRow(ctx, `SELECT pg_current_xact_id()::text`).Scan(&xid)
		return xid, err
	})
	if err != nil {
		return false, fault("cancel", err)
	}
	return cancelled, nil
}

// Cancel is [Store.CancelTx] on its own.
func (s *Store) Cancel(ctx context.Context, result ratelimit.Result) (cancelled bool, err error) {
	err = s.ownTx(ctx, func(tx pgx.Tx) error {
		cancelled, err = s.CancelTx(ctx, tx, result)
		return err
	})
	if err != nil {
		return false, err
	}
	s.changedBy(result)
	return cancelled, nil
}

func paidParts(payments []ratelimit.Payment) []part {
	parts := make([]part, len(payments))
	for i, p := range payments {
		a := ratelimit.Ask{Request: p.Limit.For(p.Key), Definition: p.Limit.Definition()}
		parts[i] = newPart(i, a, p.Shard, -p.Tokens)
	}
	return parts
}

// PauseTx lets nothing come in to the request's limit and key before until,
// inside tx, and what is there is gone; debt stays, and so does what is
// credited from now on. It is for a third party's 429 with Retry-After. It
// reports false, and changes nothing, when until is not in the future of the
// database's clock. The request's count does not matter.
func (s *Store) PauseTx(ctx context.Context, tx pgx.Tx, r ratelimit.Request, until time.Time) (paused bool, err error) {
	call, err := editCall(r)
	if err != nil {
		return false, err
	}
	if y := until.Year(); y < 1 || y > 9999 {
		return false, &ratelimit.FieldError{Limit: call.Asks[0].Definition.Name, Field: "Until", Value: until, Reason: "must be in the years 1 to 9999"}
	}
	sc := &scope{q: tx}
	found, err := s.lock(ctx, sc, call)
	if err != nil {
		return false, fault("pause", err)
	}
	if !until.After(found.at) {
		return false, s.rollback(ctx, sc)
	}
	var batch pgx.Batch
	for _, p := range everyRow(call) {
		// Less than a period ago, so that until alone says where the next edge is.
		last := ratelimit.State{TS: found.at.Add(time.Microsecond - p.definition.Period)}
		empty := p.definition.Pause(last, found.at, until)
		batch.Queue(s.sql.pause, p.definition.Name, p.key, int32(p.shard), empty.TS)
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return false, fault("pause", err)
	}
	s.changed(r)
	return true, nil
}

// Pause is [Store.PauseTx] on its own.
func (s *Store) Pause(ctx context.Context, r ratelimit.Request, until time.Time) (paused bool, err error) {
	err = s.ownTx(ctx, func(tx pgx.Tx) error {
		paused, err = s.PauseTx(ctx, tx, r, until)
		return err
	})
	return paused && err == nil, err
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
	old, err := editCall(ratelimit.Request{Limit: from, Key: key})
	if err != nil {
		return err
	}
	renewed, err := editCall(ratelimit.Request{Limit: to, Key: key})
	if err != nil {
		return err
	}
	a, b := old.Asks[0].Definition, renewed.Asks[0].Definition
	if a.Shards = b.Shards; a != b {
		return &ratelimit.FieldError{Limit: b.Name, Field: "Limit", Value: b, Reason: "must differ in nothing but Shards"}
	}
	err = s.ownTx(ctx, func(tx pgx.Tx) error { return s.reshard(ctx, tx, old, renewed) })
	s.changed(ratelimit.Request{Limit: to, Key: key})
	return err
}

func (s *Store) reshard(ctx context.Context, tx pgx.Tx, old, renewed ratelimit.Call) error {
	outcomes, _, err := s.force(ctx, tx, everyRow(old))
	if err != nil {
		return fault("reshard", err)
	}
	share := ratelimit.State{TS: outcomes[0].after.TS}
	for _, o := range outcomes {
		share.Value += o.after.Value / float64(renewed.Asks[0].Definition.Shards)
		if o.after.TS.After(share.TS) { // paused: nothing comes in before the last of them
			share.TS = o.after.TS
		}
	}
	var batch pgx.Batch
	parts := everyRow(renewed)
	for _, p := range parts {
		batch.Queue(s.sql.put, p.definition.Name, p.key, int32(p.shard), share.Value, share.TS)
	}
	batch.Queue(s.sql.resetFrom, parts[0].definition.Name, parts[0].key, int32(len(parts)))
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return fault("reshard", err)
	}
	return nil
}

// changed forgets what is remembered of a limit and key.
func (s *Store) changed(r ratelimit.Request) {
	key := limitKey{r.Limit.Definition().Name, r.Key}
	s.shards.forget(key)
	s.refusals.forget(key)
}

func (s *Store) changedBy(result ratelimit.Result) {
	if result.Receipt == nil {
		return
	}
	for _, p := range result.Receipt.Payments() {
		s.changed(p.Limit.For(p.Key))
	}
}

// editCall is a call that asks nothing of r's limit and key, for the verbs
// that cannot be refused.
func editCall(r ratelimit.Request) (ratelimit.Call, error) {
	if err := r.Validate(); err != nil {
		return ratelimit.Call{}, err
	}
	return ratelimit.NewCall(false, r.Limit.ForN(r.Key, 0))
}

// everyRow is a taking of nothing from each row of a call.
func everyRow(call ratelimit.Call) []part {
	var parts []part
	for i, a := range call.Asks {
		for shard := range a.Definition.Shards {
			parts = append(parts, newPart(i, a, shard, 0))
		}
	}
	return parts
}

// bottomless is a floor that nothing is below: finite, since an infinity is
// not a number literal in PostgreSQL's simple protocol.
const bottomless = -math.MaxFloat64 / 2

// force takes the parts whatever their rows hold, and returns what it left
// there and when.
func (s *Store) force(ctx context.Context, q querier, parts []part) ([]outcome, time.Time, error) {
	outcomes := make([]outcome, len(parts))
	for i := range parts {
		parts[i].floor = bottomless
	}
	for range rounds {
		at, missed, err := s.takeMissing(ctx, q, parts, outcomes)
		if err != nil || missed == 0 {
			return outcomes, at, err
		}
		if err := s.align(ctx, q, parts, outcomes); err != nil {
			return nil, time.Time{}, err
		}
	}
	return nil, time.Time{}, errors.New("a row's windows changed each time it was looked at")
}

// takeMissing takes the parts that have no outcome yet.
func (s *Store) takeMissing(ctx context.Context, q querier, parts []part, outcomes []outcome) (at time.Time, missed int, err error) {
	now := s.clock()
	var batch pgx.Batch
	for i := range parts {
		if !outcomes[i].taken {
			s.queueTake(&batch, now, &parts[i], &outcomes[i])
		}
	}
	batch.Queue(clockSQL, now).QueryRow(func(row pgx.Row) error { return row.Scan(&at, nil) })
	if err := q.SendBatch(ctx, &batch).Close(); err != nil {
		return time.Time{}, 0, err
	}
	for _, o := range outcomes {
		if !o.taken {
			missed++
		}
	}
	return at.UTC(), missed, nil
}

// align gives the parts that have no outcome the ticks of their rows: of a
// fixed window that was paused, or had another Start.
func (s *Store) align(ctx context.Context, q querier, parts []part, outcomes []outcome) error {
	var batch pgx.Batch
	for i := range parts {
		if outcomes[i].taken {
			continue
		}
		p := &parts[i]
		batch.Queue(s.sql.ticks, p.definition.Name, p.key, int32(p.shard)).QueryRow(func(row pgx.Row) error {
			err := row.Scan(&p.origin)
			if errors.Is(err, pgx.ErrNoRows) { // deleted since: fresh ticks do
				return nil
			}
			return err
		})
	}
	return q.SendBatch(ctx, &batch).Close()
}
