// Package edit changes rows other than by taking from them: resets, credits, pauses, settlements,
// other definitions, and pruning.
package edit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/known"
	"github.com/pgratelimit/ratelimit/pgstore/internal/memory"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
	"github.com/pgratelimit/ratelimit/pgstore/internal/tx"
)

// Editor edits rows. It is safe for concurrent use.
type Editor struct {
	*conn.Conn
	table  *table.Table
	known  *known.Known
	memory *memory.Memory // nil without Config.Escrow
	taker  *tx.Taker
}

// New returns an Editor; m may be nil.
func New(c *conn.Conn, t *table.Table, k *known.Known, m *memory.Memory, taker *tx.Taker) *Editor {
	return &Editor{Conn: c, table: t, known: k, memory: m, taker: taker}
}

// Edit is an edit of the limits and keys of a call, in a transaction.
type Edit = func(context.Context, pgx.Tx, *decide.Call) error

// Own makes an edit in a transaction of its own.
func (e *Editor) Own(ctx context.Context, call *decide.Call, do Edit) error {
	var rows []decide.Row
	for i := range call.Demands {
		rows = append(rows, call.Demands[i].Rows()...)
	}
	err := e.transact(ctx, rows, func(ctx context.Context, tx pgx.Tx) error { return do(ctx, tx, call) })
	for i := range call.Demands {
		e.known.Forget(call.Demands[i].KeyOf()) // again, now that others see it
	}
	return err
}

// transact runs do, which locks rows, in a transaction of its own. In it the rows learn how many of
// their tokens this process has spent from memory. In a caller's transaction they do not, since it
// may be rolled back unnoticed.
func (e *Editor) transact(ctx context.Context, rows []decide.Row, do func(context.Context, pgx.Tx) error) error {
	taken := make(map[decide.Key]bucket.Spent)
	return e.table.Run(context.WithValue(ctx, e, taken), e.Conn, rows, do, func() {
		for key, spent := range taken {
			e.memory.RestoreSpent(key, spent)
		}
		clear(taken)
	})
}

// spent returns the tokens spent from memory that the row of a key must learn of: once in a
// transaction, for all rows of the key. A sliding window's row learns of none, since a refund goes
// to its own slot, whatever tokens are out.
func (e *Editor) spent(ctx context.Context, d *bucket.Definition, key decide.Key) bucket.Spent {
	taken, own := ctx.Value(e).(map[decide.Key]bucket.Spent)
	if !own || e.memory == nil || d.Slotted() {
		return bucket.Spent{}
	}
	if _, done := taken[key]; done {
		return bucket.Spent{}
	}
	taken[key] = e.memory.TakeSpent(key)
	return taken[key]
}

// Reset deletes the rows of an edit's limit and key. A row with tokens in the memories of processes
// stays, and is filled less those tokens.
func (e *Editor) Reset(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
	a := &call.Demands[0]
	left, err := e.table.Reset(ctx, tx, a.KeyOf())
	if err == nil && len(left) > 0 {
		err = e.refillAll(ctx, tx, a, left)
	}
	if err != nil {
		return e.FaultOf("reset", call.Names(), err)
	}
	e.known.Forget(a.KeyOf())
	e.memory.Evict(a.KeyOf())
	return nil
}

// refillAll fills the rows of some shards of a demand, less their tokens that are out. It deletes a
// row if no lease of it counts any more.
func (e *Editor) refillAll(ctx context.Context, tx pgx.Tx, a *decide.Demand, shards []int32) error {
	changes := make([]decide.Change, len(shards))
	for i, shard := range shards {
		changes[i] = a.Change(0, int(shard), 0)
	}
	given, _, err := e.taker.Touch(ctx, tx, &pgx.Batch{}, changes)
	if err != nil {
		return err
	}
	var batch pgx.Batch
	share := a.Definition.Shard()
	for i := range given {
		g := &given[i].Taken
		if share.Forgets(g.Out, g.At) {
			e.table.QueueRemove(&batch, changes[i].Row)
			continue
		}
		e.table.QueuePut(&batch, changes[i].Row, share.Full(a.Key, g.After, g.Out, g.At))
	}
	return tx.SendBatch(ctx, &batch).Close()
}

// Credit returns the edit that gives r's count back and sets status.
func (e *Editor) Credit(r ratelimit.Request, status *ratelimit.Status) Edit {
	return func(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
		a := &call.Demands[0]
		states, at, err := e.credit(ctx, tx, a, r.Count)
		if err != nil {
			return e.FaultOf("credit", call.Names(), err)
		}
		e.known.Forget(a.KeyOf())
		e.known.Shards.Observe(a, states)
		*status = decide.Credited(r, states, at)
		return nil
	}
}

