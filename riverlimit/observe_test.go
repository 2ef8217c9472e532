package riverlimit_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// Each time that a job is fetched there is one event, which says what became of it.
func TestObserveJobs(t *testing.T) {
	pgtest.Long(t)
	b := newBench(t)
	permits := ratelimit.InFlight{Name: "permits", Limit: 1}
	var requests []ratelimit.Request
	permitted := false
	var heard []string
	config := riverlimit.MiddlewareConfig{
		Limits:  func(*rivertype.JobRow) []ratelimit.Request { return requests },
		MaxWait: time.Second, // for a permit, with the round trip of what is free
		InFlight: func(*rivertype.JobRow) ratelimit.PermitRequest {
			if permitted {
				return permits.For("k")
			}
			return ratelimit.PermitRequest{}
		},
		Observe: func(ctx context.Context, e ratelimit.Event) {
			if job := riverlimit.JobOf(ctx); job == nil || job.Kind != "call" {
				t.Errorf("the event is of the job %v", job)
			}
			if e.Door != riverlimit.Door || strings.Contains(fmt.Sprint(e), "secret") {
				t.Errorf("heard %v", e)
			}
			heard = append(heard, fmt.Sprintf("%s %s %t %s %s", e.Verb, e.Outcome, e.Passed, e.Policy(), e.ErrorClass))
		},
	}
	o := newOne(t, b, middleware(t, b.store, config))
	pool, err := pgxpool.New(t.Context(), b.URL)
	must(t, err)
	pool.Close()
	broken := newOne(t, b, middleware(t, newStore(t, pool, b.Schema), config))
	worked := func(want string, o *one, job *rivertype.JobRow, event river.EventKind) *rivertype.JobRow {
		t.Helper()
		heard = nil
		runs := o.runs
		if strings.Contains(want, "true") {
			runs++
		}
		job = o.work(job, event, runs)
		if fmt.Sprint(heard) != fmt.Sprint([]string{want}) {
			t.Errorf("heard %q, want %q", heard, want)
		}
		return job
	}
	requests = []ratelimit.Request{hourly.For("secret")}
	worked("reserve granted true hourly ", o, nil, river.EventKindJobCompleted)
	o.result = errors.New("the call failed")
	job := worked("reserve granted true hourly ", o, nil, river.EventKindJobFailed)
	o.result = nil
	job = worked("reserve refused false hourly ", o, job, river.EventKindJobSnoozed)
	job = worked("reserve refused false hourly ", o, job, river.EventKindJobSnoozed)
	worked("reserve granted true hourly ", o, o.due(job), river.EventKindJobCompleted)
	worked("reserve failed false hourly other", broken, nil, river.EventKindJobSnoozed)
	requests = []ratelimit.Request{bounded.ForN("secret", 4)}
	worked("reserve too_large false bounded too_large", o, nil, river.EventKindJobCancelled)
	requests = []ratelimit.Request{bounded.ForN("secret", -1)}
	worked("reserve invalid false bounded invalid", o, nil, river.EventKindJobCancelled)
	requests, permitted = nil, true
	worked("acquire granted true permits ", o, nil, river.EventKindJobCompleted)
	must(t, errOf(b.store.Permits().Acquire(t.Context(), permits.For("k"))))
	worked("acquire refused false permits ", o, nil, river.EventKindJobSnoozed)
	worked("acquire failed false permits other", broken, nil, river.EventKindJobSnoozed)
	requests, permitted, heard = nil, false, nil
	o.work(nil, river.EventKindJobCompleted, o.runs+1)
	if len(heard) > 0 {
		t.Errorf("heard %q of a job that is not limited", heard)
	}
}
