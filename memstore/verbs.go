package memstore

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// The verbs of a scope, which are the same on their own and in a transaction.

// decide decides the requests of a verb.
func (s scope) decide(ctx context.Context, verb decide.Verb, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	w := s.watch(ctx, verb.Observed(reserve), requests...)
	result, err := s.decideWatched(ctx, verb, reserve, requests)
	w.Report(&result, err)
	return result, err
}

func (s scope) decideWatched(ctx context.Context, verb decide.Verb, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	if err := s.usable(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	if decide.Moded(requests) {
		return decide.ByMode(verb, s.now(), requests, func(left []ratelimit.Request) (ratelimit.Result, error) {
			return s.decideWatched(ctx, verb, reserve, left)
		})
	}
	call, err := s.seen.Call(verb, reserve, nil, requests)
	switch {
	case err != nil:
		return ratelimit.Result{}, err
	case verb == decide.Look:
		return s.check(&call)
	}
	return s.take(ctx, &call)
}

// take decides a call that takes.
func (s scope) take(ctx context.Context, call *decide.Call) (ratelimit.Result, error) {
	if err := s.lock(ctx, call); err != nil {
		return ratelimit.Result{}, err
	}
	defer s.mu.Unlock()
	view := s.view(call)
	changes, ok := call.Plan(view)
	if !ok {
		return call.Refused(view), nil
	}
	for i := range changes {
		s.put(changes[i].Row, changes[i].After)
	}
	result := call.Receipted(changes, decide.View{States: s.states(call, view.At), At: view.At}, "", nil)
	if paid := result.Receipt; s.session != nil {
		s.onRollback(func() { receipt.RolledBack(paid) })
	}
	return result, nil
}

func (s scope) check(call *decide.Call) (ratelimit.Result, error) {
	if err := s.lockOpen(); err != nil {
		return ratelimit.Result{}, err
	}
	defer s.mu.Unlock()
	return call.Checked(s.view(call)), nil
}

// begin begins a verb that changes rows of a call's limits: it has the store's lock then,
// unless it returns an error.
func (s scope) begin(ctx context.Context, call *decide.Call, err error) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	if err == nil {
		err = s.seen.NoteEdit(call)
	}
	if err != nil {
		return err
	}
	return s.lock(ctx, call)
}

func (s scope) view(call *decide.Call) decide.View {
	now := s.now()
	return decide.View{States: s.states(call, now), At: now}
}

func (s scope) states(call *decide.Call, now time.Time) [][]bucket.State {
	states := make([][]bucket.State, len(call.Demands))
	for i := range call.Demands {
		states[i] = s.of(&call.Demands[i], now)
	}
	return states
}

// of returns the states of all shards of an ask.
func (s scope) of(a *decide.Demand, now time.Time) []bucket.State {
	states := make([]bucket.State, a.Definition.Shards)
	for shard := range states {
		states[shard] = s.state(a.Definition.Shard(), decide.Row{Key: a.KeyOf(), Shard: shard}, now)
	}
	return states
}

func (s scope) state(d *bucket.Definition, row decide.Row, now time.Time) bucket.State {
	if state, ok := s.get(row); ok {
		return state
	}
	return d.Fresh(row.Key.Key, now)
}

// edit runs change under the lock for the limits and keys of requests; their counts do not
// matter.
func (s scope) edit(ctx context.Context, change func(a *decide.Demand, now time.Time), requests ...ratelimit.Request) error {
	questions := slices.Clone(requests)
	for i := range questions {
		questions[i].Count = 0
	}
	call, err := decide.New(false, questions...)
	if err := s.begin(ctx, &call, err); err != nil {
		return err
	}
	defer s.mu.Unlock()
	now := s.now()
	for i := range call.Demands {
		change(&call.Demands[i], now)
	}
	return nil
}

func (s scope) reset(ctx context.Context, limit ratelimit.Limit, key string) (err error) {
	w := s.watch(ctx, ratelimit.VerbReset, ratelimit.Request{Limit: limit, Key: key})
	defer w.ReportError(&err)
	return s.edit(ctx, func(a *decide.Demand, _ time.Time) {
		for shard := range ratelimit.MaxShards {
			s.remove(decide.Row{Key: a.KeyOf(), Shard: shard})
		}
	}, ratelimit.Request{Limit: limit, Key: key})
}

func (s scope) credit(ctx context.Context, r ratelimit.Request) (status ratelimit.Status, err error) {
	w := s.watch(ctx, ratelimit.VerbCredit, r)
	defer w.ReportError(&err)
	if err := decide.BadCredit(r); err != nil {
		return ratelimit.Status{}, err
	}
	err = s.edit(ctx, func(a *decide.Demand, now time.Time) {
		states, each := s.of(a, now), a.Definition.Shard()
		for shard, n := range a.Fill(states, r.Count, now) {
			states[shard] = each.Credit(states[shard], now, n)
			s.put(decide.Row{Key: a.KeyOf(), Shard: shard}, states[shard])
		}
		status = decide.Credited(r, states, now)
	}, r)
	return status, err
}

