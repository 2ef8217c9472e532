package ratelimit_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
)

const year = 365 * 24 * time.Hour

// fieldErrors is every *FieldError in err, which may be joined.
func fieldErrors(err error) []*FieldError {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []*FieldError
		for _, e := range joined.Unwrap() {
			all = append(all, fieldErrors(e)...)
		}
		return all
	}
	var fe *FieldError
	if errors.As(err, &fe) {
		return []*FieldError{fe}
	}
	return nil
}

// checkFields wants an error to be of fields and their values, and of no others.
func checkFields(t *testing.T, what any, err error, want []string) {
	t.Helper()
	var got []string
	for _, fe := range fieldErrors(err) {
		got = append(got, fmt.Sprintf("%s %v", fe.Field, fe.Value))
	}
	if !slices.Equal(got, want) || errors.Is(err, ErrInvalid) != (len(want) > 0) {
		t.Errorf("%v: %v, bad fields %q, want %q", what, err, got, want)
	}
}

// windowOf is a fixed window with the fields of l, for what holds of both
// kinds.
func windowOf(l TokenBucket) FixedWindow {
	return FixedWindow{
		Name: l.Name, Rate: l.Rate, Period: l.Period, Capacity: l.Capacity,
		MaxReserved: l.MaxReserved, Shards: l.Shards,
	}
}

