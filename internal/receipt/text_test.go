package receipt_test

import (
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

var (
	tokens = &receipt.Limit{Key: "org 42", Definition: bucket.Definition{
		Name: "llm_tokens", Kind: 1, Rate: 40_000, Period: time.Minute,
		Capacity: 40_000, MaxReserved: math.Inf(1), Shards: 8,
	}}
	window = &receipt.Limit{Key: `o'neil \ "$1" é`, Definition: bucket.Definition{
		Name: "requests", Kind: 2, Rate: 1.0 / 3, Period: 24*time.Hour + time.Microsecond,
		Capacity: 10, MaxReserved: 0.1, Shards: 1, Start: time.Date(1969, 12, 31, 23, 59, 59, 999_999_999, time.UTC),
	}}
	sliding = &receipt.Limit{Key: "k", Definition: bucket.Definition{
		Name: "partner", Kind: 3, Rate: 100, Period: time.Minute,
		Capacity: 100, MaxReserved: math.Inf(1), Shards: 4, Slots: 1000,
	}}
	decided = time.Date(2026, 3, 14, 12, 0, 0, 123_456_000, time.UTC)
)

// several is a receipt of two limits, of which one paid from two rows.
func several() *receipt.Receipt {
	return receipt.New([]receipt.Payment{
		{Limit: window, Place: 1, Tokens: 1},
		{Limit: tokens, Place: 0, Shard: 3, Tokens: 900.25},
		{Limit: tokens, Place: 0, Shard: 7, Tokens: 0},
	}, nil, "4294967297", nil, decided)
}

func textOf(t *testing.T, r *receipt.Receipt) string {
	t.Helper()
	text, err := r.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestText(t *testing.T) {
	for name, want := range map[string]*receipt.Receipt{
		"one":         receipt.New([]receipt.Payment{{Limit: tokens, Tokens: 1200}}, nil, "", nil, decided),
		"several":     several(),
		"with a slot": receipt.New([]receipt.Payment{{Limit: sliding, Slot: -1 << 62, Tokens: 3}}, nil, "7", nil, decided),
		"with slots":  receipt.New([]receipt.Payment{{Limit: sliding, Slot: decided.UnixMicro(), Tokens: 3}, {Limit: sliding, Shard: 3, Slot: decided.UnixMicro(), Tokens: 1}}, nil, "7", nil, decided),
		"by the calendar": receipt.New([]receipt.Payment{{Limit: &receipt.Limit{Definition: bucket.Definition{
			Name: "a", Kind: bucket.FixedWindow, Rate: 1, Period: 93 * 24 * time.Hour, Capacity: 1, MaxReserved: 1, Shards: 1,
			Every: 3 * bucket.Month, Zone: "Europe/Berlin", Anchor: bucket.Date{Year: 2026, Month: 1, Day: 31}, Time: 9*time.Hour + 30*time.Minute,
		}}, Tokens: 1}}, nil, "7", nil, decided),
		"no key": receipt.New([]receipt.Payment{{Limit: &receipt.Limit{Definition: bucket.Definition{Name: "a", Kind: 1, Rate: 1, Period: 1000, Shards: 1}}, Tokens: 1}}, nil, "", nil, time.Time{}),
	} {
		t.Run(name, func(t *testing.T) {
			text := textOf(t, want)
			var got receipt.Receipt
			if err := got.UnmarshalText([]byte(text)); err != nil {
				t.Fatal(err)
			}
			if g, w := receipt.Payments(&got), receipt.Payments(want); !reflect.DeepEqual(g, w) {
				t.Errorf("payments %+v, want %+v", g, w)
			}
			if receipt.Taker(&got) != receipt.Taker(want) || !receipt.At(&got).Equal(receipt.At(want)) {
				t.Errorf("taken by %q at %v, want %q at %v", receipt.Taker(&got), receipt.At(&got), receipt.Taker(want), receipt.At(want))
			}
			if !receipt.Read(&got) || receipt.Read(want) {
				t.Error("it is not known which of them was read")
			}
			if strings.Trim(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
				t.Errorf("text %q has more than letters, digits, - and _", text)
			}
		})
	}
}

// The text of a receipt of today must be read for ever: jobs have it.
func TestTextStays(t *testing.T) {
	const text = "1gYCAgBCAyYaa176mBgIIcmVxdWVzdHMQbyduZWlsIFwgIiQxIiDDqQK_qteq1arVqlWBwN3uwQLASL_y5syZs-bMmgEBAQH_k-vcAwEBAAC_4AMKbGxtX3Rva2VucwZvcmcgNDIBwMajBICOzhzAxqME_-ADCAAAAgMAwJiKAQcAAA"
	if got := textOf(t, several()); got != text {
		t.Errorf("text %q, want %q", got, text)
	}
	var r receipt.Receipt
	if err := r.UnmarshalText([]byte(text)); err != nil || !reflect.DeepEqual(receipt.Payments(&r), receipt.Payments(several())) {
		t.Errorf("read as %+v, %v", receipt.Payments(&r), err)
	}
}

func TestTextIsShort(t *testing.T) {
	for name, test := range map[string]struct {
		payments []receipt.Payment
		most     int
	}{
		"one limit":    {[]receipt.Payment{{Limit: tokens, Tokens: 1200}}, 80},
		"three limits": {[]receipt.Payment{{Limit: tokens, Tokens: 1200}, {Limit: window, Place: 1, Tokens: 1}, {Limit: tokens, Place: 2, Tokens: 1200}}, 260},
	} {
		if got := len(textOf(t, receipt.New(test.payments, nil, "123456789", nil, decided))); got > test.most {
			t.Errorf("%s: %d bytes, want at most %d", name, got, test.most)
		}
	}
}

// What the ways of storing a receipt have in common.
func TestStored(t *testing.T) {
	text := textOf(t, several())
	value, err := several().Value()
	if err != nil || value != text {
		t.Errorf("Value() = %v, %v, want %q", value, err, text)
	}
	for _, src := range []any{text, []byte(text)} {
		var got receipt.Receipt
		if err := got.Scan(src); err != nil || textOf(t, &got) != text {
			t.Errorf("Scan(%T) = %v, and then %q", src, err, textOf(t, &got))
		}
	}
	type job struct{ Receipt *receipt.Receipt }
	object, err := json.Marshal(job{several()})
	if err != nil || string(object) != `{"Receipt":"`+text+`"}` {
		t.Errorf("JSON %s, %v", object, err)
	}
	var read job
	if err := json.Unmarshal(object, &read); err != nil || textOf(t, read.Receipt) != text {
		t.Errorf("from JSON: %v, %v", read, err)
	}
}

func TestNothingTaken(t *testing.T) {
	var none *receipt.Receipt
	for _, r := range []*receipt.Receipt{none, {}} {
		if text := textOf(t, r); text != "" {
			t.Errorf("text %q, want none", text)
		}
		if value, err := r.Value(); value != nil || err != nil {
			t.Errorf("Value() = %v, %v, want NULL", value, err)
		}
	}
	for _, src := range []any{nil, "", []byte{}} {
		r := several()
		if err := r.Scan(src); err != nil || len(receipt.Payments(r)) != 0 {
			t.Errorf("Scan(%#v) = %v, with payments %v", src, err, receipt.Payments(r))
		}
	}
	var object struct{ Receipt *receipt.Receipt }
	if err := json.Unmarshal([]byte(`{"Receipt": null}`), &object); err != nil || object.Receipt != nil {
		t.Errorf("from null: %v, %v", object.Receipt, err)
	}
}

func TestBadText(t *testing.T) {
	good := textOf(t, several())
	tests := map[string]string{
		"another version": "2" + good[1:],
		"no version":      "!" + good,
		"not base64":      "1*",
		"empty":           "1",
		"a line break":    good[:20] + "\n" + good[20:],
		"cut":             good[:len(good)-4],
		"longer":          good + "AAAA",
		"huge":            "1" + strings.Repeat("A", 5<<20),
		"many limits":     textOf(t, receipt.New(limits(65), nil, "", nil, decided)),
	}
	for name, change := range map[string]func(*receipt.Payment){
		"long name":       func(p *receipt.Payment) { p.Name = strings.Repeat("a", 256) },
		"long key":        func(p *receipt.Payment) { p.Key = strings.Repeat("a", 2049) },
		"zero byte":       func(p *receipt.Payment) { p.Key = "a\x00" },
		"no UTF-8":        func(p *receipt.Payment) { p.Name = "\xff" },
		"NaN":             func(p *receipt.Payment) { p.Tokens = math.NaN() },
		"infinite":        func(p *receipt.Payment) { p.Tokens = math.Inf(1) },
		"below zero":      func(p *receipt.Payment) { p.Tokens = -1 },
		"minus zero":      func(p *receipt.Payment) { p.Tokens = math.Copysign(0, -1) },
		"too many tokens": func(p *receipt.Payment) { p.Tokens = 1e15 },
		"infinite rate":   func(p *receipt.Payment) { p.Rate = math.Inf(1) },
		"many shards":     func(p *receipt.Payment) { p.Shards = 1025 },
		"no such shard":   func(p *receipt.Payment) { p.Shard = p.Shards },
		"no such place":   func(p *receipt.Payment) { p.Place = 1 },
		"late start":      func(p *receipt.Payment) { p.Start = time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC) },
	} {
		limit := *tokens
		p := receipt.Payment{Limit: &limit, Tokens: 1}
		change(&p)
		tests[name] = textOf(t, receipt.New([]receipt.Payment{p}, nil, "", nil, decided))
	}
	tests["two in one place"] = textOf(t, receipt.New([]receipt.Payment{{Limit: tokens}, {Limit: window}}, nil, "", nil, decided))
	for name, text := range tests {
		t.Run(name, func(t *testing.T) {
			r := several()
			err := r.UnmarshalText([]byte(text))
			if !errors.Is(err, receipt.ErrInvalid) {
				t.Errorf("error %v, want ErrInvalid", err)
			}
			if textOf(t, r) != good {
				t.Error("the receipt has changed")
			}
			if err != nil && len(err.Error()) > 200 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
	if err := new(receipt.Receipt).Scan(7); !errors.Is(err, receipt.ErrInvalid) {
		t.Errorf("Scan(7) = %v, want ErrInvalid", err)
	}
}

func limits(n int) []receipt.Payment {
	payments := make([]receipt.Payment, n)
	for i := range payments {
		payments[i] = receipt.Payment{Limit: tokens, Place: i, Tokens: 1}
	}
	return payments
}

// Whatever a text says, reading it does no harm, and what was read is written as it
// was.
func FuzzText(f *testing.F) {
	for _, r := range []*receipt.Receipt{several(), receipt.New(limits(3), nil, "", nil, decided), receipt.New(limits(64), nil, "1", nil, decided)} {
		text, err := r.MarshalText()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
		f.Add(string(text[:len(text)/2]))
	}
	f.Fuzz(func(t *testing.T, text string) {
		var r receipt.Receipt
		if err := r.UnmarshalText([]byte(text)); err != nil {
			if !errors.Is(err, receipt.ErrInvalid) {
				t.Errorf("error %v, want ErrInvalid", err)
			}
			if len(receipt.Payments(&r)) != 0 {
				t.Error("payments beside an error")
			}
			return
		}
		if got := textOf(t, &r); got != text {
			t.Errorf("written as %q", got)
		}
		var again receipt.Receipt
		if err := again.Scan(text); err != nil || !reflect.DeepEqual(receipt.Payments(&again), receipt.Payments(&r)) {
			t.Errorf("read again: %v, %v", receipt.Payments(&again), err)
		}
		for _, p := range receipt.Payments(&r) {
			if !(p.Tokens >= 0) || !(p.Rate >= 0) || !(p.Capacity >= 0) || p.Shard < 0 || p.Place < 0 || p.Place >= receipt.MaxLimits || len(p.Key) > receipt.MaxKeyLength {
				t.Errorf("payment %+v", p)
			}
		}
	})
}
