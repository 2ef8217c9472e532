package riverlimit_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

const (
	killSchema = "RIVERLIMIT_TEST_KILL_SCHEMA" // set in the worker processes
	killURL    = "RIVERLIMIT_TEST_KILL_URL"
	killParked = "RIVERLIMIT_TEST_KILL_PARKED" // set if they limit how many at once
	killJobs   = 60

	// killRescue is when River takes a running job to be stuck: beyond what a
	// job waits in the worker and runs, or it is rescued from the living.
	killRescue = 2 * time.Second
)

var killLimit = ratelimit.TokenBucket{Name: "calls", Rate: perSecond, Period: time.Second, Capacity: 1}

func killInFlight(*rivertype.JobRow) ratelimit.PermitRequest {
	return ratelimit.InFlight{Name: "killed", Limit: 3, Lease: killRescue}.For("")
}

// soon retries at once: River's own policy waits a second.
type soon struct{}

func (soon) NextRetry(*rivertype.JobRow) time.Time { return time.Now() }

// TestKillWorkerProcess is the process that TestKill kills; as a test of its
// own it has nothing to do. It works until it is killed or stdin ends.
func TestKillWorkerProcess(t *testing.T) {
	schema := os.Getenv(killSchema)
	if schema == "" {
		return
	}
	config, err := pgxpool.ParseConfig(os.Getenv(killURL))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 20
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	limits := riverlimit.MiddlewareConfig{Limits: each(killLimit), HardStart: true, MaxWait: killRescue / 4}
	if os.Getenv(killParked) != "" {
		limits = riverlimit.MiddlewareConfig{InFlight: killInFlight}
	}
	m := middleware(t, newStore(t, pool, schema), limits)
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(ctx context.Context, job *river.Job[callArgs]) error {
		began := time.Now()
		_, err := pool.Exec(ctx, fmt.Sprintf("INSERT INTO %s.starts (job, at, pid) VALUES ($1, $2, $3)", schema), job.ID, began, os.Getpid())
		if err != nil {
			return err
		}
		// So that there are jobs in the middle whenever the process is killed.
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
		}
		return ctx.Err()
	}))
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		FetchPollInterval:    200 * time.Millisecond,
		JobTimeout:           time.Second,
		Logger:               quiet,
		Middleware:           []rivertype.Middleware{m},
		Queues:               map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 50}},
		RescueStuckJobsAfter: killRescue,
		RetryPolicy:          soon{},
		Schema:               schema,
		Workers:              workers,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	_, _ = os.Stdin.Read(make([]byte, 1)) // the end of the test that started us
}

// workerProcess starts a process that works on b's jobs.
func (b *bench) workerProcess(t *testing.T, env ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestKillWorkerProcess$", "-test.count=1")
	cmd.Env = append(append(os.Environ(), killSchema+"="+b.Schema, killURL+"="+b.URL), env...)
	cmd.Stderr = os.Stderr
	if _, err := cmd.StdinPipe(); err != nil { // held open as long as we live
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(cmd) })
	return cmd
}

// kill is SIGKILL: nothing is cleaned up.
func kill(cmd *exec.Cmd) {
	if cmd.ProcessState == nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// A worker process is killed with jobs in all stages: running, waiting in the
// worker, snoozed and not yet fetched. Another takes over.
func TestKill(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	b := newBench(t)
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), fmt.Sprintf("CREATE TABLE %s.starts (job bigint, at timestamptz, pid int)", b.Schema))
		return err
	})
	// Half of them have reservations from the start, half get theirs when they
	// are worked.
	params := make([]riverlimit.InsertManyParams, killJobs)
	for i := range params {
		params[i].Args = callArgs{i}
		if i%2 == 0 {
			params[i].Requests = []ratelimit.Request{killLimit.For("")}
		}
	}
	in := b.inserter(t)
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := in.InsertManyTx(t.Context(), tx, params)
		return err
	})

	stalled := measureStalls()
	victim := b.workerProcess(t)
	for end := time.Now().Add(patience); b.count(t, `SELECT count(*) FROM starts`) < killJobs/4; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the first process does not work")
		}
	}
	kill(victim)
	left := b.count(t, `SELECT count(*) FROM river_job WHERE state <> 'completed'`)
	stuck := b.count(t, `SELECT count(*) FROM river_job WHERE state = 'running'`)
	killed := b.count(t, `SELECT count(*) FROM starts`)
	if stuck == 0 {
		t.Error("the kill hit no running job")
	}
	// What the victim was at is stuck after two seconds, and its successor looks
	// for that when it becomes the leader. The lease of the dead one has 15
	// seconds to go: this is both of them running out.
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), fmt.Sprintf(`UPDATE %[1]s.river_job SET attempted_at = attempted_at - interval '2.5 s' WHERE state = 'running';
			DELETE FROM %[1]s.river_leader`, b.Schema))
		return err
	})

	b.workerProcess(t)
	b.eventually(t, killJobs, `SELECT count(*) FROM river_job WHERE state = 'completed'`)
	if got := b.count(t, `SELECT count(DISTINCT job) FROM starts`); got != killJobs {
		t.Errorf("%d jobs ran, want all %d", got, killJobs)
	}
	b.checkStarts(t, left, stuck, killed, time.Second-stalled())
}

