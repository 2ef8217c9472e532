package tx

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/keyqueue"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/memory"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Runner runs callers' functions in transactions. It is safe for concurrent use.
//
// Transactions of one process that take from the same row queue before they have a connection and
// begin. Otherwise they would queue in PostgreSQL for the row, which stays locked until COMMIT.
// Each would keep a connection while it waits, and then fail: under SERIALIZABLE the row has
// changed since its snapshot (40001). For a limit with several shards, as many transactions run at
// a time as there are shards, each on its own shard.
type Runner struct {
	*Taker
	memory     *memory.Memory             // nil without Config.Escrow
	queues     keyqueue.Queue[decide.Row] // Shard is here the number of shards, which differs while a new definition is rolled out
	contention table.Lately               // the rows at which this process has met others
}

// NewRunner returns a Runner; m may be nil.
func NewRunner(t *Taker, m *memory.Memory) *Runner { return &Runner{Taker: t, memory: m} }

// Waiting returns how many transactions wait for their turn before they begin.
func (r *Runner) Waiting() int { return r.queues.Waiting() }

// Func is a caller's function.
type Func = func(pgx.Tx, ratelimit.Result) error

// Run takes for requests and runs do in one transaction. It also returns a result whose transaction
// was rolled back.
func (r *Runner) Run(ctx context.Context, w *watch.Watch, reserve bool, requests []ratelimit.Request, do Func) (ratelimit.Result, error) {
	if call, ok := r.known.Definitions.Plain(decide.All, reserve, nil, requests); ok {
		u := run{Runner: r, watch: w, do: do, call: call}
		return u.run(ctx)
	}
	if decide.Moded(requests) {
		return r.runByMode(ctx, w, reserve, requests, do)
	}
	return r.runEnforced(ctx, w, reserve, requests, false, do)
}

// runByMode runs requests with modes. If a limit in ModeShadow refuses, it runs the others without
// it. The function has not run by then.
func (r *Runner) runByMode(ctx context.Context, w *watch.Watch, reserve bool, requests []ratelimit.Request, do Func) (ratelimit.Result, error) {
	m, err := decide.NewModes(decide.All, r.Instant(), requests)
	if err != nil {
		return ratelimit.Result{}, err
	}
	var reported ratelimit.Result
	result, err := m.Decide(func(left []ratelimit.Request) (ratelimit.Result, error) {
		result, err := r.runEnforced(ctx, w, reserve, left, len(left) == 0, func(tx pgx.Tx, result ratelimit.Result) error {
			reported = m.Report(result)
			return do(tx, reported)
		})
		if errors.Is(err, ratelimit.ErrRefused) && !result.OK && result.Request.Limit != nil { // the limits refused, and not the function
			err = nil
		}
		return result, err
	})
	switch {
	case result.OK: // perhaps rolled back
		return reported, err
	case err != nil:
		return result, err
	}
	reported = m.Report(result)
	return reported, reported.Err()
}

// runEnforced runs requests that are all enforced; with noTake there may be none, for a transaction
// that takes nothing.
func (r *Runner) runEnforced(ctx context.Context, w *watch.Watch, reserve bool, requests []ratelimit.Request, noTake bool, do Func) (ratelimit.Result, error) {
	u := run{Runner: r, watch: w, do: do}
	if !noTake {
		var err error
		if u.call, err = r.known.Definitions.Call(decide.All, reserve, nil, requests); err != nil {
			return ratelimit.Result{}, err
		}
	}
	return u.run(ctx)
}

// run is one run of a caller's function, in one or more attempts.
type run struct {
	*Runner
	watch *watch.Watch
	do    Func

	queued *Queued // the takes that travel with COMMIT; nil for a run that takes before the function
	level  pgx.TxIsoLevel

	call   decide.Call
	rows   *decide.Call  // the part of call that the transaction takes from rows
	claim  *memory.Claim // the tokens that memory gives; nil if there are none
	spent  bool          // the claimed tokens are used
	result ratelimit.Result
}

// run makes attempts.
func (u *run) run(ctx context.Context) (ratelimit.Result, error) {
	if u.Pool == nil {
		return ratelimit.Result{}, conn.ErrNoPool
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, u.RetryBudget)
		defer cancel()
	}
	if u.memory != nil {
		defer func() { // also when the function panics or ends its goroutine
			if u.claim != nil {
				u.claim.End(u.spent)
			}
		}()
	}
	u.rows = &u.call
	err := u.RetryCounted(ctx, func() { u.watch.Retries++ }, func() error { return u.attempt(ctx) })
	if err == nil && u.result.OK {
		receipt.Committed(u.result.Receipt)
		if u.memory != nil {
			for i := range u.rows.Demands { // again, now that other transactions see it
				u.known.Changed(u.rows.Demands[i].KeyOf())
			}
		}
	}
	return u.result, err
}

