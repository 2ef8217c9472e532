// Package decide decides calls for every store: from the requests ([Call]) and the states of their
// rows ([View]) to the tokens to take from each row ([Call.Plan]) and the result. Everything in it
// is pure except [Definitions], which remembers the limits that a store was called with. Package
// bucket has the arithmetic of one row.
package decide

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/valid"
)

// Call holds the validated requests of an allow, reserve or check. New adds up requests for the
// same limit and key, and puts Demands in the order in which their rows are locked. NewFirst and
// NewChecks keep the requests and their order.
type Call struct {
	Reserve bool
	First   bool // takes from the first demand that can grant
	Demands []Demand

	// Plain marks an allow of one limit without Above, whose row has a value and no shards: the
	// call of most users. Only [Definitions.Plain] sets it, so its definition is noted.
	Plain bool

	asked float64 // the count of an AtMost call; that of its demand is cut to what the limit can ever grant
}

// Demand is a request of a call, with the definition of its limit.
type Demand struct {
	ratelimit.Request
	Definition bucket.Definition
	Floor      float64 // the lowest value to leave behind: in all shards together if it is above 0, otherwise divided among them
	index      int     // the place of its request in the call
	noted      bool    // the definition comes from Definitions, which has checked it
}

// Key names the state of a limit for a key: all rows with this name and key.
type Key struct{ Name, Key string }

// Row names a row of the table.
type Row struct {
	Key
	Shard int
}

// Change is a call's change of one row.
type Change struct {
	Row
	Demand     int               // the call's demand that it serves
	Definition bucket.Definition // of one shard
	Count      float64           // tokens to take
	Floor      float64           // the lowest value to leave behind
	Before     bucket.State      // the row as it was read; zero if it was not
	Past       time.Time         // an instant known to be past; zero if none is
	Slot       int64             // of tokens that are given back, in limits with slots
	After      bucket.State      // the changed row
}

// Verb says how the requests of a call belong together.
type Verb uint8

// The verbs.
const (
	All    Verb = iota // all or nothing
	Look               // as All, without taking
	AtMost             // as many whole tokens as there are
	First              // from the first that can grant
)

// Observed returns the name under which observers see the verb.
func (v Verb) Observed(reserve bool) ratelimit.Verb {
	switch {
	case v == Look:
		return ratelimit.VerbCheck
	case v == AtMost:
		return ratelimit.VerbAllowAtMost
	case v == First:
		return ratelimit.VerbAllowFirst
	case reserve:
		return ratelimit.VerbReserve
	}
	return ratelimit.VerbAllow
}

// Call returns the call of requests without modes. Its errors are those of [New], [NewAtMost] or
// [NewFirst]. See NewIn for met and demands.
func (v Verb) Call(met Met, demands []Demand, reserve bool, requests []ratelimit.Request) (Call, error) {
	switch v {
	case AtMost:
		return NewAtMost(requests[0])
	case First:
		return NewFirst(requests...)
	}
	return NewIn(met, demands, reserve, requests...)
}

// Met finds the limit of a request, nil unless it was found valid before. [Definitions] implements
// it.
type Met interface {
	of(r ratelimit.Request) *validated
}

// validated is a valid limit with its definition.
type validated struct {
	limit      ratelimit.Limit
	definition bucket.Definition
	most       float64 // the largest count of a plain call; 0 if no call of the limit is plain
}

// Compare orders the rows of one call or batch.
func (r Row) Compare(other Row) int {
	if c := strings.Compare(r.Name, other.Name); c != 0 {
		return c
	}
	if c := strings.Compare(r.Key.Key, other.Key.Key); c != 0 {
		return c
	}
	return cmp.Compare(r.Shard, other.Shard)
}

// KeyOf returns the name and key of a's rows.
func (a *Demand) KeyOf() Key { return Key{a.Definition.Name, a.Key} }

// RowOnly reports whether a is decided by its row alone, without tokens in the memories of
// processes, because it must leave a share.
func (a *Demand) RowOnly() bool { return a.Floor > 0 }

// Sharded reports whether a's limit has several rows.
func (a *Demand) Sharded() bool { return a.Definition.Shards > 1 }

