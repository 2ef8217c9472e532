package pgstore

import (
	"context"
	"errors"
	"iter"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// CheckEach is [Store.Check] for many requests, each by itself and not all or nothing: the
// status that each would get by itself, in their order, by one statement and at one instant.
// (With Config.Portable it is one statement for each, sent together.) There may be up to
// [ratelimit.MaxChecks] of them, a limit with n shards counting as n; more are
// [ratelimit.ErrInvalid]. It takes, locks and writes nothing.
func (s *Store) CheckEach(ctx context.Context, requests ...ratelimit.Request) (statuses []ratelimit.Status, err error) {
	if err := s.usable(); err != nil {
		return nil, err
	}
	if decide.Moded(requests) {
		return decide.EachByMode(s.now(), requests, func(left []ratelimit.Request) ([]ratelimit.Status, error) {
			return s.CheckEach(ctx, left...)
		})
	}
	call, err := decide.NewChecks(requests...)
	if err == nil {
		err = s.seen.NoteCall(&call)
	}
	if err != nil {
		return nil, err
	}
	err = s.alone(ctx, "check", func(ctx context.Context) error {
		view, err := s.readEach(ctx, &call)
		if err == nil {
			statuses = call.CheckedEach(view)
		}
		return err
	})
	return statuses, err
}

// readEach reads the rows of all of a call's asks.
func (s *Store) readEach(ctx context.Context, call *decide.Call) (decide.View, error) {
	if s.config.Portable {
		return s.table.Look(ctx, s.pool, &pgx.Batch{}, call, all, s.clock())
	}
	var rows table.Rows
	for i := range call.Asks {
		rows.Rows = append(rows.Rows, call.Asks[i].Rows()...)
	}
	if err := s.table.Decider().Read(ctx, s.pool, &rows, s.clock()); err != nil {
		return decide.View{}, err
	}
	view, n := decide.View{States: make([][]bucket.State, len(call.Asks)), At: rows.At}, 0
	for i := range call.Asks {
		a := &call.Asks[i]
		each := a.Definition.Shard()
		view.States[i] = make([]bucket.State, a.Definition.Shards)
		for shard := range view.States[i] {
			if view.States[i][shard] = rows.States[n]; !rows.Found[n] {
				view.States[i][shard] = each.Fresh(a.Key, view.At)
			}
			n++
		}
	}
	return view, nil
}

// pageRows is how many rows Rows reads at a time.
const pageRows = 1000

// Rows returns the status of each of a limit's keys that has a row, in the order of the keys'
// bytes: for dashboards. Of a Status see Value, [ratelimit.Status.Share], PausedUntil and
// [ratelimit.Status.FullAt]; OK is false while there is debt or a pause. Everything is brought
// to the instant of reading, by the definition that is given. A key without a row is full.
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
		l := listing{Store: s, limit: limit, page: page, yield: yield}
		if err := l.run(ctx); err != nil {
			yield(ratelimit.Status{}, err)
		}
	}
}

// listing is a run of Rows.
type listing struct {
	*Store
	limit ratelimit.Limit
	page  ratelimit.Page
	yield func(ratelimit.Status, error) bool

	key    string         // the key of the rows being read
	states []bucket.State // that it has, nil before the first
	at     time.Time      // when the last of them was read
	told   int
}

func (l *listing) run(ctx context.Context) error {
	after := decide.Row{Key: decide.Key{Name: ratelimit.NameOf(l.limit), Key: l.page.After}, Shard: math.MaxInt32}
	if l.page.After == "" || l.page.Prefix > l.page.After {
		after.Key.Key, after.Shard = l.page.Prefix, -1
	}
	most := pageRows
	if n := l.page.Most; n > 0 && n < pageRows {
		most = min(pageRows, n*l.limit.Definition().Shards)
	}
	for {
		var rows *table.Rows
		err := l.alone(ctx, "list", func(ctx context.Context) (err error) {
			rows, err = l.table.Page(ctx, l.pool, after, most, l.clock())
			return err
		})
		if err != nil {
			return err
		}
		for i, row := range rows.Rows {
			if !strings.HasPrefix(row.Key.Key, l.page.Prefix) {
				l.tell()
				return nil
			}
			if l.states != nil && row.Key.Key != l.key && !l.tell() {
				return nil
			}
			l.add(row, rows.States[i], rows.At)
		}
		if len(rows.Rows) < most {
			l.tell()
			return nil
		}
		after = rows.Rows[len(rows.Rows)-1]
	}
}

// add adds a row to its key's.
func (l *listing) add(row decide.Row, state bucket.State, at time.Time) {
	d := bucket.Definition(l.limit.Definition())
	l.at = at
	if l.states == nil {
		each := d.Shard()
		fresh := each.Fresh(row.Key.Key, at)
		l.key, l.states = row.Key.Key, make([]bucket.State, d.Shards)
		for shard := range l.states {
			l.states[shard] = fresh
		}
	}
	if row.Shard < d.Shards { // others are of another number of shards
		l.states[row.Shard] = state
	}
}

// tell yields the key of which the rows have been read, if there is one; false when the caller
// has enough.
func (l *listing) tell() bool {
	if l.states == nil || l.page.Most > 0 && l.told == l.page.Most {
		return false
	}
	status := decide.Shown(l.limit, l.key, l.states, l.at)
	l.states = nil
	l.told++
	return l.yield(status, nil) && l.told != l.page.Most
}
