// Package decide is how every store decides a call: what it asks (Call), what
// there is (View), what is to be taken from which row (Plan), and what the caller
// is told. It is pure. The arithmetic of one row is the root package's.
package decide

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/exact"
)

// Call is what an allow, reserve or check asks: its requests, found sound, those
// for the same limit and key added up, in the one order in which rows are locked.
type Call struct {
	Reserve bool
	Asks    []Ask
}

// Ask is a request of a call with its limit's definition.
type Ask struct {
	ratelimit.Request
	Definition ratelimit.Definition
	Floor      float64 // the lowest value that it may leave behind
	place      int     // in the order of the call
}

// Key names a limit's state: all rows that have this name and key.
type Key struct{ Name, Key string }

// Row names a row of the table.
type Row struct {
	Key
	Shard int
}

// Compare is the order of rows of one call or batch.
func (r Row) Compare(other Row) int {
	if c := strings.Compare(r.Name, other.Name); c != 0 {
		return c
	}
	if c := strings.Compare(r.Key.Key, other.Key.Key); c != 0 {
		return c
	}
	return cmp.Compare(r.Shard, other.Shard)
}

// Of is the key that a asks for.
func (a *Ask) Of() Key { return Key{a.Definition.Name, a.Key} }

// Sharded reports whether a's limit has several rows.
func (a *Ask) Sharded() bool { return a.Definition.Shards > 1 }

// Sharded reports whether one of c's limits has several rows.
func (c *Call) Sharded() bool { return c.Asks[len(c.Asks)-1].Sharded() }

// New checks requests and puts them in order: those of one row first, since what
// is taken from several must be undone differently, and then by name and key. Its
// errors are ErrInvalid and ErrExceedsCapacity.
func New(reserve bool, requests ...ratelimit.Request) (Call, error) {
	if len(requests) == 0 || len(requests) > ratelimit.MaxRequests {
		return Call{}, &ratelimit.FieldError{
			Field: "Requests", Value: len(requests),
			Reason: fmt.Sprintf("a call must have from 1 to %d", ratelimit.MaxRequests),
		}
	}
	call := Call{Reserve: reserve, Asks: make([]Ask, 0, len(requests))}
	for _, r := range requests {
		if err := call.add(r); err != nil {
			return Call{}, err
		}
	}
	for i := range call.Asks {
		if err := call.Asks[i].exceeds(reserve); err != nil {
			return Call{}, err
		}
	}
	slices.SortFunc(call.Asks, func(a, b Ask) int {
		return cmp.Or(cmp.Compare(min(a.Definition.Shards, 2), min(b.Definition.Shards, 2)),
			cmp.Compare(a.Definition.Name, b.Definition.Name), cmp.Compare(a.Key, b.Key))
	})
	return call, nil
}

func (c *Call) add(r ratelimit.Request) error {
	if err := r.Validate(); err != nil {
		return err
	}
	d := r.Limit.Definition()
	for i := range c.Asks {
		a := &c.Asks[i]
		if a.Definition.Name != d.Name || a.Key != r.Key {
			continue
		}
		if a.Definition != d {
			return &ratelimit.FieldError{Limit: d.Name, Field: "Limit", Value: d.Name, Reason: "has two definitions in one call"}
		}
		a.Count += r.Count
		return nil
	}
	c.Asks = append(c.Asks, Ask{Request: r, Definition: d, Floor: d.Floor(c.Reserve), place: len(c.Asks)})
	return nil
}

// exceeds is the error of a count that can never be granted.
func (a *Ask) exceeds(reserve bool) error {
	most := a.Definition.Most(a.Floor)
	if a.Count <= most+exact.Tolerance(a.Count, most, 0)/2 {
		return nil
	}
	return &ratelimit.ExceedsCapacityError{Request: a.Request, Reserve: reserve, Most: most}
}

// Rows returns all rows of an ask's limit and key.
func (a *Ask) Rows() []Row {
	rows := make([]Row, a.Definition.Shards)
	for shard := range rows {
		rows[shard] = Row{a.Of(), shard}
	}
	return rows
}

// BadPause is the error of a pause that cannot be: for no time, or for longer than
// MaxSpan.
func BadPause(limit ratelimit.Limit, lasts time.Duration) error {
	reason := ""
	switch {
	case lasts <= 0:
		reason = "must be positive"
	case lasts > ratelimit.MaxSpan:
		reason = fmt.Sprintf("must be at most %v", ratelimit.MaxSpan)
	default:
		return nil
	}
	return &ratelimit.FieldError{Limit: ratelimit.NameOf(limit), Field: "Duration", Value: lasts, Reason: reason}
}
