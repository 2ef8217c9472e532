package riverlimit_test

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertest"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// hourly is a limit whose debts do not go away while a test runs.
var hourly = ratelimit.TokenBucket{Name: "hourly", Rate: 1, Period: time.Hour, Capacity: 2}

// bounded is hourly with room for one reservation ahead.
var bounded = ratelimit.TokenBucket{Name: "bounded", Rate: 1, Period: time.Hour, Capacity: 2, MaxReserved: 1}

const (
	countJobs   = `SELECT count(*) FROM river_job`
	countLimits = `SELECT count(*) FROM rate_limits`
)

func TestInsertTx(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	for i, wantWait := range []time.Duration{0, 0, time.Hour, 2 * time.Hour} {
		b.inTx(t, func(tx pgx.Tx) error {
			got, err := in.InsertTx(t.Context(), tx, callArgs{i}, nil, hourly.For("k"))
			if err != nil {
				return err
			}
			if off := got.Reservation.RetryAfter - wantWait; off.Abs() > time.Minute {
				t.Errorf("job %d: wait %v, want %v", i, got.Reservation.RetryAfter, wantWait)
			}
			wantState := rivertype.JobStateAvailable
			if wantWait > 0 {
				wantState = rivertype.JobStateScheduled
				if !got.Job.ScheduledAt.Equal(got.Reservation.RetryAt) {
					t.Errorf("job %d is scheduled at %v, want %v", i, got.Job.ScheduledAt, got.Reservation.RetryAt)
				}
			}
			if got.Job.State != wantState {
				t.Errorf("job %d is %s, want %s", i, got.Job.State, wantState)
			}
			n := noted(t, got.Job)
			if n.Attempt != 1 || n.Started || !n.At.Equal(got.Reservation.RetryAt) || len(n.Paid) != 1 || n.Paid[0].Name != "hourly" || n.Paid[0].Key != "k" {
				t.Errorf("job %d: note %+v", i, n)
			}
			// River's own helper sees the job in the transaction.
			rivertest.RequireInsertedTx[*riverpgxv5.Driver](t.Context(), t, tx, callArgs{}, &rivertest.RequireInsertedOpts{
				Schema: b.Schema, State: wantState,
			})
			_, err = tx.Exec(t.Context(), "UPDATE "+b.Schema+".river_job SET kind = 'seen'") // the helper wants just one
			return err
		})
	}
}

func TestInsertTxRollback(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	tx := b.begin(t)
	for i := range 5 {
		must(t, errOf(in.InsertTx(t.Context(), tx, callArgs{i}, nil, hourly.For(""))))
	}
	must(t, tx.Rollback(t.Context()))
	b.want(t, 0, countJobs)
	b.want(t, 0, countLimits)
}

// InsertTx and its like in a transaction that goes on and commits: each fails,
// and leaves nothing behind.
func TestInsertFailures(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	type insert func(context.Context, riverlimit.Inserter, pgx.Tx) error
	many := func(params ...riverlimit.InsertManyParams) insert {
		return func(ctx context.Context, in riverlimit.Inserter, tx pgx.Tx) error {
			return errOf(in.InsertManyTx(ctx, tx, params))
		}
	}
	batch := func(params ...river.InsertManyParams) insert {
		return func(ctx context.Context, in riverlimit.Inserter, tx pgx.Tx) error {
			return errOf(in.InsertBatchTx(ctx, tx, params, hourly.For("")))
		}
	}
	with := func(opts river.InsertOpts) riverlimit.InsertManyParams {
		return riverlimit.InsertManyParams{Args: callArgs{}, InsertOpts: &opts, Requests: []ratelimit.Request{hourly.For("")}}
	}
	never, badQueue := numbered(1, bounded.ForN("", 4))[0], with(river.InsertOpts{Queue: "no such name!"})
	for _, test := range []struct {
		name   string
		insert insert
		want   error // by errors.Is, if it is one of ours
	}{
		{"refused, the fourth of many", many(numbered(6, bounded.For(""))...), ratelimit.ErrRefused},
		{"never", many(never), ratelimit.ErrExceedsCapacity},
		{"never, the last of many", many(append(numbered(3, hourly.For("")), never)...), ratelimit.ErrExceedsCapacity},
		{"River does not like the queue", many(badQueue), nil},
		{"River does not like one queue of many", many(append(numbered(2, hourly.For("")), badQueue)...), nil},
		{"metadata is not an object", many(with(river.InsertOpts{Metadata: []byte("[1]")})), nil},
		{"batch: metadata is not an object", batch(river.InsertManyParams{Args: callArgs{}, InsertOpts: &river.InsertOpts{Metadata: []byte("1")}}), nil},
		{"batch: nothing to insert", batch(), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t)
			in := b.inserter(t)
			b.inTx(t, func(tx pgx.Tx) error {
				err := test.insert(t.Context(), in, tx)
				if err == nil {
					t.Error("no error")
				}
				if test.want != nil && !errors.Is(err, test.want) {
					t.Errorf("got %v, want %v", err, test.want)
				}
				if refused, ok := errors.AsType[*ratelimit.RefusedError](err); ok && (refused.Result.RetryAfter-3*time.Hour).Abs() > time.Minute {
					t.Errorf("got %v, want a refusal with an hour to wait for each of three", err)
				}
				return nil
			})
			b.want(t, 0, countJobs)
			b.want(t, 0, `SELECT count(*) FROM rate_limits WHERE value < 2`)
		})
	}
}

