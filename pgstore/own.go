package pgstore

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/escrow"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// Decisions on their own share statements: while one is under way, the calls that
// arrive gather, and the next one decides all of them (package batch). They are
// decided in two ways.
//
//   - grant: one UPDATE takes from each row what its callers want together, if it
//     has enough for all of them. The row need not be read first.
//   - settle: rows are locked, read, decided in memory, in the order of arrival, and
//     written.
//
// In between the rows are read without a lock, to answer checks, and to refuse what
// cannot be granted: that writes and locks nothing.
//
// Neither waits for a row that somebody else has locked; such rows are passed over.
// Their callers go on in a queue for that row alone, which waits for it.

// beginSQL begins a transaction in which a take is right, and nobody asks it again.
const beginSQL = "BEGIN ISOLATION LEVEL READ COMMITTED"

// lanes is how many statements, and so how many connections, decide at a time.
// Calls for one limit and key share a lane.
const lanes = 2

// mostTogether bounds the calls that one statement decides.
const mostTogether = 1024

// own is the decisions on their own that are under way.
type own struct {
	*base
	seed  maphash.Seed
	lanes [lanes]lane

	// together has a call decided with others: in its lane, or as Config.Portable has it.
	// The error is that of a caller who gave up.
	together func(context.Context, *pending) error

	mu     sync.Mutex
	locked map[decide.Row]*lane // of rows that somebody had locked
}

// lane is a queue of calls that are decided together.
type lane struct {
	queue    *batch.Queue[*pending]
	refusing bool      // most of the last calls were refused, so that granting is not worth an attempt
	used     time.Time // of a row's own queue: when a call last found it locked
}

// pending is a call that waits for its decision.
type pending struct {
	call  decide.Call
	check bool
	hold  bool // it wants tokens that can be put back, or nothing

	holder  *escrow.Holder // of its key, if it asks for one row and that is remembered; else nil
	changes int            // of the holder, before a statement was sent

	tokens escrow.Tokens // that it got so
	result ratelimit.Result
	err    error

	row   decide.Row // from which it takes, as one of a group
	floor float64    // the lowest value that it may leave behind there
	place int        // in the order of arrival

	locked atomic.Pointer[decide.Row] // that it waits for
}

type ticket = batch.Ticket[*pending]

func newOwn(b *base) *own {
	o := &own{base: b, seed: maphash.MakeSeed(), locked: make(map[decide.Row]*lane)}
	for i := range o.lanes {
		l := &o.lanes[i]
		l.queue = batch.New(mostTogether, b.config.Timeout, func(ctx context.Context, tickets []*ticket) { o.serve(ctx, l, tickets) }, b.work.spawn)
	}
	o.together = o.inLane
	return o
}

// decide decides a call on its own.
func (o *own) decide(ctx context.Context, reserve, check bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	if o == nil {
		return ratelimit.Result{}, (*base)(nil).usable()
	}
	if !check && len(requests) == 1 && o.hints.memory != nil {
		if err := ctx.Err(); err != nil {
			return ratelimit.Result{}, err
		}
		if result, ok := o.fromMemory(reserve, &requests[0]); ok {
			return result, nil
		}
	}
	p := &pending{check: check}
	var err error
	if p.call, err = decide.New(reserve, requests...); err != nil {
		return ratelimit.Result{}, err
	}
	return o.decideCall(ctx, p)
}

// fromMemory is the result of a call that was seen before, if it is in memory.
func (o *own) fromMemory(reserve bool, r *ratelimit.Request) (ratelimit.Result, bool) {
	h := o.hints.memory.Seen(r)
	if t, ok := h.Take(r.Count); ok {
		return o.told(reserve, &t), true
	}
	if reserve { // there may be debt to give
		return ratelimit.Result{}, false
	}
	return h.Refuse(r.Count)
}

// told is the result of a call whose tokens were held.
func (o *own) told(reserve bool, t *escrow.Tokens) ratelimit.Result {
	if t.Low {
		o.refill(t.Holder)
	}
	return t.Result(reserve)
}

// decideMade decides on its own a call that decide has made.
func (o *own) decideMade(ctx context.Context, call decide.Call, err error) (ratelimit.Result, error) {
	if o == nil {
		return ratelimit.Result{}, (*base)(nil).usable()
	}
	if err != nil {
		return ratelimit.Result{}, err
	}
	return o.decideCall(ctx, &pending{call: call})
}