func TestValidate(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	tests := []struct {
		name  string
		limit TokenBucket
		want  []string // each bad field and its value
	}{
		{"least", TokenBucket{Name: "a", Rate: 1, Period: time.Second}, nil},
		{"every field", TokenBucket{Name: "a", Rate: 0.5, Period: time.Hour, Capacity: 2.5, MaxReserved: 7.25, Shards: 2}, nil},
		{"none", TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: None, MaxReserved: None}, nil},
		{"zero", TokenBucket{}, []string{"Name ", "Rate 0", "Period 0s"}},

		{"longest name", TokenBucket{Name: strings.Repeat("n", 255), Rate: 1, Period: time.Second}, nil},
		{"long name", TokenBucket{Name: strings.Repeat("n", 256), Rate: 1, Period: time.Second}, []string{"Name " + strings.Repeat("n", 256)}},
		{"name in UTF-8", TokenBucket{Name: "größe/日本", Rate: 1, Period: time.Second}, nil},
		{"name not UTF-8", TokenBucket{Name: "a\xff", Rate: 1, Period: time.Second}, []string{"Name a\xff"}},
		{"name with NUL", TokenBucket{Name: "a\x00b", Rate: 1, Period: time.Second}, []string{"Name a\x00b"}},

		{"negative rate", TokenBucket{Name: "a", Rate: -1, Period: time.Second}, []string{"Rate -1"}},
		{"rate NaN", TokenBucket{Name: "a", Rate: nan, Period: time.Second}, []string{"Rate NaN"}},
		{"rate Inf", TokenBucket{Name: "a", Rate: inf, Period: time.Second}, []string{"Rate +Inf"}},
		{"rate -Inf", TokenBucket{Name: "a", Rate: -inf, Period: time.Second}, []string{"Rate -Inf"}},
		{"rate none", TokenBucket{Name: "a", Rate: None, Period: time.Second}, []string{"Rate 5e-324"}},
		{"largest rate", TokenBucket{Name: "a", Rate: 1e12, Period: time.Second}, nil},
		{"large rate", TokenBucket{Name: "a", Rate: 1.001e12, Period: time.Second, Capacity: 1}, []string{"Rate 1.001e+12"}},

		{"smallest rate", TokenBucket{Name: "a", Rate: 1e-15, Period: time.Second, Capacity: None}, nil},
		{"small rate", TokenBucket{Name: "a", Rate: 1e-320, Period: time.Second, Capacity: 1}, []string{"Rate 1e-320"}},
		{"less than a token", TokenBucket{Name: "a", Rate: 0.5, Period: time.Second}, []string{"Rate 0.5"}},
		{"less than a token, saved up", TokenBucket{Name: "a", Rate: 0.5, Period: time.Second, Capacity: 1}, nil},
		{"less than a token, reserved", TokenBucket{Name: "a", Rate: 0.5, Period: time.Second, Capacity: None}, nil},
		{"less than a token, on purpose", TokenBucket{Name: "a", Rate: 0.5, Period: time.Second, Capacity: 0.5}, nil},

		{"shortest period", TokenBucket{Name: "a", Rate: 1, Period: time.Microsecond}, nil},
		{"negative period", TokenBucket{Name: "a", Rate: 1, Period: -time.Second}, []string{"Period -1s"}},
		{"period below a microsecond", TokenBucket{Name: "a", Rate: 1, Period: time.Nanosecond}, []string{"Period 1ns"}},
		{"period not whole microseconds", TokenBucket{Name: "a", Rate: 1, Period: time.Second + 500}, []string{"Period 1.0000005s"}},
		{"longest period", TokenBucket{Name: "a", Rate: 1, Period: 100 * year}, nil},
		{"long period", TokenBucket{Name: "a", Rate: 1, Period: 100*year + time.Microsecond, Capacity: None}, []string{"Period 876000h0m0.000001s"}},

		{"negative capacity", TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: -1}, []string{"Capacity -1"}},
		{"capacity NaN", TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: nan}, []string{"Capacity NaN"}},
		{"capacity Inf", TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: inf}, []string{"Capacity +Inf"}},
		{"largest capacity", TokenBucket{Name: "a", Rate: 1e12, Period: time.Second, Capacity: 1e12}, nil},
		{"large capacity", TokenBucket{Name: "a", Rate: 1e12, Period: time.Second, Capacity: 1.001e12}, []string{"Capacity 1.001e+12"}},
		{"fills in 100 years", TokenBucket{Name: "a", Rate: 1, Period: year, Capacity: 100}, nil},
		{"fills in 101 years", TokenBucket{Name: "a", Rate: 1, Period: year, Capacity: 101}, []string{"Capacity 101"}},
		{"never fills", TokenBucket{Name: "a", Rate: 1e-9, Period: year, Capacity: 1e12}, []string{"Capacity 1e+12"}},
		{"smallest capacity", TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: 1e-15}, nil},
		{"small capacity", TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: 9e-16}, []string{"Capacity 9e-16"}},

		{"negative debt", TokenBucket{Name: "a", Rate: 1, Period: time.Second, MaxReserved: -1}, []string{"MaxReserved -1"}},
		{"debt NaN", TokenBucket{Name: "a", Rate: 1, Period: time.Second, MaxReserved: nan}, []string{"MaxReserved NaN"}},
		{"debt Inf", TokenBucket{Name: "a", Rate: 1, Period: time.Second, MaxReserved: inf}, []string{"MaxReserved +Inf"}},
		{"largest debt", TokenBucket{Name: "a", Rate: 1, Period: time.Second, MaxReserved: 1e12}, nil},
		{"smallest debt", TokenBucket{Name: "a", Rate: 1, Period: time.Second, MaxReserved: 1e-15}, nil},
		{"small debt", TokenBucket{Name: "a", Rate: 1, Period: time.Second, MaxReserved: 9e-16}, []string{"MaxReserved 9e-16"}},
		{"large debt", TokenBucket{Name: "a", Rate: 1, Period: time.Second, MaxReserved: 1.001e12}, []string{"MaxReserved 1.001e+12"}},

		{"negative shards", TokenBucket{Name: "a", Rate: 1, Period: time.Second, Shards: -1}, []string{"Shards -1"}},
		{"most shards", TokenBucket{Name: "a", Rate: 1024, Period: time.Second, Shards: 1024}, nil},
		{"many shards", TokenBucket{Name: "a", Rate: 1, Period: time.Second, Shards: 1025}, []string{"Shards 1025"}},

		{"a token for each shard", TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: 8, Shards: 8}, nil},
		{"more shards than tokens", TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 8, Shards: 9}, []string{"Shards 9"}},
		{"more shards than debt", TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: None, MaxReserved: 3, Shards: 4}, []string{"Shards 4"}},
		{"shards of debt alone", TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: None, Shards: 4}, nil},

		{
			"everything",
			TokenBucket{Rate: nan, Period: -1, Capacity: -2, MaxReserved: inf, Shards: -3},
			[]string{"Name ", "Rate NaN", "Capacity -2", "MaxReserved +Inf", "Period -1ns", "Shards -3"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, limit := range []Limit{tt.limit, windowOf(tt.limit)} {
				err := limit.Validate()
				checkFields(t, fmt.Sprintf("%T", limit), err, tt.want)
				for _, fe := range fieldErrors(err) {
					if fe.Limit != tt.limit.Name || fe.Reason == "" {
						t.Errorf("%T: %s: Limit, Reason = %q, %q, want %q and a reason", limit, fe.Field, fe.Limit, fe.Reason, tt.limit.Name)
					}
				}
				if errors.Is(err, ErrExceedsCapacity) || errors.Is(err, ErrRefused) {
					t.Errorf("%T: %v is ErrExceedsCapacity or ErrRefused", limit, err)
				}
			}
		})
	}
}

