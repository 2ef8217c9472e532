package decide

import (
	"cmp"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// Settlement is the change from the tokens paid, by a receipt, to the tokens used.
type Settlement struct {
	Call    Call     // of the tokens used, in the order of the call that paid
	Changes []Change // in the order of rows, mostly one for each; with negative counts to give back

	over []over
}

// over is the tokens of a limit with shards that were used besides those taken.
type over struct {
	ask   int
	count float64
}

// Settle returns how to settle a receipt with the tokens used, one count for each limit in the
// order of its call; without counts, with nothing. Unused tokens are refunded from the last
// payments first. Tokens used besides are taken from all shards: see Spread. A shard that the
// limit has no longer, by the definition that was called last, stands for one that it has.
// Errors are ErrInvalid.
func (s *Definitions) Settle(r *ratelimit.Receipt, used []float64) (Settlement, error) {
	payments := slices.Clone(receipt.Payments(r))
	slices.SortStableFunc(payments, func(a, b receipt.Payment) int { return cmp.Compare(a.Place, b.Place) })
	var settlement Settlement
	for len(payments) > 0 {
		n := 1
		for n < len(payments) && payments[n].Place == payments[0].Place {
			n++
		}
		if err := settlement.add(s, payments[:n], used); err != nil {
			return Settlement{}, err
		}
		payments = payments[n:]
	}
	limits := len(settlement.Call.Demands)
	switch {
	case limits == 0:
		return Settlement{}, &ratelimit.FieldError{Field: "Receipt", Value: nil, Reason: "must be of a call that took something"}
	case used != nil && len(used) != limits:
		return Settlement{}, &ratelimit.FieldError{Field: "Used", Value: used, Reason: "must be one count for each limit of the call, in its order"}
	}
	settlement.merge()
	return settlement, nil
}

// add adds the payments of one limit.
func (s *Settlement) add(seen *Definitions, payments []receipt.Payment, used []float64) error {
	p, place := payments[0], len(s.Call.Demands)
	d := p.Definition
	count := 0.0
	if place < len(used) {
		count = used[place]
	}
	if p.IsNothing() {
		count = 0
	}
	request := ratelimit.Request{Limit: ratelimit.Definition(d).Limit(), Key: p.Key, Count: count}
	if err := request.Validate(); err != nil {
		return err
	}
	if d != bucket.Definition(request.Limit.Definition()) { // in a receipt written by hand
		return &ratelimit.FieldError{Field: "Receipt", Value: ratelimit.Definition(d), Reason: "must be of limits that can be"}
	}
	if newest, ok := seen.newest(Key{p.Name, p.Key}); ok && !alike(newest, d) {
		d = newest
		request.Limit = ratelimit.Definition(d).Limit()
	}
	a := Demand{Request: request, Definition: d, index: place}
	s.Call.Demands = append(s.Call.Demands, a)
	left := count
	for _, p := range payments {
		kept := min(p.Tokens, left)
		left -= kept
		change := a.Change(place, p.Shard%d.Shards, kept-p.Tokens)
		if !p.IsNothing() {
			change.Slot = p.Slot
		}
		s.Changes = append(s.Changes, change)
	}
	switch {
	case left <= 0:
	case a.Sharded():
		s.over = append(s.over, over{place, left})
		for shard := range d.Shards {
			s.Changes = append(s.Changes, a.Change(place, shard, 0))
		}
	default:
		s.Changes[len(s.Changes)-1].Count += left
	}
	return nil
}

// Spread has the changes, whose rows are in states at now, take the tokens of limits with
// shards that were used besides those taken: from the fullest first, so that they all are left
// with as much. Tokens taken from one shard alone would be granted again by others.
func (s *Settlement) Spread(states []bucket.State, now time.Time) {
	for _, o := range s.over {
		a := s.Call.Demands[o.ask]
		a.Count = o.count
		values, of := make([]float64, a.Definition.Shards), make([]*Change, a.Definition.Shards)
		for i := range s.Changes {
			if c := &s.Changes[i]; c.Demand == o.ask && c.Slot == 0 {
				values[c.Shard], of[c.Shard] = c.Definition.Refill(states[i], now).Value, c
			}
		}
		level := a.level(values, bottom)
		for shard, v := range values {
			of[shard].Count = max(0, v-level) // no taken tokens are given back
		}
	}
}

// merge puts changes in the order of rows, one for each row, or slot of a row.
func (s *Settlement) merge() {
	slices.SortStableFunc(s.Changes, func(a, b Change) int { return a.Row.Compare(b.Row) })
	merged := s.Changes[:0]
	for _, c := range s.Changes {
		if n := len(merged) - 1; n >= 0 && merged[n].Row == c.Row && merged[n].Slot == c.Slot {
			merged[n].Count += c.Count
			continue
		}
		merged = append(merged, c)
	}
	s.Changes = merged
}

// Rows returns the rows that a settlement changes.
func (s *Settlement) Rows() []Row {
	rows := make([]Row, len(s.Changes))
	for i := range rows {
		rows[i] = s.Changes[i].Row
	}
	return rows
}

// Refill returns a change's row in a state once it was settled at now: see
// [bucket.Definition.Charge] and [bucket.Definition.Refund].
func (c *Change) Refill(state bucket.State, now time.Time) bucket.State {
	if c.Count > 0 {
		return c.Definition.Charge(state, now, c.Count)
	}
	return c.Definition.Refund(state, now, -c.Count, c.Slot)
}

// Result returns that of a settlement, after which the limits' rows are as in the view.
// Each status is OK, since a settlement is not refused; while there is debt or a pause,
// RetryAt is when that is over.
func (s *Settlement) Result(after View) ratelimit.Result {
	statuses := make([]ratelimit.Status, len(s.Call.Demands))
	for i := range s.Call.Demands {
		a := &s.Call.Demands[i]
		statuses[i] = Credited(a.Request, after.States[i], after.At)
		statuses[i].OK, statuses[i].Taken = true, a.Count
	}
	for i := range s.Changes {
		if c := &s.Changes[i]; c.Count > 0 {
			statuses[c.Demand].Before += c.Count
		}
	}
	return s.Call.result(statuses)
}