func (o *own) decideCall(ctx context.Context, p *pending) (ratelimit.Result, error) {
	if o.pool == nil {
		return ratelimit.Result{}, ErrNoPool
	}
	if !p.check && o.hints.memory != nil {
		if err := ctx.Err(); err != nil {
			return ratelimit.Result{}, err
		}
		h := o.takeHeld(&p.call)
		rest := &p.call
		if h != nil {
			rest = &h.rest
		}
		if len(rest.Asks) > 1 && !rest.First {
			o.missed(rest)
		}
		if h != nil {
			return o.decideRest(ctx, h)
		}
	}
	return o.decideByRows(ctx, p)
}

// decideRest decides what was not in memory of a call.
func (o *own) decideRest(ctx context.Context, h *held) (rest ratelimit.Result, err error) {
	if !h.all() {
		if rest, err = o.decideByRows(ctx, &pending{call: h.rest}); err != nil || !rest.OK {
			h.putBack()
		}
	}
	if err != nil {
		return ratelimit.Result{}, err
	}
	return h.call.Whole(rest, h.stands, "", nil), nil
}

func (o *own) decideByRows(ctx context.Context, p *pending) (ratelimit.Result, error) {
	if !p.check && len(p.call.Asks) == 1 {
		p.holder = o.hints.memory.Of(&p.call.Asks[0])
		if result, ok := refusedBefore(p); ok {
			return result, ctx.Err()
		}
	}
	if err := o.work.begin(); err != nil {
		return ratelimit.Result{}, err
	}
	defer o.work.end()
	if err := o.together(ctx, p); err != nil {
		return ratelimit.Result{}, o.gaveUp(p, err)
	}
	return p.result, p.err
}

// refusedBefore is the result of a call that is refused by what is remembered.
func refusedBefore(p *pending) (ratelimit.Result, bool) {
	state, at, ok := p.holder.Refusal()
	if !ok {
		return ratelimit.Result{}, false
	}
	result := p.call.Checked(decide.View{States: [][]ratelimit.State{{state}}, At: at})
	return result, !result.OK
}

// held is tokens that were taken out of memory for a call.
type held struct {
	call   *decide.Call
	rest   decide.Call     // for what was not in memory
	tokens []escrow.Tokens // of each of its asks; zero of one that was not
	stands []*decide.Stand // of those
}

// putBack puts the tokens back, which were not used.
func (h *held) putBack() {
	for i := range h.tokens {
		if h.stands[i] != nil {
			h.tokens[i].PutBack()
		}
	}
}

// all reports whether all of the call was in memory.
func (h *held) all() bool { return h != nil && len(h.rest.Asks) == 0 }

// missed has what a call takes from rows taken ahead for those who come later, unless the
// statement that grants it does that.
func (o *own) missed(call *decide.Call) {
	for i := range call.Asks {
		a := &call.Asks[i]
		if holder := o.hints.memory.Of(a); holder.Miss(a.Count) {
			o.refill(holder)
		}
	}
}

// takeHeld takes out of memory what there is for a call, limit by limit; nil if there is
// nothing.
func (o *own) takeHeld(call *decide.Call) *held {
	if o.hints.memory == nil || call.First || call.AtMost() {
		return nil
	}
	var h *held
	for i := range call.Asks {
		a := &call.Asks[i]
		holder := o.hints.memory.Of(a)
		t, ok := holder.Take(a.Count)
		if !ok {
			continue
		}
		if t.Low {
			o.refill(holder)
		}
		if h == nil {
			h = &held{call: call, tokens: make([]escrow.Tokens, len(call.Asks)), stands: make([]*decide.Stand, len(call.Asks))}
		}
		h.tokens[i] = t
		h.stands[i] = t.Stand()
	}
	if h != nil {
		h.rest = call.Rest(h.stands)
	}
	return h
}

// secure is takeHeld for tokens that may be put back later. Those of a single limit are
// taken ahead for the call, if that can be.
func (o *own) secure(ctx context.Context, call *decide.Call) (*held, error) {
	h := o.takeHeld(call)
	switch {
	case o.hints.memory == nil:
		return nil, nil
	case h != nil:
		o.missed(&h.rest)
		return h, nil
	case len(call.Asks) > 1:
		o.missed(call)
		return nil, nil
	}
	t, ok, err := o.secureOne(ctx, call)
	if !ok {
		return nil, err
	}
	return &held{call: call, tokens: []escrow.Tokens{t}, stands: []*decide.Stand{t.Stand()}}, nil
}

