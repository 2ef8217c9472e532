package ratelimit

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"
)

func TestReceiptPayments(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Shards: 2}
	want := []Payment{{Limit: a, Key: "k", Shard: 0, Tokens: 2}, {Limit: a, Key: "k", Shard: 1, Tokens: 0.5}}
	if got := NewReceipt(slices.Clone(want)).Payments(); !slices.Equal(got, want) {
		t.Errorf("Payments() = %v, want %v", got, want)
	}
}

// Each caller is told the mark that the last one left; one that failed leaves
// none.
func TestReceiptRedeem(t *testing.T) {
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
	receipt := NewReceipt(nil)
	for i, tt := range tests {
		var told string
		err := receipt.Redeem(func(mark string) (string, error) {
			told = mark
			return tt.mark, tt.err
		})
		if told != tt.told || !errors.Is(err, tt.err) {
			t.Errorf("step %d: told mark %q, error %v, want %q, %v", i, told, err, tt.told, tt.err)
		}
	}
}

// Of many callers at once one gives back, and the others know.
func TestReceiptRedeemOnce(t *testing.T) {
	receipt := NewReceipt(nil)
	given := 0 // no lock of its own: the race detector looks
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			err := receipt.Redeem(func(mark string) (string, error) {
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
