package receipt_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

func TestPayments(t *testing.T) {
	want := []receipt.Payment{
		{Limit: &receipt.Limit{Key: "k", Definition: bucket.Definition{Name: "a", Kind: 1, Rate: 10, Period: time.Second, Capacity: 10, Shards: 2}}, Shard: 0, Tokens: 2},
		{Limit: &receipt.Limit{Key: "k", Definition: bucket.Definition{Name: "a", Kind: 1, Rate: 10, Period: time.Second, Capacity: 10, Shards: 2}}, Shard: 1, Tokens: 0.5},
	}
	r := receipt.New(slices.Clone(want), nil, "tx 1", 7, time.Time{})
	if got := receipt.Payments(r); !slices.Equal(got, want) {
		t.Errorf("Payments() = %v, want %v", got, want)
	}
	if taker, conn := receipt.Taker(r), receipt.Conn(r); taker != "tx 1" || conn != 7 {
		t.Errorf("Taker(), Conn() = %q, %v, want tx 1, 7", taker, conn)
	}
}

// Each caller is told the mark that the last one left; one that failed leaves
// none.
func TestRedeem(t *testing.T) {
	fault := errors.New("the database is away")
	tests := []struct {
		told, mark string
		err        error
	}{
		{"", "lost", fault},
		{"", "tx 1", nil},
		{"tx 1", "lost", fault},
		{"tx 1", "tx 2", nil},
		{"tx 2", "tx 2", nil},
	}
	r := receipt.New(nil, nil, "", nil, time.Time{})
	for i, tt := range tests {
		var told string
		err := receipt.Redeem(t.Context(), r, func(mark string) (string, error) {
			told = mark
			return tt.mark, tt.err
		})
		if told != tt.told || !errors.Is(err, tt.err) {
			t.Errorf("step %d: told mark %q, error %v, want %q, %v", i, told, err, tt.told, tt.err)
		}
	}
}

// Of many callers at once one gives back, and the others know.
func TestRedeemOnce(t *testing.T) {
	r := receipt.New(nil, nil, "", nil, time.Time{})
	given := 0 // no lock of its own: the race detector looks
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			err := receipt.Redeem(t.Context(), r, func(mark string) (string, error) {
				given += 1 - len(mark)
				return "x", nil
			})
			if err != nil {
				t.Errorf("Redeem() = %v", err)
			}
		})
	}
	wg.Wait()
	if given != 1 {
		t.Errorf("given back %d times, want 1", given)
	}
}

// A caller who waits for another to give back waits no longer than for its context.
func TestRedeemHasAnEnd(t *testing.T) {
	r := receipt.New(nil, nil, "", nil, time.Time{})
	ctx, cancel := context.WithCancel(t.Context())
	err := receipt.Redeem(t.Context(), r, func(string) (string, error) {
		cancel()
		err := receipt.Redeem(ctx, r, func(string) (string, error) {
			t.Error("two gave back at once")
			return "", nil
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the one that waits: %v, want context.Canceled", err)
		}
		return "x", nil
	})
	if err != nil {
		t.Errorf("Redeem() = %v", err)
	}
}
