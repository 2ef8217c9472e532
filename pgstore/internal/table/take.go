package table

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Take makes a change if its row has enough tokens and, unless reserve, is not paused. Even if not,
// the row stays locked. A sliding window's reservations do not use it.
func (t *Table) Take(ctx context.Context, q Querier, reserve bool, c *decide.Change, now *time.Time) (taken Taken, err error) {
	k := t.kinds[c.Definition.Form()]
	s, read := k.taking(reserve, c)
	if !reserve && k.takeBare.sql != "" {
		s, read = &k.takeBare, bare
	}
	err = taken.scan(q.QueryRow(ctx, s.sql, s.args(taking{c, reserve}, now)...), &c.Definition, read, now)
	return taken, err
}

// QueueTake puts a take into a batch.
func (t *Table) QueueTake(batch *pgx.Batch, reserve bool, c *decide.Change, now *time.Time, taken *Taken) {
	s, read := t.kinds[c.Definition.Form()].taking(reserve, c)
	batch.Queue(s.sql, s.args(taking{c, reserve}, now)...).QueryRow(func(row pgx.Row) error {
		return taken.scan(row, &c.Definition, read, now)
	})
}

// taking returns the statement for a take, and the columns that it returns. It is the lean one if
// the kind has one, unless the take reserves or the lean one has turned it away.
func (k *kind) taking(reserve bool, c *decide.Change) (*statement[taking], columns) {
	if reserve || k.takeLean.sql == "" || !c.Past.IsZero() {
		return &k.take, all
	}
	return &k.takeLean, lean
}

// Tokens come in to a token bucket all the time:
//
//	refilled = least(value + greatest(now - ts, 0) * rate / period, capacity)
//
// The order of operations is that of the algebra, so both get the same number to the last bit.
// Rates are tokens per period, and periods microseconds. An executor looks up each function of its
// statement when it starts. That costs more than calling the function, so no statement has more
// functions than it needs.
//
// Grants pass over rows that another transaction has locked. xmax is the last transaction that
// locked the row. If the snapshot does not see it, it may not have ended. That test errs if xmax is
// a savepoint or an ID of another epoch, or if a transaction locks the row just before the write.
// Then there is an error after the lock_timeout, and nothing has happened. (SKIP LOCKED needs
// neither, but makes a statement for many rows slower by a sixth.) Grants turn away calls during a
// pause, and calls that the algebra grants only by its tolerance. The statements that lock and
// write decide these.

// bucketTake returns the arguments of a take. It takes a count, and returns a row if and only if it
// took. It reads only through the row that it conflicts with, so it leaves no predicate lock under
// SERIALIZABLE, except in a subtransaction. It reads the clock before it waits for the row, so
// another transaction may leave a later ts behind. greatest then counts no time, and so no time
// twice.
func bucketTake(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, c.Count, now, d.Rate, d.Micros(), c.Floor, c.over()}
}

// bucketLean returns the arguments of a take that has less to compute, which makes a transaction
// with one INSERT 1.06 times as fast. It turns away what only the tolerance grants, and what may be
// short by a clock that went back. The caller then reads the row, and takes by bucketTake.
func bucketLean(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, c.Count, now, d.Rate, d.Micros(), c.Count + c.Floor}
}

// bucketMust returns the arguments of a must: a take's, with the mark in the last place.
func bucketMust(m must, now *time.Time) []any {
	args := bucketTake(m.taking, now)
	args[len(args)-1] = m.mark
	return args
}

// A fixed window is a token bucket whose clock stands still between its edges, which are a period
// apart. So ts is an edge, and the last edge before now decides.

// windowTake returns the arguments of a window's take. In the conflict's clauses excluded.ts is the
// edge before now, counted from origin. A row may have other edges, if it was paused or had another
// Start. For such a row excluded.ts is no edge, so it is turned away: the caller reads it, and
// sends its ts as origin. If a pause has ended since the edge, the caller must say that it is over.
func windowTake(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{
		c.Name, c.Key.Key, int32(c.Shard), d.Capacity, c.Count, d.Micros(), now,
		origin(d, c.Key.Key, c.Before.TS, now), d.Rate, c.Floor, c.over(),
	}
}

// windowMust returns the arguments of a window's take, with the mark in the last place.
func windowMust(m must, now *time.Time) []any {
	args := windowTake(m.taking, now)
	args[len(args)-1] = m.mark
	return args
}

// The edges of a quota by the calendar are not a period apart, so they are arguments: the edges
// around now, ascending. Beside each stands the first ts with which a row has had the edge. The
// refill is Rate for each edge up to now that the row has not had. Their give is that of windows,
// which counts no edges. A row that stands on no edge has had the first one after it: see package
// bucket, calendar.go.
//
// The machine's clock chooses the edges that are sent, and the database's clock decides by them. A
// row is turned away if the database's clock is outside of the edges. It is also turned away if it
// is older than the first edge and would not be full by all edges up to now. The caller reads it,
// and sends other edges or writes it anew.

