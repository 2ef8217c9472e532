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
// A pool sends a batch as one transaction, so without another one work and limit are all or nothing
// as well, at the session's isolation level.
//
// A refusal is an error of the take's statement. PostgreSQL does nothing that is queued behind it,
// COMMIT included, and the transaction has failed until it is rolled back. Close of the batch's
// results returns it as a [*ratelimit.RefusedError], with the Result of the limit that refused. A
// program that reads result by result passes an error to [QueuedTake.Err]. Config.Observe is called
// there and in Close, unless a statement before the take fails.
//
// Each refusal is a line in the server's log, without the key, and makes pgx prepare the batch's
// statements again. So QueueTake is for limits that seldom refuse; [Store.AllowTx] is for others.
//
// QueueTake sends nothing, and its own errors queue nothing: [ratelimit.ErrInvalid],
// [ratelimit.ErrExceedsCapacity], and the refusal of a limit in [ratelimit.ModeRefuse]. Limits with
// shards and sliding windows are [ratelimit.ErrInvalid], and windows on a [Config.Portable] table.
// Rows are locked in the one order of all calls. Two QueueTake in one transaction have no common
// order: ask for several limits in one.
//
// A limit in [ratelimit.ModeShadow] never fails the batch. A window in that mode that was paused in
// this period, or whose Start was moved, takes nothing and is reported as refused. If the row of a
// quota by the calendar is many edges behind, such as one in debt, the take is an error until
// AllowTx has taken from it.
func (s *Store) QueueTake(batch *pgx.Batch, requests ...ratelimit.Request) (*QueuedTake, error) {
	if err := s.usable(); err != nil {
		return nil, err
	}
	if batch == nil {
		return nil, &ratelimit.FieldError{Field: "Batch", Value: nil, Reason: "must not be nil"}
	}
	// There is no context: the batch is sent with one that is not known yet.
	w := s.watch(context.Background(), ratelimit.VerbAllow, ratelimit.FormTx, requests...)
	queued, err := s.taker.Queue(batch, requests, w.Report)
	if err != nil {
		w.Report(&ratelimit.Result{}, err)
		return nil, err
	}
	return &QueuedTake{queued}, nil
}

// Result returns the result of a take that was granted, once the results of the batch have been
// closed; before, and if the take failed or its result was read in another way, it is the zero
// Result. As with [Store.AllowTx] the tokens are spent if and only if the transaction commits, which
// it does not if what is behind the take fails.
func (q *QueuedTake) Result() ratelimit.Result { return q.queued.Result }

// Err returns the refusal if err, which reading the results of the batch returned, is one of this
// take. Any other err, nil included, is returned as it is.
func (q *QueuedTake) Err(err error) error { return q.queued.Err(err) }
