package engine

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// parts are the parts of a distributed table, whose calls share statements. They are asked for once, and
// asked for again after some time: a key of another part than is remembered is decided all the same, only
// slower.
type parts struct {
	queues map[int64]*batch.Queue[*Pending]
	asking *batch.Queue[*Pending] // of calls for keys whose part is not known

	of    map[string]int64 // of keys; nil if the table has no parts
	asked time.Time

	underWay atomic.Int64 // calls, of which so many go
	alone    int64
}

const (
	partsKnown = time.Minute // for which the parts of keys are remembered,
	mostKnown  = 1 << 17     // and of how many keys
)

// decider returns the Decider of calls that wait for await.
func (e *Engine) decider(await *awaited) table.Decider {
	if await != nil && await.part {
		return e.table.Part()
	}
	return e.table.Decider()
}

// queueOnNode returns the queue of a call for one row of a distributed table: that of its part, if calls
// of its kind share statements there, or else that of the row. A row that did not share lately is not
// tried together with others. It needs mu.
func (e *Engine) queueOnNode(p *Pending, underWay int64) *batch.Queue[*Pending] {
	demand := &p.Call.Demands[0]
	row := decide.Row{Key: demand.KeyOf()}
	if !p.Call.Plain || p.Extra || !e.table.InParts(&demand.Definition) {
		return e.queueOf(row)
	}
	if q := e.rows[row]; q != nil && q.calls != nil && (time.Since(q.apart) <= Contended || !q.calls.Idle()) {
		return q.calls
	}
	if underWay <= e.parts.alone {
		return e.queueOf(row)
	}
	if time.Since(e.parts.asked) > partsKnown {
		e.parts.asked, e.parts.of = time.Now(), make(map[string]int64)
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
		if e.parts.queues == nil {
			e.parts.queues = make(map[int64]*batch.Queue[*Pending])
		}
		calls = q.calls
		e.parts.queues[part] = calls
	}
	return calls
}

// askParts asks for the parts of calls' keys, and moves the calls to the queues of these. If the table has
// no parts, they move to the queues of their rows.
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
		q := (*batch.Queue[*Pending])(nil)
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
