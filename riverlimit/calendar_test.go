package riverlimit_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// monthly is a quota of two jobs a month, from the 31st on in Berlin.
var monthly = ratelimit.FixedWindow{
	Name: "monthly", Rate: 2, Every: ratelimit.Month, Zone: "Europe/Berlin",
	Anchor: ratelimit.Date{Year: 2026, Month: time.January, Day: 31},
}

// edges returns the beginnings of the n windows after now.
func edges(n int) (edges []time.Time) {
	d, at := monthly.Definition(), time.Now()
	for range n {
		_, at = d.Window("", at)
		edges = append(edges, at)
	}
	return edges
}

// Jobs that are inserted above a monthly quota are scheduled for the months in which their
// tokens are sold, two in each.
func TestInsertByTheMonth(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	next := edges(2)
	for i, want := range []time.Time{{}, {}, next[0], next[0], next[1]} {
		b.inTx(t, func(tx pgx.Tx) error {
			got, err := in.InsertTx(t.Context(), tx, callArgs{i}, nil, monthly.For(""))
			if err != nil {
				return err
			}
			if got.Job.State == rivertype.JobStateScheduled != !want.IsZero() || !want.IsZero() && !got.Job.ScheduledAt.Equal(want) {
				t.Errorf("job %d is %s at %v, want %v", i, got.Job.State, got.Job.ScheduledAt, want)
			}
			return nil
		})
	}
}

// A job above a monthly quota is held back until the month's end, by its reservation or by a
// refusal, and nothing of the quota is lost by it.
func TestWorkByTheMonth(t *testing.T) {
	t.Parallel()
	for name, bound := range map[string]float64{"reserved": 0, "refused": ratelimit.None} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			quota := monthly
			quota.MaxReserved = bound
			o := newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(quota)}))
			o.work(nil, river.EventKindJobCompleted, 1)
			o.work(nil, river.EventKindJobCompleted, 2)
			job := o.work(nil, river.EventKindJobSnoozed, 2)
			if edge := edges(1)[0]; job.ScheduledAt.Sub(edge).Abs() > time.Minute {
				t.Errorf("snoozed until %v, want about %v", job.ScheduledAt, edge)
			}
			if want := map[string]float64{"reserved": -1, "refused": 0}[name]; o.value(t, "monthly") != want {
				t.Errorf("%v tokens, want %v", o.value(t, "monthly"), want)
			}
		})
	}
}

// A part that is kept is for calls that take at once: a job that reserves above it is cancelled,
// with the reason among its errors.
func TestWorkAbove(t *testing.T) {
	b := newBench(t)
	o := newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{
		Limits: func(*rivertype.JobRow) []ratelimit.Request { return []ratelimit.Request{monthly.For("").Above(0.5)} },
	}))
	if job := o.work(nil, river.EventKindJobCancelled, 0); len(job.Errors) != 1 {
		t.Errorf("errors %v, want the reason", job.Errors)
	}
}