func (o *own) secureOne(ctx context.Context, call *decide.Call) (t escrow.Tokens, ok bool, err error) {
	a := &call.Asks[0]
	h := o.hints.memory.Of(a)
	if a.Count == 0 || !h.Holds() || o.work.begin() != nil {
		return t, false, nil // the caller's transaction takes from the row
	}
	defer o.work.end()
	p := &pending{call: decide.Call{Asks: []decide.Ask{*a}}, hold: true, holder: h}
	p.call.Asks[0].Floor = 0 // debt is the row's to give
	if err := o.together(ctx, p); err != nil {
		return t, false, o.gaveUp(p, err)
	}
	return p.tokens, p.tokens.Holder != nil, p.err
}

// gaveUp is the error of a caller whose context ended.
func (o *own) gaveUp(p *pending, err error) error {
	if row := p.locked.Load(); row != nil {
		return locked(row.Key, err)
	}
	return o.fault("decide", err)
}

// inLane has a call decided with those of its lane.
func (o *own) inLane(ctx context.Context, p *pending) error {
	_, err := o.laneOf(&p.call).queue.Do(ctx, p)
	return err
}

func (o *own) laneOf(call *decide.Call) *lane {
	return &o.lanes[maphash.Comparable(o.seed, call.Asks[0].Of())%lanes]
}

// serve decides the calls of a lane, but for those that go on in the queue of a
// locked row.
func (o *own) serve(ctx context.Context, l *lane, tickets []*ticket) {
	o.noteAll(tickets)
	tickets = o.redirect(o.serveHeld(tickets))
	if len(tickets) == 0 {
		return
	}
	o.await(o.decideAll(ctx, tickets, !l.refusing, nil))
	refused := 0
	for _, t := range tickets {
		if t.Finished() && !t.Value.hold && !t.Value.result.OK {
			refused++
		}
	}
	l.refusing = 2*refused > len(tickets)
}

// serveHeld answers calls for which enough has been taken ahead since they came, and
// returns the others.
func (o *own) serveHeld(tickets []*ticket) []*ticket {
	if o.hints.memory == nil {
		return tickets
	}
	return slices.DeleteFunc(tickets, func(t *ticket) bool {
		p := t.Value
		if !o.plain(p) {
			return false
		}
		tokens, ok := p.holder.Take(p.call.Asks[0].Count)
		if ok {
			o.tellHeld(t, &tokens)
		}
		return ok
	})
}

// plain reports whether a call takes what it asks, from one row.
func (o *own) plain(p *pending) bool {
	return !p.check && len(p.call.Asks) == 1 && !p.call.First && !p.call.AtMost() && !p.call.Sharded()
}

func (o *own) tellHeld(t *ticket, tokens *escrow.Tokens) {
	if p := t.Value; p.hold {
		p.tokens = *tokens
	} else {
		p.result = o.told(p.call.Reserve, tokens)
	}
	t.Finish()
}

// noteAll remembers the definitions of calls, most of which are the same.
func (o *own) noteAll(tickets []*ticket) {
	var last ratelimit.Definition
	for _, t := range tickets {
		for i := range t.Value.call.Asks {
			if a := &t.Value.call.Asks[i]; a.Definition != last {
				last = a.Definition
				o.seen.Note(last)
			}
		}
	}
}

// decideAll decides calls, and returns those whose rows are locked by somebody else.
// If the database finds fault with a statement for many, each half of them is
// decided by itself, so that only the one at fault fails. A row that is to be
// waited for is await.
func (o *own) decideAll(ctx context.Context, tickets []*ticket, granting bool, await *decide.Row) (locked []*ticket) {
	left := tickets
	err := o.retry(ctx, func() (err error) {
		if granting {
			if left, err = o.grant(ctx, left, await); err != nil || len(left) == 0 {
				return err
			}
			granting = false
		}
		if left = unheld(left); len(left) == 0 {
			return nil
		}
		var sheet *decide.Sheet
		if left, sheet, err = o.read(ctx, left); err != nil || len(left) == 0 {
			return err
		}
		left, err = o.settle(ctx, left, sheet, await)
		return err
	})
	switch {
	case err == nil:
		return left
	case code(err) == lockNotAvailable && allWait(left):
		return left
	case answered(err) && !retriable(err) && len(left) > 1:
		half := len(left) / 2
		return append(o.decideAll(ctx, left[:half:half], granting, nil), o.decideAll(ctx, left[half:], granting, nil)...)
	}
	for _, t := range left {
		t.Value.result, t.Value.err = ratelimit.Result{}, err
		t.Finish()
	}
	return nil
}

