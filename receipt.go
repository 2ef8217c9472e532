package ratelimit

import "sync"

// Payment is tokens that were taken from one row.
type Payment struct {
	Limit  Limit
	Key    string
	Shard  int
	Tokens float64
}

// Receipt is what a call paid, row by row. A store's Cancel gives exactly
// that back, once. It is safe for concurrent use, and copies of a [Result]
// share it.
type Receipt struct {
	payments []Payment

	mu   sync.Mutex
	mark string
}

// NewReceipt is for stores.
func NewReceipt(payments []Payment) *Receipt { return &Receipt{payments: payments} }

// Payments is what was paid. It must not be changed.
func (r *Receipt) Payments() []Payment { return r.payments }

// Redeem is for stores. It calls giveBack, one caller at a time, with the
// mark that the last call left, "" at first; the mark that giveBack returns
// is kept when it returns no error.
func (r *Receipt) Redeem(giveBack func(mark string) (string, error)) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	mark, err := giveBack(r.mark)
	if err != nil {
		return err
	}
	r.mark = mark
	return nil
}
