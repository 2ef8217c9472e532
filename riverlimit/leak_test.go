package riverlimit_test

import (
	"testing"
	"time"

	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

func TestNoTypeShowsKeys(t *testing.T) {
	b := newBench(t)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 1, Period: time.Minute}
	jobs := riverlimit.Inserter{Client: b.client(t, b.config(nil)), Store: b.store}
	tx := b.begin(t)
	inserted, err := jobs.InsertTx(t.Context(), tx, callArgs{}, nil, limit.For(leak.Key))
	must(t, err)
	config := riverlimit.MiddlewareConfig{Limits: func(*rivertype.JobRow) []ratelimit.Request { return []ratelimit.Request{limit.For(leak.Key)} }}
	middleware, err := riverlimit.NewMiddleware(b.store, &config)
	must(t, err)
	leak.Check(t, ".", map[string]any{
		"Inserted":         []any{inserted, *inserted, riverlimit.Inserted{}},
		"Inserter":         jobs,
		"InsertManyParams": riverlimit.InsertManyParams{Args: callArgs{}, Requests: []ratelimit.Request{limit.For(leak.Key)}},
		"Line":             riverlimit.Line{Limit: "l", Key: leak.Key},
		"LineFullError":    &riverlimit.LineFullError{Limit: "l", Most: 1},
		"Middleware":       middleware,
		"MiddlewareConfig": config,
	})

	parks := b.inserter(t)
	parks.InFlight, parks.MaxParked = oneOfTenant, 1
	_, full := b.insertTenants(t, parks, leak.Key, leak.Key, leak.Key)
	must(t, errOf(b.Pool.Exec(t.Context(), "DROP TABLE "+b.Schema+".rate_limit_parked")))
	_, notMigrated := b.insertTenants(t, parks, leak.Key, leak.Key)
	leak.Errors(t, ".", map[string]leak.Provoked{
		"ErrNotMigrated": {Is: riverlimit.ErrNotMigrated, Err: notMigrated}, "LineFullError": {Err: full},
	})
}
