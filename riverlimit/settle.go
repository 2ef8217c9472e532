package riverlimit

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/gate"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// SettleTx replaces, inside tx, the tokens reserved for a job's attempt by those really used, fewer
// or more: the store's SettleTx for the receipts in the job's note, those of the gates that it has
// passed included. A limit and key that used does not name keep their reservation. Call it with the
// worker's context, in the transaction that completes the job, so that both happen or neither:
//
//	if err := riverlimit.SettleTx(ctx, tx, store, job.JobRow, Tokens.ForN(org, used)); err != nil {
//		return err
//	}
//	_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
//
// The error is [ratelimit.ErrInvalid] if nothing was reserved for a limit and key, or if the job
// has no note. It is [ratelimit.ErrSettled] a second time within the same attempt. Roll tx back
// then, so that nothing is settled.
//
// Without a [Middleware] it settles the reservation made when the job was inserted, whichever
// attempt this is.
func SettleTx(ctx context.Context, tx pgx.Tx, store *pgstore.Store, job *rivertype.JobRow, used ...ratelimit.Request) error {
	receipts, err := receiptsOf(ctx, store, job)
	if err != nil {
		return err
	}
	for _, r := range used {
		if err := r.Validate(); err != nil {
			return err
		}
		if !slices.ContainsFunc(receipts, func(of *ratelimit.Receipt) bool {
			return slices.ContainsFunc(receipt.Payments(of), func(p receipt.Payment) bool { return pays(p, r) })
		}) {
			return invalid("Used", r, "is a limit and key for which nothing was reserved")
		}
	}
	for i, r := range receipts {
		if counts, changed := settled(r, receipts[i+1:], used); changed {
			if _, err := store.SettleTx(ctx, tx, r, counts...); err != nil {
				return fmt.Errorf("riverlimit: %w", err)
			}
		}
	}
	return nil
}

// CancelTx gives back, inside tx, the reservation of a job that has not begun, in the
// transaction that cancels or deletes it. It reports false when there is nothing to give back:
// no reservation, or one that an attempt has used up.
func CancelTx(ctx context.Context, tx pgx.Tx, store *pgstore.Store, job *rivertype.JobRow) (cancelled bool, err error) {
	if err := usable(store, job); err != nil {
		return false, err
	}
	n, err := storedNote(job)
	if err != nil || n.Started || job.Attempt >= n.Attempt { // River has taken back attempts that were snoozes
		return false, nil
	}
	for _, r := range n.Receipts {
		given, err := store.CancelTx(ctx, tx, r)
		if err != nil {
			return false, fmt.Errorf("riverlimit: %w", err)
		}
		cancelled = cancelled || given
	}
	return cancelled, nil
}

func usable(store *pgstore.Store, job *rivertype.JobRow) error {
	switch {
	case store == nil:
		return invalid("Store", nil, "must not be nil")
	case job == nil:
		return invalid("Job", nil, "must not be nil")
	}
	return nil
}

// receiptsOf returns the receipts of the reservations for the attempt that job is at.
func receiptsOf(ctx context.Context, store *pgstore.Store, job *rivertype.JobRow) ([]*ratelimit.Receipt, error) {
	if err := usable(store, job); err != nil {
		return nil, err
	}
	n, ok := ctx.Value(noteKey{job.ID}).(note)
	if !ok {
		n, _ = storedNote(job) // a note of another format has no receipt
	}
	if len(n.Receipts) == 0 {
		return nil, invalid("Job", job.ID, "has no receipt of what was reserved for it")
	}
	return n.Receipts, nil
}

// storedNote returns the note in a job's metadata.
func storedNote(job *rivertype.JobRow) (note, error) {
	var metadata struct {
		Note note `json:"ratelimit"` // MetadataKey
	}
	err := json.Unmarshal(job.Metadata, &metadata)
	return metadata.Note, err
}

// settled returns the counts to settle a receipt with, in the order of its call, and whether used
// names one of them. later are the receipts made after it: one for the same limit is for a slot
// that replaced a missed one.
func settled(r *ratelimit.Receipt, later []*ratelimit.Receipt, used []ratelimit.Request) (counts []float64, changed bool) {
	for _, p := range receipt.Payments(r) {
		for len(counts) <= p.Place {
			counts = append(counts, 0)
		}
		counts[p.Place] += p.Tokens
	}
	for _, p := range receipt.Payments(r) {
		for _, u := range used {
			if !pays(p, u) {
				continue
			}
			if counts[p.Place], changed = u.Count, true; slices.ContainsFunc(later, func(r *ratelimit.Receipt) bool { return hasPaid(r, p) }) {
				counts[p.Place] = 0
			}
		}
	}
	return counts, changed
}

// hasPaid reports whether a receipt is for a payment's limit and key as well.
func hasPaid(r *ratelimit.Receipt, p receipt.Payment) bool {
	return slices.ContainsFunc(receipt.Payments(r), func(q receipt.Payment) bool { return q.Name == p.Name && q.Key == p.Key })
}

// pays reports whether a payment is for r's limit and key, or for its gate.
func pays(p receipt.Payment, r ratelimit.Request) bool {
	name := ratelimit.NameOf(r.Limit)
	return p.Key == r.Key && (p.Name == name || p.Name == name+gate.Suffix)
}