// unheld tells those who want to hold what they take, or nothing, that it is nothing.
func unheld(tickets []*ticket) []*ticket {
	return slices.DeleteFunc(slices.Clone(tickets), func(t *ticket) bool {
		if t.Value.hold {
			t.Finish()
		}
		return t.Value.hold
	})
}

// allWait reports whether of each call the row is known that it waits for.
func allWait(tickets []*ticket) bool {
	return !slices.ContainsFunc(tickets, func(t *ticket) bool { return t.Value.locked.Load() == nil })
}

// grant decides the calls of the groups whose rows have enough for all of them.
// Nothing is written or locked for the others, which it returns.
func (o *own) grant(ctx context.Context, tickets []*ticket, await *decide.Row) (left []*ticket, err error) {
	groups, grants, left := o.groups(tickets)
	orders, groups, grants, left := o.orders(groups, grants, left)
	if len(groups) == 0 {
		return left, nil
	}
	sent := o.hints.memory.Now()
	grant := o.grantFree
	if await != nil && len(grants) == 1 && grants[0].Row == *await {
		grant = o.grantInTurn
	}
	if err := grant(ctx, grants); err != nil {
		return tickets, o.fault("take", err)
	}
	for i, g := range groups {
		if !grants[i].Taken.OK {
			left = append(left, g...)
			continue
		}
		g[0].Value.holder.Note(grants[i].Count, len(g))
		if orders == nil || orders[i].Holder == nil {
			o.tellGroup(g, &grants[i], nil)
		} else {
			o.tellGroup(g, &grants[i], arrived(&orders[i], &grants[i], sent))
		}
	}
	return left, nil
}

// orders has grants take ahead for keys from which this process takes much. Those of
// which something must be held, and cannot be, are left.
func (o *own) orders(groups [][]*ticket, grants []table.Grant, left []*ticket) ([]escrow.Order, [][]*ticket, []table.Grant, []*ticket) {
	if o.hints.memory == nil {
		return nil, groups, grants, left
	}
	orders, n := make([]escrow.Order, 0, len(groups)), 0
	for i, g := range groups {
		hold := slices.ContainsFunc(g, func(t *ticket) bool { return t.Value.hold })
		order, ok := o.order(&grants[i], g[0].Value.holder, hold)
		if !ok {
			left = append(left, g...)
			continue
		}
		orders = append(orders, order)
		groups[n], grants[n] = g, grants[i]
		n++
	}
	return orders, groups[:n], grants[:n], left
}

// grantFree grants what can be had from rows that nobody has locked: nothing, if one
// of them was locked in the same moment.
func (o *own) grantFree(ctx context.Context, grants []table.Grant) error {
	if err := o.table.Grant(ctx, o.pool, grants, o.clock()); code(err) != lockNotAvailable {
		return err
	}
	return nil
}

// grantInTurn waits for its row, among all who do, in other processes too.
func (o *own) grantInTurn(ctx context.Context, grants []table.Grant) error {
	conn, err := o.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer release(ctx, conn)
	var b pgx.Batch
	b.Queue(beginSQL)
	o.bounds(&b, awaited)
	o.table.QueueGrant(&b, &grants[0], o.clock())
	if err := conn.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	// Not with the rest: the server would go on to it when nobody waits any more.
	_, err = conn.Exec(ctx, "COMMIT")
	return err
}

// tellGroup answers the calls of a group. Each is told what it left behind. What they
// got can be put back if it came with an arrival.
func (o *own) tellGroup(tickets []*ticket, g *table.Grant, arrival *escrow.Arrival) {
	changes := []decide.Change{g.Change}
	change, rest := &changes[0], g.Count
	change.After = g.Taken.After
	for _, t := range tickets {
		p := t.Value
		change.Count = p.call.Asks[0].Count
		if g.AtMost { // alone: less, if there was less
			change.Count = g.Count
		}
		rest -= change.Count
		change.After = g.Definition.Spend(g.Taken.After, g.Taken.At, -rest)
		if p.hold {
			p.tokens = arrival.Tokens(change.Count, change.After)
		} else {
			p.result = o.granted(&p.call, changes, g.Taken.At, "", nil)
		}
		t.Finish()
	}
}

