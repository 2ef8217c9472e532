// Package edge is shared by the middlewares of several protocols: policies, which give the
// limit that a request takes from, its key and the tokens; the decision, and its event; the
// refund when the request has ended; and clients that wait.
//
// R is the protocol's request, such as *http.Request, and O is how one has ended. Errors name
// the package of the protocol.
package edge

import (
	"errors"

	"github.com/pgratelimit/ratelimit"
)

// Faults is the faults of a configuration.
type Faults struct {
	Package string // of the fields
	found   []error
}

// Must notes a fault unless a field is good.
func (f *Faults) Must(good bool, field string, value any, reason string) {
	if !good {
		f.Add(Invalid(f.Package, field, value, reason))
	}
}

// Add notes a fault.
func (f *Faults) Add(err error) { f.found = append(f.found, err) }

// Err returns the faults as one error: nil, the only one, or all joined.
func (f *Faults) Err() error {
	if len(f.found) == 1 {
		return f.found[0]
	}
	return errors.Join(f.found...)
}

// Invalid returns the error of a package's field that has a value that it cannot have.
func Invalid(pkg, field string, value any, reason string) error {
	return &ratelimit.FieldError{Package: pkg, Field: field, Value: value, Reason: reason}
}

// OrDefault returns v, or def if v is the zero value.
func OrDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}
