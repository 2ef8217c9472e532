package pgstore

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/escrow"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// Decisions on their own with Config.Portable use the statements of callers' transactions,
// which change one row each, and wait for it if somebody has it locked. So each row has a
// queue, and who waits for one row holds up nobody who wants another.
//
// The calls that gather for a row are decided by one take of what they want together, if
// there is enough for all. If there is not, the row is looked at, those that it has enough
// for are found in memory, one after another in order of arrival, and they are taken
// together. The others are refused by what is there when that is done.

// portable decides so.
type portable struct {
	*own

	mu   sync.Mutex
	rows map[decide.Key]*rowQueue // of those that are asked for now
}

// rowQueue is the calls for a row.
type rowQueue struct {
	queue    *batch.Queue[*pending]
	users    int  // needs the mu of portable
	refusing bool // most of the last calls were refused, so that it is better to look first
}

func newPortable(o *own) *portable {
	return &portable{own: o, rows: make(map[decide.Key]*rowQueue)}
}

// together decides a call: one for a row with others, and the rest by itself.
func (p *portable) together(ctx context.Context, call *pending) error {
	if call.check || len(call.call.Asks) > 1 || call.call.Sharded() {
		call.result, call.err = p.decideAlone(ctx, &call.call, call.check)
		return nil
	}
	key := call.call.Asks[0].Of()
	row := p.enter(key)
	defer p.leave(key, row)
	_, err := row.queue.Do(ctx, call)
	return err
}

// decideAlone decides a call that others cannot join. What takes from several rows does
// that in a transaction.
func (p *portable) decideAlone(ctx context.Context, call *decide.Call, check bool) (result ratelimit.Result, err error) {
	p.note(call)
	ctx, cancel := p.timed(ctx)
	defer cancel()
	err = p.retry(ctx, func() error {
		if check {
			view, err := p.look(ctx, p.pool, &pgx.Batch{}, call, all)
			if err == nil {
				result = call.Checked(view)
			}
			return err
		}
		return pgx.BeginTxFunc(ctx, p.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if result, err = p.takeSeveral(ctx, tx, call); err != nil {
				return err
			}
			return result.Err() // which leaves nothing behind
		})
	})
	if err != nil && !errors.Is(err, ratelimit.ErrRefused) {
		return ratelimit.Result{}, p.fault("decide", err)
	}
	return result, nil
}

// enter is the queue of a row, which stays as long as somebody is in it.
func (p *portable) enter(key decide.Key) *rowQueue {
	p.mu.Lock()
	defer p.mu.Unlock()
	row, ok := p.rows[key]
	if !ok {
		row = &rowQueue{}
		row.queue = batch.New(mostTogether, p.config.Timeout, func(ctx context.Context, tickets []*ticket) { p.serve(ctx, row, tickets) }, p.work.spawn)
		p.rows[key] = row
	}
	row.users++
	return row
}

func (p *portable) leave(key decide.Key, row *rowQueue) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if row.users--; row.users == 0 {
		delete(p.rows, key)
	}
}

// serve decides the calls of a row: together those that have one definition, since it is
// part of the statement.
func (p *portable) serve(ctx context.Context, row *rowQueue, tickets []*ticket) {
	p.noteAll(tickets)
	tickets = p.serveHeld(tickets)
	for left := tickets; len(left) > 0; {
		var same, others []*ticket
		for _, t := range left {
			if t.Value.call.Asks[0].Definition == left[0].Value.call.Asks[0].Definition {
				same = append(same, t)
			} else {
				others = append(others, t)
			}
		}
		p.decideRow(ctx, same, row.refusing)
		left = others
	}
	row.refusing = mostRefused(tickets)
}

// decideRow decides calls for a row, which it looks at first if it is told to. If the
// database finds fault with what they are together, each half of them is decided by itself,
// so that only the one at fault fails.
func (p *portable) decideRow(ctx context.Context, tickets []*ticket, look bool) {
	r := &rowCalls{portable: p, left: tickets, unsure: look}
	err := p.retry(ctx, func() error { return r.decide(ctx) })
	if n := len(r.left); n > 1 && isOfValues(err) {
		p.decideRow(ctx, r.left[:n/2:n/2], false)
		p.decideRow(ctx, r.left[n/2:], false)
		return
	}
	for _, t := range r.left { // there are none without an error, but for those that are gone
		t.Value.result, t.Value.err = ratelimit.Result{}, err
		t.Finish()
	}
}