func TestInsertDuplicates(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	unique := &river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}
	b.inTx(t, func(tx pgx.Tx) error {
		for i := range 3 {
			got, err := in.InsertTx(t.Context(), tx, callArgs{1}, unique, hourly.For(""))
			if err != nil {
				return err
			}
			if got.UniqueSkippedAsDuplicate != (i > 0) {
				t.Errorf("insert %d: skipped is %v", i, got.UniqueSkippedAsDuplicate)
			}
		}
		one := []ratelimit.Request{hourly.For("")}
		_, err := in.InsertManyTx(t.Context(), tx, []riverlimit.InsertManyParams{
			{callArgs{1}, unique, one}, {callArgs{2}, unique, one}, {callArgs{3}, unique, nil},
		})
		if err != nil {
			return err
		}
		_, err = in.InsertBatchTx(t.Context(), tx, []river.InsertManyParams{
			{Args: callArgs{1}, InsertOpts: unique}, {Args: callArgs{2}, InsertOpts: unique},
		}, hourly.ForN("", 50))
		return err
	})
	// Two jobs have paid of two tokens.
	if got := b.value(t, "hourly"); got < -0.001 || got > 0.1 {
		t.Errorf("%v tokens left, want 0", got)
	}
}

func TestInsertBatchTx(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	b.inTx(t, func(tx pgx.Tx) error {
		got, err := in.InsertBatchTx(t.Context(), tx, []river.InsertManyParams{
			{Args: callArgs{1}}, {Args: callArgs{2}}, {Args: callArgs{3}},
		}, hourly.ForN("", 5))
		if err != nil {
			return err
		}
		for i, g := range got {
			if !g.Job.ScheduledAt.Equal(got[0].Reservation.RetryAt) || (got[0].Reservation.RetryAfter-3*time.Hour).Abs() > time.Minute {
				t.Errorf("job %d: scheduled at %v, reserved after %v", i, g.Job.ScheduledAt, g.Reservation.RetryAfter)
			}
		}
		return nil
	})
	if got := b.value(t, "hourly"); got > -2.99 || got < -3 {
		t.Errorf("%v tokens, want -3", got)
	}
}

// What the caller asked of River stays.
func TestInsertOpts(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	tomorrow := time.Now().Add(24 * time.Hour).Truncate(time.Microsecond)
	opts := &river.InsertOpts{
		Metadata: []byte(`{"trace": {"id": 12345678901234567890}}`), ScheduledAt: tomorrow, Tags: []string{"tag"},
	}
	b.inTx(t, func(tx pgx.Tx) error {
		got, err := in.InsertTx(t.Context(), tx, callArgs{}, opts, hourly.ForN("", 3))
		if err != nil {
			return err
		}
		if !got.Job.ScheduledAt.Equal(tomorrow) || !slices.Equal(got.Job.Tags, []string{"tag"}) {
			t.Errorf("got %v and %v", got.Job.ScheduledAt, got.Job.Tags)
		}
		var metadata struct{ Trace struct{ ID json.Number } }
		if err := json.Unmarshal(got.Job.Metadata, &metadata); err != nil || metadata.Trace.ID != "12345678901234567890" {
			t.Errorf("metadata %s: %v", got.Job.Metadata, err)
		}
		plain, err := in.InsertTx(t.Context(), tx, callArgs{}, nil)
		if err == nil && (plain.Job.State != rivertype.JobStateAvailable || string(plain.Job.Metadata) != "{}") {
			t.Errorf("a job without limits: %s, metadata %s", plain.Job.State, plain.Job.Metadata)
		}
		return err
	})
	if string(opts.Metadata) != `{"trace": {"id": 12345678901234567890}}` || !opts.ScheduledAt.Equal(tomorrow) {
		t.Error("the caller's options were changed")
	}
}

func TestInsertJitter(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	in.Jitter = 10 * time.Minute
	different := map[time.Duration]bool{}
	b.inTx(t, func(tx pgx.Tx) error {
		for i := range 10 {
			got, err := in.InsertTx(t.Context(), tx, callArgs{i}, nil, hourly.For(""))
			if err != nil {
				return err
			}
			shift := got.Job.ScheduledAt.Sub(got.Reservation.RetryAt)
			if i < 2 { // due at once
				if got.Job.State != rivertype.JobStateAvailable {
					t.Errorf("job %d is %s", i, got.Job.State)
				}
				continue
			}
			if shift < 0 || shift > in.Jitter {
				t.Errorf("job %d: shifted by %v", i, shift)
			}
			if !noted(t, got.Job).At.Equal(got.Job.ScheduledAt) {
				t.Errorf("job %d: noted for %v, scheduled at %v", i, noted(t, got.Job).At, got.Job.ScheduledAt)
			}
			different[shift] = true
		}
		return nil
	})
	if len(different) < 2 {
		t.Error("all shifted alike")
	}
}

