// Package bucket is the algebra of limits: what a row holds at an instant, what can be
// taken from it and what comes back to it. It is pure, and imports nothing of the library
// but arithmetic, so that the root package, receipts and stores share it.
//
// A [Definition] says what a limit is, a [State] what is in a row, and the methods of
// Definition are the arithmetic. Each kind of limit is one file, which implements the
// interface kind: tokenbucket.go, fixedwindow.go, calendar.go and slidingwindow.go. What the
// first three have in common, a value that is what there is, is level.go. The rest of the library
// does not ask for the kind of a limit. It asks what matters there:
//
//   - [Definition.Statements] names the SQL statements for the rows of a kind.
//   - [Definition.Slotted] reports whether rows have slots beside the value. Then what is
//     given back needs the row to be read, and what must wait needs a slot of its own.
//   - [Definition.Tick] is the time between two ticks of a row's clock, in microseconds:
//     1 for a token bucket, otherwise a period or a slot.
//   - [Definition.Stands] reports whether the clock stands still between ticks.
//   - [Definition.Next] is the tick after one.
//   - [Definition.End] is when tokens end that are prefetched: all of them with the window
//     or slot, or after a time.
//   - [Definition.Inflow] is what is refilled in a time in which no prefetched token ends:
//     nothing while the clock stands still.
//   - [Definition.Plain] reports whether a statement can add to a row as it is.
//   - [Definition.Whole], [Definition.Together] and [Definition.By] are what a call of at
//     most so many, and one of several shards, need.
package bucket