func TestRequestValidate(t *testing.T) {
	limit := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	tiny := TokenBucket{Name: "a", Rate: 1e-3, Period: time.Second, Capacity: 1e-3}
	tests := []struct {
		name    string
		request Request
		want    []string // each bad field and its value
	}{
		{"plain", limit.For("user 1"), nil},
		{"empty key", limit.For(""), nil},
		{"key in UTF-8", limit.For("größe/日本"), nil},
		{"longest key", limit.For(strings.Repeat("k", 2048)), nil},
		{"long key", limit.For(strings.Repeat("k", 2049)), []string{"Key " + strings.Repeat("k", 2049)}},
		{"long key in bytes", limit.For(strings.Repeat("ä", 1025)), []string{"Key " + strings.Repeat("ä", 1025)}},
		{"key not UTF-8", limit.For("k\xc3"), []string{"Key k\xc3"}},
		{"key with NUL", limit.For("k\x00"), []string{"Key k\x00"}},

		{"count 0", limit.ForN("k", 0), nil},
		{"count a fraction", limit.ForN("k", 0.001), nil},
		{"largest count", limit.ForN("k", 1e12), nil},
		{"large count", limit.ForN("k", 1.001e12), []string{"Count 1.001e+12"}},
		{"negative count", limit.ForN("k", -1), []string{"Count -1"}},
		{"count beside the capacity", limit.ForN("k", 10*0x1p-46), nil},
		{"count lost beside the capacity", limit.ForN("k", 9.9*0x1p-46), []string{"Count 1.4068746168049984e-13"}},
		{"count none", limit.ForN("k", None), []string{"Count 5e-324"}},
		{"smallest count", tiny.ForN("k", 1e-15), nil},
		{"small count", tiny.ForN("k", 9e-16), []string{"Count 9e-16"}},
		{"count NaN", limit.ForN("k", math.NaN()), []string{"Count NaN"}},
		{"count Inf", limit.ForN("k", math.Inf(1)), []string{"Count +Inf"}},

		{"no limit", Request{Key: "k", Count: 1}, []string{"Limit <nil>"}},
		{"a nil bucket", Request{Limit: (*TokenBucket)(nil), Key: "k"}, []string{"Limit <nil>"}},
		{"a nil window", Request{Limit: (*FixedWindow)(nil), Key: "k"}, []string{"Limit <nil>"}},
		{"embeds nil", Request{Limit: struct{ *TokenBucket }{}, Key: "k"}, []string{"Limit <nil>"}},
		{"bad limit", FixedWindow{Name: "a", Rate: -1, Shards: -1}.For("k"), []string{"Rate -1", "Period 0s", "Shards -1"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			checkFields(t, "Validate()", tt.request.Validate(), tt.want)
		})
	}
}

// A long value is cut, so that one bad name does not fill the log, a key is not told, and None is told by
// its name.
func TestFieldErrorIsShort(t *testing.T) {
	limit := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	err := limit.For(strings.Repeat("k", 100_000)).Validate()
	if got, want := err.Error(), `ratelimit: limit "a": Key of 100000 bytes: must be at most 2048 bytes long`; got != want {
		t.Errorf("Error() = %.200q, want %q", got, want)
	}
	limit.Name = strings.Repeat("n", 100_000)
	name := `"` + strings.Repeat("n", 64) + `"…`
	if got, want := limit.Validate().Error(), "ratelimit: limit "+name+": Name "+name+": must be at most 255 bytes long"; got != want {
		t.Errorf("Error() = %.200q, want %q", got, want)
	}
	err = TokenBucket{Name: "a", Rate: None, Period: time.Second}.Validate()
	if got, want := err.Error(), `ratelimit: limit "a": Rate none: must be positive`; got != want {
		t.Errorf("Error() = %q, want %q", got, want)
	}
}

