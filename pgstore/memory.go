package pgstore

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// memory is the layer above the engine with Config.Escrow: calls are answered from prefetched
// tokens, or refused by the known state (package escrow), and only the rest of them reach rows.
// A nil memory holds nothing.
type memory struct {
	*base
	engine *engine
}

func newMemory(e *engine) *memory {
	m := &memory{base: e.base, engine: e}
	config := escrow.Config{Lasts: e.config.Escrow, Prefetch: m.prefetch, GiveBack: m.giveBackLater}
	if e.config.Clock != nil {
		config.Clock = func() time.Time { return *e.Clock() }
	}
	e.cache = escrow.New(config)
	return m
}

// decide decides a call on its own, from the leases and the known state of its keys as far as
// possible.
func (m *memory) decide(ctx context.Context, w *watch.Watch, reserve bool, requests []ratelimit.Request) (result ratelimit.Result, err error) {
	if err := ctx.Err(); err != nil {
		return result, err
	}
	var entry *escrow.Entry
	if len(requests) == 1 {
		if entry = m.seen(&requests[0]); m.known(entry, reserve, requests[0].Count, &result) {
			w.Form = ratelimit.FormMemory
			return result, nil // before anything is made of the call
		}
	}
	p := &pending{entry: entry}
	if p.call, err = decide.NewIn(p.one[:0], reserve, requests...); err != nil {
		return result, err
	}
	if p.entry != nil { // which had been asked already
		return m.engine.decide(ctx, w, p)
	}
	c := m.claim(&p.call)
	if c.none() {
		if len(p.call.Demands) == 1 {
			p.entry = m.of(&p.call.Demands[0])
		}
		return m.engine.decide(ctx, w, p)
	}
	var rest ratelimit.Result
	if c.all() {
		w.Form = ratelimit.FormMemory
	} else {
		rest, err = m.engine.decide(ctx, w, &pending{call: c.rest})
	}
	c.end(err == nil && (c.all() || rest.OK))
	if err != nil {
		return ratelimit.Result{}, err
	}
	return c.result(rest), nil
}

// seen returns the entry of a request's key, if it was seen before; nil for a request that is
// to leave a share, which only the row decides: the tokens in memory are for the others.
func (m *memory) seen(r *ratelimit.Request) *escrow.Entry {
	if r.AboveShare != 0 {
		return nil
	}
	return m.cache.Seen(r)
}

// of is seen for an ask, and begins to remember its key.
func (m *memory) of(a *decide.Demand) *escrow.Entry {
	if a.RowOnly() {
		return nil
	}
	return m.cache.Of(a)
}

// known tells the result of a call for n tokens of one key, if it is held or known that
// there is too little.
func (m *memory) known(entry *escrow.Entry, reserve bool, n float64, result *ratelimit.Result) (ok bool) {
	var t escrow.Tokens
	if entry.Take(n, false, &t) {
		t.Result(reserve, result)
		return true
	}
	if reserve { // there may be debt to give
		return false
	}
	*result, ok = entry.Refuse(n)
	return ok
}

// claim is the tokens of a call that were held, and the rest of it, for rows.
type claim struct {
	reserve bool
	call    *decide.Call    // nil if all is held, of a single limit
	tokens  []escrow.Tokens // of each limit; zero of one that is not held. Nil if none is
	rest    decide.Call
}

func (c *claim) none() bool { return c == nil || c.tokens == nil }

// all reports whether all of the call was held.
func (c *claim) all() bool { return !c.none() && len(c.rest.Demands) == 0 }

// claim takes the held tokens of a call out of memory, limit by limit, until claim.end. For
// several limits, missing tokens are prefetched for later calls: for one, the statement that
// grants it prefetches.
func (m *memory) claim(call *decide.Call) *claim {
	if m == nil {
		return nil
	}
	c := &claim{reserve: call.Reserve, call: call}
	for i := range call.Demands {
		a := &call.Demands[i]
		var t escrow.Tokens
		if !m.of(a).Take(a.Count, true, &t) {
			continue
		}
		if c.tokens == nil {
			c.tokens = make([]escrow.Tokens, len(call.Demands))
		}
		c.tokens[i] = t
	}
	rest := call
	if c.tokens != nil {
		c.rest = call.Remainder(c.balances())
		rest = &c.rest
	}
	if len(call.Demands) > 1 {
		for i := range rest.Demands {
			a := &rest.Demands[i]
			m.of(a).Miss(a.Count)
		}
	}
	return c
}

// claimSeen is claim for a transaction's call for one limit that was seen before; nil if it
// is not held.
func (m *memory) claimSeen(reserve bool, requests []ratelimit.Request) *claim {
	if m == nil || len(requests) != 1 {
		return nil
	}
	var t escrow.Tokens
	if !m.seen(&requests[0]).Take(requests[0].Count, true, &t) {
		return nil
	}
	return &claim{reserve: reserve, tokens: []escrow.Tokens{t}}
}

// claimFor is claim for a transaction of the runner. The missing tokens of a single limit are
// granted on their own, if it is worth prefetching with them: false if that is refused.
func (m *memory) claimFor(ctx context.Context, call *decide.Call) (c *claim, refused ratelimit.Result, err error) {
	c = m.claim(call)
	if m == nil || !c.none() || len(call.Demands) != 1 {
		return c, refused, nil
	}
	a := call.Demands[0]
	p := &pending{tokens: &escrow.Tokens{}, entry: m.of(&a)}
	if !m.worth(call) {
		p.entry.Note(a.Count, 1)
		return c, refused, nil // the transaction takes from the row
	}
	a.Floor = 0 // debt is the row's to give
	p.call = decide.Call{Demands: []decide.Demand{a}}
	result, err := m.engine.decide(ctx, nil, p)
	switch {
	case err != nil:
		return nil, refused, err
	case result.OK:
		return &claim{reserve: call.Reserve, tokens: []escrow.Tokens{*p.tokens}}, refused, nil
	case call.Reserve:
		return c, refused, nil
	}
	return nil, result, nil
}

