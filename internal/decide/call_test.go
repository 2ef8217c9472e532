package decide_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

const year = 365 * 24 * time.Hour

func TestNew(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second, MaxReserved: 5}
	b := FixedWindow{Name: "b", Rate: 10, Period: time.Second, MaxReserved: None}
	c := TokenBucket{Name: "A", Rate: 10, Period: time.Second, Shards: 2}
	tests := []struct {
		name     string
		reserve  bool
		requests []Request
		want     []string // name/key count floor, in the order of locking
	}{
		{"one", false, []Request{a.For("k")}, []string{"a/k 1 0"}},
		{"a reservation", true, []Request{a.For("k")}, []string{"a/k 1 -5"}},
		{"by name", true, []Request{b.For("k"), a.For("k")}, []string{"a/k 1 -5", "b/k 1 0"}},
		{"by key in a name", false, []Request{a.For("z"), b.For("a"), a.For("x"), a.For("")}, []string{"a/ 1 0", "a/x 1 0", "a/z 1 0", "b/a 1 0"}},
		{"by bytes, not letters", false, []Request{a.For("é"), a.For("z"), a.For("Z")}, []string{"a/Z 1 0", "a/z 1 0", "a/é 1 0"}},
		{"the same twice", false, []Request{a.ForN("k", 2), a.ForN("k", 3)}, []string{"a/k 5 0"}},
		{"the same, apart", false, []Request{a.ForN("k", 2), b.For("k"), a.ForN("k", 0.5)}, []string{"a/k 2.5 0", "b/k 1 0"}},
		{"all there is", false, []Request{a.ForN("k", 10)}, []string{"a/k 10 0"}},
		{"all there is, tenth by tenth", false, slices.Repeat([]Request{a.ForN("k", 10.0/64)}, 64), []string{"a/k 10 0"}},
		{"all there can be", true, []Request{a.ForN("k", 15)}, []string{"a/k 15 -5"}},
		{"none", false, []Request{a.ForN("k", 0)}, []string{"a/k 0 0"}},
		{"those of one row first", false, []Request{c.For("k"), b.For("k"), a.For("k")}, []string{"a/k 1 0", "b/k 1 0", "A/k 1 0"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call, err := decide.New(tt.reserve, tt.requests...)
			must(t, err)
			var got []string
			for _, ask := range call.Demands {
				got = append(got, fmt.Sprintf("%s/%s %v %v", ask.Definition.Name, ask.Key, ask.Count, ask.Floor))
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("New() asks %q, want %q", got, tt.want)
			}
			if call.Reserve != tt.reserve {
				t.Errorf("Reserve = %v, want %v", call.Reserve, tt.reserve)
			}
		})
	}
}

func TestNewInvalid(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	faster := a
	faster.Rate = 20
	window := FixedWindow{Name: a.Name, Rate: a.Rate, Period: a.Period}
	tests := []struct {
		name     string
		requests []Request
		field    string
		value    any
	}{
		{"no request", nil, "Requests", 0},
		{"no limit", []Request{a.For("k"), {Key: "k", Count: 1}}, "Limit", nil},
		{"a nil limit", []Request{a.For("k"), {Limit: (*FixedWindow)(nil)}}, "Limit", nil},
		{"too many requests", slices.Repeat([]Request{a.ForN("k", 0)}, 65), "Requests", 65},
		{"bad definition", []Request{a.For("k"), TokenBucket{Name: "b", Rate: -1, Period: time.Second}.For("k")}, "Rate", -1.0},
		{"bad key", []Request{a.For("k"), a.For("\x00")}, "Key", "\x00"},
		{"bad count", []Request{a.For("k"), a.ForN("j", -1)}, "Count", -1.0},
		{"two rates", []Request{a.For("k"), faster.For("k")}, "Limit", "a"},
		{"two kinds", []Request{a.For("k"), window.For("k")}, "Limit", "a"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call, err := decide.New(false, tt.requests...)
			var fe *FieldError
			if !errors.As(err, &fe) || !errors.Is(err, ErrInvalid) {
				t.Fatalf("New() = %v, want a *FieldError that is ErrInvalid", err)
			}
			if fe.Field != tt.field || fe.Value != tt.value {
				t.Errorf("New() = %v, want field %s, value %v", err, tt.field, tt.value)
			}
			if len(call.Demands) != 0 {
				t.Errorf("New() asks %v beside an error", call.Demands)
			}
		})
	}
}