// groups sorts calls by the row that they would take from. A group is granted as a
// whole or not at all: to grant all of it, the row needs to have no more than the most
// that any of its calls needs after those before it. Those that check or take from
// several rows are in none, and neither are those whose definition is not that of the
// others, while a new one is being rolled out.
func (o *own) groups(tickets []*ticket) (groups [][]*ticket, grants []table.Grant, left []*ticket) {
	singles := make([]*ticket, 0, len(tickets))
	for i, t := range tickets {
		if o.single(t.Value) {
			t.Value.place = i
			singles = append(singles, t)
		} else {
			left = append(left, t)
		}
	}
	slices.SortFunc(singles, func(a, b *ticket) int {
		return cmp.Or(a.Value.row.Compare(b.Value.row), cmp.Compare(a.Value.place, b.Value.place))
	})
	for i, t := range singles {
		p := t.Value
		a := &p.call.Asks[0]
		n := len(grants) - 1
		switch {
		case i == 0 || p.row != grants[n].Row:
			grants = append(grants, table.Grant{Change: a.Change(0, p.row.Shard, 0), Need: math.Inf(-1)})
			groups = append(groups, singles[i:i])
			n++
		case a.Definition != groups[n][0].Value.call.Asks[0].Definition:
			left = append(left, t)
			continue
		}
		g := &grants[n]
		g.Count += a.Count
		g.Need = max(g.Need, g.Count+p.floor)
		g.AtMost = len(groups[n]) == 0 && p.call.AtMost()
		groups[n] = append(groups[n], t)
	}
	return groups, grants, left
}

// single finds the row of a call that takes from one; false if it does not.
func (o *own) single(p *pending) bool {
	call := p.call.Head()
	if p.check || len(call.Asks) > 1 {
		return false
	}
	a := &call.Asks[0]
	if p.row, p.floor = (decide.Row{Key: a.Of()}), a.Floor; a.Definition.Kind == ratelimit.KindSlidingWindow {
		p.floor = 0 // what must wait has a slot of its own, so a group has all of it at once
	}
	if !a.Sharded() {
		return true
	}
	changes, ok := o.guess(call, func(int) int { return o.choose(a) })
	if ok {
		p.row, p.floor = changes[0].Row, changes[0].Floor
	}
	return ok
}

// read reads the calls' rows, answers checks, and refuses what cannot be granted.
// It returns the others, and what it has read.
func (o *own) read(ctx context.Context, tickets []*ticket) (left []*ticket, sheet *decide.Sheet, err error) {
	sheet = newSheet(tickets)
	sent := o.asking(tickets)
	rows := table.Rows{Rows: sheet.Rows}
	if err := o.table.Read(ctx, o.pool, &rows, o.clock()); err != nil {
		return tickets, nil, o.fault("read", err)
	}
	sheet.States, sheet.Found, sheet.At = rows.States, rows.Found, rows.At
	for _, t := range tickets {
		p := t.Value
		view := sheet.View(&p.call)
		o.hints.saw(&p.call, view)
		if !p.check {
			if changes, ok := p.call.Plan(view); ok {
				sheet.Need(&p.call, changes)
				left = append(left, t)
				continue
			}
			p.refused(view, sent)
		}
		p.result = p.call.Checked(view)
		t.Finish()
	}
	return left, sheet, nil
}

// asking notes what is known of the keys of calls for which a statement is about to be
// sent, and returns when that is.
func (o *own) asking(tickets []*ticket) time.Time {
	if o.hints.memory == nil {
		return time.Time{}
	}
	for _, t := range tickets {
		t.Value.changes = t.Value.holder.Changes()
	}
	return o.hints.memory.Now()
}

// refused remembers what refused a call that was asked in a statement sent then.
func (p *pending) refused(view decide.View, sent time.Time) {
	if p.holder != nil {
		p.holder.Refused(view.States[0][0], view.At, sent, p.changes)
	}
}

func newSheet(tickets []*ticket) *decide.Sheet {
	calls := make([]*decide.Call, len(tickets))
	for i, t := range tickets {
		calls[i] = &t.Value.call
	}
	return decide.NewSheet(calls)
}

