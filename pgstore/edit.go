package pgstore

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/edit"
)

// ResetTx forgets the limit's state for key inside tx: full again, debt and pause gone. A
// receipt from before a reset gives back tokens that the reset has given back already: do not
// cancel it.
func (s *Store) ResetTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string) error {
	return s.edit(ctx, tx, ratelimit.VerbReset, nil, s.edits().Reset, ratelimit.Request{Limit: limit, Key: key})
}

// Reset is [Store.ResetTx] on its own.
func (s *Store) Reset(ctx context.Context, limit ratelimit.Limit, key string) error {
	return s.editOwn(ctx, ratelimit.VerbReset, nil, s.edits().Reset, ratelimit.Request{Limit: limit, Key: key})
}

// CreditTx gives the request's count back to its limit inside tx, capped at the capacity, and
// returns the status then. To settle an estimate, or to give back all that a call took, use
// [Store.SettleTx] and [Store.CancelTx], which know the rows that it took from. A sharded limit
// is credited in the shard from which tx took last, or else where it has least; a sliding
// window in its oldest slots first. While the limit is paused, credited tokens are for
// reservations, and for other calls after the pause.
func (s *Store) CreditTx(ctx context.Context, tx pgx.Tx, r ratelimit.Request) (status ratelimit.Status, err error) {
	err = s.edit(ctx, tx, ratelimit.VerbCredit, decide.BadCredit(r), s.edits().Credit(r, &status), r)
	return status, err
}

// Credit is [Store.CreditTx] on its own.
func (s *Store) Credit(ctx context.Context, r ratelimit.Request) (status ratelimit.Status, err error) {
	if err := s.editOwn(ctx, ratelimit.VerbCredit, decide.BadCredit(r), s.edits().Credit(r, &status), r); err != nil {
		return ratelimit.Status{}, err
	}
	return status, nil
}

// PauseTx empties the limit's key inside tx; for a duration nothing is allowed and nothing is
// refilled. Debt stays, and so do a sliding window's slots. It is for a third party's 429 with
// Retry-After. The later of two pauses holds; PauseTx returns the instant at which it ends, on
// the database's clock.
//
// Tokens that are given back during the pause, by credit or cancel, can be taken when it is
// over and not before. A reservation during a pause is due when it is over or later. One that
// was made before keeps its instant, which may be within the pause: before acting on it, read
// the PausedUntil of its Status by [Store.Check]. Only [Store.ResumeTx] and [Store.ResetTx] end
// a pause early.
func (s *Store) PauseTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string, lasts time.Duration) (until time.Time, err error) {
	return s.PauseEachTx(ctx, tx, []ratelimit.Request{{Limit: limit, Key: key}}, lasts)
}

// Pause is [Store.PauseTx] on its own.
func (s *Store) Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (until time.Time, err error) {
	return s.PauseEach(ctx, []ratelimit.Request{{Limit: limit, Key: key}}, lasts)
}

// PauseEachTx is [Store.PauseTx] for the limits and keys of several requests, all for one duration;
// on an error it pauses none. Counts do not matter. It returns the instant at which the last pause
// ends.
func (s *Store) PauseEachTx(ctx context.Context, tx pgx.Tx, requests []ratelimit.Request, lasts time.Duration) (until time.Time, err error) {
	if err := s.edit(ctx, tx, ratelimit.VerbPause, badPause(requests, lasts), s.edits().Pause(lasts, &until), requests...); err != nil {
		return time.Time{}, err
	}
	return until, nil
}

// PauseEach is [Store.PauseEachTx] on its own, in one transaction.
func (s *Store) PauseEach(ctx context.Context, requests []ratelimit.Request, lasts time.Duration) (until time.Time, err error) {
	if err := s.editOwn(ctx, ratelimit.VerbPause, badPause(requests, lasts), s.edits().Pause(lasts, &until), requests...); err != nil {
		return time.Time{}, err
	}
	return until, nil
}

