package memory

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

const (
	returnTime  = conn.DefaultTimeout // bounds an attempt to return tokens, and all of them once the store is closed
	unreachable = time.Second         // between attempts without a connection
)

// Evict returns the tokens held of a key, so that a pause or another definition holds at once.
func (m *Memory) Evict(key decide.Key) {
	if m != nil {
		m.returnLater(m.cache.Evict(key))
	}
}

// EvictAll returns the tokens held of all keys.
func (m *Memory) EvictAll() {
	if m != nil {
		m.returnLater(m.cache.EvictAll())
	}
}

// Close returns all held tokens to their rows.
func (m *Memory) Close() {
	if m != nil {
		m.returnAll(m.cache.EvictAll())
	}
}

// returnLater returns tokens to their rows without keeping the caller waiting, unless the store is
// closed.
func (m *Memory) returnLater(returns []escrow.Return) {
	if len(returns) == 0 {
		return
	}
	if m.Work.Begin(context.Background()) != nil {
		m.returnAll(returns)
		return
	}
	go func() {
		defer m.Work.End()
		m.returnAll(returns)
	}()
}

// returnAll returns tokens to their rows. It tries as long as the tokens are worth anything, however
// long other transactions have the rows locked; once the store is closed it gives up after a while.
func (m *Memory) returnAll(returns []escrow.Return) {
	ctx, cancel := table.Outlast(m.Work.Opened)
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

// returnOnce makes one attempt to return tokens, and reports whether it was the last that is needed.
func (m *Memory) returnOnce(ctx context.Context, r *escrow.Return, await bool) (over bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, returnTime)
	defer cancel()
	back := r.Return
	back.Known = m.cache.DatabaseTime(r)
	done, err := m.table.Return(ctx, m.Pool, r.Row, &r.Definition, &back, await, m.Clock())
	m.LeaveReadOnly(err)
	if done {
		m.cache.RowChanged(r.Row.Key)
	}
	return done || err != nil && !m.retriable(err), err
}

// retriable reports whether a failed return certainly did nothing, and may succeed another time.
func (m *Memory) retriable(err error) bool {
	if table.Unsent(err) {
		return m.Work.Opened.Err() == nil
	}
	return conn.Forgotten(err) || intx.Answered(err) && !conn.OfValues(err) && !strings.HasPrefix(conn.Code(err), "42")
}
