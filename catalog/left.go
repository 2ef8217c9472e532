package catalog

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/visible"
)

// Left is what is left of a key before an edit, and after it.
type Left struct {
	Before  float64       `json:"before"` // tokens
	Of      float64       `json:"of"`     // the capacity
	After   float64       `json:"after"`
	AfterOf float64       `json:"afterOf"`
	Within  time.Duration `json:"-"` // until all of it is there; 0 for at once
}

// String returns what is left in a line, such as "0 left of 50 → 950 left of 1000".
func (l *Left) String() string {
	text := fmt.Sprintf("%s left of %s → %s left of %s", visible.Amount(l.Before), visible.Amount(l.Of), visible.Amount(l.After), visible.Amount(l.AfterOf))
	if l.Within > 0 {
		text += fmt.Sprintf(" (within %v)", l.Within)
	}
	return text
}
