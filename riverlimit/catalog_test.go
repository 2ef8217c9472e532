package riverlimit_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// raised is a catalog that has two more tokens an hour for hourly.
func raised(t *testing.T) *catalog.Catalog {
	t.Helper()
	limits := newCatalog(t)
	must(t, limits.Publish(t.Context(), hourly))
	must(t, errOf(limits.Set(t.Context(), "hourly", catalog.AllKeys, catalog.Override{Rate: 60, Capacity: 4})))
	return limits
}

// Jobs are scheduled by what the catalog says.
func TestInsertByCatalog(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	in.Catalog = raised(t)
	b.inTx(t, func(tx pgx.Tx) error {
		batch, err := in.InsertBatchTx(t.Context(), tx, []river.InsertManyParams{{Args: callArgs{0}}}, hourly.ForN("", 4))
		if err != nil {
			return err
		}
		if wait := batch[0].Reservation.RetryAfter; wait != 0 {
			t.Errorf("the batch waits for %v", wait)
		}
		requests := []ratelimit.Request{hourly.For("")}
		one, err := in.InsertTx(t.Context(), tx, callArgs{1}, nil, requests...)
		if err != nil {
			return err
		}
		if wait := one.Reservation.RetryAfter; (wait - time.Minute).Abs() > 5*time.Second {
			t.Errorf("the job waits for %v, want a minute", wait)
		}
		if requests[0].Limit.Definition().Rate != 1 {
			t.Errorf("the caller's request was changed: %v", requests[0].Limit)
		}
		return nil
	})
}

// So are attempts, and a pause is of what holds.
func TestMiddlewareByCatalog(t *testing.T) {
	b := newBench(t)
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(hourly), Catalog: raised(t)})
	if rows := m.Rows(hourly.For("")); len(rows) != 1 || rows[0].Limit.Definition().Rate != 60 {
		t.Errorf("got rows %v", rows)
	}
	o := newOne(t, b, m)
	for n := range 4 {
		o.work(nil, river.EventKindJobCompleted, n+1)
	}
	job := o.work(nil, river.EventKindJobSnoozed, 4)
	wantWait(t, job, time.Minute, 20*time.Second)
}
