package ratelimit_test

import (
	"errors"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

var t0 = time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)

func TestResultErr(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	call, err := decide.New(false, a.ForN("k", 2))
	must(t, err)
	checked := func(value float64) Result {
		return call.Checked(decide.View{States: [][]bucket.State{{{Value: value, TS: t0}}}, At: t0})
	}
	if err := checked(2).Err(); err != nil {
		t.Errorf("Err() = %v for a result that is OK", err)
	}
	refused := checked(0).Err()
	var re *RefusedError
	if !errors.Is(refused, ErrRefused) || !errors.As(refused, &re) {
		t.Fatalf("Err() = %v, want a *RefusedError that is ErrRefused", refused)
	}
	if got, want := re.Result.RetryAfter, 200*time.Millisecond; got != want {
		t.Errorf("RetryAfter = %v, want %v", got, want)
	}
	if got, want := refused.Error(), `ratelimit: limit "a" refused, retry after 200ms`; got != want {
		t.Errorf("Error() = %q, want %q", got, want)
	}
	if err := (Result{}).Err(); !errors.Is(err, ErrRefused) { // that of a call that failed
		t.Errorf("Err() of the zero Result = %v, want ErrRefused", err)
	}
	if errors.Is(refused, ErrExceedsCapacity) || errors.Is(refused, ErrInvalid) {
		t.Errorf("%v is ErrExceedsCapacity or ErrInvalid", refused)
	}
}

// An error is told before a refusal, and the result in any case.
func TestGranted(t *testing.T) {
	failed := errors.New("failed")
	for _, tt := range []struct {
		name   string
		result Result
		err    error
		want   error
	}{
		{"granted", Result{Status: Status{OK: true, Taken: 3}}, nil, nil},
		{"refused", Result{Status: Status{RetryAfter: time.Second}}, nil, ErrRefused},
		{"failed", Result{}, failed, failed},
		{"failed, with a result", Result{Status: Status{OK: true, Taken: 3}}, failed, failed},
	} {
		result, err := Granted(tt.result, tt.err)
		if !errors.Is(err, tt.want) || result.Taken != tt.result.Taken || result.RetryAfter != tt.result.RetryAfter {
			t.Errorf("%s: %v, %v, want %v, %v", tt.name, result, err, tt.result, tt.want)
		}
	}
}