// Sharded reports whether one of c's limits has several rows.
func (c *Call) Sharded() bool {
	if c.First {
		return slices.ContainsFunc(c.Demands, func(a Demand) bool { return a.Sharded() })
	}
	return c.Demands[len(c.Demands)-1].Sharded()
}

// Names returns the names of c's limits, one for each demand.
func (c *Call) Names() []string {
	names := make([]string, len(c.Demands))
	for i := range c.Demands {
		names[i] = c.Demands[i].Definition.Name
	}
	return names
}

// AtMost reports whether c takes the tokens available, up to its count.
func (c *Call) AtMost() bool { return c.asked > 0 }

// OnLockedRows reports whether c must be decided on rows that are read and locked. These calls
// must: one that takes what is available, a reservation in a sliding window, and one that leaves a
// share in several shards together.
func (c *Call) OnLockedRows() bool {
	return c.AtMost() || slices.ContainsFunc(c.Demands, func(a Demand) bool {
		return c.Reserve && a.Definition.Slotted() || a.Floor > 0 && a.Sharded()
	})
}

// Head returns the part of c to try first: its first demand if it takes from one of several,
// otherwise c.
func (c *Call) Head() *Call {
	if !c.First || len(c.Demands) == 1 {
		return c
	}
	return &Call{Reserve: c.Reserve, Demands: c.Demands[:1]}
}

// New validates requests and sorts them by name and key, limits with one row first: takes from
// several rows are undone differently. Its errors are ErrInvalid and ErrExceedsCapacity.
func New(reserve bool, requests ...ratelimit.Request) (Call, error) {
	return NewIn(nil, nil, reserve, requests...)
}

// NewIn does what New does, and reuses the slice demands if it is large enough. It skips the checks
// of limits that met has found valid; met may be nil.
func NewIn(met Met, demands []Demand, reserve bool, requests ...ratelimit.Request) (Call, error) {
	if err := badNumber(len(requests), ratelimit.MaxRequests); err != nil {
		return Call{}, err
	}
	call := Call{Reserve: reserve, Demands: slices.Grow(demands[:0], len(requests))}
	for i := range requests {
		if err := call.add(met, &requests[i]); err != nil {
			return Call{}, err
		}
	}
	for i := range call.Demands {
		if err := call.Demands[i].exceeds(reserve); err != nil {
			return Call{}, err
		}
	}
	slices.SortFunc(call.Demands, inLockingOrder)
	return call, nil
}

func inLockingOrder(a, b Demand) int {
	return cmp.Or(cmp.Compare(min(a.Definition.Shards, 2), min(b.Definition.Shards, 2)),
		cmp.Compare(a.Definition.Name, b.Definition.Name), cmp.Compare(a.Key, b.Key))
}

// Locking returns the places of c's demands in the order in which their rows are locked.
func (c *Call) Locking() []int {
	order := UpTo(len(c.Demands))
	slices.SortFunc(order, func(i, j int) int { return inLockingOrder(c.Demands[i], c.Demands[j]) })
	return order
}

