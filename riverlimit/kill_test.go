package riverlimit_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

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
	must(t, err)
	config.MaxConns = 20
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
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
	must(t, err)
	must(t, client.Start(context.Background()))
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
	must(t, cmd.Start())
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

// killed has processes work until jobs have started so many times, kills them, and has another one work until
// all are completed. It returns the starts, how many jobs the dead processes worked on, and for how long at most
// the machine stood still.
func (b *bench) killed(t *testing.T, processes, starts, jobs int, env ...string) (at []time.Time, stuck int, stall time.Duration) {
	t.Helper()
	stalled := measureStalls()
	b.exec(t, "CREATE TABLE starts (job int8, at timestamptz, pid int4)")
	var victims []*exec.Cmd
	for range processes {
		victims = append(victims, b.workerProcess(t, env...))
	}
	b.eventually(t, 1, fmt.Sprintf(`SELECT (count(*) >= %d)::int FROM starts`, starts))
	for _, v := range victims {
		kill(v)
	}
	stuck = b.count(t, running)
	if stuck == 0 || len(env) > 0 && b.count(t, parkedRows) == 0 {
		t.Errorf("the kill hit %d running jobs", stuck)
	}
	// What the victims were at is stuck after two seconds, and their successor looks for that when it becomes
	// the leader. The lease of the dead one has 15 seconds to go: this is both of them running out.
	b.exec(t, "UPDATE river_job SET attempted_at = attempted_at - interval '2.5 s' WHERE state = 'running'; DELETE FROM river_leader")
	b.workerProcess(t, env...)
	b.eventually(t, jobs, completed)
	b.eventually(t, 0, parkedRows)
	b.want(t, jobs, `SELECT count(DISTINCT job) FROM starts`)
	b.query(t, `SELECT array_agg(at ORDER BY at) FROM starts`, &at)
	return at, stuck, stalled()
}

// A worker process is killed with jobs in all stages: running, waiting in the worker, snoozed and not yet
// fetched. Half of them have reservations from the start. Another process takes over.
func TestKill(t *testing.T) {
	pgtest.Long(t)
	b := newBench(t)
	b.insert(t, b.inserter(t), append(numbered(killJobs/2, killLimit.For("")), numbered(killJobs/2)...))
	at, _, stall := b.killed(t, 1, killJobs/4, killJobs)
	if most := mostIn(sinceFirst(at), time.Second-stall); most > perSecond {
		t.Errorf("%d starts in a second, want at most %d", most, perSecond)
	}
}

// All of three processes are killed while jobs are parked. Another one works on within a lease, as the first
// in line comes by itself: no job is lost, none runs twice but those that were killed, and never more
// than the limit at a time.
func TestKillParked(t *testing.T) {
	pgtest.Long(t)
	b := newBench(t)
	in := b.inserter(t)
	in.InFlight = killInFlight
	b.insert(t, in, numbered(40))
	at, stuck, stall := b.killed(t, 3, 9, 40, killParked+"=yes")
	twice := b.count(t, `SELECT count(*) FROM (SELECT FROM starts GROUP BY job HAVING count(*) > 1) AS t`)
	least := 200*time.Millisecond - stall // that each job takes
	if most := mostIn(sinceFirst(at), max(least, time.Millisecond)); most > 3 || twice > stuck {
		t.Errorf("%d jobs at a time, %d ran twice, of %d that were killed", most, twice, stuck)
	}
}
