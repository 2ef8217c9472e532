package table

import (
	"math"
	"strconv"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// state is a state as it is read.
type state struct {
	value  *float64
	ts     *time.Time
	paused *time.Time
	slots  []float64
}

func (s *state) fields(more ...any) []any {
	return append([]any{&s.value, &s.ts, &s.paused, &s.slots}, more...)
}

// get returns the state; false when there was no row.
func (s *state) get() (bucket.State, bool) {
	if s.value == nil {
		return bucket.State{}, false
	}
	read := bucket.State{Value: *s.value, TS: *s.ts}
	if s.paused != nil {
		read.Paused = *s.paused
	}
	if s.slots != nil {
		read.Slots = slots.Read(s.slots, read.Value)
		s.slots = nil // of which it has a part
	}
	return read, true
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

// epoch is the zero of the seconds in a row's ahead.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// longAgo is before every instant that a limit is asked about. Edges are counted
// from there, so that nobody divides a negative time.
var longAgo = time.Date(300, 1, 1, 0, 0, 0, 0, time.UTC)

// readOut returns the tokens out by a row's ahead.
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

// orNull is a time as an argument: NULL for the zero time.
func orNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// instant is the instant that decided: the one that a statement was told, or else the clock that
// it has read.
func instant(now *time.Time, read time.Time) time.Time {
	if now != nil {
		return *now
	}
	return read
}

func micros(d time.Duration) float64 { return float64(d.Microseconds()) }
