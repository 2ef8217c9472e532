package ratelimit

import (
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// This file is how definitions, requests and answers look in text and in logs.

// String returns the definition in a line, with its defaults:
//
//	token bucket "api": 10 per 1m, capacity 20, max reserved unlimited, 8 shards
func (d Definition) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v %s: %s per %s", d.Kind, quoteShort(d.Name), amount(d.Rate), d.per())
	if shapeOf(d.Kind).has("capacity") {
		fmt.Fprintf(&b, ", capacity %s", amountOrNone(d.Capacity))
	}
	fmt.Fprintf(&b, ", max reserved %s", amountOrNone(d.MaxReserved))
	if d.Slots > 0 {
		fmt.Fprintf(&b, ", %d slots", d.Slots)
	}
	if d.Shards > 1 {
		fmt.Fprintf(&b, ", %d shards", d.Shards)
	}
	if !d.Start.IsZero() {
		fmt.Fprintf(&b, ", start %s", d.Start.Format(time.RFC3339Nano))
	}
	return b.String()
}

// per returns the time in which the rate is refilled, as text.
func (d *Definition) per() string {
	if d.Every != 0 {
		per := fmt.Sprintf("%v in %s from %v", d.Every, quoteShort(d.Zone), d.Anchor)
		if d.Time != 0 {
			per += " at " + bucket.TimeOfDay(d.Time)
		}
		return per
	}
	return span(d.Period)
}

// String returns the limit's [Definition] in a line.
func (l TokenBucket) String() string { return l.Definition().String() }

// String returns the limit's [Definition] in a line.
func (l FixedWindow) String() string { return l.Definition().String() }

// String returns the limit's [Definition] in a line.
func (l SlidingWindow) String() string { return l.Definition().String() }

// String returns the request in a line, without the key (see [LogKeys]):
//
//	2 of "api"
func (r Request) String() string { return r.text(false) }

// String returns the status in a line, without the key (see [LogKeys]):
//
//	2 of "api": refused, retry after 6s, 1 of 20 left
func (s Status) String() string { return s.text(false) }

// String returns the Status that decides in a line, without the key (see [LogKeys]), and of
// how many limits it is one.
func (r Result) String() string { return r.text(false) }

// String returns the definitions in a line, without the key.
func (r Replacement) String() string { return fmt.Sprintf("%v in place of %v", r.To, r.From) }

// LogValue returns String.
func (r Replacement) LogValue() slog.Value { return slog.StringValue(r.String()) }

// String returns the page in a line, without its keys.
func (p Page) String() string { return fmt.Sprintf("at most %d keys (0 is no bound)", p.Most) }

func (r Request) text(keys bool) string {
	limit := "no limit"
	if !missing(r.Limit) {
		limit = quoteShort(NameOf(r.Limit))
	}
	text := amount(r.Count) + " of " + limit
	if keys {
		text += " for " + quoteShort(r.Key)
	}
	if r.AboveShare != 0 {
		text += " above " + amount(r.AboveShare)
	}
	if r.Mode > ModeEnforce {
		text += " in mode " + r.Mode.String()
	}
	return text
}

func (s Status) text(keys bool) string {
	var b strings.Builder
	b.WriteString(s.Request.text(keys))
	switch {
	case !s.OK:
		fmt.Fprintf(&b, ": refused, retry after %s", span(s.RetryAfter))
	case s.RetryAfter > 0:
		fmt.Fprintf(&b, ": ok after %s", span(s.RetryAfter))
	default:
		b.WriteString(": ok")
	}
	if s.OK && s.Taken > 0 && s.Taken != s.Request.Count {
		fmt.Fprintf(&b, ", %s taken", amount(s.Taken))
	}
	if s.Value < 0 {
		fmt.Fprintf(&b, ", %s in debt", amount(-s.Value))
	} else {
		fmt.Fprintf(&b, ", %d of %s left", s.Remaining, amount(s.Capacity))
	}
	if !s.PausedUntil.IsZero() {
		fmt.Fprintf(&b, ", paused until %s", s.PausedUntil.Format(time.RFC3339Nano))
	}
	return b.String()
}

func (r Result) text(keys bool) string {
	if len(r.Several) > 1 {
		return fmt.Sprintf("%s (decides for %d limits)", r.Status.text(keys), len(r.Several))
	}
	return r.Status.text(keys)
}

