package riverlimit_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// oneAnHour returns a limit of each kind that grants one token, and the next an hour later.
func oneAnHour(name string) []ratelimit.Limit {
	return []ratelimit.Limit{
		ratelimit.TokenBucket{Name: name, Rate: 1, Period: time.Hour},
		ratelimit.FixedWindow{Name: name, Rate: 1, Period: time.Hour, Start: time.Now()},
		ratelimit.SlidingWindow{Name: name, Rate: 1, Period: time.Hour, Slots: 2, Start: time.Now()},
	}
}

// moded is a middleware that limits jobs to one an hour, in a mode that the test changes.
type moded struct {
	*one
	*riverlimit.Middleware
	limit ratelimit.Limit
	mode  ratelimit.Mode
}

func newModed(t *testing.T, b *bench, limit ratelimit.Limit, hard bool) *moded {
	t.Helper()
	m := &moded{limit: limit, mode: ratelimit.ModeEnforce}
	m.Middleware = middleware(t, b.store, riverlimit.MiddlewareConfig{
		HardStart: hard, StartSlack: time.Minute, // no start is too late
		Limits: func(*rivertype.JobRow) []ratelimit.Request { return []ratelimit.Request{m.request()} },
	})
	m.one = newOne(t, b, m.Middleware)
	return m
}

func (m *moded) request() ratelimit.Request { return m.limit.For("").In(m.mode) }

// exhaust takes what there is, from gates too.
func (m *moded) exhaust() {
	m.t.Helper()
	for _, r := range m.Rows(m.limit.For("")) {
		for range 2 {
			if _, err := m.store.Reserve(m.t.Context(), r); err != nil {
				m.t.Fatal(err)
			}
		}
	}
}

// insert inserts a job that reserves what m asks for, in the mode of now.
func (m *moded) insert() (job *rivertype.JobRow) {
	m.t.Helper()
	m.inTx(m.t, func(tx pgx.Tx) error {
		inserted, err := m.inserter(m.t).InsertTx(m.t.Context(), tx, callArgs{}, nil, m.request())
		if err == nil {
			job = inserted.Job
		}
		return err
	})
	return job
}

// A mode reaches jobs at both doors, by every kind of limit, with HardStart and without. A job
// that waits when its limit is switched off does not start, uses up no attempt, keeps its
// reservation, and starts when the limit is on again. One whose limit is in shadow starts at
// once, also if it was inserted to wait.
func TestModesOfJobs(t *testing.T) {
	b := newBench(t)
	for _, door := range []string{"at execution", "at insertion"} {
		for _, hard := range []bool{false, true} {
			for _, limit := range oneAnHour(fmt.Sprintf("%s hard %t", door, hard)) {
				d := limit.Definition()
				for _, mode := range []ratelimit.Mode{ratelimit.ModeRefuse, ratelimit.ModeShadow} {
					d.Name = fmt.Sprintf("%s, %s, %s", limit.Definition().Name, d.Kind, mode)
					t.Run(d.Name, func(t *testing.T) {
						m := newModed(t, b, d.Limit(), hard)
						if mode == ratelimit.ModeShadow {
							m.startsInShadow(door == "at insertion")
						} else {
							m.waitsWhileRefused(door == "at insertion")
						}
					})
				}
			}
		}
	}
}

func (m *moded) startsInShadow(inserted bool) {
	m.t.Helper()
	m.exhaust()
	var jobs []*rivertype.JobRow // nil for a new one
	if inserted {
		jobs = append(jobs, m.insert())
		m.mode = ratelimit.ModeShadow
		if jobs = append(jobs, m.insert()); jobs[1].State != rivertype.JobStateAvailable {
			m.t.Errorf("a job that was inserted in shadow is %s", jobs[1].State)
		}
	} else {
		jobs = make([]*rivertype.JobRow, 2)
	}
	m.mode = ratelimit.ModeShadow
	for n, job := range jobs {
		m.work(job, river.EventKindJobCompleted, n+1)
	}
}

func (m *moded) waitsWhileRefused(inserted bool) {
	m.t.Helper()
	var job *rivertype.JobRow
	if inserted {
		job = m.insert()
	}
	rows := fmt.Sprintf("SELECT count(*) FROM rate_limits WHERE name LIKE '%s%%'", m.limit.Definition().Name)
	before := m.count(m.t, rows)
	m.mode = ratelimit.ModeRefuse
	for range 2 {
		job = m.work(job, river.EventKindJobSnoozed, 0)
		wantWait(m.t, job, ratelimit.RefusedFor, 20*time.Second)
		m.want(m.t, before, rows)
	}
	m.mode = ratelimit.ModeEnforce
	m.work(job, river.EventKindJobCompleted, 1)
}

// A job that was inserted in shadow starts by the limit once that is enforced: it has no slot.
func TestInsertedInShadow(t *testing.T) {
	m := newModed(t, newBench(t), oneAnHour("sliding")[2], true)
	m.exhaust()
	m.mode = ratelimit.ModeShadow
	job := m.insert()
	m.mode = ratelimit.ModeEnforce
	m.work(job, river.EventKindJobSnoozed, 0)
}

// Jobs of one call are alike only if they are in the same mode.
func TestInsertManyInModes(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	limit := oneAnHour("mixed")[0]
	b.inTx(t, func(tx pgx.Tx) error {
		var params []riverlimit.InsertManyParams
		for _, mode := range []ratelimit.Mode{ratelimit.ModeShadow, ratelimit.ModeShadow, ratelimit.ModeEnforce} {
			params = append(params, riverlimit.InsertManyParams{Args: callArgs{}, Requests: []ratelimit.Request{limit.For("").In(mode)}})
		}
		jobs, err := in.InsertManyTx(t.Context(), tx, params)
		for i, want := range []time.Duration{0, 0, 2 * time.Hour} {
			if err == nil && jobs[i].Reservation.RetryAfter.Round(time.Minute) != want {
				t.Errorf("job %d waits for %v, want %v", i, jobs[i].Reservation.RetryAfter, want)
			}
		}
		return err
	})
}

// A job that waits in the worker when its limit is switched off does not start.
func TestRefusedWhileItWaits(t *testing.T) {
	b := newBench(t)
	limits := newCatalog(t)
	must(t, limits.Publish(t.Context(), hourly))
	asked := 0
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Catalog: limits, Limits: func(*rivertype.JobRow) []ratelimit.Request {
		if asked++; asked == 2 { // it has waited
			if _, err := limits.Set(t.Context(), "hourly", catalog.AllKeys, catalog.Override{Mode: ratelimit.ModeRefuse}); err != nil {
				t.Error(err)
			}
		}
		return []ratelimit.Request{hourly.For("")}
	}})
	newOne(t, b, m).work(nil, river.EventKindJobSnoozed, 0)
}
