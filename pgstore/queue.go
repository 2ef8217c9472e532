package pgstore

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore/internal/tx"
)

// QueuedTake is a take that [Store.QueueTake] has put into a batch. It belongs to the goroutine
// that reads the batch's results.
type QueuedTake struct{ queued *tx.Queued }

// QueueTake puts a take for requests into the caller's batch, so that limit and work are one round
// trip:
//
//	var batch pgx.Batch
//	take, err := store.QueueTake(&batch, SendMessage.For(user))
//	if err != nil {
//		return err
//	}
//	batch.Queue("INSERT INTO messages (sender, body) VALUES ($1, $2)", user, body)
//	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
//		return err // ErrRefused: nothing behind the take was done
//	}
//
// A pool sends a batch as one transaction, so limit and work are all or nothing without a
// transaction of yours too.
//
// A refusal is an error of the take's statement, so PostgreSQL does nothing that is queued behind
// it. Close of the batch's results returns it as a [*ratelimit.RefusedError]. A program that reads
// result by result passes errors to [QueuedTake.Err]. Config.Observe is called there or in Close,
// unless a statement before the take fails.
//
// QueueTake sends nothing. If it returns an error, nothing is queued: [ratelimit.ErrInvalid], also
// for limits with shards and sliding windows, and for windows with [Config.Portable];
// [ratelimit.ErrExceedsCapacity]; or the refusal of a limit in [ratelimit.ModeRefuse]. What
// refusals cost, and when to use it:
// https://github.com/pgratelimit/ratelimit/blob/main/docs/transactions.md#in-the-round-trip-of-your-work.
func (s *Store) QueueTake(batch *pgx.Batch, requests ...ratelimit.Request) (*QueuedTake, error) {
	if err := s.usable(); err != nil {
		return nil, err
	}
	if batch == nil {
		return nil, &ratelimit.FieldError{Field: "Batch", Value: nil, Reason: "must not be nil"}
	}
	// The context with which the batch will be sent is not known yet.
	w := s.watch(context.Background(), ratelimit.VerbAllow, ratelimit.FormTx, requests...)
	queued, err := s.taker.Queue(batch, requests, w.Report)
	if err != nil {
		w.Report(&ratelimit.Result{}, err)
		return nil, err
	}
	return &QueuedTake{queued}, nil
}

// Result returns the result of a granted take once the results of the batch have been closed.
// Before that, and if the take failed or its result was read in another way, it returns the zero
// Result. As with [Store.AllowTx] the tokens are spent if and only if the transaction commits.
func (q *QueuedTake) Result() ratelimit.Result { return q.queued.Result }

// Err returns the refusal if err, from reading the batch's results, is a refusal of this take. It
// returns any other err, nil included, as it is.
func (q *QueuedTake) Err(err error) error { return q.queued.Err(err) }
