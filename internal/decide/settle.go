package decide

import (
	"cmp"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// Settlement is the change from the tokens that a receipt paid to the tokens that were used.
type Settlement struct {
	Call    Call     // its counts are the tokens used, in the order of the call that paid
	Changes []Change // in the order of rows; negative counts give tokens back

	over []over
}

// over holds the tokens that a limit with shards used beyond those paid.
type over struct {
	ask   int
	count float64
}

// Settle returns the settlement of a receipt for the tokens used: one count for each limit, in the
// order of its call, or no counts if nothing was used. Unused tokens return to the last payments
// first. Tokens beyond those paid are taken from all shards: see Spread. If the limit has fewer
// shards now, another shard takes a missing one's place. Errors are ErrInvalid.
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
	if d != bucket.Definition(request.Limit.Definition()) { // in a text that no receipt wrote
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

// Spread divides the tokens that a limit with shards used beyond those paid. It takes from the
// fullest rows, and leaves these at one value; emptier rows stay as they are. states are those of
// s.Changes at now. If one shard paid for all, the others would grant these tokens again.
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
			of[shard].Count = max(0, v-level) // no shard gets tokens back
		}
	}
}

// merge sorts changes in locking order, and merges those of one row, or of one slot of a row.
func (s *Settlement) merge() {
	slices.SortStableFunc(s.Changes, func(a, b Change) int {
		return cmp.Or(inLockingOrder(s.Call.Demands[a.Demand], s.Call.Demands[b.Demand]), a.Row.Compare(b.Row))
	})
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

// Rows returns the rows that the settlement changes.
func (s *Settlement) Rows() []Row {
	rows := make([]Row, len(s.Changes))
	for i := range rows {
		rows[i] = s.Changes[i].Row
	}
	return rows
}

// Refill returns a row after the change settles it at now: see [bucket.Definition.Charge] and
// [bucket.Definition.Refund].
func (c *Change) Refill(state bucket.State, now time.Time) bucket.State {
	if c.Count > 0 {
		return c.Definition.Charge(state, now, c.Count)
	}
	return c.Definition.Refund(state, now, -c.Count, c.Slot)
}

// Result returns the result of the settlement; after has its rows as the settlement left them.
// Statuses are OK, because a settlement cannot be refused. During debt or a pause, RetryAt is the
// end of those.
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