// Transactions that insert jobs with the same limits in opposite orders wait for
// each other, and never in a circle.
func TestInsertManyNeverDeadlocks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	free := func(name string) ratelimit.TokenBucket {
		return ratelimit.TokenBucket{Name: name, Rate: 1_000_000, Period: time.Second}
	}
	a, b, c := free("a"), free("b"), free("c")
	b.Shards = 2
	type jobs [][]ratelimit.Request
	for _, test := range []struct {
		name   string
		half   jobs // of the inserters insert these
		others jobs
	}{
		{"one limit each", jobs{{a.For("1")}, {a.For("2")}, {b.For("")}, nil, {c.For("")}}, jobs{{c.For("")}, nil, {b.For("")}, {a.For("2")}, {a.For("1")}}},
		{"several each", jobs{{a.For("1"), c.For("")}, {a.For("2"), b.For("")}}, jobs{{b.For(""), a.For("2")}, {c.For(""), a.For("1")}}},
		{"several each, whose rows overlap", jobs{{a.For("1"), c.For("")}, {a.For("3"), c.For("")}}, jobs{{a.For("3"), c.For("")}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			const rounds, inserters = 15, 8
			bench := newBench(t)
			in := bench.inserter(t)
			params := [][]riverlimit.InsertManyParams{paramsOf(test.half), paramsOf(test.others)}
			var deadlocks atomic.Int64
			var wg sync.WaitGroup
			for i := range inserters {
				wg.Go(func() {
					for range rounds {
						err := pgx.BeginFunc(t.Context(), bench.Pool, func(tx pgx.Tx) error {
							_, err := in.InsertManyTx(t.Context(), tx, params[i%2])
							return err
						})
						var pgErr *pgconn.PgError
						if errors.As(err, &pgErr) && pgErr.Code == "40P01" {
							deadlocks.Add(1)
						} else if err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			if got := deadlocks.Load(); got != 0 {
				t.Errorf("%d of %d transactions deadlocked, want none", got, rounds*inserters)
			}
		})
	}
}

// Of jobs that share their limits, the first are due first, whatever else they are
// inserted with.
func TestInsertManyOrder(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	other := hourly
	other.Name = "another"
	for _, test := range []struct {
		name string
		jobs [][]ratelimit.Request
		want []int // hours until each is due
	}{
		{"one limit each", [][]ratelimit.Request{{hourly.ForN("", 2)}, nil, {other.ForN("", 3)}, {hourly.For("")}, {hourly.For("")}, {other.For("")}}, []int{0, 0, 1, 1, 2, 2}},
		{"several each", [][]ratelimit.Request{{hourly.ForN("", 2)}, {hourly.For(""), other.For("")}, {other.ForN("", 2)}, {other.For(""), hourly.For("")}}, []int{0, 1, 1, 2}},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t)
			b.inTx(t, func(tx pgx.Tx) error {
				inserted, err := b.inserter(t).InsertManyTx(t.Context(), tx, paramsOf(test.jobs))
				for i, job := range inserted {
					var args callArgs
					if err := json.Unmarshal(job.Job.EncodedArgs, &args); err != nil || args.N != i {
						t.Errorf("job %d: got that with arguments %s", i, job.Job.EncodedArgs)
					}
					if got, want := job.Reservation.RetryAfter, time.Duration(test.want[i])*time.Hour; (got - want).Abs() > time.Minute {
						t.Errorf("job %d is due in %v, want %v", i, got, want)
					}
				}
				return err
			})
		})
	}
}

func TestInserterInvalid(t *testing.T) {
	b := newBench(t)
	whole := b.inserter(t)
	for _, test := range []struct {
		field string
		in    riverlimit.Inserter
	}{
		{"Client", riverlimit.Inserter{Store: whole.Store}},
		{"Store", riverlimit.Inserter{Client: whole.Client}},
	} {
		b.inTx(t, func(tx pgx.Tx) error {
			_, one := test.in.InsertTx(t.Context(), tx, callArgs{}, nil, hourly.For(""))
			_, batch := test.in.InsertBatchTx(t.Context(), tx, []river.InsertManyParams{{Args: callArgs{}}}, hourly.For(""))
			for _, err := range []error{one, batch} {
				if !errors.Is(err, ratelimit.ErrInvalid) || !strings.HasPrefix(err.Error(), "riverlimit: "+test.field) {
					t.Errorf("got %v, want an error about %s", err, test.field)
				}
			}
			return nil
		})
	}
}