// calendarTake returns the arguments of a take by the calendar. excluded.ts is the edge before now.
// If that edge was not sent, excluded.ts is the last argument, an edge of long ago. A new row with
// that ts would count as full, so the caller must read the answer as a refusal.
func calendarTake(c taking, now *time.Time) []any {
	d := &c.Definition
	at := around(now)
	if !c.reserve && !c.Past.IsZero() && now == nil {
		at = c.Past // the database's clock has shown it
	}
	edges, had := d.Edges(at)
	return []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, c.Count, now, edges, had, d.Rate, c.Floor, c.over(), d.Fresh("", longAgo).TS}
}

// calendarMust returns the arguments of a take by the calendar, with the mark in the last place. If
// now is outside of the edges, the error has the mark and no state.
func calendarMust(m must, now *time.Time) []any {
	args := calendarTake(m.taking, now)
	return append(args[:len(args)-2], m.mark)
}

// A sliding window's slots are an array: the length of a slot, the number of slots from that of ts
// to the newest, the value, and then the running totals (package slots). So a decision, and the row
// that it writes, are subscripts of the array. ts is the start of the slot of the last write. The
// statements compute, as the algebra does:
//
//	passed	slots from the newest to that of now; below 0 if the newest is ahead
//	newest	the newest total
//	later	passed, but at most as many as move all totals out
//	held	newest less the first total after the totals have moved by later
//
// The granted count is added to newest, behind the totals that moved. A row that its definition
// would not write so is turned away, read, and written anew before it is asked again. If the value
// differs from that in the array, a limit of another kind has written it.

// slotsTake returns the arguments of a sliding window's take, in the slot of now. In the conflict's
// clauses excluded.ts is the start of that slot, a whole number of slots after origin.
func slotsTake(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{
		c.Name, c.Key.Key, int32(c.Shard), d.Rate, c.Count, tick(d), now,
		origin(d, c.Key.Key, c.Before.TS, now), size(d), c.Floor, c.over(),
	}
}

// QueueTouch puts into a batch the locking of a change's row, which it returns unchanged. It makes
// a missing row, full. It leaves no predicate lock under SERIALIZABLE.
func (t *Table) QueueTouch(batch *pgx.Batch, c *decide.Change, now *time.Time, taken *Taken) {
	d := &c.Definition
	fresh := d.Fresh(c.Key.Key, longAgo)
	args := []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, tick(d), now, origin(d, c.Key.Key, c.Before.TS, now), numbers(&fresh)}
	batch.Queue(t.common["touch"], args...).QueryRow(func(row pgx.Row) error { return taken.scanGive(row, now) })
}

// Give gives tokens to rows and reports spent ones, after the statements in batch. It locks each
// row. A missing row is Made, full. A give of nothing, or to a row with slots, only locks and reads
// it. It leaves no predicate lock under SERIALIZABLE. On a distributed table statements do not
// return which rows they made, so Give reads the rows first.
func (t *Table) Give(ctx context.Context, q Querier, batch *pgx.Batch, gives []Give, now *time.Time) (at time.Time, err error) {
	var rows Rows
	if t.distributed {
		for i := range gives {
			rows.Rows = append(rows.Rows, gives[i].Row)
		}
		t.QueueRead(batch, &rows, now)
		if err := q.SendBatch(ctx, batch).Close(); err != nil {
			return at, err
		}
		batch = &pgx.Batch{}
	}
	for i := range gives {
		t.queueGive(batch, &gives[i], now)
	}
	QueueNow(batch, now, &at)
	err = q.SendBatch(ctx, batch).Close()
	for i := range rows.Rows { // one that is not full was made since, with another definition
		g := &gives[i]
		g.Taken.Made = !rows.Found[i] && g.Definition.Plain(g.Taken.After, at) && g.Definition.Missing(g.Taken.After) == 0
	}
	return at, err
}

// queueGive puts into a batch the giving of tokens to a row.
func (t *Table) queueGive(batch *pgx.Batch, g *Give, now *time.Time) {
	s := &t.kinds[g.Definition.Form()].give
	if g.Given = s.sql != ""; !g.Given || g.Tokens == 0 && g.Spent.Spent == 0 {
		t.QueueTouch(batch, g.Change, now, &g.Taken)
		return
	}
	batch.Queue(s.sql, s.args(g, now)...).QueryRow(func(row pgx.Row) error { return g.Taken.scanGive(row, now) })
}

// bucketGive returns the arguments of a give, which gives tokens back and reports spent ones. It
// does not refill the row, since the refill can be added before or after. If tokens are out, it
// leaves room for them and for the refill until their latest end. After the end they fade as fast
// as the row is refilled. ahead has their number and that end, in seconds since 2000.
func bucketGive(g *Give, now *time.Time) []any {
	d := &g.Definition
	return []any{g.Name, g.Key.Key, int32(g.Shard), d.Capacity, g.Tokens, now, d.Rate, d.Micros(), g.Most, g.Spent.Spent, spentEnd(d, &g.Spent)}
}