// LogValue returns the definition as a group.
func (d Definition) LogValue() slog.Value {
	attrs := []slog.Attr{
		slog.String("name", d.Name),
		slog.String("kind", d.Kind.String()),
		slog.Float64("rate", d.Rate),
		slog.Duration("period", d.Period),
		logAmount("capacity", d.Capacity),
		logAmount("max_reserved", d.MaxReserved),
		slog.Int("shards", d.Shards),
	}
	if d.Slots > 0 {
		attrs = append(attrs, slog.Int("slots", d.Slots))
	}
	if !d.Start.IsZero() {
		attrs = append(attrs, slog.Time("start", d.Start))
	}
	if d.Every != 0 {
		attrs = append(attrs, slog.String("every", d.Every.String()), slog.String("zone", d.Zone), slog.String("anchor", d.Anchor.String()))
	}
	if d.Time != 0 {
		attrs = append(attrs, slog.String("time", bucket.TimeOfDay(d.Time)))
	}
	return slog.GroupValue(attrs...)
}

// LogValue returns the limit's [Definition] as a group.
func (l TokenBucket) LogValue() slog.Value { return l.Definition().LogValue() }

// LogValue returns the limit's [Definition] as a group.
func (l FixedWindow) LogValue() slog.Value { return l.Definition().LogValue() }

// LogValue returns the limit's [Definition] as a group.
func (l SlidingWindow) LogValue() slog.Value { return l.Definition().LogValue() }

// LogValue returns the request as a group, without the key: see [LogKeys].
func (r Request) LogValue() slog.Value { return slog.GroupValue(r.attrs(false)...) }

// LogValue returns the status as a group, without the key: see [LogKeys].
func (s Status) LogValue() slog.Value { return slog.GroupValue(s.attrs(false)...) }

// LogValue returns the Status that decides as a group, without the key (see
// [LogKeys]), and of several limits the names.
func (r Result) LogValue() slog.Value { return slog.GroupValue(r.attrs(false)...) }

// LogKeys is v for a log that may have keys in it, which LogValue and String leave out:
//
//	slog.Info("refused", "limit", ratelimit.LogKeys(result))
//
// It has a String, too.
func LogKeys[T Request | Status | Result](v T) slog.LogValuer { return withKeys{any(v).(keyed)} }

// keyed is a Request, a Status or a Result.
type keyed interface {
	attrs(keys bool) []slog.Attr
	text(keys bool) string
}

type withKeys struct{ of keyed }

func (k withKeys) LogValue() slog.Value { return slog.GroupValue(k.of.attrs(true)...) }
func (k withKeys) String() string       { return k.of.text(true) }

func (r Request) attrs(keys bool) []slog.Attr {
	attrs := []slog.Attr{slog.String("limit", NameOf(r.Limit))}
	if keys {
		attrs = append(attrs, slog.String("key", r.Key))
	}
	attrs = append(attrs, slog.Float64("count", r.Count))
	if r.AboveShare != 0 {
		attrs = append(attrs, slog.Float64("above", r.AboveShare))
	}
	if r.Mode > ModeEnforce {
		attrs = append(attrs, slog.String("mode", r.Mode.String()))
	}
	return attrs
}

func (s Status) attrs(keys bool) []slog.Attr {
	attrs := append(s.Request.attrs(keys),
		slog.Bool("ok", s.OK),
		slog.Duration("retry_after", s.RetryAfter),
		slog.Float64("value", s.Value),
		slog.Int64("remaining", s.Remaining),
		slog.Float64("capacity", s.Capacity),
		slog.Duration("reset_after", s.ResetAfter),
	)
	if !s.PausedUntil.IsZero() {
		attrs = append(attrs, slog.Time("paused_until", s.PausedUntil))
	}
	return attrs
}

func (r Result) attrs(keys bool) []slog.Attr {
	attrs := r.Status.attrs(keys)
	if len(r.Several) < 2 {
		return attrs
	}
	names := make([]string, len(r.Several))
	for i, s := range r.Several {
		names[i] = NameOf(s.Request.Limit)
	}
	return append(attrs, slog.Any("limits", names))
}

// logAmount returns an amount of a definition. JSON has no number for infinity.
func logAmount(key string, v float64) slog.Attr {
	if v == 0 || v == None || math.IsInf(v, 0) {
		return slog.String(key, amountOrNone(v))
	}
	return slog.Float64(key, v)
}

// amountOrNone returns an amount of a definition, where 0 is none.
func amountOrNone(v float64) string {
	if v == 0 {
		v = None
	}
	return amount(v)
}

// amount returns a number of tokens in the words of a limit's fields.
func amount(v float64) string {
	switch {
	case v == None:
		return "none"
	case math.IsInf(v, 1):
		return "unlimited"
	}
	return plain(v)
}

// plain returns a number without an exponent where people write none.
func plain(v float64) string {
	format := byte('f')
	if a := math.Abs(v); a >= 1e15 || a < 1e-6 && a > 0 {
		format = 'g'
	}
	return strconv.FormatFloat(v, format, -1, 64)
}

// span returns a duration without the zeros that time.Duration ends with: 1m, not
// 1m0s.
func span(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-len("0s")]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-len("0m")]
	}
	return s
}