// badPause returns the error of requests that cannot be paused for a duration.
func badPause(requests []ratelimit.Request, lasts time.Duration) error {
	if len(requests) == 0 { // the edit itself reports that
		return nil
	}
	return decide.BadPause(requests[0].Limit, lasts)
}

// ResumeTx ends a pause that is not over, inside tx: the value stays, a token bucket fills from
// now on, and a fixed window has its own edges back. Without a pause it changes nothing.
func (s *Store) ResumeTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string) error {
	return s.edit(ctx, tx, ratelimit.VerbResume, nil, s.edits().Resume, ratelimit.Request{Limit: limit, Key: key})
}

// Resume is [Store.ResumeTx] on its own.
func (s *Store) Resume(ctx context.Context, limit ratelimit.Limit, key string) error {
	return s.editOwn(ctx, ratelimit.VerbResume, nil, s.edits().Resume, ratelimit.Request{Limit: limit, Key: key})
}

// ChangeTx replaces the definition from of a key by to, inside tx, and keeps what was used. It
// returns the status after that. Call it in the transaction that changes a customer's plan. Without
// it the row stays as it is until time or the next window refills it.
//
// A raise adds the difference of the capacities to what is left. A cut takes it away, and leaves no
// debt. Old debt and pauses stay. Another name or kind is [ratelimit.ErrInvalid], and changes
// nothing.
//
// A process that still takes by the old definition cuts the row to its capacity. So raise when all
// processes have the new one, and cut before. [Store.Pause] a key while its Shards change. More:
// https://github.com/pgratelimit/ratelimit/blob/main/docs/calendar.md#a-quota-that-changes.
func (s *Store) ChangeTx(ctx context.Context, tx pgx.Tx, from, to ratelimit.Limit, key string) (status ratelimit.Status, err error) {
	return s.change(ctx, ratelimit.FormTx, s.usableIn(tx), from, to, key, func(before, after *decide.Demand) (ratelimit.Status, error) {
		return s.editor.Change(ctx, tx, before, after)
	})
}

// Change is [Store.ChangeTx] on its own.
func (s *Store) Change(ctx context.Context, from, to ratelimit.Limit, key string) (status ratelimit.Status, err error) {
	return s.change(ctx, ratelimit.FormOwn, s.usable(), from, to, key, func(before, after *decide.Demand) (ratelimit.Status, error) {
		return s.editor.ChangeOwn(ctx, before, after)
	})
}

// change runs do for a key's limit by both definitions, unless they are invalid.
func (s *Store) change(ctx context.Context, form ratelimit.Form, invalid error, from, to ratelimit.Limit, key string, do func(before, after *decide.Demand) (ratelimit.Status, error)) (status ratelimit.Status, err error) {
	w := s.watch(ctx, ratelimit.VerbChange, form, ratelimit.Request{Limit: to, Key: key})
	defer w.ReportError(&err)
	if invalid != nil {
		return status, invalid
	}
	before, after, err := s.noted(from, to, key)
	if err != nil {
		return status, err
	}
	return do(before, after)
}

// ReplaceTx is for package catalog and the command. Inside tx it locks the rows of replacements,
// all of one name, in the given order, and changes them. It returns the statuses before, by From.
// Without a mark, a missing row stays missing.
func (s *Store) ReplaceTx(ctx context.Context, tx pgx.Tx, replacements ...ratelimit.Replacement) (statuses []ratelimit.Status, err error) {
	requests := make([]ratelimit.Request, len(replacements))
	for i := range replacements {
		requests[i] = ratelimit.Request{Limit: replacements[i].To, Key: replacements[i].Key}
	}
	w := s.watch(ctx, ratelimit.VerbChange, ratelimit.FormTx, requests...)
	defer w.ReportError(&err)
	if err := s.usableIn(tx); err != nil || len(replacements) == 0 {
		return nil, err
	}
	all := make([]edit.Replacement, len(replacements))
	for i := range replacements {
		if all[i], err = s.replacement(&replacements[i]); err != nil {
			return nil, err
		}
	}
	return s.editor.Replace(ctx, tx, all)
}

