package decide

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// held is a result and all that it points to.
type held struct {
	each    [1]ratelimit.Status
	payment [1]receipt.Payment
	left    [1]receipt.Left
	receipt receipt.Receipt
}

// Held is the result of an ask, of one row, whose tokens the process held already: in one
// allocation. after is what there is then. taker and conn are those of Receipt.
func (a *Ask) Held(reserve bool, after ratelimit.State, at time.Time, taker string, conn any) ratelimit.Result {
	h := new(held)
	h.each[0] = a.status(true, after, at, at)
	h.each[0].Taken = a.Count
	h.payment[0] = a.payment(0, 0, a.Count)
	var left []receipt.Left
	if reserve {
		h.left[0] = receipt.Left{TS: at} // no debt
		left = h.left[:]
	}
	receipt.Set(&h.receipt, h.payment[:], left, taker, conn, at)
	return ratelimit.Result{Status: h.each[0], Each: h.each[:], Receipt: &h.receipt}
}

// Stand is what there is of a limit at an instant.
type Stand struct {
	State ratelimit.State
	At    time.Time
}

// Held is the result of a call whose tokens the process held already, with how each of
// its limits stands then.
func (c *Call) Held(stands []Stand, taker string, conn any) ratelimit.Result {
	if len(c.Asks) == 1 {
		return c.Asks[0].Held(c.Reserve, stands[0].State, stands[0].At, taker, conn)
	}
	statuses, changes, at := make([]ratelimit.Status, len(c.Asks)), make([]Change, len(c.Asks)), time.Time{}
	for i := range c.Asks {
		a := &c.Asks[i]
		statuses[i] = a.status(true, stands[i].State, stands[i].At, stands[i].At)
		statuses[i].Taken = a.Count
		changes[i] = a.Change(i, 0, a.Count)
		changes[i].After = ratelimit.State{TS: stands[i].At} // no debt
		at = latest(at, stands[i].At)
	}
	result := c.result(at, statuses)
	result.Receipt = c.Receipt(changes, taker, conn, at)
	return result
}

// payment is n tokens that were taken from one of a's shards.
func (a *Ask) payment(place, shard int, n float64) receipt.Payment {
	d := &a.Definition
	return receipt.Payment{
		Limit: receipt.Limit{
			Name: d.Name, Key: a.Key, Kind: uint8(d.Kind), Rate: d.Rate, Period: d.Period,
			Capacity: d.Capacity, MaxReserved: d.MaxReserved, Shards: d.Shards, Start: d.Start,
		},
		Place: place, Shard: shard, Tokens: n,
	}
}