// worth reports whether a call is worth a statement of its own, which prefetches.
func (m *memory) worth(call *decide.Call) bool {
	if m == nil || len(call.Demands) != 1 {
		return false
	}
	a := &call.Demands[0]
	return a.Count > 0 && a.Count <= a.Definition.Capacity && m.of(a).Worth()
}

// end notes that the call or transaction is over that has the tokens: unless they are spent,
// they are put back.
func (c *claim) end(spent bool) {
	if c.none() {
		return
	}
	for i := range c.tokens {
		if spent {
			c.tokens[i].Spend()
		} else {
			c.tokens[i].PutBack()
		}
	}
}

func (c *claim) balances() []*decide.Balance {
	balances := make([]*decide.Balance, len(c.call.Demands))
	for i := range c.tokens {
		balances[i] = c.tokens[i].Balance()
	}
	return balances
}

// result returns the result of the whole call, by that of the rest.
func (c *claim) result(rest ratelimit.Result) (result ratelimit.Result) {
	if len(c.tokens) > 1 {
		return c.call.Join(rest, c.balances())
	}
	c.tokens[0].Result(c.reserve, &result)
	return result
}

// prefetch prefetches before the leases have run out. It is called on the way of a call, and
// does not keep that waiting. It goes with the calls for its key that were too late, by the
// same statement: two would find each other's lock on the row.
func (m *memory) prefetch(entry *escrow.Entry) {
	if m.Work.Begin(context.Background()) != nil {
		entry.Prefetched(false)
		return
	}
	go func() {
		defer m.Work.End()
		ctx, cancel := context.WithTimeout(context.Background(), m.patience())
		defer cancel()
		p := &pending{call: decide.Call{Demands: []decide.Demand{*entry.Ask()}}, prefetch: true, entry: entry}
		result, err := m.engine.decide(ctx, nil, p)
		entry.Prefetched(err == nil && result.OK)
	}()
}

// patience is when to give up prefetching: a connection that has fallen silent holds up all
// calls that gather behind it. Other processes' turns at the row take less.
func (m *memory) patience() time.Duration {
	late := max(m.config.Escrow, conn.Awaited)
	if m.Timeout > 0 {
		late = min(late, m.Timeout)
	}
	return late
}

const (
	giveBackTime = conn.DefaultTimeout // bounds an attempt to return tokens, and all of them when the store is closed
	unreachable  = time.Second         // between attempts while there is no connection to be had
)

// giveBackLater returns tokens to their rows without keeping the caller waiting.
func (m *memory) giveBackLater(returns []escrow.Return) {
	if m.Work.Begin(context.Background()) != nil { // the store is closed, and nobody will wait for it
		m.giveBack(returns)
		return
	}
	go func() {
		defer m.Work.End()
		m.giveBack(returns)
	}()
}

// evict returns the tokens held of a key, for which a pause or another definition is to be
// heeded at once.
func (m *memory) evict(key decide.Key) {
	if m == nil {
		return
	}
	if returns := m.cache.Evict(key); len(returns) > 0 {
		m.giveBackLater(returns)
	}
}

// evictAll returns the tokens held of all keys.
func (m *memory) evictAll() {
	if m != nil {
		m.giveBackLater(m.cache.EvictAll())
	}
}

// close returns all that is held, before it returns.
func (m *memory) close() {
	if m != nil {
		m.giveBack(m.cache.EvictAll())
	}
}

// giveBack returns tokens to their rows, however long others have these locked, as long as
// they are worth anything. When the store is closed it gives up after a while.
func (m *memory) giveBack(returns []escrow.Return) {
	ctx, cancel := table.Outlast(m.Work.Opened, giveBackTime)
	defer cancel()
	begun, absent := time.Now(), false
	attempt := func(p *conn.Seat) error {
		since := time.Since(begun)
		absent = false
		returns = slices.DeleteFunc(returns, func(r escrow.Return) bool {
			over, err := m.giveBackOnce(ctx, &r, p != nil)
			absent = absent || table.Unsent(err)
			return over || r.Definition.Fades(&r.Return, m.config.Escrow) < since
		})
		return nil
	}
	_ = attempt(nil)
	for w := m.LockWait(conn.Poll); len(returns) > 0; {
		if absent && conn.Sleep(ctx, unreachable) != nil || w.Attempt(ctx, attempt) != nil {
			return
		}
	}
}

// giveBackOnce reports whether nothing is left to be done.
func (m *memory) giveBackOnce(ctx context.Context, r *escrow.Return, await bool) (over bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, giveBackTime)
	defer cancel()
	back := r.Return
	back.Known = m.cache.Past(r)
	done, err := m.table.Return(ctx, m.Pool, r.Row, &r.Definition, &back, await, m.Clock())
	if done {
		m.cache.Changed(r.Row.Key)
	}
	return done || err != nil && !m.again(err), err
}

// again reports whether a failed operation is worth another attempt: it was certainly not done,
// and may succeed another time.
func (m *memory) again(err error) bool {
	if table.Unsent(err) {
		return m.Work.Opened.Err() == nil
	}
	return conn.Forgotten(err) || conn.Answered(err) && !conn.OfValues(err) && !strings.HasPrefix(conn.Code(err), "42")
}