// credit gives n tokens back to the rows of a demand, and returns their states afterwards. For
// shards that it does not lock it returns cached states.
func (e *Editor) credit(ctx context.Context, tx pgx.Tx, a *decide.Demand, n float64) (states []bucket.State, at time.Time, err error) {
	shard, counts := 0, []float64{n}
	if !a.Sharded() {
		states = make([]bucket.State, 1)
	} else if held, ok := e.taker.HeldBy(tx, a); ok {
		shard, states = held, e.known.Shards.Cached(a, time.Time{})
	} else {
		var rows []locked
		if rows, at, err = e.lockEach(ctx, tx, a); err != nil {
			return nil, at, err
		}
		states = rows[0].states
		counts = a.Fill(states, n, at)
	}
	given, err := e.give(ctx, tx, a, shard, counts)
	for i := range given {
		states[shard+i], at = given[i].Taken.After, given[i].Taken.At.UTC()
	}
	return states, at, err
}

// give gives counts to shards of a demand, beginning with shard, and returns their rows afterwards.
// A sliding window gets its tokens in a second round trip, with the row locked.
func (e *Editor) give(ctx context.Context, tx pgx.Tx, a *decide.Demand, shard int, counts []float64) ([]table.Give, error) {
	var batch pgx.Batch
	changes, gives := make([]decide.Change, len(counts)), make([]table.Give, len(counts))
	for i, n := range counts {
		c := &changes[i]
		*c = a.Change(0, shard+i, 0)
		gives[i] = table.Give{Change: c, Tokens: n, Most: c.Definition.Capacity, Spent: e.spent(ctx, &c.Definition, c.Key)}
	}
	if _, err := e.table.Give(ctx, tx, &pgx.Batch{}, gives, e.Clock()); err != nil {
		return nil, err
	}
	for i, n := range counts {
		if g := &gives[i]; !g.Given && !g.Taken.Made {
			g.Taken.After = g.Definition.CreditBeside(g.Taken.After, g.Taken.Out, g.Taken.At, n)
			e.table.QueuePut(&batch, g.Row, g.Taken.After)
		}
	}
	if batch.Len() == 0 {
		return gives, nil
	}
	return gives, tx.SendBatch(ctx, &batch).Close()
}

// locked holds the locked rows of a demand.
type locked struct {
	states []bucket.State
	outs   []bucket.Out // their tokens that are out
	made   bool         // none was there, so that all have been made
}

// lockEach locks all rows of demands, in order.
func (e *Editor) lockEach(ctx context.Context, q table.Querier, demands ...*decide.Demand) ([]locked, time.Time, error) {
	var changes []decide.Change
	for _, a := range demands {
		for shard := range a.Definition.Shards {
			changes = append(changes, a.Change(0, shard, 0))
		}
	}
	given, at, err := e.taker.Touch(ctx, q, &pgx.Batch{}, changes)
	if err != nil {
		return nil, at, err
	}
	all := make([]locked, len(demands))
	for i, a := range demands {
		l := &all[i]
		l.made = true
		for _, g := range given[:a.Definition.Shards] {
			l.states, l.outs = append(l.states, g.Taken.After), append(l.outs, g.Taken.Out)
			l.made = l.made && g.Taken.Made
		}
		given = given[a.Definition.Shards:]
	}
	return all, at, nil
}

// Pause returns the edit that pauses, and sets until to the latest end.
func (e *Editor) Pause(lasts time.Duration, until *time.Time) Edit {
	return func(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
		*until = time.Time{}
		for i := range call.Demands {
			a := &call.Demands[i]
			err := e.rewrite(ctx, tx, a, func(share *bucket.Definition, state bucket.State, _ bucket.Out, at time.Time) bucket.State {
				after := share.Pause(state, at, at.Add(lasts))
				if after.Paused.After(*until) {
					*until = after.Paused
				}
				return after
			})
			e.memory.Evict(a.KeyOf()) // while the row is locked, so that nothing is prefetched before the pause is seen
			if err != nil {
				return err
			}
		}
		return nil
	}
}

// Resume ends the pause of an edit's limit and key.
func (e *Editor) Resume(ctx context.Context, tx pgx.Tx, call *decide.Call) error {
	a := &call.Demands[0]
	return e.rewrite(ctx, tx, a, func(share *bucket.Definition, state bucket.State, out bucket.Out, at time.Time) bucket.State {
		return share.ResumeBeside(a.Key, state, out, at)
	})
}

// rewrite changes all rows of a demand.
func (e *Editor) rewrite(ctx context.Context, tx pgx.Tx, a *decide.Demand, to func(*bucket.Definition, bucket.State, bucket.Out, time.Time) bucket.State) error {
	rows, at, err := e.lockEach(ctx, tx, a)
	if err != nil {
		return e.FaultOf("edit", []string{a.Definition.Name}, err)
	}
	var batch pgx.Batch
	states, outs := rows[0].states, rows[0].outs
	for shard, state := range states {
		states[shard] = to(a.Definition.Shard(), state, outs[shard], at)
		e.table.QueuePut(&batch, decide.Row{Key: a.KeyOf(), Shard: shard}, states[shard])
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return e.FaultOf("edit", []string{a.Definition.Name}, err)
	}
	e.known.Forget(a.KeyOf())
	e.known.Shards.Observe(a, states)
	return nil
}
