// Package memory is the layer above the engine with Config.Escrow. It answers calls from prefetched
// tokens, or refuses them by the known state of a row (package escrow). Only the other calls reach
// rows.
package memory

import (
	"context"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
	"github.com/pgratelimit/ratelimit/pgstore/internal/known"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Memory holds a process's tokens. It is safe for concurrent use. A nil Memory holds nothing.
type Memory struct {
	*conn.Conn
	table  *table.Table
	known  *known.Known
	engine *engine.Engine
	cache  *escrow.Cache
	lasts  time.Duration // of a lease
}

// New returns a Memory above an engine, which it serves.
func New(c *conn.Conn, t *table.Table, k *known.Known, e *engine.Engine, lasts time.Duration) *Memory {
	m := &Memory{Conn: c, table: t, known: k, engine: e, lasts: lasts}
	config := escrow.Config{Lasts: lasts, Prefetch: m.prefetch, GiveBack: m.returnLater}
	if c.Now != nil {
		config.Clock = func() time.Time { return *c.Clock() }
	}
	m.cache = escrow.New(config)
	k.OnChange, e.Memory = m.cache.RowChanged, m
	return m
}

// Decide decides a call on its own. It takes from leases and refuses by known states where it can.
func (m *Memory) Decide(ctx context.Context, w *watch.Watch, reserve bool, requests []ratelimit.Request) (result ratelimit.Result, err error) {
	if err := ctx.Err(); err != nil {
		return result, err
	}
	var entry *escrow.Entry
	if len(requests) == 1 {
		if entry = m.Remembered(&requests[0]); answer(entry, reserve, requests[0].Count, &result) {
			w.InMemory()
			return result, nil // before anything is made of the call
		}
	}
	p, plain := &engine.Pending{}, false
	if p.Call, plain = m.known.Definitions.Plain(decide.All, reserve, p.One[:0], requests); !plain {
		if p.Call, err = m.known.Definitions.Call(decide.All, reserve, p.One[:0], requests); err != nil {
			return result, err
		}
	}
	if len(p.Call.Demands) > 1 {
		return m.decideSeveral(ctx, w, &p.Call)
	}
	if a := &p.Call.Demands[0]; entry == nil {
		if entry = m.entryOf(a); answer(entry, reserve, a.Count, &result) {
			w.InMemory()
			return result, nil
		}
	}
	Attach(p, entry, nil)
	return m.engine.Decide(ctx, w, p)
}

// decideSeveral decides a call for several limits: those whose tokens are held from memory, and the
// rest on rows.
func (m *Memory) decideSeveral(ctx context.Context, w *watch.Watch, call *decide.Call) (ratelimit.Result, error) {
	c := m.claim(call)
	if c == nil {
		return m.engine.Decide(ctx, w, &engine.Pending{Call: *call})
	}
	if c.All() {
		w.InMemory()
		c.End(true)
		return c.Result(ratelimit.Result{}), nil
	}
	rest, err := m.engine.Decide(ctx, w, &engine.Pending{Call: c.Rest})
	c.End(err == nil && rest.OK)
	if err != nil {
		return ratelimit.Result{}, err
	}
	return c.Result(rest), nil
}

// answer answers a call for n tokens of one key from memory: with tokens that are held, or with a
// refusal that is known.
func answer(entry *escrow.Entry, reserve bool, n float64, result *ratelimit.Result) (ok bool) {
	var t escrow.Tokens
	if entry.Take(n, false, &t) {
		t.Result(reserve, result)
		return true
	}
	if reserve { // the row may give debt
		return false
	}
	*result, ok = entry.Refuse(n)
	return ok
}

// Remembered returns the entry of a request's key, if it is remembered. It returns nil for a request
// that is to leave a share: the tokens in memory are for the others, so only the row decides it.
func (m *Memory) Remembered(r *ratelimit.Request) *escrow.Entry {
	if r.AboveShare != 0 {
		return nil
	}
	return m.cache.Find(r)
}

// entryOf returns the entry of a demand's key, and adds it if it is missing; nil if only the row
// decides the demand.
func (m *Memory) entryOf(a *decide.Demand) *escrow.Entry {
	if a.RowOnly() {
		return nil
	}
	return m.cache.FindOrAdd(a)
}

// prefetch prefetches before the leases have run out, without keeping its caller waiting. It shares
// the statement of calls for the key that found nothing held: two statements would find each
// other's lock on the row. It gives up soon, since a silent connection holds up all calls that
// gather behind it. Turns of other processes at the row are shorter.
func (m *Memory) prefetch(entry *escrow.Entry) {
	if m.Work.Begin(context.Background()) != nil {
		entry.Prefetched(false)
		return
	}
	go func() {
		defer m.Work.End()
		patience := max(m.lasts, conn.Awaited)
		if m.Timeout > 0 {
			patience = min(patience, m.Timeout)
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		p := &engine.Pending{Call: decide.Call{Demands: []decide.Demand{*entry.Template()}}, Extra: true}
		Attach(p, entry, nil)
		result, err := m.engine.Decide(ctx, nil, p)
		entry.Prefetched(err == nil && result.OK)
	}()
}

// Contended notes that a transaction met others at the row of a demand.
func (m *Memory) Contended(a *decide.Demand) {
	m.entryOf(a).Contended()
}

// NoteShared notes that other processes took from the rows of a call at the same time, and are done.
// Calls that prefetch wait in the rows' queues from now on.
func (m *Memory) NoteShared(call *decide.Call) {
	for i := range call.Demands {
		if entry := m.entryOf(&call.Demands[i]); entry.CanPrefetch() {
			entry.Contended()
			m.engine.Shared(decide.Row{Key: call.Demands[i].KeyOf()})
		}
	}
}

// TakeSpent takes out a key's tokens spent from memory. A transaction is about to report them to
// the row.
func (m *Memory) TakeSpent(key decide.Key) bucket.Spent { return m.cache.TakeSpent(key) }

// RestoreSpent puts spent tokens back, since the transaction that reported them was rolled back.
func (m *Memory) RestoreSpent(key decide.Key, spent bucket.Spent) { m.cache.RestoreSpent(key, spent) }

// Held returns the tokens held, by the limits' names.
func (m *Memory) Held() map[string]escrow.Held {
	if m == nil {
		return nil
	}
	return m.cache.Held()
}

// Claim holds a call's tokens from memory until [Claim.End]. Rest is the part of the call that rows
// decide. A Claim is nil if memory held no tokens.
type Claim struct {
	Rest decide.Call

	call   *decide.Call
	tokens []escrow.Tokens // of each limit; zero if they were not held
}

// All reports whether all of the call was held.
func (c *Claim) All() bool { return len(c.Rest.Demands) == 0 }

// claim takes the held tokens of a call out of memory. For a call with several limits it prefetches
// the missing tokens, for later calls. The statement that grants a single limit prefetches by
// itself.
func (m *Memory) claim(call *decide.Call) *Claim {
	c := &Claim{call: call}
	for i := range call.Demands {
		a := &call.Demands[i]
		var t escrow.Tokens
		if entry := m.entryOf(a); !entry.Take(a.Count, true, &t) {
			if len(call.Demands) > 1 {
				entry.Miss(a.Count)
			}
			continue
		}
		if c.tokens == nil {
			c.tokens = make([]escrow.Tokens, len(call.Demands))
		}
		c.tokens[i] = t
	}
	if c.tokens == nil {
		return nil
	}
	c.Rest = call.Remainder(c.balances())
	return c
}

// Claim claims the tokens of a transaction's call. If the tokens of a single limit are missing, and
// prefetching pays, a statement of its own grants them and prefetches. If that refuses an allow,
// refused is the call's result.
func (m *Memory) Claim(ctx context.Context, call *decide.Call) (c *Claim, refused ratelimit.Result, err error) {
	c = m.claim(call)
	if c != nil || len(call.Demands) != 1 {
		return c, refused, nil
	}
	a := call.Demands[0]
	tokens, entry := &escrow.Tokens{}, m.entryOf(&a)
	if !m.WorthPrefetching(call) {
		entry.CountDemand(a.Count, 1)
		return c, refused, nil // the transaction takes from the row
	}
	a.Floor = 0 // only the row gives debt
	p := &engine.Pending{Call: decide.Call{Demands: []decide.Demand{a}}}
	Attach(p, entry, tokens)
	result, err := m.engine.Decide(ctx, nil, p)
	switch {
	case err != nil:
		return nil, refused, err
	case result.OK:
		return &Claim{call: call, tokens: []escrow.Tokens{*tokens}}, refused, nil
	case call.Reserve:
		return c, refused, nil
	}
	return nil, result, nil
}

// WorthPrefetching reports whether a call should have a statement of its own, which prefetches.
func (m *Memory) WorthPrefetching(call *decide.Call) bool {
	if len(call.Demands) != 1 {
		return false
	}
	a := &call.Demands[0]
	return a.Count > 0 && a.Count <= a.Definition.Capacity && m.entryOf(a).WorthPrefetching()
}

// End ends the claim with its call or transaction: the tokens are spent or put back.
func (c *Claim) End(spent bool) {
	for i := range c.tokens {
		if spent {
			c.tokens[i].Spend()
		} else {
			c.tokens[i].PutBack()
		}
	}
}

func (c *Claim) balances() []*decide.Balance {
	balances := make([]*decide.Balance, len(c.call.Demands))
	for i := range c.tokens {
		balances[i] = c.tokens[i].Balance()
	}
	return balances
}

// Result returns the result of the whole call; rest is the result of Rest.
func (c *Claim) Result(rest ratelimit.Result) (result ratelimit.Result) {
	if len(c.tokens) > 1 {
		return c.call.Join(rest, c.balances())
	}
	c.tokens[0].Result(c.call.Reserve, &result)
	return result
}
