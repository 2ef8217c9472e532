package decide_test

import (
	"fmt"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// When others were faster each time, a call is refused though there may be enough by now; so
// is one of which a part was held.
func TestWholeIsRefusedWithItsRest(t *testing.T) {
	for n := range 3 {
		t.Run(fmt.Sprint(n+1, " from rows"), func(t *testing.T) {
			var requests []Request
			for i := range n + 2 {
				requests = append(requests, TokenBucket{Name: fmt.Sprint("limit ", i), Rate: 10, Period: time.Second}.For("k"))
			}
			call := newCall(t, false, requests...)
			balances := make([]*decide.Balance, len(requests))
			balances[0] = &decide.Balance{State: row(9, t0), At: t0}
			rest := call.Remainder(balances)
			view := decide.View{At: t0}
			for range rest.Demands {
				view.States = append(view.States, rows(10))
			}
			result := call.Join(rest.Refused(view), balances)
			if result.OK || result.RetryAfter <= 0 || result.Receipt != nil || len(result.Each()) != len(requests) {
				t.Errorf("%v after %v, receipt %v, of %d limits", result, result.RetryAfter, result.Receipt, len(result.Each()))
			}
		})
	}
}
