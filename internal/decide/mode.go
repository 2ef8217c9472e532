package decide

import (
	"errors"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// Modes decides a call whose requests have modes. Stores know no modes: they are asked as if every
// limit were enforced. If a limit in ModeShadow refuses, it is set aside, and the others are asked
// again.
type Modes struct {
	verb  Verb
	at    time.Time
	keys  []Key                     // in the order of the call
	asked map[Key]ratelimit.Request // their counts added up
	aside map[Key]ratelimit.Status  // limits that are not asked any more
}

// Moded reports whether a request has another mode than ModeEnforce.
func Moded(requests []ratelimit.Request) bool {
	for i := range requests {
		if requests[i].Mode > ratelimit.ModeEnforce {
			return true
		}
	}
	return false
}

// ByMode decides a call of requests with modes. ask decides one without. Its errors are those of
// New and of ask.
func ByMode(verb Verb, at time.Time, requests []ratelimit.Request, ask func([]ratelimit.Request) (ratelimit.Result, error)) (ratelimit.Result, error) {
	m, err := NewModes(verb, at, requests)
	if err != nil {
		return ratelimit.Result{}, err
	}
	result, err := m.Decide(func(left []ratelimit.Request) (ratelimit.Result, error) {
		if len(left) == 0 {
			return ratelimit.Result{Status: ratelimit.Status{OK: true}}, nil
		}
		return ask(left)
	})
	if err != nil {
		return ratelimit.Result{}, err
	}
	return m.Report(result), nil
}

// NewModes checks requests at an instant. Its errors are ErrInvalid. AtMost and First enforce
// limits in ModeShadow: these verbs have no shadow, and a mode set in a catalog must not fail
// calls.
func NewModes(verb Verb, at time.Time, requests []ratelimit.Request) (*Modes, error) {
	if err := badNumber(len(requests), ratelimit.MaxRequests); err != nil {
		return nil, err
	}
	m := &Modes{verb: verb, at: at, asked: map[Key]ratelimit.Request{}, aside: map[Key]ratelimit.Status{}}
	var call Call
	for i, r := range requests {
		if (verb == AtMost || verb == First) && r.Mode == ratelimit.ModeShadow {
			r.Mode = ratelimit.ModeEnforce
		}
		had := len(call.Demands)
		if err := call.add(nil, &r); err != nil {
			return nil, err
		}
		key := keyOf(&r)
		switch same := m.asked[key]; {
		case len(call.Demands) > had:
			m.keys = append(m.keys, key)
		case verb == First:
			return nil, twice(i, r)
		case max(same.Mode, ratelimit.ModeEnforce) != max(r.Mode, ratelimit.ModeEnforce):
			return nil, &ratelimit.FieldError{Limit: key.Name, Field: "Mode", Value: r.Mode, Reason: "is not the only one for this limit and key in one call"}
		}
		m.asked[key] = r
	}
	for i := range call.Demands { // counts are added up now
		m.asked[call.Demands[i].KeyOf()] = call.Demands[i].Request
	}
	return m, nil
}

// InShadow reports whether the limit is in ModeShadow for this key.
func (m *Modes) InShadow(key Key) bool { return m.is(key, ratelimit.ModeShadow) }

func (m *Modes) is(key Key, mode ratelimit.Mode) bool { return m.asked[key].Mode == mode }

// left returns the requests that are not set aside, without their modes.
func (m *Modes) left() (requests []ratelimit.Request) {
	for _, key := range m.keys {
		if _, aside := m.aside[key]; !aside {
			r := m.asked[key]
			r.Mode, r.RefusedUntil = 0, time.Time{}
			requests = append(requests, r)
		}
	}
	return requests
}

// Decide calls ask until the call is granted, or refused by an enforced limit. ask must grant an
// empty call. Pass the result to Report.
func (m *Modes) Decide(ask func([]ratelimit.Request) (ratelimit.Result, error)) (ratelimit.Result, error) {
	if m.verb == First {
		return m.decideFirst(ask)
	}
	if m.refuse() {
		return ratelimit.Result{}, nil
	}
	for {
		result, err := ask(m.left())
		if m.setAsideNever(err) || err == nil && !result.OK && m.setAside(result) {
			continue
		}
		return result, err
	}
}

// decideFirst decides a call that takes from the first limit that can grant. It skips limits in
// ModeRefuse.
func (m *Modes) decideFirst(ask func([]ratelimit.Request) (ratelimit.Result, error)) (ratelimit.Result, error) {
	for _, key := range m.keys {
		if m.is(key, ratelimit.ModeRefuse) {
			m.aside[key] = m.refused(key)
		}
	}
	left := m.left()
	if len(left) == 0 {
		return ratelimit.Result{}, nil
	}
	return ask(left)
}

// refuse sets all limits aside if one of them is in ModeRefuse; then none is asked.
func (m *Modes) refuse() bool {
	if !slices.ContainsFunc(m.keys, func(key Key) bool { return m.is(key, ratelimit.ModeRefuse) }) {
		return false
	}
	for _, key := range m.keys {
		m.aside[key] = m.refused(key)
	}
	return true
}

// refused returns the status of a limit in a call that ModeRefuse refuses. Another limit's status
// is unknown: it has no instant.
func (m *Modes) refused(key Key) ratelimit.Status {
	r := m.asked[key]
	s := ratelimit.Status{Request: r, Capacity: r.Limit.Definition().Capacity}
	if r.Mode != ratelimit.ModeRefuse {
		return s
	}
	s.At, s.RetryAt = m.at, refusedUntil(r.RefusedUntil, m.at)
	s.RetryAfter = s.RetryAt.Sub(m.at)
	return s
}

// refusedUntil returns when to ask again after a refusal by ModeRefuse: when the mode ends. If that
// is unknown, it is RefusedFor later. A past end counts as unknown: the request is older than that,
// and callers that repeat it must pause.
func refusedUntil(until, at time.Time) time.Time {
	if until.After(at) {
		return until
	}
	return at.Add(ratelimit.RefusedFor)
}

// PermitRefused returns the refusal of permits by ModeRefuse at an instant; false if none of the limits
// is in that mode.
func PermitRefused(asked []ratelimit.PermitRequest, at time.Time) (ratelimit.Permit, bool) {
	for _, r := range asked {
		if r.Limit.Mode == ratelimit.ModeRefuse {
			return ratelimit.Permit{InFlight: r.Limit, Key: r.Key, N: r.N, At: at, NotBefore: refusedUntil(r.Limit.RefusedUntil, at)}, true
		}
	}
	return ratelimit.Permit{}, false
}

// never returns the status of a limit that can never grant its count.
func (m *Modes) never(key Key) ratelimit.Status {
	r := m.asked[key]
	return ratelimit.Status{
		Request: r, Capacity: r.Limit.Definition().Capacity,
		At: m.at, RetryAfter: ratelimit.MaxSpan, RetryAt: m.at.Add(ratelimit.MaxSpan),
	}
}

// setAsideNever sets aside the limit in ModeShadow that can never grant its count, if err says so.
// It reports whether there was one.
func (m *Modes) setAsideNever(err error) bool {
	var never *ratelimit.ExceedsCapacityError
	if !errors.As(err, &never) {
		return false
	}
	key := keyOf(&never.Request)
	if !m.is(key, ratelimit.ModeShadow) {
		return false
	}
	m.aside[key] = m.never(key)
	return true
}

// setAside sets aside the limits in ModeShadow that have refused, and reports whether there are
// any. Sharded limits come last: stores do not read them if another limit refuses.
func (m *Modes) setAside(result ratelimit.Result) (found bool) {
	faster := true // other calls were faster each time; by now there may be enough
	for _, s := range result.Each() {
		faster = faster && s.OK
	}
	for _, sharded := range []bool{false, true} {
		for _, s := range result.Each() {
			key := keyOf(&s.Request)
			if !m.is(key, ratelimit.ModeShadow) || s.OK && !faster || (s.Request.Limit.Definition().Shards > 1) != sharded {
				continue
			}
			if s.OK {
				s.OK, s.RetryAfter, s.RetryAt = false, time.Microsecond, s.At.Add(time.Microsecond)
			}
			m.aside[key], found = s, true
		}
		if found && !faster {
			break
		}
	}
	return found
}

func keyOf(r *ratelimit.Request) Key { return Key{ratelimit.NameOf(r.Limit), r.Key} }

// Report returns the result of the call. It gets the result of Decide, or of a transaction that
// made the calls of Decide itself.
func (m *Modes) Report(result ratelimit.Result) ratelimit.Result {
	if m.verb == First && result.OK { // it has one limit only
		result.Request = m.inMode(result.Request)
		return result
	}
	statuses := m.statuses(result)
	told := ratelimit.Result{Receipt: result.Receipt}
	told.Status = m.main(result, statuses)
	for i := range statuses {
		told.Shadowed = told.Shadowed || statuses[i].Shadowed
	}
	if len(statuses) > 1 || told.Shadowed {
		told.Several = statuses
	}
	if result.OK && m.verb != Look {
		told.Receipt = m.receipt(result, statuses)
	}
	return told
}

// inMode returns the request of a store's answer with the mode that it had.
func (m *Modes) inMode(r ratelimit.Request) ratelimit.Request {
	asked := m.asked[keyOf(&r)]
	r.Mode, r.RefusedUntil = asked.Mode, asked.RefusedUntil
	return r
}

// statuses returns the status of each limit.
func (m *Modes) statuses(result ratelimit.Result) []ratelimit.Status {
	said := make(map[Key]ratelimit.Status, len(m.keys))
	for _, s := range result.Each() {
		said[keyOf(&s.Request)] = s
	}
	statuses := make([]ratelimit.Status, 0, len(m.keys))
	for _, key := range m.keys {
		s, ok := m.aside[key]
		if !ok {
			s, ok = said[key]
		}
		if !ok { // First: it can never grant
			continue
		}
		s.Request = m.inMode(s.Request)
		if s.Request.Mode == ratelimit.ModeShadow && !s.At.IsZero() {
			s.Shadowed = !s.OK || s.RetryAfter > 0
		}
		statuses = append(statuses, s)
	}
	return statuses
}

// main returns the status that the result shows. An enforced limit decides; if there is none, the
// status says whether and when the caller may go on.
func (m *Modes) main(result ratelimit.Result, statuses []ratelimit.Status) (s ratelimit.Status) {
	decides := func(mode ratelimit.Mode, than func(s, t ratelimit.Status) bool) bool {
		found := false
		for _, t := range statuses {
			if max(t.Request.Mode, ratelimit.ModeEnforce) == mode && (!found || than(t, s)) {
				s, found = t, true
			}
		}
		return found
	}
	switch {
	case result.OK:
		if decides(ratelimit.ModeEnforce, outweighs) {
			return s
		}
		decides(ratelimit.ModeShadow, outweighs)
	case m.verb == First:
		_ = decides(ratelimit.ModeRefuse, sooner)
		if result.Request.Limit != nil && (s.Request.Limit == nil || sooner(result.Status, s)) {
			s = result.Status
			s.Request = m.inMode(s.Request)
		}
		return s
	case result.Request.Limit != nil:
		s = result.Status
		s.Request = m.inMode(s.Request)
		return s
	default:
		decides(ratelimit.ModeRefuse, outweighs)
		return s
	}
	return through(s)
}

func sooner(s, t ratelimit.Status) bool { return s.RetryAt.Before(t.RetryAt) }

// through returns the status of a limit in ModeShadow that lets a call pass.
func through(s ratelimit.Status) ratelimit.Status {
	s.OK, s.RetryAfter, s.RetryAt = true, 0, s.At
	return s
}

// receipt returns the receipt of a granted call, in which every limit has its place.
func (m *Modes) receipt(result ratelimit.Result, statuses []ratelimit.Status) *ratelimit.Receipt {
	var places []int
	var nothing []receipt.Payment
	for i := range statuses {
		s := &statuses[i]
		if s.OK {
			places = append(places, i)
			continue
		}
		limit := &receipt.Limit{Definition: bucket.Definition(s.Request.Limit.Definition()), Key: s.Request.Key}
		nothing = append(nothing, receipt.Nothing(limit, i))
	}
	if nothing == nil {
		return result.Receipt
	}
	return receipt.Put(result.Receipt, places, nothing, m.at)
}

// EachByMode returns the status that each request would get alone, by its mode. ask returns the
// statuses of requests without modes.
func EachByMode(at time.Time, requests []ratelimit.Request, ask func([]ratelimit.Request) ([]ratelimit.Status, error)) ([]ratelimit.Status, error) {
	if err := badNumber(len(requests), ratelimit.MaxChecks); err != nil {
		return nil, err
	}
	statuses := make([]ratelimit.Status, len(requests))
	var asked []ratelimit.Request
	var places []int
	for i, r := range requests {
		m, err := NewModes(Look, at, requests[i:i+1])
		if err != nil {
			return nil, err
		}
		if m.refuse() {
			statuses[i] = m.aside[m.keys[0]]
			continue
		}
		if _, err := New(false, m.left()...); m.setAsideNever(err) {
			statuses[i] = m.Report(ratelimit.Result{Status: ratelimit.Status{OK: true}}).Status
			continue
		}
		r.Mode, r.RefusedUntil = 0, time.Time{}
		asked, places = append(asked, r), append(places, i)
	}
	if len(asked) == 0 {
		return statuses, nil
	}
	found, err := ask(asked)
	if err != nil {
		return nil, err
	}
	for n, i := range places {
		s := found[n]
		s.Request.Mode, s.Request.RefusedUntil = requests[i].Mode, requests[i].RefusedUntil
		if s.Request.Mode == ratelimit.ModeShadow && !s.OK {
			s.Shadowed = true
			s = through(s)
		}
		statuses[i] = s
	}
	return statuses, nil
}
