package edge

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Policy is a limit, its key, and the tokens that a request takes from it. Clients see the limit's
// name.
type Policy[R, O any] struct {
	// Limit is the limit. Required. Its name differs from those of all other policies.
	Limit ratelimit.Limit

	// Applies selects requests. The default, nil, is all of them.
	Applies func(R) bool

	// Key returns the key of a request. Nil is one key for all requests.
	Key func(R) (string, error)

	// Tier chooses the limit of a request, such as by the customer's plan: a copy of Limit with
	// other numbers and the same name. With a nil limit the policy does not apply to the
	// request. An error is answered like one of Key. The default, nil, is Limit for all.
	Tier func(R) (ratelimit.Limit, error)

	// Cost says how many tokens a request takes. Nil is one.
	Cost func(R) (float64, error)

	// Above is the share of the limit's Capacity that these requests leave to others. Give less
	// important requests of a limit a middleware of their own, with a larger share. See
	// [ratelimit.Request.Above]. The default is 0: they may use all of it.
	Above float64

	// Counts reports after the handler whether the request counts. If not, its tokens are given
	// back. Until then they are taken, so a thousand simultaneous guesses are limited too. The
	// default, nil, counts all.
	Counts func(O) bool
}

// InFlight limits how many requests of a key are handled at a time, over all processes. A request
// holds its permits until its handler has returned or panicked. The lease is renewed meanwhile, also
// while the handler streams or works on for a client that has gone. If the database does not answer
// for a lease, the permit is lost, and the handler's context ends with the [context.Cause]
// [ratelimit.ErrLeaseLost]. The permits of a process that dies are free within a lease.
type InFlight[R any] struct {
	// Limit is the limit. Required. Its name is public like a Policy's, and differs from those
	// of all policies.
	Limit ratelimit.InFlight

	// Applies selects requests. The default, nil, is all of them.
	Applies func(R) bool

	// Key returns the key of a request. Nil is one key for all requests.
	Key func(R) (string, error)

	// Tier chooses the limit of a request: a copy of Limit with another number or lease, and
	// the same name. With a zero InFlight the policy does not apply to the request. An error is
	// answered like one of Key. The default, nil, is Limit for all.
	Tier func(R) (ratelimit.InFlight, error)

	// Weight returns how many permits a request takes, all or nothing. More permits than the
	// limit has are never granted. An error is answered like one of Key. The default, nil, is
	// one.
	Weight func(R) (int, error)
}

// Names returns the names of the policies' limits; those of how many at once stand last.
func Names[R, O any](policies []Policy[R, O], inFlight []InFlight[R]) (names []string) {
	for _, p := range policies {
		names = append(names, ratelimit.NameOf(p.Limit))
	}
	for _, p := range inFlight {
		names = append(names, p.Limit.Name)
	}
	return names
}

// Quoted returns the quoted names of the policies' limits, separated by commas.
func Quoted[R, O any](policies []Policy[R, O], inFlight []InFlight[R]) string {
	quoted := Names(policies, inFlight)
	for i, name := range quoted {
		quoted[i] = strconv.Quote(name)
	}
	return strings.Join(quoted, ", ")
}

// request returns what r takes by policy p. Its limit is nil if p does not apply.
func (p *Policy[R, O]) request(r R, catalog ratelimit.Catalog) (request ratelimit.Request, err error) {
	if p.Applies != nil && !p.Applies(r) {
		return request, nil
	}
	limit := p.Limit
	if p.Tier != nil {
		if limit, err = p.Tier(r); err != nil || limit == nil {
			return request, err
		}
		if got, want := ratelimit.NameOf(limit), ratelimit.NameOf(p.Limit); got != want {
			return request, &ratelimit.FieldError{Limit: want, Field: "Tier", Value: got, Reason: "must be a copy of the policy's limit, of the same name"}
		}
	}
	key, n := "", 1.0
	if p.Key != nil {
		if key, err = p.Key(r); err != nil {
			return request, err
		}
	}
	if p.Cost != nil {
		if n, err = p.Cost(r); err != nil {
			return request, err
		}
	}
	request = limit.ForN(key, n).Above(p.Above)
	if catalog != nil {
		request = catalog.Resolve(request)
	}
	return bounded(request)
}

// request returns the permits of a policy that r needs; N is 0 if the policy does not apply.
func (p *InFlight[R]) request(r R, catalog ratelimit.Catalog) (want ratelimit.PermitRequest, err error) {
	if p.Applies != nil && !p.Applies(r) {
		return want, nil
	}
	limit := p.Limit
	if p.Tier != nil {
		if limit, err = p.Tier(r); err != nil || limit == (ratelimit.InFlight{}) {
			return want, err
		}
		if limit.Name != p.Limit.Name {
			return want, &ratelimit.FieldError{Limit: p.Limit.Name, Field: "Tier", Value: limit.Name, Reason: "must be a copy of the policy's limit, of the same name"}
		}
	}
	key, n := "", 1
	if p.Key != nil {
		if key, err = p.Key(r); err != nil {
			return want, err
		}
	}
	if p.Weight != nil {
		if n, err = p.Weight(r); err != nil {
			return want, err
		}
	}
	if catalog != nil {
		limit = catalog.InFlight(limit, key)
	}
	return limit.ForN(key, n), nil
}

// bounded returns request, or an error if no store accepts its count.
func bounded(request ratelimit.Request) (ratelimit.Request, error) {
	switch n := request.Count; {
	case !(n >= 0):
		name := ratelimit.NameOf(request.Limit)
		return request, &ratelimit.FieldError{Limit: name, Field: "Count", Value: n, Reason: "is negative or not a number"}
	case n > ratelimit.MaxTokens:
		return request, &ratelimit.ExceedsCapacityError{Request: request, Most: request.Limit.Definition().Capacity}
	}
	return request, nil
}

// StatedCost returns the cost that a client states, a whole number in digits, or least if it is
// lower. Without a value it returns otherwise. fault makes the error of an invalid value; what
// names the field.
func StatedCost(what string, values []string, least, otherwise float64, fault func(detail string) error) (float64, error) {
	switch {
	case len(values) == 0:
		return otherwise, nil
	case len(values) > 1:
		return 0, fault(what + " has several values")
	case values[0] == "":
		return otherwise, nil
	case strings.Trim(values[0], "0123456789") != "":
		return 0, fault(what + " must be a whole number, in digits")
	}
	n, err := strconv.ParseFloat(values[0], 64)
	if err != nil { // too large for a float64; no limit grants it
		n = math.MaxFloat64
	}
	return max(n, least), nil
}

// Identity returns a limit's name and a key in one string. No name holds a zero byte.
func Identity(name, key string) string { return name + "\x00" + key }

// Shift returns the fixed part of spread for an identity.
func Shift(identity string, spread time.Duration) time.Duration {
	return ratelimit.JitterFor(identity, time.Time{}, spread).Sub(time.Time{})
}
