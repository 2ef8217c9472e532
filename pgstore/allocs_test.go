package pgstore_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// TestAllocations bounds what a granted call allocates, pgx included: what is read of a row goes into
// fields, and a limit that was called before is not validated again.
func TestAllocations(t *testing.T) {
	db, store := setUp(t)
	limit := slow("allocations", 1e9)
	requests := []ratelimit.Request{limit.For("k")}
	granted := func(result ratelimit.Result, err error) {
		if err != nil || !result.OK {
			t.Fatalf("got %+v and %v", result, err)
		}
	}
	tx := begin(t, db, pgx.ReadCommitted)
	for _, test := range []struct {
		name string
		most float64
		call func()
	}{
		{"AllowTx", 29, func() { granted(store.AllowTx(t.Context(), tx, limit.For("in a transaction"))) }},
		{"Allow", 34, func() { granted(store.Allow(t.Context(), limit.For("k"))) }},
		{"AllowFunc", 81, func() {
			granted(store.AllowFunc(t.Context(), requests, func(pgx.Tx, ratelimit.Result) error { return nil }))
		}},
		{"AllowOnCommit", 143, func() {
			granted(store.AllowOnCommit(t.Context(), requests, pgx.ReadCommitted, func(pgx.Tx) error { return nil }))
		}},
	} {
		for range 10 { // until statements are prepared
			test.call()
		}
		if n := testing.AllocsPerRun(200, test.call); n > test.most {
			t.Errorf("%s: %v allocations, want at most %v", test.name, n, test.most)
		}
	}
}
