// Package gate names the gates by which package riverlimit bounds starts of jobs, so that those
// who look at rows know them.
package gate

import "strings"

// Suffix ends the name of a gate, after the name of its limit.
const Suffix = ":start"

// Of returns the name of the limit whose gate a name is. It reports false if it is none.
func Of(name string) (limit string, ok bool) { return strings.CutSuffix(name, Suffix) }
