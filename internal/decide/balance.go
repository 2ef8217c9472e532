package decide

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// Held stores the result of n tokens that the process held already for a, which has one row. It
// makes one allocation, or three for a reservation. paid is what Paid returns, and after is the
// balance that is left.
func (a *Demand) Held(paid *receipt.Limit, n float64, reserve bool, after *bucket.State, at time.Time, result *ratelimit.Result) {
	holding := holdingOf(&a.Definition, *after, at)
	a.report(&result.Status, true, &holding, at, at)
	result.Request.Count, result.Taken = n, n
	result.Before += n
	var left []receipt.Left
	if reserve {
		left = []receipt.Left{{TS: at}} // without debt
	}
	result.Receipt = receipt.One(paid, a.Definition.Slot(*after), n, left, at)
}

// Refused returns the result of an allow of n tokens for a, which has one row, if its state cannot
// grant them; otherwise it returns false.
func (a *Demand) Refused(n float64, state bucket.State, at time.Time) (ratelimit.Result, bool) {
	d, without := &a.Definition, state
	paused := state.Paused.After(at)
	if paused { // a pause delays an allow, and leaves its tokens as they are
		without.Paused = time.Time{}
	}
	_, ok := d.Take(without, at, n, a.Floor)
	if ok && !paused {
		return ratelimit.Result{}, false
	}
	retryAt := at
	if !ok {
		retryAt = d.Ready(without, at, n, a.Floor)
	}
	if paused {
		retryAt = bucket.Later(retryAt, state.Paused)
	}
	result := ratelimit.Result{Status: a.status(false, holdingOf(d, d.Refill(state, at), at), at, retryAt)}
	result.Request.Count = n
	return result, true
}

// Balance is the state of a limit at an instant.
type Balance struct {
	State bucket.State
	At    time.Time
}

// Remainder returns a call for the demands of c without a balance: those that tokens held by the
// process did not grant.
func (c *Call) Remainder(balances []*Balance) Call {
	rest := Call{Reserve: c.Reserve}
	for i := range c.Demands {
		if balances[i] == nil {
			rest.Demands = append(rest.Demands, c.Demands[i])
			rest.Demands[len(rest.Demands)-1].index = len(rest.Demands) - 1
		}
	}
	return rest
}

// Join returns the result of c. rest is the result of Remainder, or the zero Result if it was
// empty; balances are those of the demands that tokens held by the process granted. If the rest was
// refused, so is the whole.
func (c *Call) Join(rest ratelimit.Result, balances []*Balance) ratelimit.Result {
	statuses := make([]ratelimit.Status, len(c.Demands))
	var (
		payments []receipt.Payment
		left     []receipt.Left
		taker    string // the transaction of the rest, on conn
		conn     any
		at       time.Time
		places   []int // in c, of the demands of the rest
	)
	each := rest.Each()
	for i := range c.Demands {
		a := &c.Demands[i]
		if balances[i] == nil {
			statuses[i] = each[len(places)]
			places = append(places, a.index)
		} else {
			statuses[i] = a.status(true, holdingOf(&a.Definition, balances[i].State, balances[i].At), balances[i].At, balances[i].At)
			statuses[i].Taken = a.Count
			statuses[i].Before += a.Count
			payments = append(payments, receipt.Payment{Limit: a.Paid(), Place: a.index, Slot: a.Definition.Slot(balances[i].State), Tokens: a.Count})
			left = append(left, receipt.Left{TS: balances[i].At}) // without debt
		}
		at = bucket.Later(at, statuses[i].At)
	}
	if places != nil && !rest.OK {
		for i := range statuses {
			statuses[i].Taken, statuses[i].Before = 0, statuses[i].Value
		}
		result := c.result(statuses)
		if result.OK { // other calls were faster; by now there may be enough
			result.Status = rest.Status
		}
		return result
	}
	if r := rest.Receipt; r != nil {
		taker, conn, at = receipt.Taker(r), receipt.Conn(r), receipt.At(r)
		for _, p := range receipt.Payments(r) {
			p.Place = places[p.Place]
			payments = append(payments, p)
		}
		left = append(left, receipt.Lefts(r)...)
	}
	result := c.result(statuses)
	if !c.Reserve {
		left = nil
	}
	result.Receipt = receipt.New(payments, left, taker, conn, at)
	return result
}
