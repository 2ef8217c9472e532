// Package riverlimit brings rate limits to River's job queue, in the database
// and in the transactions that River uses already.
//
// There are two places to limit a job, and they go together:
//
//   - [Inserter] reserves capacity where the job is inserted, in the same transaction: there is
//     no job without capacity, and no capacity without a job. The job is scheduled for the
//     instant at which its capacity is available.
//   - [Middleware] reserves where the job is worked: once for each attempt, and not at all for
//     limits reserved at insertion. It holds the job back until the instant, in the worker if
//     that is near, otherwise with a snooze, so that limiting never uses up an attempt.
//
// A Middleware also holds jobs back while their limit is paused ([Middleware.Pause]) or switched
// off ([ratelimit.ModeRefuse]), even if they were inserted before that.
//
// # Averages and starts
//
// A reservation bounds how many jobs become due in any stretch of time. When
// they start is up to River, which looks for due jobs once in a while and then
// starts all of them: every 5 seconds for those that were inserted for later.
// The long-run rate holds, the spacing does not. That is enough for most
// purposes. For a third party that counts calls, and bans callers that make too
// many, it is not: see [MiddlewareConfig.HardStart], best with a
// [ratelimit.SlidingWindow] whose slots are longer than River is late.
//
// # The note
//
// The reservation of a job is noted in its metadata, under [MetadataKey], by name and key of
// the limits, with its attempt and its receipts. A job that returns from a snooze finds its
// reservation there. An attempt that has begun has used its reservation up, and the next one
// pays again: it calls the third party again. A worker that is killed before it has recorded
// the note costs its job's reservation, and never a limit.
//
// # Jobs that never run
//
// River says nothing when a job is cancelled or deleted before it has run, so its reservation
// stays: after 10 such jobs at one a minute the next is due 10 minutes later than need be. Give
// the reservation back in the transaction that cancels or deletes the job, with [CancelTx],
// which finds the receipt in the job's metadata. Jobs that were inserted after it keep their
// instants; later ones are due earlier, some in the same instant as those. See the example of a
// job that is cancelled. A job that has begun has used its reservation, and CancelTx leaves it
// alone.
//
// # The real cost
//
// A job that reserves an estimate, such as the most tokens that a language model may use,
// settles it by the tokens really used, with [SettleTx] in the transaction that completes the
// job.
//
// All functions and methods are safe for concurrent use.
package riverlimit
