// Package memory is the layer above the engine with Config.Escrow: calls are answered from
// prefetched tokens, or refused by the known state of a row (package escrow), and only the rest of
// them reach rows.
package memory

import (
	"context"
	"slices"
	"strings"
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

// Memory is the tokens that a process holds. It is safe for concurrent use. A nil Memory holds
// nothing.
type Memory struct {
	*conn.Conn
	table  *table.Table
	engine *engine.Engine
	cache  *escrow.Cache
	lasts  time.Duration // of a lease
}

// New returns a Memory above an engine, which it serves.
func New(c *conn.Conn, t *table.Table, k *known.Known, e *engine.Engine, lasts time.Duration) *Memory {
	m := &Memory{Conn: c, table: t, engine: e, lasts: lasts}
	config := escrow.Config{Lasts: lasts, Prefetch: m.prefetch, GiveBack: m.returnLater}
	if c.Now != nil {
		config.Clock = func() time.Time { return *c.Clock() }
	}
	m.cache = escrow.New(config)
	k.OnChange(m.cache.Changed)
	e.Serve(m)
	return m
}

// Decide decides a call on its own, from the leases and the known state of its keys as far as
// possible.
func (m *Memory) Decide(ctx context.Context, w *watch.Watch, reserve bool, requests []ratelimit.Request) (result ratelimit.Result, err error) {
	if err := ctx.Err(); err != nil {
		return result, err
	}
	var entry *escrow.Entry
	if len(requests) == 1 {
		if entry = m.Remembered(&requests[0]); m.answer(entry, reserve, requests[0].Count, &result) {
			w.Form = ratelimit.FormMemory
			return result, nil // before anything is made of the call
		}
	}
	p := &engine.Pending{}
	if p.Call, err = decide.NewIn(p.One[:0], reserve, requests...); err != nil {
		return result, err
	}
	if entry != nil { // which had been asked already
		Attach(p, entry, nil)
		return m.engine.Decide(ctx, w, p)
	}
	c := m.claim(&p.Call)
	if c.None() {
		if len(p.Call.Demands) == 1 {
			Attach(p, m.entryOf(&p.Call.Demands[0]), nil)
		}
		return m.engine.Decide(ctx, w, p)
	}
	var rest ratelimit.Result
	if c.All() {
		w.Form = ratelimit.FormMemory
	} else {
		rest, err = m.engine.Decide(ctx, w, &engine.Pending{Call: c.Rest})
	}
	c.End(err == nil && (c.All() || rest.OK))
	if err != nil {
		return ratelimit.Result{}, err
	}
	return c.Result(rest), nil
}

// Remembered returns the entry of a request's key, if it is remembered; nil for a request that is to
// leave a share, which only the row decides: the tokens in memory are for the others.
func (m *Memory) Remembered(r *ratelimit.Request) *escrow.Entry {
	if r.AboveShare != 0 {
		return nil
	}
	return m.cache.Find(r)
}

// entryOf returns the entry of a demand's key, and begins to remember it; nil if only the row
// decides the demand.
func (m *Memory) entryOf(a *decide.Demand) *escrow.Entry {
	if m == nil || a.RowOnly() {
		return nil
	}
	return m.cache.FindOrAdd(a)
}

// answer answers a call for n tokens of one key, if they are held, or it is known that there are too
// few.
func (m *Memory) answer(entry *escrow.Entry, reserve bool, n float64, result *ratelimit.Result) (ok bool) {
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

// prefetch prefetches before the leases have run out. It is called on the way of a call, and does
// not keep that waiting. It goes with the calls for its key that were too late, by the same
// statement: two would find each other's lock on the row.
func (m *Memory) prefetch(entry *escrow.Entry) {
	if m.Work.Begin(context.Background()) != nil {
		entry.Prefetched(false)
		return
	}
	go func() {
		defer m.Work.End()
		ctx, cancel := context.WithTimeout(context.Background(), m.patience())
		defer cancel()
		p := &engine.Pending{Call: decide.Call{Demands: []decide.Demand{*entry.Template()}}, Extra: true}
		Attach(p, entry, nil)
		result, err := m.engine.Decide(ctx, nil, p)
		entry.Prefetched(err == nil && result.OK)
	}()
}

// patience returns when to give up prefetching: a connection that has fallen silent holds up all
// calls that gather behind it. Other processes' turns at the row take less.
func (m *Memory) patience() time.Duration {
	late := max(m.lasts, conn.Awaited)
	if m.Timeout > 0 {
		late = min(late, m.Timeout)
	}
	return late
}

// Contended notes that a transaction met others at the row of a demand.
func (m *Memory) Contended(a *decide.Demand) {
	m.entryOf(a).Contended()
}

// NoteShared notes that other processes took from the rows of a call at the same time, and are done: calls
// that prefetch need not find that out again.
func (m *Memory) NoteShared(call *decide.Call) {
	if m == nil {
		return
	}
	for i := range call.Demands {
		if entry := m.cache.FindOrAdd(&call.Demands[i]); entry.CanPrefetch() {
			entry.Contended()
			m.engine.Shared(decide.Row{Key: call.Demands[i].KeyOf()})
		}
	}
}

// TakeSpent takes out the tokens that this process has used from memory and that the row of a key is to
// learn of: they are not out any more.
func (m *Memory) TakeSpent(key decide.Key) bucket.Spent { return m.cache.TakeSpent(key) }

// RestoreSpent notes that a transaction was rolled back that was to tell a row of spent tokens.
func (m *Memory) RestoreSpent(key decide.Key, spent bucket.Spent) { m.cache.RestoreSpent(key, spent) }

// Held returns the tokens that are held, by the limits' names.
func (m *Memory) Held() map[string]escrow.Held {
	if m == nil {
		return nil
	}
	return m.cache.Held()
}

const (
	returnTime  = conn.DefaultTimeout // bounds an attempt to return tokens, and all of them when the store is closed
	unreachable = time.Second         // between attempts while there is no connection to be had
)

// returnLater returns tokens to their rows without keeping the caller waiting.
func (m *Memory) returnLater(returns []escrow.Return) {
	if m.Work.Begin(context.Background()) != nil { // the store is closed, and no caller will wait for it
		m.returnAll(returns)
		return
	}
	go func() {
		defer m.Work.End()
		m.returnAll(returns)
	}()
}

// Evict returns the tokens held of a key, for which a pause or another definition is to hold at
// once.
func (m *Memory) Evict(key decide.Key) {
	if m == nil {
		return
	}
	if returns := m.cache.Evict(key); len(returns) > 0 {
		m.returnLater(returns)
	}
}

// EvictAll returns the tokens held of all keys.
func (m *Memory) EvictAll() {
	if m != nil {
		m.returnLater(m.cache.EvictAll())
	}
}

// Close returns all that is held, before it returns.
func (m *Memory) Close() {
	if m != nil {
		m.returnAll(m.cache.EvictAll())
	}
}

// returnAll returns tokens to their rows, however long other transactions have these locked, as long
// as they are worth anything. When the store is closed it gives up after a while.
func (m *Memory) returnAll(returns []escrow.Return) {
	ctx, cancel := table.Outlast(m.Work.Opened, returnTime)
	defer cancel()
	begun, absent := time.Now(), false
	attempt := func(s *conn.Seat) error {
		since := time.Since(begun)
		absent = false
		returns = slices.DeleteFunc(returns, func(r escrow.Return) bool {
			over, err := m.returnOnce(ctx, &r, s != nil)
			absent = absent || table.Unsent(err)
			return over || r.Definition.Fades(&r.Return, m.lasts) < since
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

// returnOnce reports whether nothing is left to be done.
func (m *Memory) returnOnce(ctx context.Context, r *escrow.Return, await bool) (over bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, returnTime)
	defer cancel()
	back := r.Return
	back.Known = m.cache.DatabaseTime(r)
	done, err := m.table.Return(ctx, m.Pool, r.Row, &r.Definition, &back, await, m.Clock())
	m.LeaveReadOnly(err)
	if done {
		m.cache.Changed(r.Row.Key)
	}
	return done || err != nil && !m.retriable(err), err
}

// retriable reports whether a failed operation is worth another attempt: it was certainly not done, and
// may succeed another time.
func (m *Memory) retriable(err error) bool {
	if table.Unsent(err) {
		return m.Work.Opened.Err() == nil
	}
	return conn.Forgotten(err) || conn.Answered(err) && !conn.OfValues(err) && !strings.HasPrefix(conn.Code(err), "42")
}
