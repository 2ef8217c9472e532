package catalog

import (
	"fmt"
	"strconv"
	"time"
)

// Left is what is left of a key before an edit, and after it.
type Left struct {
	Before  float64       `json:"before"` // tokens
	Of      float64       `json:"of"`     // the capacity
	After   float64       `json:"after"`
	AfterOf float64       `json:"afterOf"`
	Within  time.Duration `json:"-"` // until all of it is there; 0 for at once
}

// String returns what is left in a line, such as "0 left of 50 → 950 left of 1,000".
func (l *Left) String() string {
	text := fmt.Sprintf("%s left of %s → %s left of %s", tokens(l.Before), tokens(l.Of), tokens(l.After), tokens(l.AfterOf))
	if l.Within > 0 {
		text += fmt.Sprintf(" (within %v)", l.Within)
	}
	return text
}

// tokens writes a number of tokens, rounded to a thousandth.
func tokens(v float64) string {
	text := strconv.FormatFloat(v, 'f', -1, 64)
	if whole := int64(v); float64(whole) != v {
		return strconv.FormatFloat(v, 'f', 3, 64)
	}
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