// windowGive returns the arguments of a window's give. Tokens that are out end with their window,
// and until then nothing comes in. The proposed ts is an edge, so the proposed ahead carries now.
func windowGive(g *Give, now *time.Time) []any {
	d := &g.Definition
	return []any{
		g.Name, g.Key.Key, int32(g.Shard), d.Capacity, g.Tokens, d.Micros(), now,
		origin(d, g.Key.Key, g.Before.TS, now), g.Most, g.Spent.Spent, spentEnd(d, &g.Spent),
	}
}

// QueueRemove puts into a batch the deletion of a row, so it counts as full.
func (t *Table) QueueRemove(batch *pgx.Batch, row decide.Row) {
	batch.Queue(t.common["remove"], row.Name, row.Key.Key, int32(row.Shard))
}

// QueuePut queues the writing of a row, replacing any stored one.
func (t *Table) QueuePut(batch *pgx.Batch, row decide.Row, s bucket.State) {
	batch.Queue(t.common["put"], row.Name, row.Key.Key, int32(row.Shard), s.Value, s.TS, orNull(s.Paused), numbers(&s))
}

// QueueRenew puts into a batch the rewriting of a sliding window's row as its definition writes it,
// unless it has changed since it was seen. Its meaning stays the same. The value alone does not
// show whether a slot ahead was given more, but the newest total does. Both are compared with a
// tolerance, since a connection may write numbers as text with 15 digits; no count that can be
// taken is smaller than that.
func (t *Table) QueueRenew(batch *pgx.Batch, row decide.Row, seen, as bucket.State) {
	var newest *float64
	if seen.Slots != nil {
		newest = &seen.Slots.Totals[len(seen.Slots.Totals)-1]
	}
	batch.Queue(t.common["renew"], row.Name, row.Key.Key, int32(row.Shard), as.Value, as.TS, numbers(&as), seen.TS, seen.Value, newest)
}

// Reset deletes the rows of a key, so it is full, except rows that may have tokens out. It returns
// the shards of these, which stay locked and unchanged.
func (t *Table) Reset(ctx context.Context, q Querier, key decide.Key) (left []int32, err error) {
	var batch pgx.Batch
	batch.Queue(t.common["reset"], key.Name, key.Key)
	batch.Queue(t.common["reset_left"], key.Name, key.Key).Query(func(rows pgx.Rows) error {
		left, err = pgx.CollectRows(rows, pgx.RowTo[int32])
		return err
	})
	return left, q.SendBatch(ctx, &batch).Close()
}

// Unqueueable returns the field, with its value, that keeps takes of a limit out of callers'
// batches; "" if none does.
func (t *Table) Unqueueable(d *bucket.Definition) (field string, value any) {
	switch {
	case d.Shards > 1:
		return "Shards", d.Shards
	case t.kinds[d.Form()].must.sql == "":
		return "Kind", d.Kind
	}
	return "", nil
}

// QueueMust puts a take into a batch. Its refusal is an error with the mark; without a mark it is
// no error. Once taken is set, done gets the connection and the error of the statement, and returns
// the error to report.
func (t *Table) QueueMust(batch *pgx.Batch, c *decide.Change, mark string, now *time.Time, taken *Taken, done func(session any, err error) error) {
	k, take := t.kinds[c.Definition.Form()], taking{c, false}
	sql, args := k.take.sql, []any(nil)
	if mark == "" {
		args = k.take.args(take, now)
	} else {
		sql, args = k.must.sql, k.must.args(must{take, mark}, now)
	}
	batch.Queue(sql, args...).Query(func(rows pgx.Rows) error {
		*taken = Taken{}
		err := taken.scan(first{rows}, &c.Definition, all, now)
		if c := rows.Conn(); c != nil {
			return done(c, err)
		}
		return done(nil, err)
	})
}

// first scans the first row of several.
type first struct{ pgx.Rows }

func (f first) Scan(into ...any) error {
	defer f.Close()
	if !f.Next() {
		return cmp.Or(f.Err(), pgx.ErrNoRows)
	}
	if err := f.Rows.Scan(into...); err != nil {
		return err
	}
	f.Close()
	return f.Err()
}

// Refusal returns the state and the instant of a refusal, if err is the one with this mark. The
// instant is zero if the error has no state.
func Refusal(err error, mark string) (s bucket.State, at time.Time, ok bool) {
	var failed *pgconn.PgError
	if !errors.As(err, &failed) || failed.Code != "22P02" {
		return s, at, false
	}
	i := strings.Index(failed.Message, mark+" ")
	if i < 0 {
		return s, at, false
	}
	said := strings.Fields(failed.Message[i+len(mark):])
	if len(said) == 0 {
		return s, at, true
	}
	if state, err := hex.DecodeString(said[0]); err == nil && len(state) >= 24 {
		s.Value = math.Float64frombits(binary.BigEndian.Uint64(state))
		s.TS, at = sent(state[8:]), sent(state[16:])
		if len(state) >= 32 {
			s.Paused = sent(state[24:])
		}
	}
	return s, at, true
}

// sent reads the instant at the beginning of PostgreSQL's binary data.
func sent(binaries []byte) time.Time {
	return time.UnixMicro(epoch.UnixMicro() + int64(binary.BigEndian.Uint64(binaries))).UTC()
}
