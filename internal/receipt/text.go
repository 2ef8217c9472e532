package receipt

import (
	"database/sql"
	"database/sql/driver"
	"encoding"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// The text of a receipt is its version and then, in base64 for URLs,
//
//	receipt:  transaction  instant  limits  limit…
//	limit:    name  key  kind  rate  period  capacity  max reserved  shards  start  [slots]  [every  zone  anchor  time]  place  payments  payment…
//	payment:  shard  slot  tokens
//
// Whole numbers are varints. Texts follow their lengths. Instants are in microseconds; a start is 0
// for none, or else 1, seconds and nanoseconds. Only a sliding window has slots. Only a quota by
// the calendar has the fields from every to time, and a bit of its kind says so; its anchor is in
// days since 1970, its time in minutes. Amounts are varints of their bits in reverse order, which
// is short for round numbers.
const version = "1"

// The largest fields of a receipt. A test compares the constants with the root package's of the
// same names.
const (
	MaxLimits     = 64
	MaxShards     = 1024
	MaxSlots      = 1000
	MaxNameLength = 255
	MaxKeyLength  = 2048
	MaxTokens     = 1e12

	// maxText is above the longest text of a receipt, with MaxShards payments of MaxLimits limits.
	maxText = 4 << 20
)

// byCalendar is the bit of a kind's number that marks a quota by the calendar.
const byCalendar = 1 << 4

// The root package exports ErrInvalid, and cannot be imported here.
var ErrInvalid = errors.New("ratelimit: invalid")

var (
	_ encoding.TextMarshaler   = (*Receipt)(nil)
	_ encoding.TextUnmarshaler = (*Receipt)(nil)
	_ driver.Valuer            = (*Receipt)(nil)
	_ sql.Scanner              = (*Receipt)(nil)
)

// String returns the names of the receipt's limits and the tokens of each. It holds no keys, and no
// text that could settle it.
func (r *Receipt) String() string {
	var b strings.Builder
	b.WriteString("receipt of ")
	payments := Payments(r)
	if len(payments) == 0 {
		b.WriteString("nothing")
	}
	for i := 0; i < len(payments); {
		sum, n := 0.0, together(payments[i:])
		for _, p := range payments[i : i+n] {
			sum += p.Tokens
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%g of %q", sum, payments[i].Name)
		i += n
	}
	return b.String()
}

// LogValue returns what String does.
func (r *Receipt) LogValue() slog.Value { return slog.StringValue(r.String()) }

// MarshalText returns the receipt as text: letters, digits, - and _. It is empty if the call took
// nothing.
func (r *Receipt) MarshalText() ([]byte, error) {
	if r == nil || len(r.payments()) == 0 {
		return []byte{}, nil
	}
	r.mu.Lock()
	taker := r.rest().taker
	r.mu.Unlock()
	w := writer{}
	if taker != "" {
		xid, err := strconv.ParseInt(taker, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("ratelimit: receipt: transaction %w", err)
		}
		w.uint(uint64(xid))
	} else {
		w.uint(0)
	}
	w.int(r.at)
	w.payments(r.payments())
	text := make([]byte, 0, len(version)+base64.RawURLEncoding.EncodedLen(len(w)))
	return base64.RawURLEncoding.AppendEncode(append(text, version...), w), nil
}

// UnmarshalText reads a text that MarshalText wrote. Any other text is an ErrInvalid, and leaves r
// as it was.
func (r *Receipt) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		r.become(&Receipt{})
		return nil
	}
	read, err := parse(string(text))
	if err != nil {
		return fmt.Errorf("%w: receipt: %w", ErrInvalid, err)
	}
	r.become(read)
	return nil
}

func (r *Receipt) become(to *Receipt) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.one, r.at = to.one, to.at
	rest := to.rest()
	r.more.Store(&more{several: rest.several, taker: rest.taker, read: true})
}

// Value returns the receipt as text for a database, or NULL if nothing was taken.
func (r *Receipt) Value() (driver.Value, error) {
	text, err := r.MarshalText()
	if err != nil || len(text) == 0 {
		return nil, err
	}
	return string(text), nil
}