// ReplaceFunc is for package catalog and the command. It runs do in a transaction of its own, in
// which do replaces the requests' rows by ReplaceTx. If another transaction has one of these
// locked, it waits with none of them locked, so do may run several times.
func (s *Store) ReplaceFunc(ctx context.Context, requests []ratelimit.Request, do func(context.Context, pgx.Tx) error) error {
	if err := s.usable(); err != nil {
		return err
	}
	var rows []decide.Row
	for _, r := range requests {
		call, err := decide.New(false, r)
		if err != nil {
			return err
		}
		rows = append(rows, call.Demands[0].Rows()...)
	}
	return s.editor.Func(ctx, rows, do)
}

// replacement returns a replacement for the editor.
func (s *Store) replacement(r *ratelimit.Replacement) (made edit.Replacement, err error) {
	before, after, err := s.noted(r.From, r.To, r.Key)
	if err != nil {
		return made, err
	}
	made = edit.Replacement{Before: before, After: after, By: after, Mark: r.Mark, Only: r.Only, Cuts: r.Cuts}
	if r.By != nil {
		if _, made.By, err = s.noted(r.From, r.By, r.Key); err != nil {
			return made, err
		}
	}
	for _, m := range r.Marked {
		marked := edit.Marked{At: m.Mark}
		for _, l := range m.By {
			_, by, err := s.noted(r.From, l, r.Key)
			if err != nil {
				return made, err
			}
			marked.By = append(marked.By, by.Definition.Shard())
		}
		made.Marked = append(made.Marked, marked)
	}
	return made, nil
}

// noted returns the demands of a change, whose definitions Prune knows from now on.
func (s *Store) noted(from, to ratelimit.Limit, key string) (*decide.Demand, *decide.Demand, error) {
	before, after, err := decide.NewChange(from, to, key)
	if err == nil {
		err = s.known.Definitions.NoteEdit(&before)
	}
	if err == nil {
		err = s.known.Definitions.NoteEdit(&after)
	}
	if err != nil {
		return nil, nil, err
	}
	return &before.Demands[0], &after.Demands[0], nil
}

// edit runs do in tx for the limits and keys of requests, unless these are invalid. Counts do not
// matter.
func (s *Store) edit(ctx context.Context, tx pgx.Tx, verb ratelimit.Verb, invalid error, do edit.Edit, requests ...ratelimit.Request) error {
	return s.editWatched(ctx, verb, ratelimit.FormTx, cmp.Or(invalid, s.usableIn(tx)), requests, func(call *decide.Call) error { return do(ctx, tx, call) })
}

// editOwn is edit in a transaction of its own.
func (s *Store) editOwn(ctx context.Context, verb ratelimit.Verb, invalid error, do edit.Edit, requests ...ratelimit.Request) error {
	return s.editWatched(ctx, verb, ratelimit.FormOwn, cmp.Or(invalid, s.usable()), requests, func(call *decide.Call) error { return s.editor.Own(ctx, call, do) })
}

// editWatched runs do for the call of an edit, unless that is invalid.
func (s *Store) editWatched(ctx context.Context, verb ratelimit.Verb, form ratelimit.Form, invalid error, requests []ratelimit.Request, do func(*decide.Call) error) (err error) {
	w := s.watch(ctx, verb, form, requests...)
	defer w.ReportError(&err)
	if invalid != nil {
		return invalid
	}
	call, err := s.known.Question(requests...)
	if err != nil {
		return err
	}
	return do(&call)
}

// edits returns the editor; nil for a Store that was not made by New, which the verbs then report.
func (s *Store) edits() *edit.Editor {
	if s == nil {
		return nil
	}
	return s.editor
}