// isOfValues reports whether the server did nothing because of what it was sent, and not
// because of what it waited for or lacked.
func isOfValues(err error) bool {
	if !answered(err) || retriable(err) {
		return false
	}
	class := code(err)[:min(2, len(code(err)))]
	return !slices.Contains([]string{"42", "53", "55", "57"}, class) // the table or a right, resources, a lock, intervention
}

// rowCalls are calls for one row, by one definition.
type rowCalls struct {
	*portable
	left   []*ticket // to decide, in order of arrival
	unsure bool      // it is better to look at the row than to take

	view decide.View // of the row as it was seen last; of nothing if it was not
	sent time.Time   // before it was seen
}

// viewOf is a view of one row.
func viewOf(state bucket.State, at time.Time) decide.View {
	return decide.View{States: [][]bucket.State{{state}}, At: at.UTC()}
}

func (r *rowCalls) call() *decide.Call { return &r.left[0].Value.call }

func (r *rowCalls) seen() bool { return r.view.States != nil }

// decide decides the calls that are left. An attempt to take that comes too late, because
// others have taken meanwhile, is followed by another look, for some rounds.
func (r *rowCalls) decide(ctx context.Context) error {
	for tries := 0; ; {
		r.left = slices.DeleteFunc(r.left, (*ticket).Gone)
		if r.unsure || r.seen() {
			r.left = unheld(r.left)
		}
		if len(r.left) == 0 {
			return nil
		}
		if r.unsure {
			if err := r.see(ctx); err != nil {
				return err
			}
			continue // without those who have given up meanwhile
		}
		g := r.plan()
		if r.seen() && (len(g.tickets) == 0 || tries > rounds) {
			r.refuse()
			return nil
		}
		order, ok := r.order(&g)
		if !ok {
			r.left = unheld(r.left)
			continue
		}
		if err := r.take(ctx, &g, order); err != nil {
			return err
		}
		if tries++; g.Taken.OK {
			tries = 0
		}
		r.unsure = !g.Taken.OK
	}
}

// see looks at the row.
func (r *rowCalls) see(ctx context.Context) (err error) {
	r.sent = r.asking(r.left)
	if r.view, err = r.look(ctx, r.pool, &pgx.Batch{}, r.call(), all); err != nil {
		return r.fault("look", err)
	}
	r.unsure = false
	return nil
}

// rowGrant is what some calls take together.
type rowGrant struct {
	table.Grant
	tickets []*ticket
	calls   int  // of them that ask for something
	reserve bool // all of them, by the statement that can
	judged  int  // of the calls that are left, those that come before the first one that must wait for its turn
}

// plan finds the calls that can be granted together, one after another in order of arrival.
// As long as the row was not seen it is taken for full: what a full row has not enough for
// no row has; and one that is not there is full, and takes what it is told to. On its own is
// what waits for a slot of a sliding window, and what takes less than it asks.
func (r *rowCalls) plan() (g rowGrant) {
	if r.seen() {
		return r.planSeen()
	}
	a := &r.call().Asks[0]
	state := a.Definition.Fresh(a.Key, time.Unix(0, 0))
	for i, t := range r.left {
		a := &t.Value.call.Asks[0]
		after, ok := a.Definition.Take(state, state.TS, a.Count, a.Floor)
		alone := ok && after.Slots != nil && after.Slots.Ahead > 0 || !ok && t.Value.call.AtMost()
		if alone && len(g.tickets) > 0 {
			g.judged = i
			return g
		}
		if ok || i == 0 {
			g.add(t, a.Change(0, 0, a.Count))
			state = after
		}
	}
	g.judged = len(r.left)
	return g
}

// planSeen is plan by what was seen.
func (r *rowCalls) planSeen() (g rowGrant) {
	state := r.view.States[0][0]
	for i, t := range r.left {
		call := &t.Value.call
		changes, ok := call.Plan(viewOf(state, r.view.At))
		if !ok {
			continue
		}
		c := changes[0]
		alone := c.After.Slots != nil && c.After.Slots.Ahead > 0 || c.Count != call.Asks[0].Count
		if alone && len(g.tickets) > 0 {
			g.judged = i
			return g
		}
		g.add(t, c)
		state = c.After
		if alone {
			g.AtMost = call.AtMost()
			g.judged = i + 1
			return g
		}
	}
	g.judged = len(r.left)
	return g
}