// checkStarts holds the starts of all processes in any second, which is less for what the
// machine stood still, against the limit.
func (b *bench) checkStarts(t *testing.T, left, stuck, killed int, second time.Duration) {
	t.Helper()
	var at []time.Time
	b.query(t, `SELECT array_agg(at ORDER BY at) FROM starts`, &at)
	most := mostIn(sinceFirst(at), second)
	t.Logf("%d jobs: killed after %d starts, with %d jobs left and %d of them in the dead process; "+
		"in the end %d starts in %d processes, every job at least once; most starts in any %v %d (bound %d)",
		killJobs, killed, left, stuck, len(at), b.count(t, `SELECT count(DISTINCT pid) FROM starts`), second.Round(time.Millisecond), most, perSecond)
	if most > perSecond {
		t.Errorf("%d starts in a second, want at most %d", most, perSecond)
	}
}

// All of three processes are killed while jobs are parked. Another one works on within a lease, as the first
// in line comes by itself: no job is lost, none runs twice but those that were killed, and never more
// than the limit at a time.
func TestKillParked(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	b := newBench(t)
	stalled := measureStalls()
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), fmt.Sprintf("CREATE TABLE %s.starts (job int8, at timestamptz, pid int4)", b.Schema))
		return err
	})
	const jobs = 40
	in := b.inserter(t)
	in.InFlight = killInFlight
	params := make([]riverlimit.InsertManyParams, jobs)
	for i := range params {
		params[i].Args = callArgs{i}
	}
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := in.InsertManyTx(t.Context(), tx, params)
		return err
	})
	var victims []*exec.Cmd
	for range 3 {
		victims = append(victims, b.workerProcess(t, killParked+"=yes"))
	}
	b.eventually(t, 1, `SELECT (count(*) >= 9)::int FROM starts`)
	for _, v := range victims {
		kill(v)
	}
	stuck, parked := b.count(t, `SELECT count(*) FROM river_job WHERE state = 'running'`), b.count(t, parkedRows)
	if stuck == 0 || parked == 0 {
		t.Errorf("the kill hit %d running jobs, %d are parked", stuck, parked)
	}
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), fmt.Sprintf(`UPDATE %[1]s.river_job SET attempted_at = attempted_at - interval '2.5 s' WHERE state = 'running';
			DELETE FROM %[1]s.river_leader`, b.Schema))
		return err
	})
	b.workerProcess(t, killParked+"=yes")
	b.eventually(t, jobs, `SELECT count(*) FROM river_job WHERE state = 'completed'`)
	b.eventually(t, 0, parkedRows)
	twice := b.count(t, `SELECT count(*) FROM (SELECT FROM starts GROUP BY job HAVING count(*) > 1) AS t`)
	var at []time.Time
	b.query(t, `SELECT array_agg(at ORDER BY at) FROM starts`, &at)
	least := 200*time.Millisecond - stalled() // that each job takes
	if most := mostIn(sinceFirst(at), max(least, time.Millisecond)); most > 3 || twice > stuck {
		t.Errorf("%d jobs at a time, %d ran twice, of %d that were killed", most, twice, stuck)
	}
}