// pause returns the last of the instants at which the pauses end.
func (s scope) pause(ctx context.Context, lasts time.Duration, requests ...ratelimit.Request) (until time.Time, err error) {
	w := s.watch(ctx, ratelimit.VerbPause, requests...)
	defer w.ReportError(&err)
	if len(requests) > 0 {
		if err := decide.BadPause(requests[0].Limit, lasts); err != nil {
			return time.Time{}, err
		}
	}
	err = s.edit(ctx, func(a *decide.Demand, now time.Time) {
		s.rewrite(a, now, func(d *bucket.Definition, state bucket.State) bucket.State {
			after := d.Pause(state, now, now.Add(lasts))
			if after.Paused.After(until) {
				until = after.Paused
			}
			return after
		})
	}, requests...)
	return until, err
}

func (s scope) resume(ctx context.Context, limit ratelimit.Limit, key string) (err error) {
	w := s.watch(ctx, ratelimit.VerbResume, ratelimit.Request{Limit: limit, Key: key})
	defer w.ReportError(&err)
	return s.edit(ctx, func(a *decide.Demand, now time.Time) {
		s.rewrite(a, now, func(d *bucket.Definition, state bucket.State) bucket.State { return d.Resume(key, state, now) })
	}, ratelimit.Request{Limit: limit, Key: key})
}

func (s scope) change(ctx context.Context, from, to ratelimit.Limit, key string) (status ratelimit.Status, err error) {
	w := s.watch(ctx, ratelimit.VerbChange, ratelimit.Request{Limit: to, Key: key})
	defer w.ReportError(&err)
	if err := s.usable(ctx); err != nil {
		return status, err
	}
	before, after, err := decide.NewChange(from, to, key)
	if err == nil {
		err = s.seen.NoteEdit(&before)
	}
	if err := s.begin(ctx, &after, err); err != nil {
		return status, err
	}
	defer s.mu.Unlock()
	now, a, b, missing := s.now(), &before.Demands[0], &after.Demands[0], true
	for _, row := range a.Rows() {
		_, ok := s.get(row)
		missing = missing && !ok
	}
	states := a.Definition.Change(&b.Definition, key, s.of(a, now), nil, now)
	for shard, state := range states {
		if row := (decide.Row{Key: b.KeyOf(), Shard: shard}); missing {
			s.remove(row)
		} else {
			s.put(row, state)
		}
	}
	return decide.Shown(to, key, states[:b.Definition.Shards], now), nil
}

// rewrite changes all shards of an ask.
func (s scope) rewrite(a *decide.Demand, now time.Time, to func(*bucket.Definition, bucket.State) bucket.State) {
	for shard, state := range s.of(a, now) {
		s.put(decide.Row{Key: a.KeyOf(), Shard: shard}, to(a.Definition.Shard(), state))
	}
}

func (s scope) cancel(ctx context.Context, r *ratelimit.Receipt) (cancelled bool, err error) {
	if !receipt.Pays(r) {
		return false, s.usable(ctx)
	}
	w := s.watch(ctx, ratelimit.VerbCancel)
	_, err = s.inside().settle(ctx, r, nil)
	w.ReportReceipt(r, nil, err)
	if errors.Is(err, ratelimit.ErrSettled) {
		return false, nil
	}
	return err == nil, err
}

// settled marks a receipt that was settled.
const settled = "settled"

func (s scope) settle(ctx context.Context, r *ratelimit.Receipt, used []float64) (result ratelimit.Result, err error) {
	w := s.watch(ctx, ratelimit.VerbSettle)
	defer func() { w.ReportReceipt(r, &result, err) }()
	if err := s.usable(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	settlement, err := s.seen.Settle(r, used)
	if err != nil {
		return ratelimit.Result{}, err
	}
	if err := s.lock(ctx, &settlement.Call); err != nil {
		return ratelimit.Result{}, err
	}
	defer s.mu.Unlock()
	err = receipt.Redeem(ctx, r, func(mark string) (string, error) {
		if mark != "" {
			return mark, ratelimit.ErrSettled
		}
		result = s.make(&settlement)
		return settled, nil
	})
	if err == nil && s.session != nil {
		s.onRollback(func() {
			_ = receipt.Redeem(context.Background(), r, func(string) (string, error) { return "", nil })
		})
	}
	return result, err
}

// make applies a settlement.
func (s scope) make(settlement *decide.Settlement) ratelimit.Result {
	now := s.now()
	states := make([]bucket.State, len(settlement.Changes))
	for i := range settlement.Changes {
		c := &settlement.Changes[i]
		states[i] = s.state(&c.Definition, c.Row, now)
	}
	settlement.Spread(states, now)
	for i := range settlement.Changes {
		c := &settlement.Changes[i]
		if _, ok := s.get(c.Row); ok || c.Count > 0 { // no row is full already
			s.put(c.Row, c.Refill(s.state(&c.Definition, c.Row, now), now))
		}
	}
	return settlement.Result(decide.View{States: s.states(&settlement.Call, now), At: now})
}
