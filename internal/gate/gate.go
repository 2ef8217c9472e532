// Package gate names the rows by which package riverlimit starts jobs, beside those of their limits, so
// that those who look at rows know them.
package gate

import "strings"

const (
	// Suffix ends the name of a gate, which bounds starts, after the name of its limit.
	Suffix = ":start"

	// Line ends the name of the line of jobs that a limit has refused.
	Line = ":line"
)

// Of returns the name of the limit whose gate or line a name is. It reports false if it is neither.
func Of(name string) (limit string, ok bool) {
	if limit, ok = strings.CutSuffix(name, Suffix); ok {
		return limit, true
	}
	return strings.CutSuffix(name, Line)
}
