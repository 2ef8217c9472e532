// Package ratelimit defines rate limits that live in PostgreSQL, where a limit
// is one row with two numbers, and changes in the transaction that does the
// work: a token is spent if and only if the work commits.
//
// This package holds the definitions and the arithmetic. Package pgstore keeps
// limits in PostgreSQL, package memstore in memory for tests, and package
// migrate makes the table.
//
// # Limits
//
// A [TokenBucket]'s tokens come back continuously, a [FixedWindow]'s all at
// once at the edge of each window. Both are plain values, usually package
// variables:
//
//	var SendMessage = ratelimit.TokenBucket{
//		Name: "send_message", Rate: 10, Period: time.Minute, Capacity: 20,
//	}
//
// Only the state of a limit is stored, by name and key, and only while it is
// not full for want of a call. A change of the definition holds for all keys
// from their next call on.
//
// # The two numbers
//
// A row holds value, which is tokens and may be a fraction, and ts, the instant
// at which there were so many. To decide a call at the instant now, the row is
// brought there first ([Definition.Settle]):
//
//	token bucket   value = min(value + max(0, now − ts) · rate / period, capacity)
//	               ts    = max(ts, now)
//	fixed window   w     = max(0, ⌊(now − ts) / period⌋)
//	               value = min(value + w · rate, capacity)
//	               ts    = ts + w · period
//
// A call for n tokens succeeds if at least 0 is left, or for a reservation at
// least −MaxReserved. Then what is left is stored; otherwise nothing is. A row
// that does not exist is full.
//
// # What is promised
//
// Over any stretch of time a token bucket grants at most Capacity + Rate ·
// elapsed / Period, and a fixed window at most Capacity + Rate for each edge,
// whoever calls and whatever fails. (After Reset, Credit or a change of the
// definition it starts from what these left.) What was rolled back or refused
// costs nothing. A refused call that is repeated at exactly its RetryAt
// succeeds, if nobody else came.
//
// All functions and methods of this package are safe for concurrent use.
package ratelimit
