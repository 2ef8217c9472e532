// Package bucket is the algebra of limits: how many tokens a row holds at an instant, and how takes
// and refunds change it. It is pure and imports only arithmetic, so the root package, receipts and
// stores share it.
//
// A [Definition] defines a limit, a [State] is the content of a row, and the methods of
// Definition are the arithmetic. Each kind of limit is one file, which implements the interface
// kind: tokenbucket.go, fixedwindow.go, calendar.go and slidingwindow.go. The first three share
// level.go: their value is the number of tokens left. The rest of the library does not ask for
// the kind of a limit. It asks for properties:
//
//   - [Definition.Statements] names the SQL statements for the rows of a kind.
//   - [Definition.Slotted] reports whether rows have slots beside the value. Then a refund
//     needs the row to be read, and a reservation that must wait needs a later slot.
//   - [Definition.Tick] is the time between two ticks of a row's clock, in microseconds:
//     1 for a token bucket, otherwise a period or a slot.
//   - [Definition.Stepped] reports whether the clock stands still between ticks.
//   - [Definition.Next] is the next tick.
//   - [Definition.End] is when prefetched tokens end: with their window or slot, otherwise
//     after a time.
//   - [Definition.Inflow] is the tokens refilled while prefetched tokens are out: none if the
//     clock stands still.
//   - [Definition.Plain] reports whether a statement can add to a row as it is.
//   - [Definition.Whole] serves calls that take the available tokens, up to a count.
//   - [Definition.Together] serves limits with several shards.
package bucket
