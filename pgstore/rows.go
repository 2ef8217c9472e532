package pgstore

import (
	"context"
	"errors"
	"iter"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
	"github.com/pgratelimit/ratelimit/pgstore/internal/tx"
)

// CheckEach is [Store.Check] for many requests: it returns the status that each would get by
// itself, in their order, by one statement and at one instant. (With Config.Portable it is one
// statement for each, sent together.) There may be up to [ratelimit.MaxChecks] of them, a limit
// with n shards counting as n; more are [ratelimit.ErrInvalid]. It takes, locks and writes nothing.
func (s *Store) CheckEach(ctx context.Context, requests ...ratelimit.Request) (statuses []ratelimit.Status, err error) {
	if err := s.usable(); err != nil {
		return nil, err
	}
	if decide.Moded(requests) {
		return decide.EachByMode(s.conn.Instant(), requests, func(left []ratelimit.Request) ([]ratelimit.Status, error) {
			return s.CheckEach(ctx, left...)
		})
	}
	call, err := decide.NewChecks(requests...)
	if err == nil {
		err = s.known.Definitions.NoteCall(&call)
	}
	if err != nil {
		return nil, err
	}
	err = s.alone(ctx, "check", func(ctx context.Context) error {
		view, err := s.taker.Look(ctx, s.conn.Pool, &pgx.Batch{}, &call, tx.All)
		if err == nil {
			statuses = call.CheckedEach(view)
		}
		return err
	})
	return statuses, err
}

// pageRows is how many rows Rows reads at a time.
const pageRows = 1000

// Rows returns the status of each of a limit's keys that has a row, in the order of the keys'
// bytes: for dashboards. In a Status see Value, [ratelimit.Status.Share], PausedUntil and
// [ratelimit.Status.FullAt]; OK is false while there is debt or a pause. Everything is brought to
// the instant of reading, by the definition that is given. A key without a row is full.
//
// It reads up to a thousand rows at a time along the index, and no others, each time at an
// instant of its own; it holds no connection while the caller's loop runs, and locks nothing.
// An error, which ends it, is yielded with an empty Status. Config.Timeout bounds each reading.
func (s *Store) Rows(ctx context.Context, limit ratelimit.Limit, page ratelimit.Page) iter.Seq2[ratelimit.Status, error] {
	return func(yield func(ratelimit.Status, error) bool) {
		if err := errors.Join(s.usable(), decide.BadPage(limit, page)); err != nil {
			yield(ratelimit.Status{}, err)
			return
		}
		s.list(ctx, limit, page, yield)
	}
}

// list yields what Rows yields, for a valid limit and page.
func (s *Store) list(ctx context.Context, limit ratelimit.Limit, page ratelimit.Page, yield func(ratelimit.Status, error) bool) {
	d := bucket.Definition(limit.Definition())
	var (
		key     string         // of the rows being read
		states  []bucket.State // of the key's shards; nil before its first row
		at      time.Time      // when the last of them was read
		yielded int
	)
	yieldKey := func() (more bool) {
		if states == nil || page.Most > 0 && yielded == page.Most {
			return false
		}
		status := decide.Shown(limit, key, states, at)
		states = nil
		yielded++
		return yield(status, nil) && yielded != page.Most
	}
	for rows, err := range s.pages(ctx, d.Name, d.Shards, page) {
		if err != nil {
			yield(ratelimit.Status{}, err)
			return
		}
		for i, row := range rows.Rows {
			if states != nil && row.Key.Key != key && !yieldKey() {
				return
			}
			if at = rows.At; states == nil {
				key, states = row.Key.Key, slices.Repeat([]bucket.State{d.Shard().Fresh(row.Key.Key, at)}, d.Shards)
			}
			if row.Shard < d.Shards { // others are of another number of shards
				states[row.Shard] = rows.States[i]
			}
		}
	}
	yieldKey()
}

// pages yields the rows of a page, in order, up to a thousand at a time. An error is the last.
func (s *Store) pages(ctx context.Context, name string, shards int, page ratelimit.Page) iter.Seq2[*table.Rows, error] {
	after := decide.Row{Key: decide.Key{Name: name, Key: page.After}, Shard: math.MaxInt32}
	if page.After == "" || page.Prefix > page.After {
		after.Key.Key, after.Shard = page.Prefix, -1
	}
	most := pageRows
	if n := page.Most; n > 0 && n < pageRows {
		most = min(pageRows, n*shards)
	}
	return func(yield func(*table.Rows, error) bool) {
		for last := false; !last; {
			var rows *table.Rows
			err := s.alone(ctx, "list", func(ctx context.Context) (err error) {
				rows, err = s.table.Page(ctx, s.conn.Pool, after, most, nil, s.conn.Clock())
				return err
			})
			if err != nil {
				yield(nil, err)
				return
			}
			if last = len(rows.Rows) < most; !last {
				after = rows.Rows[len(rows.Rows)-1]
			}
			if n := slices.IndexFunc(rows.Rows, func(row decide.Row) bool { return !strings.HasPrefix(row.Key.Key, page.Prefix) }); n >= 0 {
				rows.Rows, last = rows.Rows[:n], true
			}
			if !yield(rows, nil) {
				return
			}
		}
	}
}