// settle decides calls with their rows locked, from the reading to the writing. It
// returns those whose rows are locked by somebody else. Rows that are missing
// cannot be locked, so they are made first: full, which means the same.
func (o *own) settle(ctx context.Context, tickets []*ticket, seen *decide.Sheet, await *decide.Row) (left []*ticket, err error) {
	conn, err := o.pool.Acquire(ctx)
	if err != nil {
		return tickets, o.fault("acquire", err)
	}
	defer release(ctx, conn)
	sheet := newSheet(tickets)
	sent := o.asking(tickets)
	if err := o.hold(ctx, conn, sheet, seen, await); err != nil {
		if code(err) == lockNotAvailable && await != nil {
			for _, t := range tickets {
				t.Value.locked.Store(await)
			}
		}
		return tickets, o.fault("lock", err)
	}
	var decided []*ticket
	for _, t := range tickets {
		p := t.Value
		changes, ok := p.call.Plan(sheet.Free(&p.call))
		if ok && !sheet.Passes(&p.call, changes) {
			sheet.Make(changes)
			p.result = p.call.Granted(changes, sheet.View(&p.call))
			p.result.Receipt = p.call.Receipt(changes, "", nil, sheet.At)
		} else if missing := sheet.MissingOf(&p.call); missing != nil {
			p.locked.Store(&missing[0])
			left = append(left, t)
			continue
		} else {
			p.result = p.call.Refused(sheet.View(&p.call))
		}
		decided = append(decided, t)
	}
	if err := o.write(ctx, conn, sheet); err != nil {
		return tickets, o.fault("write", err)
	}
	for _, t := range decided { // it is in the database now
		o.tell(t, sheet, sent)
	}
	return left, nil
}

// tell answers a call that was decided on a sheet that has been written.
func (o *own) tell(t *ticket, sheet *decide.Sheet, sent time.Time) {
	p, view := t.Value, sheet.View(&t.Value.call)
	o.hints.saw(&p.call, view)
	if p.result.OK {
		for i := range p.call.Asks {
			o.hints.memory.Changed(p.call.Asks[i].Of())
		}
	} else {
		p.refused(view, sent)
	}
	t.Finish()
}

// hold begins a transaction that has a sheet's rows locked, and reads them, but for
// those that somebody else has locked, which are not found. If that fails because
// somebody has made one of the missing rows and not committed, the others are made
// apart. They are in any case before a row is waited for, so that nothing else is
// locked meanwhile.
func (o *own) hold(ctx context.Context, conn *pgxpool.Conn, sheet, seen *decide.Sheet, await *decide.Row) error {
	missing := o.missing(sheet, seen, await)
	if await == nil {
		err := o.lock(ctx, conn, sheet, seen, missing, nil)
		if code(err) != lockNotAvailable {
			return err
		}
		rollBack(ctx, conn)
	}
	if err := o.fill(ctx, conn, sheet, missing); err != nil {
		return err
	}
	return o.lock(ctx, conn, sheet, seen, nil, await)
}

// missing returns the rows of a sheet that were not found on the one that was read, but
// for the awaited one and those that somebody is known to have made.
func (o *own) missing(sheet, seen *decide.Sheet, await *decide.Row) (rows []decide.Row) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, row := range seen.Missing(sheet) {
		l, known := o.locked[row]
		if (!known || time.Since(l.used) > contended) && (await == nil || row != *await) {
			rows = append(rows, row)
		}
	}
	return rows
}

// fill makes rows, half by half where somebody has made one of them and not committed;
// that is noted as locked.
func (o *own) fill(ctx context.Context, conn *pgxpool.Conn, sheet *decide.Sheet, rows []decide.Row) error {
	if len(rows) == 0 {
		return nil
	}
	var b pgx.Batch
	b.Queue(beginSQL)
	o.bounds(&b, passOver)
	o.table.QueueFill(&b, rows, sheet.DefinitionsOf(rows), o.clock())
	b.Queue("COMMIT")
	err := conn.SendBatch(ctx, &b).Close()
	if code(err) != lockNotAvailable {
		return err
	}
	rollBack(ctx, conn)
	if len(rows) == 1 {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.queueOf(rows[0])
		return nil
	}
	half := len(rows) / 2
	if err := o.fill(ctx, conn, sheet, rows[:half]); err != nil {
		return err
	}
	return o.fill(ctx, conn, sheet, rows[half:])
}

