package table

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// Taken is the outcome of a take.
type Taken struct {
	OK    bool // false if the row had too little, so nothing was taken
	After bucket.State
	At    time.Time
	Xid   string // of the transaction or savepoint that took, if the statement returns it
	Made  bool   // a give made the row; on a distributed table only Table.Give sets it

	Out bucket.Out // of the row, set by gives; zero if nothing is out

	Extra float64 // tokens taken beyond what the calls asked for
}

// columns says what a take returns.
type columns uint8

const (
	all  columns = iota // the state, the instant, and the transaction's ID
	bare                // the state
	lean                // value, ts and the transaction's ID
)

// scan reads the row that a take returned, if there is one.
func (t *Taken) scan(row pgx.Row, d *bucket.Definition, has columns, now *time.Time) error {
	var read struct {
		state
		at  moment
		xid string
	}
	fields := read.fields()
	if !d.Slotted() {
		fields = fields[:3]
	}
	switch has {
	case all:
		fields = append(fields, &read.at, &read.xid)
	case lean:
		fields = append(fields[:2], &read.xid)
	}
	err := t.scanned(row.Scan(fields...), &read.state)
	if !t.After.TS.After(longAgo) { // a row made by edges that do not reach now: see calendarTake
		t.After, t.OK = bucket.State{}, false
	}
	if t.At, t.Xid = read.at.Time, read.xid; has == all {
		t.charge(d, now)
	} else { // of a bucket: its ts is the instant that decided, unless the clock went back
		t.At = instant(now, t.After.TS)
	}
	return err
}

// scanned completes the scan of a row, and returns its error.
func (t *Taken) scanned(err error, s *state) error {
	if err == nil {
		t.After, t.OK = s.get()
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	return err
}

// charge corrects the At of a take. The statement returns the clock after it waited for the row,
// but decided by the clock before. So charge moves At back to the end of the row's tick at the
// latest.
func (t *Taken) charge(d *bucket.Definition, now *time.Time) {
	last := d.Next(t.After.TS).Add(-time.Microsecond)
	if t.At = instant(now, t.At); t.At.After(last) {
		t.At = last
	}
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
	t.At, t.Out = instant(now, t.At), readOut(ahead)
	return nil
}

// taking is a change that takes.
type taking struct {
	*decide.Change
	reserve bool
}

// over returns an instant by which the pause that was read is over; NULL for none.
func (c *taking) over() any {
	if c.reserve { // a pause does not stop a reservation
		return pgtype.Timestamptz{InfinityModifier: pgtype.Infinity, Valid: true}
	}
	return orNull(c.Past)
}

// A must is a take whose refusal is an error, so that no later statement of the round trip runs.
//
// The error is that of a cast, 22P02. Its text has the mark of the take, and the state that
// decided: value, ts, now and the end of a pause. They are in binary, since a session may write
// numbers with fewer digits (extra_float_digits). (A NULL in a NOT NULL column would write the key
// into the server's log.)
//
// Unlike a take it turns nothing away, because nobody would read the row then. A pause that is over
// by its clock is over, and a window counts from the edges of its row.
type must struct {
	taking
	mark string
}

// Give gives tokens to a change's row.
type Give struct {
	*decide.Change
	Tokens, Most float64 // the row gets up to Most tokens; if tokens are out, it gets no more than leaves room for them
	Spent        bucket.Spent

	Taken Taken // the row as the statement left it, not refilled
	Given bool  // Tokens are in the row; false for a row with slots, to which the caller adds them
}

// state is a state as pgx scans it: its fields need no copies on the heap.
type state struct {
	value      pgtype.Float8
	ts, paused moment
	slots      []float64
	room       [6]any // for the fields
}

// fields returns where to scan a row.
func (s *state) fields(more ...any) []any {
	return append(append(s.room[:0], &s.value, &s.ts, &s.paused, &s.slots), more...)
}

// get returns the state; false if there was no row.
func (s *state) get() (bucket.State, bool) {
	if !s.value.Valid {
		return bucket.State{}, false
	}
	read := bucket.State{Value: s.value.Float64, TS: s.ts.Time, Paused: s.paused.Time}
	if s.slots != nil {
		read.Slots = slots.Read(s.slots, read.Value)
		s.slots = nil // Slots keeps a part of it
	}
	return read, true
}

// moment is an instant as it is scanned; the zero time for NULL.
type moment struct{ time.Time }

// ScanTimestamptz implements pgtype.TimestamptzScanner.
func (m *moment) ScanTimestamptz(v pgtype.Timestamptz) error {
	if m.Time = v.Time; v.InfinityModifier != pgtype.Finite {
		return errors.New("an instant is infinite")
	}
	return nil
}

// Scan implements sql.Scanner, for transactions of database/sql.
func (m *moment) Scan(src any) error {
	var ok bool
	if m.Time, ok = src.(time.Time); !ok && src != nil {
		return fmt.Errorf("an instant is a %T", src)
	}
	return nil
}

// numbers returns the array of a state's slots; nil without slots.
func numbers(s *bucket.State) []float64 {
	if s.Slots == nil {
		return nil
	}
	return s.Slots.Numbers(s.Value)
}

// slotsText returns the array of a state's slots as text for PostgreSQL; nil without slots.
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

// epoch is the zero of the seconds in a row's ahead.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// longAgo is before every instant that a limit is asked about. Edges are counted from there, so no
// division has a negative time.
var longAgo = time.Date(300, 1, 1, 0, 0, 0, 0, time.UTC)

// readOut returns the tokens that are out, from a row's ahead.
func readOut(ahead []float64) (out bucket.Out) {
	if len(ahead) >= 2 {
		out = bucket.Out{Tokens: ahead[0], Until: epoch.Add(time.Duration(math.Round(ahead[1]*1e6)) * time.Microsecond)}
	}
	return out
}

// orNull returns a time as an argument; NULL for the zero time.
func orNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	instant := t // allocated only if there is a time
	return &instant
}

// instant returns the instant that decided: now if it is given, otherwise the clock that the
// statement read.
func instant(now *time.Time, read time.Time) time.Time {
	if now != nil {
		return *now
	}
	return read
}

func micros(d time.Duration) float64 { return float64(d.Microseconds()) }

// origin returns an instant from which to count the ticks of a row. ts is the row's if it is known,
// otherwise zero. By the calendar it is the ts of a full row made now: an edge, if not always the
// newest by the database's clock, which makes no difference.
func origin(d *bucket.Definition, key string, ts time.Time, now *time.Time) time.Time {
	switch {
	case d.Every != 0:
		return d.Fresh(key, around(now)).TS
	case ts.IsZero():
		return d.Fresh(key, longAgo).TS
	}
	return ts
}

// around returns an instant near the database's clock: the instant that decides if it is given,
// otherwise this machine's.
func around(now *time.Time) time.Time {
	if now != nil {
		return *now
	}
	return time.Now()
}

// never is a tick that does not end, in microseconds.
const never = 1e17

// tick returns the time between two ticks of a limit's clock, in microseconds. Statements that get
// it do not count edges of the calendar.
func tick(d *bucket.Definition) float64 {
	if d.Every != 0 {
		return never
	}
	return float64(d.Tick())
}

// size returns how many totals a row with slots has.
func size(d *bucket.Definition) int32 { return int32(d.Slots + 2) }

// spentEnd returns the instant until which ahead may still include spent tokens; NULL for none.
func spentEnd(d *bucket.Definition, s *bucket.Spent) *time.Time { return orNull(d.Counted(s.SpentEnd)) }
