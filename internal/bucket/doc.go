// Package bucket is the algebra of limits: the tokens that a row holds at an instant, takes
// from it and refunds to it. It is pure and imports only arithmetic, so the root package, receipts
// and stores share it.
//
// A [Definition] defines a limit, a [State] is the content of a row, and the methods of
// Definition are the arithmetic. Each kind of limit is one file, which implements the interface
// kind: tokenbucket.go, fixedwindow.go, calendar.go and slidingwindow.go. The first three share
// level.go: their value is the number of tokens left. The rest of the library does not ask for
// the kind of a limit. It asks for properties:
//
//   - [Definition.Statements] names the SQL statements for the rows of a kind.
//   - [Definition.Slotted] reports whether rows have slots beside the value. Then a refund
//     needs the row to be read, and a reservation that must wait needs a slot of its own.
//   - [Definition.Tick] is the time between two ticks of a row's clock, in microseconds:
//     1 for a token bucket, otherwise a period or a slot.
//   - [Definition.Stepped] reports whether the clock stands still between ticks.
//   - [Definition.Next] is the next tick.
//   - [Definition.End] is when tokens end that are prefetched: all of them with the window
//     or slot, or after a time.
//   - [Definition.Inflow] is the tokens refilled in a time in which no prefetched token ends:
//     nothing while the clock stands still.
//   - [Definition.Plain] reports whether a statement can add to a row as it is.
//   - [Definition.Whole] and [Definition.Together] serve calls of at most n tokens, and limits
//     with several shards.
package bucket
