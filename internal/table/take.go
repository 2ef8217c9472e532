package table

import (
	"context"
	"errors"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// Taken is what became of a take.
type Taken struct {
	OK    bool // false when there was too little, and nothing was taken
	After bucket.State
	At    time.Time
	Xid   string // of the transaction or savepoint that took, if it was asked for
	Made  bool   // there was no row, which a give has made; on a distributed table it is not told

	Ahead float64   // tokens that are out, in the memories of processes, told by gives: see bucket.Out
	Until time.Time // the latest end of them; zero if nobody has ever prefetched from the row

	prefetched float64
}

// Take takes what a change says, if its row has enough and, unless it is to
// reserve, is not paused. The row stays locked when it has not, too.
// Nobody reserves so from a sliding window.
func (t *Table) Take(ctx context.Context, q Querier, reserve bool, c *decide.Change, now *time.Time) (taken Taken, err error) {
	name, fields := "take"+bare, []any(nil)
	if _, ok := t.of(&c.Definition, name); !ok || reserve || c.Definition.Stands() {
		name, fields = "take", []any{&taken.At, &taken.Xid}
	}
	sql, args := t.forTake(name, reserve, c, now)
	err = taken.scan(q.QueryRow(ctx, sql, args...), &c.Definition, fields...)
	if fields == nil {
		taken.At = taken.After.TS // it is that, but after the clock went back
	}
	taken.charge(&c.Definition, now)
	return taken, err
}

// QueueTake puts a take into a batch.
func (t *Table) QueueTake(batch *pgx.Batch, reserve bool, c *decide.Change, now *time.Time, taken *Taken) {
	sql, args := t.forTake("take", reserve, c, now)
	batch.Queue(sql, args...).QueryRow(func(row pgx.Row) error {
		err := taken.scan(row, &c.Definition, &taken.At, &taken.Xid)
		taken.charge(&c.Definition, now)
		return err
	})
}

// whatever is an instant by which every pause is over.
var whatever = pgtype.Timestamptz{InfinityModifier: pgtype.Infinity, Valid: true}

// forTake is a statement that takes, with its arguments.
func (t *Table) forTake(name string, reserve bool, c *decide.Change, now *time.Time) (sql string, args []any) {
	v := values{row: c.Row, definition: &c.Definition, count: c.Count, floor: c.Floor, ts: c.Seen.TS, now: now, over: whatever}
	if !c.At.IsZero() {
		v.now = &c.At
	}
	if !reserve {
		v.over = orNull(c.Over)
	}
	s, _ := t.of(&c.Definition, name)
	return s.with(v)
}

// scan reads a row of such a definition that a take returned, if it did.
func (t *Taken) scan(row pgx.Row, d *bucket.Definition, more ...any) error {
	var s state
	fields := s.fields()
	if !d.Slotted() {
		fields = fields[:3]
	}
	return t.scanned(row.Scan(append(fields, more...)...), &s)
}

// scanned is what has become of the scanning of a row.
func (t *Taken) scanned(err error, s *state) error {
	if err == nil {
		t.After, t.OK = s.get()
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	return err
}

// charge has a take, whose At is the clock as it was read then, tell when it was decided. The
// clock that decided was read before the row was waited for, and ts tells when: at the
// latest, at the end of its tick.
func (t *Taken) charge(d *bucket.Definition, now *time.Time) {
	last := d.Next(t.After.TS).Add(-time.Microsecond)
	if t.At = told(now, t.At); t.At.After(last) {
		t.At = last
	}
}

// QueueTouch puts into a batch the locking of a change's row, which is returned as it is. One
// that is missing is made, full. It leaves no predicate lock under SERIALIZABLE.
func (t *Table) QueueTouch(batch *pgx.Batch, c *decide.Change, now *time.Time, taken *Taken) {
	d := &c.Definition
	fresh := d.Fresh(c.Key.Key, longAgo)
	args := []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, tick(d), now, origin(d, c.Key.Key, c.Seen.TS, now), numbers(&fresh)}
	batch.Queue(t.common["touch"], args...).QueryRow(func(row pgx.Row) error { return taken.scanGive(row, now) })
}

// QueueGive puts into a batch the giving of n tokens to a change's row: beside tokens that are
// out no more than leaves room for them, and otherwise no further than to most. It says what
// was spent, too. Whatever is there, a row is returned, as it is before it is settled, and is
// locked. One that is missing is made, full. To give and say nothing, and all that is given to
// a sliding window, is [Table.QueueTouch]. It leaves no predicate lock under SERIALIZABLE.
func (t *Table) QueueGive(batch *pgx.Batch, c *decide.Change, n, most float64, spent Spent, now *time.Time, taken *Taken) {
	s, ok := t.of(&c.Definition, "give")
	if !ok || n == 0 && spent.Spent == 0 {
		t.QueueTouch(batch, c, now, taken)
		return
	}
	sql, args := s.with(values{row: c.Row, definition: &c.Definition, count: n, most: most, ts: c.Seen.TS, now: now, spent: &spent})
	batch.Queue(sql, args...).QueryRow(func(row pgx.Row) error { return taken.scanGive(row, now) })
}

// epoch is what the seconds in a row's ahead are counted from.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// readOut is what a row's ahead says.
func readOut(ahead []float64) (out bucket.Out) {
	if len(ahead) >= 2 {
		out = bucket.Out{Tokens: ahead[0], Until: epoch.Add(time.Duration(math.Round(ahead[1]*1e6)) * time.Microsecond)}
	}
	return out
}

// outNumbers is what readOut reads.
func outNumbers(out bucket.Out) []float64 {
	return []float64{out.Tokens, float64(out.Until.Sub(epoch).Microseconds()) / 1e6}
}

// scanGive reads a row that a give returned.
func (t *Taken) scanGive(row pgx.Row, now *time.Time) error {
	var (
		s     state
		ahead []float64
	)
	if err := t.scanned(row.Scan(s.fields(&ahead, &t.At, &t.Made)...), &s); err != nil {
		return err
	}
	out := readOut(ahead)
	t.At, t.Ahead, t.Until = told(now, t.At), out.Tokens, out.Until
	return nil
}

// FindEach looks which rows are there, and reads them, by a statement for each.
func (t *Table) FindEach(ctx context.Context, q Querier, r *Rows) error {
	var batch pgx.Batch
	t.queueFind(&batch, r)
	return q.SendBatch(ctx, &batch).Close()
}

// queueFind puts into a batch the reading of rows.
func (t *Table) queueFind(batch *pgx.Batch, r *Rows) {
	r.States, r.Found = make([]bucket.State, len(r.Rows)), make([]bool, len(r.Rows))
	for i, row := range r.Rows {
		batch.Queue(t.common["find"], row.Name, row.Key.Key, int32(row.Shard)).Query(func(rows pgx.Rows) error {
			var s state
			_, err := pgx.ForEachRow(rows, s.fields(), func() error {
				r.States[i], r.Found[i] = s.get()
				return nil
			})
			return err
		})
	}
}

// QueueRemove puts into a batch the deletion of a row, which then is full.
func (t *Table) QueueRemove(batch *pgx.Batch, row decide.Row) {
	batch.Queue(t.common["remove"], row.Name, row.Key.Key, int32(row.Shard))
}

// QueuePut puts into a batch the writing of a row whatever is there.
func (t *Table) QueuePut(batch *pgx.Batch, row decide.Row, s bucket.State) {
	batch.Queue(t.common["put"], row.Name, row.Key.Key, int32(row.Shard), s.Value, s.TS, orNull(s.Paused), numbers(&s))
}

// Renew writes a sliding window's row, which means the same afterwards, as its
// definition does, unless it has changed since it was seen.
func (t *Table) Renew(ctx context.Context, q Querier, row decide.Row, seen, as bucket.State) error {
	var batch pgx.Batch
	t.QueueRenew(&batch, row, seen, as)
	return q.SendBatch(ctx, &batch).Close()
}

// QueueRenew puts a Renew into a batch.
func (t *Table) QueueRenew(batch *pgx.Batch, row decide.Row, seen, as bucket.State) {
	var newest *float64
	if seen.Slots != nil {
		newest = &seen.Slots.Totals[len(seen.Slots.Totals)-1]
	}
	batch.Queue(t.common["renew"], row.Name, row.Key.Key, int32(row.Shard), as.Value, as.TS, numbers(&as), seen.TS, seen.Value, newest)
}

// Reset deletes the rows of a key, which then is full, but for those from which somebody may
// have prefetched, if long ago. Their shards are left; they are locked, and as they were.
func (t *Table) Reset(ctx context.Context, q Querier, key decide.Key) (left []int32, err error) {
	var batch pgx.Batch
	batch.Queue(t.common["reset"], key.Name, key.Key)
	batch.Queue(t.common["reset_left"], key.Name, key.Key).Query(func(rows pgx.Rows) error {
		left, err = pgx.CollectRows(rows, pgx.RowTo[int32])
		return err
	})
	return left, q.SendBatch(ctx, &batch).Close()
}

// Look reads the states of a call's limits, which are in a batch after what it has
// already, or of those of them that it is to look at; the others' states are nil.
func (t *Table) Look(ctx context.Context, q Querier, batch *pgx.Batch, call *decide.Call, at func(a *decide.Ask) bool, now *time.Time) (decide.View, error) {
	view := decide.View{States: make([][]bucket.State, len(call.Asks))}
	rows := make([]shardRows, len(call.Asks))
	for i := range call.Asks {
		if a := &call.Asks[i]; at(a) {
			r := &rows[i]
			batch.Queue(t.common["states"], a.Definition.Name, a.Key).QueryRow(func(row pgx.Row) error {
				return row.Scan(&r.shards, &r.values, &r.ts, &r.paused, &r.slots, &view.At)
			})
		}
	}
	if err := q.SendBatch(ctx, batch).Close(); err != nil {
		return decide.View{}, err
	}
	view.At = told(now, view.At).UTC()
	for i := range call.Asks {
		if a := &call.Asks[i]; at(a) {
			view.States[i] = rows[i].states(a, view.At)
		}
	}
	return view, nil
}

// shardRows are the rows of one limit and key.
type shardRows struct {
	shards []int32
	values []float64
	ts     []time.Time
	paused []*time.Time
	slots  []*string
}

// states is the states of all of an ask's shards.
func (r *shardRows) states(a *decide.Ask, now time.Time) []bucket.State {
	states := make([]bucket.State, a.Definition.Shards)
	each := a.Definition.Shard()
	fresh := each.Fresh(a.Key, now)
	for shard := range states {
		states[shard] = fresh
	}
	for i, shard := range r.shards {
		if int(shard) < len(states) {
			s := state{value: &r.values[i], ts: &r.ts[i], paused: r.paused[i]}
			states[shard], _ = s.get()
			states[shard].Slots = readSlots(r.slots[i], r.values[i])
		}
	}
	return states
}

// numbers is the array of a state's slots, nil without any.
func numbers(s *bucket.State) []float64 {
	if s.Slots == nil {
		return nil
	}
	return s.Slots.Numbers(s.Value)
}

// slotsText is the array of a state's slots as PostgreSQL reads it, nil without any.
func slotsText(s *bucket.State) *string {
	if s.Slots == nil {
		return nil
	}
	text := []byte{'{'}
	for i, v := range numbers(s) {
		if i > 0 {
			text = append(text, ',')
		}
		text = strconv.AppendFloat(text, v, 'g', -1, 64)
	}
	written := string(append(text, '}'))
	return &written
}

// readSlots is the slots in an array as PostgreSQL writes it, nil if there are none.
func readSlots(text *string, value float64) *slots.Slots {
	if text == nil {
		return nil
	}
	fields := strings.Split(strings.Trim(*text, "{}"), ",")
	numbers := make([]float64, len(fields))
	for i, f := range fields {
		v, err := strconv.ParseFloat(f, 64)
		if err != nil || math.IsNaN(v) {
			return nil
		}
		numbers[i] = v
	}
	return slots.Read(numbers, value)
}