// The first limit that can grant is looked for in the order of the requests, past those that
// never can. No limit and key comes twice, whether it can grant or not.
func TestNewFirst(t *testing.T) {
	small, large := TokenBucket{Name: "small", Rate: 1, Period: time.Second}, TokenBucket{Name: "large", Rate: 10, Period: time.Second}
	for _, tt := range []struct {
		name     string
		requests []Request
		want     []string
		err      error
	}{
		{"in order", []Request{small.For("k"), large.For("k"), large.For("j")}, []string{"small/k 1", "large/k 1", "large/j 1"}, nil},
		{"never", []Request{small.ForN("k", 2), large.ForN("k", 2)}, []string{"large/k 2"}, nil},
		{"all never", []Request{small.ForN("k", 20), large.ForN("k", 20)}, nil, ErrExceedsCapacity},
		{"twice", []Request{large.For("k"), large.For("k")}, nil, ErrInvalid},
		{"twice of never", []Request{small.ForN("k", 2), small.ForN("k", 3), large.For("k")}, nil, ErrInvalid},
		{"bad count", []Request{large.ForN("k", -1)}, nil, ErrInvalid},
		{"none", nil, nil, ErrInvalid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			call, err := decide.NewFirst(tt.requests...)
			var got []string
			for i := range call.Demands {
				got = append(got, fmt.Sprintf("%s/%s %v", call.Demands[i].Definition.Name, call.Demands[i].Key, call.Demands[i].Count))
			}
			if !errors.Is(err, tt.err) || !slices.Equal(got, tt.want) {
				t.Errorf("got %q, error %v, want %q, %v", got, err, tt.want, tt.err)
			}
		})
	}
}

func TestNewExceedsCapacity(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second, MaxReserved: 5}
	debtless := TokenBucket{Name: "b", Rate: 10, Period: time.Second, MaxReserved: None}
	empty := TokenBucket{Name: "c", Rate: 10, Period: time.Second, Capacity: None}
	unlimited := TokenBucket{Name: "d", Rate: 1, Period: year}
	tests := []struct {
		name     string
		reserve  bool
		requests []Request
		limit    string
		count    float64
		most     float64
	}{
		{"above capacity", false, []Request{a.ForN("k", 10.5)}, "a", 10.5, 10},
		{"above capacity by little", false, []Request{a.ForN("k", 10.000001)}, "a", 10.000001, 10},
		{"above capacity and debt", true, []Request{a.ForN("k", 16)}, "a", 16, 15},
		{"above capacity without debt", true, []Request{debtless.ForN("k", 11)}, "b", 11, 10},
		{"above capacity when added up", false, []Request{a.ForN("k", 6), a.ForN("k", 5)}, "a", 11, 10},
		{"one of several", false, []Request{a.For("k"), debtless.ForN("k", 11)}, "b", 11, 10},
		{"from an empty bucket", false, []Request{empty.ForN("k", 0.1)}, "c", 0.1, 0},
		{"above 100 years' worth", true, []Request{unlimited.ForN("k", 102)}, "d", 102, 101},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := decide.New(tt.reserve, tt.requests...)
			var ne *ExceedsCapacityError
			if !errors.As(err, &ne) || !errors.Is(err, ErrExceedsCapacity) {
				t.Fatalf("New() = %v, want a *ExceedsCapacityError that is ErrExceedsCapacity", err)
			}
			if got := ne.Request.Limit.Definition().Name; got != tt.limit || ne.Request.Count != tt.count || ne.Most != tt.most || ne.Reserve != tt.reserve {
				t.Errorf("New() = %+v, want limit %s, Count %v, Most %v, Reserve %v", ne, tt.limit, tt.count, tt.most, tt.reserve)
			}
			if errors.Is(err, ErrRefused) || errors.Is(err, ErrInvalid) {
				t.Errorf("%v is ErrRefused or ErrInvalid", err)
			}
		})
	}
}

func TestBadPause(t *testing.T) {
	limit := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	tests := []struct {
		lasts time.Duration
		want  string
	}{
		{time.Nanosecond, "<nil>"},
		{MaxSpan, "<nil>"},
		{0, `ratelimit: limit "a": Duration 0s: must be positive`},
		{-time.Second, `ratelimit: limit "a": Duration -1s: must be positive`},
		{MaxSpan + 1, `ratelimit: limit "a": Duration 876000h0m0.000000001s: must be at most 876000h0m0s`},
	}
	for _, tt := range tests {
		if got := fmt.Sprint(decide.BadPause(limit, tt.lasts)); got != tt.want {
			t.Errorf("BadPause(%v) = %s, want %s", tt.lasts, got, tt.want)
		}
	}
	for _, missing := range []Limit{nil, (*TokenBucket)(nil)} {
		if err := decide.BadPause(missing, 0); !errors.Is(err, ErrInvalid) {
			t.Errorf("BadPause(%T) = %v, want ErrInvalid", missing, err)
		}
	}
}