// Scan reads a receipt from a database. NULL means that nothing was taken.
func (r *Receipt) Scan(src any) error {
	switch v := src.(type) {
	case nil:
		return r.UnmarshalText(nil)
	case string:
		return r.UnmarshalText([]byte(v))
	case []byte:
		return r.UnmarshalText(v)
	}
	return fmt.Errorf("%w: receipt: cannot be read from a %T, must be a text", ErrInvalid, src)
}

func parse(text string) (*Receipt, error) {
	if len(text) > maxText {
		return nil, fmt.Errorf("has %d bytes, can have at most %d", len(text), maxText)
	}
	body, ok := strings.CutPrefix(text, version)
	if !ok {
		return nil, fmt.Errorf("has version %q, this program knows %q", text[:1], version)
	}
	data, err := base64.RawURLEncoding.DecodeString(body)
	if err != nil {
		return nil, errors.New("is not in base64")
	}
	r := reader{data: data}
	read := r.receipt()
	if r.fault == nil && len(r.data) > 0 {
		r.fail("goes on after its end")
	}
	if r.fault != nil {
		return nil, r.fault
	}
	// A receipt has one text only: no needless zeros, no line breaks.
	if again, err := read.MarshalText(); err != nil || string(again) != text {
		return nil, errors.New("is not as it was written")
	}
	return read, nil
}

// writer collects the bytes of a receipt.
type writer []byte

func (w *writer) uint(v uint64)   { *w = binary.AppendUvarint(*w, v) }
func (w *writer) int(v int64)     { *w = binary.AppendVarint(*w, v) }
func (w *writer) float(v float64) { w.uint(bits.ReverseBytes64(math.Float64bits(v))) }
func (w *writer) string(s string) { w.uint(uint64(len(s))); *w = append(*w, s...) }
func (w *writer) start(t time.Time) {
	if t.IsZero() {
		w.uint(0)
		return
	}
	w.uint(1)
	w.int(t.Unix())
	w.uint(uint64(t.Nanosecond()))
}

// payments writes payments, those of one limit together.
func (w *writer) payments(payments []Payment) {
	limits := 0
	for rest := payments; len(rest) > 0; rest = rest[together(rest):] {
		limits++
	}
	w.uint(uint64(limits))
	for rest := payments; len(rest) > 0; rest = rest[together(rest):] {
		n := together(rest)
		w.limit(&rest[0])
		w.uint(uint64(n))
		for i := range rest[:n] {
			w.uint(uint64(rest[i].Shard))
			w.int(rest[i].Slot)
			w.float(rest[i].Tokens)
		}
	}
}

// together returns how many payments at the start belong to one limit.
func together(payments []Payment) int {
	n := 1
	for n < len(payments) && *payments[n].Limit == *payments[0].Limit && payments[n].Place == payments[0].Place {
		n++
	}
	return n
}

func (w *writer) limit(p *Payment) {
	w.string(p.Name)
	w.string(p.Key)
	if kind := uint64(p.Kind); p.Every != 0 {
		w.uint(kind | byCalendar)
	} else {
		w.uint(kind)
	}
	w.float(p.Rate)
	w.uint(uint64(p.Period.Microseconds()))
	w.float(p.Capacity)
	w.float(p.MaxReserved)
	w.uint(uint64(p.Shards))
	w.start(p.Start)
	if p.Slotted() {
		w.uint(uint64(p.Slots))
	}
	if p.Every != 0 {
		w.uint(uint64(p.Every))
		w.string(p.Zone)
		w.int(p.Anchor.Days())
		w.uint(uint64(p.Time / time.Minute))
	}
	w.uint(uint64(p.Place))
}

// reader reads the bytes of a receipt. After a fault it reads zeros.
type reader struct {
	data  []byte
	fault error
}

func (r *reader) fail(format string, args ...any) {
	if r.fault == nil {
		r.fault = fmt.Errorf(format, args...)
	}
	r.data = nil
}

// uint reads a whole number up to most.
func (r *reader) uint(field string, most uint64) uint64 {
	v, n := binary.Uvarint(r.data)
	return checked(r, field, v, n, v <= most)
}

func (r *reader) int(field string) int64 {
	v, n := binary.Varint(r.data)
	return checked(r, field, v, n, true)
}

// amount reads a number of tokens.
func (r *reader) amount(field string, most float64) float64 {
	v, n := binary.Uvarint(r.data)
	f := math.Float64frombits(bits.ReverseBytes64(v))
	return checked(r, field, f, n, f >= 0 && !math.Signbit(f) && f <= most)
}

