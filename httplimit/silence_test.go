package httplimit_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/fallback"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// A database that is known to be silent is answered 503 at once, told of by a class of its own, and
// logged by package fallback alone, once; with FailOpen requests pass as fast. So it is where requests
// hold permits.
func TestSilentDatabase(t *testing.T) {
	for i := range 4 {
		open, inFlight := i&1 > 0, i&2 > 0
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			logger := slog.New(slog.NewTextHandler(&log, nil))
			db := memstore.New(nil)
			store, err := fallback.New(db, &fallback.Config{Logger: logger})
			must(t, err)
			defer store.Close()
			var events []ratelimit.Event
			config := httplimit.Config{
				Policies: []httplimit.Policy{{Limit: perMinute}}, FailOpen: open, Logger: logger,
				Observe: func(_ context.Context, e ratelimit.Event) { events = append(events, e) },
			}
			if inFlight {
				config.InFlight = []httplimit.InFlightPolicy{{Limit: ratelimit.InFlight{Name: "f", Limit: 1}, Key: httplimit.ForAll}}
				config.Permits = store.Permits(db.Permits())
			}
			m := newMiddleware(t, store, config)
			next := &answering{}
			h := m.Handler(next)
			db.SetSilent(true)
			for range 3 { // until it is noticed
				serve(h, get("/"))
				time.Sleep(time.Second)
			}
			synctest.Wait() // for the line of the log
			before, began := next.served.Load(), time.Now()
			events = nil
			log.Reset()
			for range 100 {
				resp := serve(h, get("/"))
				if open {
					wantStatus(t, resp, 200)
					continue
				}
				wantStatus(t, resp, 503)
				wantRetryAfter(t, resp, 5, 10)
			}
			if served := next.served.Load() - before; served != 0 != open || time.Since(began) > 0 {
				t.Errorf("fail open %v: %d of 100 were served, after %v", open, served, time.Since(began))
			}
			if len(events) != 100 {
				t.Errorf("%d events, want 100", len(events))
			}
			for _, e := range events {
				if e.Outcome != ratelimit.OutcomeFailed || e.ErrorClass != "silent" || e.Passed != open || !errors.Is(e.Err, fallback.ErrSilent) {
					t.Fatalf("told as %v of class %q, want a failure of class silent", e, e.ErrorClass)
				}
			}
			if log.Len() > 0 {
				t.Errorf("the silence is logged again:\n%.300s", log.String())
			}
		})
	}
}
