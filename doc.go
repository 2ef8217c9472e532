// Package ratelimit defines rate limits that live in PostgreSQL, where a limit
// is one row with two numbers, and changes in the transaction that does the
// work: a token is spent if and only if the work commits.
//
// This package holds the definitions, the requests and the results. Package pgstore keeps
// limits in PostgreSQL, package memstore in memory for tests, and package
// migrate makes the table.
//
// # Limits
//
// A token is the right to do something once. Calls take tokens from a limit. A [TokenBucket]
// refills continuously, a [FixedWindow] at the edge of each window, and a [SlidingWindow] never
// grants more than its rate in any window, wherever that begins. All are plain values, usually
// package variables:
//
//	var SendMessage = ratelimit.TokenBucket{
//		Name: "send_message", Rate: 10, Period: time.Minute, Capacity: 20,
//	}
//
// A [Definition] is a limit with its defaults filled in, and can be read from JSON. [Validate]
// finds the faults of a program's limits; [Key] makes one key of several parts.
//
// Only the state of a limit is stored, by name and key, and only while it is not
// full. A change of the definition holds for all keys from their next call on.
//
// # The two numbers
//
// A row holds value, a number of tokens that may be a fraction, and ts, the instant of that
// value. A value below 0 is debt: tokens that were reserved before they were refilled. To
// decide a call at the instant now, the row is brought there first:
//
//	token bucket   value = min(value + max(0, now − ts) · rate / period, capacity)
//	               ts    = max(ts, now)
//	fixed window   w     = max(0, ⌊(now − ts) / period⌋)
//	               value = min(value + w · rate, capacity)
//	               ts    = ts + w · period
//
// A sliding window has a third column: the tokens granted in each of its S + 1 newest slots,
// which are period / S long. Its value is the rate less their sum.
//
// A call for n tokens succeeds if at least 0 is left, or for a reservation at least
// −MaxReserved. Then the rest is stored; otherwise nothing is. A row that does not exist is
// full.
//
// # Pauses
//
// A pause is for a third party that answers "not before": it empties a limit, and until it is
// over nothing is allowed, not even a count of 0, and nothing is refilled. Tokens that are
// credited, settled or cancelled meanwhile do not end it: they can be reserved, for the end of
// the pause or later, and are allowed only then. Resume and Reset end it before its time.
//
// # Promises
//
// Over any stretch of time a token bucket grants at most Capacity + Rate · elapsed / Period, a
// fixed window at most Capacity + Rate for each edge, and a sliding window at most Rate in any
// Period, under any calls and any failures: also when PostgreSQL aborts a transaction for a
// serialization failure (40001: it cannot be ordered with another that ran at the same time) or
// a deadlock (40P01: each of two waits for a row that the other has locked), and the caller
// runs it again. (After Reset, Credit, Settle or a change of the definition it starts from the
// state that these left.) A call that was rolled back or refused costs nothing. A refused call
// that is repeated at exactly its RetryAt succeeds, if no other call took tokens meanwhile.
//
// All functions and methods of this package are safe for concurrent use.
package ratelimit
