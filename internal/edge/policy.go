package edge

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Policy is a limit of a middleware, with the key and the number of tokens of each request. Tier
// and Counts may be nil.
type Policy[R, O any] struct {
	Limit  ratelimit.Limit
	Key    func(R) (string, error)
	Tier   func(R) (ratelimit.Limit, error)
	Cost   func(R) (float64, error)
	Above  float64 // the share of the capacity to leave to others
	Counts func(O) bool
}

// CheckLimits notes faults of the policies' limits and returns their definitions, or none if a
// limit is invalid. others says that there are policies of another kind, so there may be no limits.
func CheckLimits(f *Faults, limits []ratelimit.Limit, others bool) []ratelimit.Definition {
	if others && len(limits) == 0 {
		return nil
	}
	f.Must(len(limits) > 0 && len(limits) <= ratelimit.MaxRequests, "Policies", len(limits), fmt.Sprintf("must be 1 to %d", ratelimit.MaxRequests))
	if err := ratelimit.Validate(limits...); err != nil {
		f.Add(err)
		return nil
	}
	definitions := make([]ratelimit.Definition, len(limits))
	for i, l := range limits {
		definitions[i] = l.Definition()
		if definitions[i].Capacity == 0 {
			f.Add(&ratelimit.FieldError{Package: f.Package, Limit: definitions[i].Name, Field: "Capacity", Value: 0.0, Reason: "can never grant a request"})
		}
	}
	return definitions
}

// CheckAbove notes an invalid share.
func CheckAbove(f *Faults, name string, above float64) {
	if !(above >= 0 && above <= 1) {
		f.Add(&ratelimit.FieldError{Package: f.Package, Limit: name, Field: "Above", Value: above, Reason: "must be a share of the capacity, from 0 to 1"})
	}
}

// Names returns the quoted names of limits, separated by commas.
func Names(limits []ratelimit.Limit, inFlight []ratelimit.InFlight) string {
	names := make([]string, 0, len(limits)+len(inFlight))
	for _, l := range limits {
		names = append(names, strconv.Quote(ratelimit.NameOf(l)))
	}
	for _, l := range inFlight {
		names = append(names, strconv.Quote(l.Name))
	}
	return strings.Join(names, ", ")
}

// request returns what r takes by policy p. Its limit is nil if p does not apply.
func (p *Policy[R, O]) request(r R, catalog ratelimit.Catalog) (request ratelimit.Request, err error) {
	limit := p.Limit
	if p.Tier != nil {
		if limit, err = p.Tier(r); err != nil || limit == nil {
			return request, err
		}
		if got, want := ratelimit.NameOf(limit), ratelimit.NameOf(p.Limit); got != want {
			return request, &ratelimit.FieldError{Limit: want, Field: "Tier", Value: got, Reason: "must be a copy of the policy's limit, of the same name"}
		}
	}
	key, err := p.Key(r)
	if err != nil {
		return request, err
	}
	n, err := p.Cost(r)
	if err != nil {
		return request, err
	}
	request = limit.ForN(key, n).Above(p.Above)
	if catalog != nil {
		request = catalog.Resolve(request)
	}
	return bounded(request)
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

// DefaultMaxJitter bounds the jitter of a wait.
const DefaultMaxJitter = 30 * time.Second

// Jittered returns the wait of a refusal plus jitter, which is below most, and below share of the
// wait. Each deciding key has a fixed part of that bound.
func Jittered(result ratelimit.Result, share float64, most time.Duration) time.Duration {
	identity := Identity(ratelimit.NameOf(result.Request.Limit), result.Request.Key)
	return result.RetryAfter + Shift(identity, min(most, time.Duration(share*float64(result.RetryAfter))))
}

// Shift returns the fixed part of spread for an identity.
func Shift(identity string, spread time.Duration) time.Duration {
	return ratelimit.JitterFor(identity, time.Time{}, spread).Sub(time.Time{})
}
