// Package bucket is the algebra of limits: what a row holds at an instant, what can be
// taken from it and what can be given back. It is pure, and imports nothing of the
// library but arithmetic, so that the root package, receipts and stores share it.
package bucket

import (
	"fmt"
	"time"
)

// MaxSpan is the longest period, the longest time to fill an empty limit, and the
// longest wait for a reservation.
const MaxSpan = 100 * 365 * 24 * time.Hour

// Kind is how a limit refills.
type Kind uint8

const (
	TokenBucket   Kind = iota + 1 // continuously
	FixedWindow                   // at the edge of each window
	SlidingWindow                 // slot by slot, as what was taken leaves the window
)

// String returns the kind in words, such as "token bucket".
func (k Kind) String() string {
	switch k {
	case TokenBucket:
		return "token bucket"
	case FixedWindow:
		return "fixed window"
	case SlidingWindow:
		return "sliding window"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Definition is a limit with its defaults filled in. It has the fields of the root
// package's Definition, which converts to it; the methods are the arithmetic.
type Definition struct {
	Name        string
	Kind        Kind
	Rate        float64       // tokens per Period
	Period      time.Duration // whole microseconds
	Capacity    float64       // 0 is an empty bucket; Rate for a sliding window
	MaxReserved float64       // 0 is no debt, +Inf unlimited
	Shards      int           // at least 1
	Start       time.Time     // of a window: an edge; zero for a phase by key
	Slots       int           // sliding window: into how many its period is cut; otherwise 0
}
