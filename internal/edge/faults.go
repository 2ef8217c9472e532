// Package edge is shared by the middlewares of several protocols. A policy gives a request's limit,
// its key and the number of tokens. A Limiter decides on requests and reports events. Admission
// refunds unused tokens when a request has ended. A Waiter serves clients that wait.
//
// R is the protocol's request, such as *http.Request. O tells how a request has ended. Errors name
// the package of the protocol.
package edge

import (
	"errors"
	"fmt"
	"slices"

	"github.com/pgratelimit/ratelimit"
)

// Faults collects the faults of a configuration.
type Faults struct {
	Package string // named in errors
	found   []error
}

// Must notes a fault of a field unless it is good.
func (f *Faults) Must(good bool, field string, value any, reason string) {
	if !good {
		f.Add(Invalid(f.Package, field, value, reason))
	}
}

// Add notes a fault.
func (f *Faults) Add(err error) { f.found = append(f.found, err) }

// Err returns the faults as one error; nil if there are none.
func (f *Faults) Err() error {
	if len(f.found) == 1 {
		return f.found[0]
	}
	return errors.Join(f.found...)
}

// Invalid returns an error for a field with an invalid value.
func Invalid(pkg, field string, value any, reason string) error {
	return &ratelimit.FieldError{Package: pkg, Field: field, Value: value, Reason: reason}
}

// Told returns the statuses that clients may see. It omits limits in shadow, which stop nobody, and
// limits that were not asked because another's mode refused.
func Told(result ratelimit.Result) []ratelimit.Status {
	return slices.DeleteFunc(slices.Clone(result.Each()), func(s ratelimit.Status) bool {
		return s.Request.Mode == ratelimit.ModeShadow || s.At.IsZero()
	})
}

// TooLarge says what a request would take that its limit never grants; "" if err does not say.
func TooLarge(err error) string {
	var exceeds *ratelimit.ExceedsCapacityError
	if !errors.As(err, &exceeds) {
		return ""
	}
	return fmt.Sprintf("would take %g tokens from %q, which grants at most %g at once",
		exceeds.Request.Count, ratelimit.NameOf(exceeds.Request.Limit), exceeds.Most)
}

// Field says which field of a request is invalid, without its value; "" if err does not say.
func Field(err error) string {
	var field *ratelimit.FieldError
	if !errors.As(err, &field) {
		return ""
	}
	names := map[string]string{"Key": "key", "Count": "cost", "N": "weight"}
	return fmt.Sprintf("the %s for limit %q %s", names[field.Field], field.Limit, field.Reason)
}