// checked returns a number that took n bytes.
func checked[T any](r *reader, field string, v T, n int, good bool) (read T) {
	switch {
	case r.fault != nil:
		return read
	case n <= 0:
		r.fail("ends within its %s", field)
		return read
	case !good:
		r.fail("has %s %v", field, v)
		return read
	}
	r.data = r.data[n:]
	return v
}

func (r *reader) string(field string, most int) string {
	n := int(r.uint(field, uint64(most)))
	if n > len(r.data) {
		r.fail("ends within its %s", field)
		return ""
	}
	s := string(r.data[:n])
	if !utf8.ValidString(s) || strings.IndexByte(s, 0) >= 0 {
		r.fail("has a %s that is no text", field)
		return ""
	}
	r.data = r.data[n:]
	return s
}

func (r *reader) start() time.Time {
	if r.uint("start", 1) == 0 {
		return time.Time{}
	}
	seconds, nanos := r.int("start"), r.uint("start", 999_999_999)
	start := time.Unix(seconds, int64(nanos)).UTC()
	if y := start.Year(); r.fault == nil && (y < 1 || y > 9999 || start.IsZero()) {
		r.fail("has a start in the year %d", y)
	}
	return start
}

// date reads a day in the years 1 to 9999.
func (r *reader) date(field string) bucket.Date {
	days := r.int(field)
	date := bucket.DateAt(min(max(days, -1e6), 1e7))
	if r.fault == nil && (!date.Valid() || date.Days() != days) {
		r.fail("has %s %d", field, days)
	}
	return date
}

// unit reads a unit of days or of months.
func (r *reader) unit(field string) bucket.Unit {
	unit := bucket.Unit(r.uint(field, math.MaxInt64))
	if r.fault == nil && unit.Longest() == 0 {
		r.fail("has %s %d", field, int64(unit))
	}
	return unit
}

func (r *reader) receipt() *Receipt {
	taker := ""
	if xid := r.uint("transaction", math.MaxInt64); xid > 0 {
		taker = strconv.FormatUint(xid, 10)
	}
	at := r.int("instant")
	limits := r.uint("limits", MaxLimits)
	places := make([]bool, limits)
	var payments []Payment
	for range limits {
		if r.fault == nil {
			payments = append(payments, r.limit(places)...)
		}
	}
	if r.fault == nil && limits == 0 {
		r.fail("has no limit")
	}
	return New(payments, nil, taker, nil, time.UnixMicro(at))
}

// limit reads a limit and its payments. Each limit has a place of its own in the call.
func (r *reader) limit(places []bool) (paid []Payment) {
	name, limit := r.string("name", MaxNameLength), Limit{Key: r.string("key", MaxKeyLength)}
	kind := r.uint("kind", math.MaxUint8)
	limit.Definition = bucket.Definition{
		Name: name, Kind: bucket.Kind(kind) &^ byCalendar, Rate: r.amount("rate", MaxTokens),
		Period:   time.Duration(r.uint("period", math.MaxInt64/uint64(time.Microsecond))) * time.Microsecond,
		Capacity: r.amount("capacity", MaxTokens), MaxReserved: r.amount("max reserved", math.Inf(1)),
		Shards: int(r.uint("shards", MaxShards)), Start: r.start(),
	}
	if limit.Slotted() {
		limit.Slots = int(r.uint("slots", MaxSlots))
	}
	if kind&byCalendar != 0 {
		limit.Every = r.unit("every")
		limit.Zone, limit.Anchor = r.string("zone", MaxNameLength), r.date("anchor")
		limit.Time = time.Duration(r.uint("time", 24*60-1)) * time.Minute
	}
	place := int(r.uint("place", uint64(len(places))-1))
	payments := int(r.uint("payments", MaxShards))
	if r.fault == nil && (places[place] || payments == 0) {
		r.fail("has %d payments in place %d", payments, place)
	}
	for range payments {
		if r.fault != nil {
			return nil
		}
		paid = append(paid, Payment{
			Limit: &limit, Place: place,
			Shard: int(r.uint("shard", uint64(max(limit.Shards, 1))-1)), Slot: r.int("slot"), Tokens: r.amount("tokens", MaxLimits*MaxTokens),
		})
	}
	places[place] = true
	return paid
}
