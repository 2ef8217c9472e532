package engine

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// parts holds the parts of a distributed table, which Citus calls shards. Calls for rows of one part share
// statements. A key whose part has changed since it was asked for is decided all the same, only slower.
type parts struct {
	queues map[int64]*batch.Queue[*Pending]
	asking *batch.Queue[*Pending] // of calls for keys whose part is not known

	of    map[string]int64 // the parts of keys; nil if the table has none, or asking failed
	asked time.Time        // when of and queues were made

	underWay atomic.Int64 // the number of calls
	alone    int64        // up to this number, each goes to the queue of its row; half of the pool's connections
}

const (
	partsKnown = time.Minute // how long parts are remembered
	mostKnown  = 1 << 17     // the number of keys whose parts are remembered
	fewest     = 4           // the number of calls under way for each part above which they share statements
)

// decider returns the Decider of calls that wait for await.
func (e *Engine) decider(await *awaited) table.Decider {
	if await != nil && await.part {
		return e.table.Part()
	}
	return e.decides
}

// queueOnNode returns the queue of a call for one row of a distributed table: that of its part, if the call
// can share statements there, otherwise that of the row. A few calls have a connection each, and go faster
// alone. While calls wait for a row, it is not tried together with others. It needs mu.
func (e *Engine) queueOnNode(p *Pending, underWay int64) *batch.Queue[*Pending] {
	demand := &p.Call.Demands[0]
	row := decide.Row{Key: demand.KeyOf()}
	if !p.Call.Plain || p.Extra || !e.table.InParts(&demand.Definition) {
		return e.queueOf(row)
	}
	if q := e.rows[row]; q != nil && q.calls != nil && !q.calls.Idle() {
		return q.calls
	}
	if underWay <= max(e.parts.alone, fewest*int64(len(e.parts.queues))) {
		return e.queueOf(row)
	}
	if time.Since(e.parts.asked) > partsKnown {
		e.parts.asked, e.parts.of, e.parts.queues = time.Now(), make(map[string]int64), make(map[int64]*batch.Queue[*Pending])
	}
	if e.parts.of == nil {
		return e.queueOf(row)
	}
	if part, ok := e.parts.of[row.Key.Key]; ok {
		return e.queueOfPart(part)
	}
	if e.parts.asking == nil {
		e.parts.asking = e.newQueue(e.askParts)
	}
	return e.parts.asking
}

// queueOfPart returns the queue of a part, and makes it if it is missing. It needs mu.
func (e *Engine) queueOfPart(part int64) *batch.Queue[*Pending] {
	calls, ok := e.parts.queues[part]
	if !ok {
		q := new(queue)
		q.calls = e.newQueue(func(ctx context.Context, tickets []*Ticket) { e.serve(ctx, q, tickets, &awaited{part: true}) })
		calls = q.calls
		e.parts.queues[part] = calls
	}
	return calls
}

// askParts asks for the parts of calls' keys, and moves the calls to the queues of their parts. If
// the table has none, or asking failed, they move to the queues of their rows.
func (e *Engine) askParts(ctx context.Context, tickets []*Ticket) {
	keys := make([]string, len(tickets))
	for i, t := range tickets {
		keys[i] = t.Value.Call.Demands[0].Key
	}
	found, err := e.table.Parts(ctx, e.Pool, keys)
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case len(found) == len(keys):
		if e.parts.of == nil || len(e.parts.of)+len(keys) > mostKnown {
			e.parts.of = make(map[string]int64)
		}
	case err == nil || ctx.Err() == nil:
		e.parts.of, found = nil, nil
	}
	together := make(map[*batch.Queue[*Pending]][]*Ticket)
	for i, t := range tickets {
		var q *batch.Queue[*Pending]
		if found == nil {
			q = e.queueOf(decide.Row{Key: t.Value.Call.Demands[0].KeyOf()})
		} else {
			e.parts.of[keys[i]] = found[i]
			q = e.queueOfPart(found[i])
		}
		together[q] = append(together[q], t)
	}
	for q, tickets := range together {
		q.Join(tickets...)
	}
}
