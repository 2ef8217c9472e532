package table

import (
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Taken is the outcome of a take.
type Taken struct {
	OK    bool // false if the row had too little, so nothing was taken
	After bucket.State
	At    time.Time
	Xid   string // of the transaction or savepoint that took, if the statement returns it
	Made  bool   // a give made the row; on a distributed table only Table.Give sets it

	Out bucket.Out // of the row, set by gives; zero if nothing was ever prefetched from it

	Prefetched float64 // the tokens that a grant took for a lease
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

// charge corrects the At of a take, which is the clock after the decision. The clock that decided
// was read before the wait for the row, and is no later than the end of the row's tick.
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