// lock begins a transaction that makes missing rows, waits for the awaited one, and
// locks and reads what nobody else has locked of a sheet.
func (o *own) lock(ctx context.Context, conn *pgxpool.Conn, sheet, seen *decide.Sheet, missing []decide.Row, await *decide.Row) error {
	t, now := o.table, o.clock()
	var b pgx.Batch
	b.Queue(beginSQL)
	if await != nil {
		missing = []decide.Row{*await}
		o.bounds(&b, awaited)
	} else if len(missing) > 0 {
		o.bounds(&b, passOver)
	}
	if len(missing) > 0 {
		t.QueueFill(&b, missing, sheet.DefinitionsOf(missing), now)
	}
	if await != nil {
		t.QueueAwait(&b, *await)
	}
	o.bounds(&b, 0) // nothing waits any more but for what others have put on the table
	rows := table.Rows{Rows: sheet.Rows}
	t.QueueLock(&b, &rows, now)
	if err := conn.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	sheet.States, sheet.Found, sheet.At = rows.States, rows.Found, rows.At
	sheet.Assume(seen)
	return nil
}

// write writes a sheet's changed rows, and commits.
func (o *own) write(ctx context.Context, conn *pgxpool.Conn, sheet *decide.Sheet) error {
	var changed table.Rows
	for i, row := range sheet.Rows {
		if sheet.Changed[i] {
			if !sheet.Found[i] {
				return fmt.Errorf("row %v is to be written and was not locked", row)
			}
			changed.Rows = append(changed.Rows, row)
			changed.States = append(changed.States, sheet.States[i])
		}
	}
	var b pgx.Batch
	if len(changed.Rows) > 0 {
		o.table.QueueWrite(&b, &changed)
	}
	b.Queue("COMMIT")
	return conn.SendBatch(ctx, &b).Close()
}

// redirect moves the calls for locked rows to the queues of those, and returns the
// others.
func (o *own) redirect(tickets []*ticket) (left []*ticket) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.locked) == 0 {
		return tickets
	}
	for _, t := range tickets {
		if row, ok := o.lockedRow(t.Value); ok {
			t.Value.locked.Store(&row)
			o.locked[row].queue.Join(t)
		} else {
			left = append(left, t)
		}
	}
	return left
}

// lockedRow is a row of a call that is waited for. It needs mu.
func (o *own) lockedRow(p *pending) (row decide.Row, ok bool) {
	if p.check {
		return row, false
	}
	call := p.call.Head()
	for i := range call.Asks {
		a := &call.Asks[i]
		row = decide.Row{Key: a.Of()}
		l, ok := o.locked[row]
		switch {
		case !ok || a.Sharded(): // of which another may do
		case l.queue.Idle() && time.Since(l.used) > contended:
			delete(o.locked, row)
		default:
			return row, true
		}
	}
	return row, false
}

// await moves calls to the queues of the rows that they wait for.
func (o *own) await(tickets []*ticket) {
	if len(tickets) == 0 {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, t := range tickets {
		o.queueOf(*t.Value.locked.Load()).Join(t)
	}
}

// queueOf is the queue of a row that somebody was just found to have locked. A new one
// takes the place of those that nobody needs any more. It needs mu.
func (o *own) queueOf(row decide.Row) *batch.Queue[*pending] {
	l, ok := o.locked[row]
	if !ok {
		for other, l := range o.locked {
			if l.queue.Idle() && time.Since(l.used) > contended {
				delete(o.locked, other)
			}
		}
		l = &lane{}
		l.queue = batch.New(mostTogether, 0, func(ctx context.Context, tickets []*ticket) { o.serveLocked(ctx, row, tickets) }, o.work.spawn)
		o.locked[row] = l
	}
	l.used = time.Now()
	return l.queue
}

// serveLocked decides the calls that wait for a row, as soon as it is free. While
// no connection may wait for it, it looks now and then.
func (o *own) serveLocked(ctx context.Context, row decide.Row, tickets []*ticket) {
	for w := o.waiting(0); len(tickets) > 0; {
		var left []*ticket
		_ = w.again(ctx, func(spared bool) error { // if ctx is over nobody is left
			var await *decide.Row
			if spared {
				await = &row
			}
			left = o.decideAll(ctx, tickets, true, await)
			return nil
		})
		tickets = tickets[:0]
		var others []*ticket
		for _, t := range left {
			switch {
			case t.Gone():
			case *t.Value.locked.Load() == row:
				tickets = append(tickets, t)
			default:
				others = append(others, t)
			}
		}
		o.await(others)
	}
}