// UpTo returns the numbers from 0 to n-1.
func UpTo(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

func badNumber(requests, most int) error {
	if requests > 0 && requests <= most {
		return nil
	}
	return &ratelimit.FieldError{
		Field: "Requests", Value: requests,
		Reason: fmt.Sprintf("a call must have from 1 to %d", most),
	}
}

// NewAtMost returns a call that takes the available whole tokens, up to the request's count. Its
// errors are those of New.
func NewAtMost(r ratelimit.Request) (Call, error) {
	if err := r.Validate(); err != nil {
		return Call{}, err
	}
	d, asked := bucket.Definition(r.Limit.Definition()), r.Count
	if r.Count = math.Floor(asked); r.Count < 1 {
		return Call{}, &ratelimit.FieldError{Limit: d.Name, Field: "Count", Value: asked, Reason: "must be at least 1, since whole tokens are taken"}
	}
	floor := kept(&r, &d)
	most := d.Most(floor)
	r.Count = min(r.Count, math.Floor(most+bucket.Tolerance(d.Capacity, 1, 0)))
	if r.Count < 1 {
		r.Count = asked
		return Call{}, &ratelimit.ExceedsCapacityError{Request: r, Most: most}
	}
	return Call{Demands: []Demand{{Request: r, Definition: d, Floor: floor}}, asked: asked}, nil
}

// NewFirst returns a call that takes from the first limit that can grant. It leaves out limits that
// can never grant their count. If no limit is left, it returns the error that New would.
func NewFirst(requests ...ratelimit.Request) (Call, error) {
	if err := badNumber(len(requests), ratelimit.MaxRequests); err != nil {
		return Call{}, err
	}
	call, never := Call{First: true}, error(nil)
	for i, r := range requests {
		if err := call.add(nil, &r); err != nil {
			return Call{}, err
		}
		if len(call.Demands) == i {
			return Call{}, twice(i, r)
		}
	}
	call.Demands = slices.DeleteFunc(call.Demands, func(a Demand) bool {
		err := a.exceeds(false)
		never = cmp.Or(never, err)
		return err != nil
	})
	if len(call.Demands) == 0 {
		return Call{}, never
	}
	for i := range call.Demands {
		call.Demands[i].index = i
	}
	return call, nil
}

// twice returns the error of a call that takes from the first of several, and whose i-th request
// repeats a limit and key.
func twice(i int, r ratelimit.Request) error {
	return &ratelimit.FieldError{Limit: ratelimit.NameOf(r.Limit), Field: "Requests", Value: i, Reason: "is for a limit and key that another one is for"}
}

// NewChecks returns a call whose requests are checked independently of each other; a limit and key
// may repeat. Its errors are those of New.
func NewChecks(requests ...ratelimit.Request) (Call, error) {
	if err := badNumber(len(requests), ratelimit.MaxChecks); err != nil {
		return Call{}, err
	}
	call, rows := Call{Demands: make([]Demand, len(requests))}, 0
	for i, r := range requests {
		if err := r.Validate(); err != nil {
			return Call{}, err
		}
		d := bucket.Definition(r.Limit.Definition())
		call.Demands[i] = Demand{Request: r, Definition: d, Floor: kept(&r, &d), index: i}
		if err := call.Demands[i].exceeds(false); err != nil {
			return Call{}, err
		}
		rows += call.Demands[i].Definition.Shards
	}
	if err := badNumber(rows, ratelimit.MaxChecks); err != nil { // a limit counts once for each of its shards
		return Call{}, err
	}
	return call, nil
}

// add adds a request to c. It skips the checks of a limit that met has found valid.
func (c *Call) add(met Met, r *ratelimit.Request) error {
	var d bucket.Definition
	noted := false
	if met != nil {
		if v := met.of(*r); v != nil {
			d, noted = v.definition, true
		}
	}
	if !noted || !sound(r, &d) {
		if err := r.Validate(); err != nil {
			return err
		}
		d = bucket.Definition(r.Limit.Definition())
	}
	floor := kept(r, &d)
	if c.Reserve {
		if r.AboveShare != 0 {
			return notAbove(*r, "a reservation, which may go into debt")
		}
		floor = d.Floor(true)
	}
	for i := range c.Demands {
		a := &c.Demands[i]
		if a.Definition.Name != d.Name || a.Key != r.Key {
			continue
		}
		if a.Definition != d {
			return &ratelimit.FieldError{Limit: d.Name, Field: "Limit", Value: d.Name, Reason: "has two definitions in one call"}
		}
		a.Count += r.Count
		a.Floor, a.Request.AboveShare = max(a.Floor, floor), max(a.Request.AboveShare, r.AboveShare)
		a.Overridden = a.Overridden && r.Overridden
		return nil
	}
	c.Demands = append(c.Demands, Demand{Request: *r, Definition: d, Floor: floor, index: len(c.Demands), noted: noted})
	return nil
}

// sound reports whether r is valid, given that its limit is.
func sound(r *ratelimit.Request, d *bucket.Definition) bool {
	return valid.Text(r.Key, ratelimit.MaxKeyLength) == "" && valid.Count(r.Count, d.Capacity) == "" &&
		r.AboveShare >= 0 && r.AboveShare <= 1 && r.Mode <= ratelimit.ModeRefuse
}

// kept returns the tokens that r must leave.
func kept(r *ratelimit.Request, d *bucket.Definition) float64 { return r.AboveShare * d.Capacity }

func notAbove(r ratelimit.Request, what string) error {
	return &ratelimit.FieldError{Limit: ratelimit.NameOf(r.Limit), Field: "Above", Value: r.AboveShare, Reason: "is not for " + what}
}

// BadCredit returns an error if the request's count cannot be given back.
func BadCredit(r ratelimit.Request) error {
	if err := r.Validate(); err != nil || r.AboveShare == 0 {
		return err
	}
	return notAbove(r, "a credit, which takes nothing")
}

// exceeds returns an error if the count can never be granted.
func (a *Demand) exceeds(reserve bool) error {
	most := a.Definition.Most(a.Floor)
	if a.Count <= most+bucket.Tolerance(a.Count, most, 0)/2 {
		return nil
	}
	return &ratelimit.ExceedsCapacityError{Request: a.Request, Reserve: reserve, Most: most}
}

// Rows returns all rows of a's limit and key.
func (a *Demand) Rows() []Row {
	rows := make([]Row, a.Definition.Shards)
	for shard := range rows {
		rows[shard] = Row{a.KeyOf(), shard}
	}
	return rows
}

// BadPage returns an error if the limit or page is invalid.
func BadPage(limit ratelimit.Limit, page ratelimit.Page) error {
	for _, key := range []string{page.Prefix, page.After} {
		if err := (ratelimit.Request{Limit: limit, Key: key}).Validate(); err != nil {
			return err
		}
	}
	if page.Most < 0 {
		return &ratelimit.FieldError{Limit: ratelimit.NameOf(limit), Field: "Most", Value: page.Most, Reason: "must not be negative"}
	}
	return nil
}

// NewChange returns two calls that take nothing from a key: one by its limit's definition before a
// change, one by that after it. Both definitions must have the same name and kind, since programs
// with the other one would misread the rows.
func NewChange(from, to ratelimit.Limit, key string) (before, after Call, err error) {
	if before, err = New(false, ratelimit.Request{Limit: from, Key: key}); err != nil {
		return before, after, err
	}
	if after, err = New(false, ratelimit.Request{Limit: to, Key: key}); err != nil {
		return before, after, err
	}
	a, b := &before.Demands[0].Definition, &after.Demands[0].Definition
	switch {
	case a.Name != b.Name:
		err = &ratelimit.FieldError{Limit: a.Name, Field: "Name", Value: b.Name, Reason: "must be the name of the definition that is replaced"}
	case a.Kind != b.Kind:
		err = &ratelimit.FieldError{Limit: a.Name, Field: "Kind", Value: b.Kind, Reason: "must be that of the definition that is replaced, " + a.Kind.String() + ": give a limit of another kind a name of its own"}
	}
	return before, after, err
}

// BadPause returns an error if a pause is not positive, or longer than MaxSpan.
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

// Resolved returns requests with the definitions that a catalog has for their keys. Without a
// catalog it returns requests.
func Resolved(catalog ratelimit.Catalog, requests []ratelimit.Request) []ratelimit.Request {
	if catalog == nil {
		return requests
	}
	held := make([]ratelimit.Request, len(requests))
	for i := range requests {
		held[i] = catalog.Resolve(requests[i])
	}
	return held
}

// Change returns a change that takes n tokens from one of a's shards; i is a's place in its call.
func (a *Demand) Change(i, shard int, n float64) Change {
	c := Change{Row: Row{a.KeyOf(), shard}, Demand: i, Definition: a.Definition, Count: n, Floor: a.Floor}
	if a.Sharded() {
		c.Definition, c.Floor = *a.Definition.Shard(), a.rowFloor()
	}
	return c
}

// rowFloor returns the lowest value that a may leave in one row. A share to leave in several rows
// together binds none of them.
func (a *Demand) rowFloor() float64 {
	if a.Floor > 0 && a.Sharded() {
		return 0
	}
	return a.Floor / float64(a.Definition.Shards)
}

// Divides reports whether changes take from several rows of one limit.
func (c *Call) Divides(changes []Change) bool { return len(changes) > len(c.Demands) }