func TestValidateLimits(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	b := FixedWindow{Name: "b", Rate: 10, Period: time.Second}
	tests := []struct {
		name   string
		limits []Limit
		want   []string // each bad field and its value, by limit
	}{
		{"none", nil, nil},
		{"sound", []Limit{a, b, &TokenBucket{Name: "c", Rate: 1, Period: 1000}}, nil},
		{"bad", []Limit{a, TokenBucket{Name: "c", Rate: -1, Shards: -1}, FixedWindow{Name: "d", Rate: 1}}, []string{"c: Rate -1", "c: Period 0s", "c: Shards -1", "d: Period 0s"}},
		{"nil", []Limit{a, nil, b, (*TokenBucket)(nil), (*FixedWindow)(nil), (*SlidingWindow)(nil)}, []string{": Limits[1] <nil>", ": Limits[3] <nil>", ": Limits[4] <nil>", ": Limits[5] <nil>"}},
		{"embeds nil", []Limit{struct{ *SlidingWindow }{}, struct{ Limit }{}, a, (*struct{ TokenBucket })(nil)}, []string{": Limits[0] <nil>", ": Limits[1] <nil>", ": Limits[3] <nil>"}},
		{"twice", []Limit{a, b, windowOf(a), &a}, []string{"a: Name a"}},
		{"twice and bad", []Limit{b, FixedWindow{Name: "b"}}, []string{"b: Rate 0", "b: Period 0s", "b: Name b"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := Validate(tt.limits...)
			var got []string
			for _, fe := range fieldErrors(err) {
				got = append(got, fmt.Sprintf("%s: %s %v", fe.Limit, fe.Field, fe.Value))
			}
			if !slices.Equal(got, tt.want) || errors.Is(err, ErrInvalid) != (len(tt.want) > 0) {
				t.Errorf("Validate() = %v, bad fields %q, want %q", err, got, tt.want)
			}
		})
	}
}

func TestValidateStart(t *testing.T) {
	tests := []struct {
		start time.Time
		ok    bool
	}{
		{time.Time{}, true},
		{time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC), true},
		{time.Date(0, 12, 31, 23, 59, 59, 0, time.UTC), false},
		{time.Date(1, 1, 1, 0, 0, 0, 0, time.FixedZone("", 3600)), false},
		{time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), true},
		{time.Date(9999, 12, 31, 23, 59, 59, 0, time.FixedZone("", -3600)), false},
	}
	for _, tt := range tests {
		err := FixedWindow{Name: "a", Rate: 1, Period: time.Second, Start: tt.start}.Validate()
		fe, bad := err.(*FieldError)
		if bad == tt.ok || bad && fe.Field != "Start" {
			t.Errorf("Validate() with a start of %v = %v, want OK: %v", tt.start, err, tt.ok)
		}
	}
}

func TestNameOf(t *testing.T) {
	tests := []struct {
		limit Limit
		want  string
	}{
		{TokenBucket{Name: "a"}, "a"},
		{FixedWindow{Name: "b"}, "b"},
		{SlidingWindow{Name: "s"}, "s"},
		{&SlidingWindow{Name: "s"}, "s"},
		{(*SlidingWindow)(nil), ""},
		{&TokenBucket{Name: "c"}, "c"},
		{struct{ FixedWindow }{FixedWindow{Name: "d"}}, "d"},
		{nil, ""},
		{(*TokenBucket)(nil), ""},
		{(*FixedWindow)(nil), ""},
		{struct{ *TokenBucket }{&TokenBucket{Name: "e"}}, "e"},
		{struct{ *TokenBucket }{}, ""},
		{struct{ Limit }{(*FixedWindow)(nil)}, ""},
		{(*struct{ FixedWindow })(nil), ""},
	}
	for _, tt := range tests {
		if got := NameOf(tt.limit); got != tt.want {
			t.Errorf("NameOf(%T) = %q, want %q", tt.limit, got, tt.want)
		}
	}
}

// A definition says of itself what its limit says.
func TestDefinitionValidate(t *testing.T) {
	for _, tt := range []struct {
		name string
		d    Definition
		want string // the bad field
	}{
		{"sound", SlidingWindow{Name: "a", Rate: 1, Period: time.Second}.Definition(), ""},
		{"no kind", Definition{Name: "a", Rate: 1, Period: time.Second}, "Kind"},
		{"a kind that there is not", Definition{Name: "a", Kind: 200, Rate: 1, Period: time.Second}, "Kind"},
		{"a field", Definition{Name: "a", Kind: KindTokenBucket, Rate: -1, Period: time.Second, Shards: 1}, "Rate"},
	} {
		bad := fieldErrors(tt.d.Validate())
		if tt.want == "" && len(bad) != 0 || tt.want != "" && (len(bad) != 1 || bad[0].Field != tt.want) {
			t.Errorf("%s: %v, want %q to be at fault", tt.name, bad, tt.want)
		}
		if got := tt.d.SlotWidth(); got < 0 {
			t.Errorf("%s: SlotWidth() = %v", tt.name, got)
		}
	}
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }
