package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/memstore"
)

// events are those of all kinds of calls with leak.Key.
func events(t *testing.T, requests []Request) (all []any) {
	store := memstore.NewWithConfig(memstore.Config{
		Clock:   func() time.Time { return t0 },
		Observe: func(_ context.Context, e Event) { all = append(all, e, &e) },
	})
	for range 2 {
		granted, err := store.Allow(t.Context(), requests...)
		must(t, err)
		store.Settle(t.Context(), granted.Receipt, 1, 1)
		store.Cancel(t.Context(), granted.Receipt)
	}
	store.Allow(t.Context(), requests[0].Limit.ForN(leak.Key, 1e9))
	store.Credit(t.Context(), requests[0])
	permit, err := store.Permits().Acquire(t.Context(), InFlight{Name: "calls", Limit: 1}.For(leak.Key))
	must(t, err)
	store.Permits().Release(t.Context(), permit)
	locked := fmt.Errorf("somebody has locked limit %q, key %q", "api", leak.Key)
	return append(all, Event{Err: locked, Requests: requests}, Event{Err: locked, Permit: &permit})
}

// Keys and receipts leave by no log, and by JSON only where a receipt or a permit itself is
// encoded, which is how it is stored.
func TestNoTypeShowsKeys(t *testing.T) {
	store := memstore.New(func() time.Time { return t0 })
	api := TokenBucket{Name: "api", Rate: 10, Period: time.Minute}
	other := SlidingWindow{Name: "other", Rate: 1, Period: time.Minute, MaxReserved: None}
	both := []Request{api.For(leak.Key), other.For(leak.Key)}
	granted, err := store.Allow(t.Context(), both...)
	if err != nil || !granted.OK {
		t.Fatal(granted, err)
	}
	one, err := store.Allow(t.Context(), api.For(leak.Key))
	must(t, err)
	refused, err := store.Allow(t.Context(), both...)
	if err != nil || refused.OK {
		t.Fatal(refused, err)
	}
	_, never := store.Allow(t.Context(), api.ForN(leak.Key, 11))
	var exceeds *ExceedsCapacityError
	if !errors.As(never, &exceeds) {
		t.Fatal(never)
	}
	badKey := api.For(leak.Key + strings.Repeat("k", MaxKeyLength)).Validate()
	_, twice := store.AllowFirst(t.Context(), both[0], both[0])
	var field *FieldError
	if !errors.As(badKey, &field) || !errors.As(twice, &field) {
		t.Fatal(badKey, twice)
	}
	calls := InFlight{Name: "calls", Limit: 1}
	permit, err := store.Permits().Acquire(t.Context(), calls.For(leak.Key), both[0])
	full, err2 := store.Permits().Acquire(t.Context(), calls.For(leak.Key))
	if err != nil || err2 != nil || full.OK {
		t.Fatal(permit, full, err, err2)
	}
	var exceedsLimit *ExceedsLimitError
	if _, err := store.Permits().Acquire(t.Context(), calls.ForN(leak.Key, 2)); !errors.As(err, &exceedsLimit) {
		t.Fatal(err)
	}
	values := map[string]any{
		"Kind": KindTokenBucket, "Definition": api.Definition(), "TokenBucket": api, "SlidingWindow": other,
		"FixedWindow":          []any{FixedWindow{Name: "w", Rate: 1, Period: time.Hour}, FixedWindow{Name: "q", Rate: 1, Every: Month}},
		"Unit":                 Month,
		"Mode":                 ModeShadow,
		"Date":                 Date{Year: 2026, Month: time.January, Day: 31},
		"Request":              []any{both[0], &both[0]},
		"Status":               []any{granted.Status, refused.Several[1]},
		"Result":               []any{granted, refused, one, &granted, Result{}},
		"Page":                 Page{Prefix: leak.Key, After: leak.Key, Most: 1},
		"Receipt":              []any{granted.Receipt, one.Receipt, new(Receipt)},
		"FieldError":           []any{badKey, twice},
		"ExceedsCapacityError": exceeds,
		"RefusedError":         refused.Err(),
		"InFlight":             InFlight{Name: "calls", Limit: 1},
		"PermitRequest":        []any{calls.For(leak.Key), calls.ForN(leak.Key, 3).And(calls.For(leak.Key + "2"))},
		"PermitNumber":         PermitNumber{Number: 1, Fence: 1},
		"ExceedsLimitError":    exceedsLimit,
		"Permit":               []any{permit, &permit, full},
		"FullError":            full.Err(),
		"Event":                events(t, both),
		"Verb":                 VerbAllow,
		"Form":                 FormOwn,
		"Outcome":              OutcomeGranted,
		"Part":                 Part{Outcome: OutcomeRefused, Status: refused.Several[1]},
		"Replacement":          Replacement{Key: leak.Key, From: api, To: api, Marked: []Marked{{Mark: t0, By: []Limit{api}}}},
		"Marked":               Marked{Mark: t0, By: []Limit{api}},
		"WaitError":            &WaitError{Result: granted, Wait: time.Second, Err: context.Canceled},
	}
	leak.Check(t, ".", values, "Receipt", "Permit")

	must(t, errOf(store.Settle(t.Context(), one.Receipt, 0)))
	_, settled := store.Settle(t.Context(), one.Receipt, 0)
	must(t, store.Permits().Release(t.Context(), permit))
	_, lost := store.Permits().Renew(t.Context(), permit)
	short, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, waited := store.Wait(short, TokenBucket{Name: "wait", Rate: 1, Period: time.Hour}.ForN(leak.Key, 2))
	leak.Errors(t, ".", map[string]leak.Provoked{
		"ErrInvalid": {Is: ErrInvalid, Err: badKey}, "FieldError": {Err: twice},
		"ErrExceedsCapacity": {Is: ErrExceedsCapacity, Err: never}, "ExceedsCapacityError": {Err: never},
		"ErrRefused": {Is: ErrRefused, Err: refused.Err()}, "RefusedError": {Err: refused.Err()}, "FullError": {Err: full.Err()}, "ExceedsLimitError": {Err: exceedsLimit},
		"ErrSettled": {Is: ErrSettled, Err: settled}, "ErrLeaseLost": {Is: ErrLeaseLost, Err: lost}, "WaitError": {Err: waited},
	})

	text, err := granted.Receipt.MarshalText()
	if err != nil || len(text) == 0 {
		t.Errorf("the receipt's text is %q, %v, want it as it is stored", text, err)
	}
	if got, want := granted.Receipt.String(), `receipt of 1 of "api", 1 of "other"`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