// attempt makes one attempt, once it is the transaction's turn at its rows.
func (u *run) attempt(ctx context.Context) (err error) {
	shards, leave, err := u.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	a := attempt{taker: u.Taker, contention: &u.contention, call: u.rows, shards: shards, lockAll: !u.rows.Plain && u.rows.OnLockedRows(), claim: u.claim, do: u.do, queued: u.queued, level: u.level}
	a.held = u.queued == nil && u.claim != nil && u.claim.All()
	done, w := false, u.watch
	defer func() { // also when the function panics or ends its goroutine
		if done = done || a.ended; !done {
			receipt.RolledBack(a.result.Receipt)
		}
		u.spent = u.spent || done
		if a.ended && w.Outcome == ratelimit.OutcomeRolledBack { // the function ended the transaction, perhaps by COMMIT
			w.Outcome = ratelimit.OutcomeUnknown
		}
	}()
	w.Outcome = ratelimit.OutcomeRolledBack // unless the function returns
	err = a.run(ctx)
	w.Outcome = a.outcome(err)
	if a.met && u.memory != nil {
		u.memory.NoteShared(u.rows)
	}
	u.result, done = a.result, err == nil || conn.Done(err)
	return err
}

// enter waits for the transaction's turn at its rows. With a memory it first claims the tokens that
// memory holds. If it claimed none, had to wait, and prefetching pays by then, it gives up the
// turn, claims once more, and waits again.
func (u *run) enter(ctx context.Context) (shards []int, leave func(), err error) {
	if u.queued != nil { // it has the row for one round trip only, so it waits in PostgreSQL
		return nil, func() {}, u.claimHeld(ctx)
	}
	if u.memory == nil {
		shards, leave, _, err = u.wait(ctx)
		return shards, leave, err
	}
	for again := true; ; again = false {
		if err := u.claimHeld(ctx); err != nil {
			return nil, nil, err
		}
		shards, leave, waited, err := u.wait(ctx)
		if err != nil || !again || !waited || u.claim != nil || !u.memory.WorthPrefetching(&u.call) {
			return shards, leave, err
		}
		leave()
	}
}

// claimHeld claims the tokens that memory holds for the call, once. A take with modes is left to
// the rows.
func (u *run) claimHeld(ctx context.Context) (err error) {
	if u.memory == nil || u.queued != nil && u.queued.modes != nil {
		return nil
	}
	if u.claim == nil {
		u.noteContention()
		if u.claim, u.result, err = u.memory.Claim(ctx, &u.call); err != nil || u.result.Request.Limit != nil {
			return cmp.Or(err, u.result.Err())
		}
	}
	if u.claim != nil {
		u.rows = &u.claim.Rest
	}
	return nil
}

// wait waits for the transaction's turn at its rows, and reports whether it had to wait.
func (u *run) wait(ctx context.Context) (shards []int, leave func(), waited bool, err error) {
	begun := time.Now()
	shards, leave, waited, err = u.queue(ctx, u.rows)
	if err != nil {
		return nil, nil, waited, u.Fault("wait", err)
	}
	if waited {
		u.watch.Queued += time.Since(begun)
	}
	return shards, leave, waited, nil
}

// noteContention tells memory that other transactions were lately at the rows of the call.
func (u *run) noteContention() {
	for i := range u.call.Demands {
		a := &u.call.Demands[i]
		locks := func() []int64 { return []int64{table.Lock(u.Schema, decide.Row{Key: a.KeyOf()})} }
		if len(u.contention.Among(locks)) > 0 {
			u.memory.Contended(a)
		}
	}
}

// queue waits until each of the call's limits has a place for the call. It reports whether it had
// to wait. All calls take places in one order, so no two wait for each other.
func (r *Runner) queue(ctx context.Context, call *decide.Call) (shards []int, leave func(), waited bool, err error) {
	keyOf := func(i int) decide.Row {
		return decide.Row{Key: call.Demands[i].KeyOf(), Shard: call.Demands[i].Definition.Shards}
	}
	leave = func() {
		for i, shard := range shards {
			r.queues.Leave(keyOf(i), shard)
		}
	}
	for i := range call.Demands {
		a := &call.Demands[i]
		atOnce := false
		shard, err := r.queues.Enter(ctx, keyOf(i), a.Definition.Shards, func(among []int) int {
			atOnce = true
			return r.known.Shards.Choose(a, among)
		})
		if !atOnce {
			if waited = true; r.memory != nil {
				r.memory.Contended(a)
			}
		}
		if err != nil {
			leave()
			return nil, nil, waited, err
		}
		shards = append(shards, shard)
	}
	return shards, leave, waited, nil
}
