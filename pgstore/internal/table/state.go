package table

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

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

// outNumbers is the inverse of readOut.
func outNumbers(out bucket.Out) []float64 {
	return []float64{out.Tokens, float64(out.Until.Sub(epoch).Microseconds()) / 1e6}
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