// floorAmong is the floor of a change that is made together with others: a sliding
// window's reservations have their slots at once then.
func floorAmong(c *decide.Change) float64 {
	if c.Definition.Kind == ratelimit.KindSlidingWindow {
		return 0
	}
	return c.Floor
}

// add adds a call. The row must have no more than the most that any of them needs after
// those before it.
func (g *rowGrant) add(t *ticket, c decide.Change) {
	g.tickets = append(g.tickets, t)
	if t.Value.wants == ahead && len(g.tickets) > 1 {
		return // it asks for no more than the others do
	}
	if g.calls == 0 {
		g.Change, g.Need = c, c.Count+floorAmong(&c)
		g.AtMost, g.reserve = t.Value.call.AtMost(), t.Value.call.Reserve
	} else {
		g.Count += c.Count
		g.Need = max(g.Need, g.Count+floorAmong(&c))
		g.Floor = g.Need - g.Count
		g.AtMost = false
		g.reserve = g.reserve && t.Value.call.Reserve && c.Definition.Kind != ratelimit.KindSlidingWindow
	}
	if t.Value.wants != ahead {
		g.calls++
	}
}

// order has a grant of all calls take ahead, if that is worth it; ok is false if some of
// them must be held, and cannot be.
func (r *rowCalls) order(g *rowGrant) (o escrow.Order, ok bool) {
	if r.hints.memory == nil || r.seen() || len(g.tickets) < len(r.left) {
		return o, !wanting(r.left, toHold)
	}
	return r.own.order(&g.Grant, holderOf(g.tickets), wanting(g.tickets, toHold))
}

// take takes what a grant says, and if that was there decides the calls by it.
func (r *rowCalls) take(ctx context.Context, g *rowGrant, o escrow.Order) error {
	if r.seen() {
		changes := []decide.Change{g.Change}
		if err := r.renew(ctx, r.pool, changes, r.view.At); err != nil {
			return r.fault("renew", err)
		}
		g.Change = changes[0]
	}
	sent := r.asking(r.left)
	if err := r.table.TakeGrant(ctx, r.pool, g.reserve, &g.Grant, r.clock()); err != nil {
		return r.fault("take", err)
	}
	if !g.Taken.OK {
		return nil
	}
	r.sent = sent
	refused := r.judge(g)
	var arrival *escrow.Arrival
	note(g.tickets, g.Count)
	if o.Holder != nil {
		arrival = arrived(&o, &g.Grant, sent)
	}
	r.tellGroup(g.tickets, &g.Grant, arrival)
	r.view = viewOf(g.Taken.After, g.Taken.At)
	r.tell(refused)
	return nil
}

// judge takes those of the calls that are decided by a grant out of those that are left,
// and returns the ones that it refuses: in order of arrival, each by what the calls before it
// left behind, or if there are none by what was seen.
func (r *rowCalls) judge(g *rowGrant) (refused []*ticket) {
	d, rest, n := &r.call().Asks[0].Definition, g.Count, 0
	left := slices.Clone(r.left[g.judged:])
	var more []*ticket // that have enough by now, as time has passed
	for _, t := range r.left[:g.judged] {
		if n < len(g.tickets) && t == g.tickets[n] {
			n++
			rest -= t.Value.call.Asks[0].Count
			continue
		}
		view := r.view
		if n > 0 {
			view = viewOf(d.Spend(g.Taken.After, g.Taken.At, -rest), g.Taken.At)
		}
		if _, ok := t.Value.call.Plan(view); ok {
			more = append(more, t)
			continue
		}
		t.Value.result = t.Value.call.Refused(view)
		refused = append(refused, t)
	}
	r.left = append(more, left...)
	return refused
}

// refuse refuses the calls that are left by what was seen.
func (r *rowCalls) refuse() {
	for _, t := range r.left {
		t.Value.result = t.Value.call.Refused(r.view)
	}
	r.tell(r.left)
	r.left = nil
}

// tell answers calls that were refused.
func (r *rowCalls) tell(refused []*ticket) {
	for _, t := range refused {
		t.Value.refused(r.view, r.sent)
		t.Finish()
	}
}
