package fallback

import (
	"context"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// memory is this process's part of the limits: a bucket for each key that is not full, of the
// limit's rate and capacity divided by the number of processes. While the database answers, a bucket
// is never fuller than this part of the row. So silences that follow each other fill nothing.
// A nil memory knows nothing.
type memory struct {
	processes float64
	most      int       // keys
	began     time.Time // from which the monotonic clock counts: a step of the wall clock fills nothing

	mu    sync.Mutex
	rows  map[decide.Key]row
	swept time.Time
}

// row is a bucket, and when it is full again.
type row struct {
	state bucket.State
	full  time.Time
}

// taker is that of memory's receipts. It is no transaction's, so they have no text, and no other
// store settles them.
const taker = "of a silence, which one process remembers"

// The reasons for which memory does not decide.
const (
	tooSmall = "this process's share of the limit is too small for the call"
	tooMany  = "this process remembers as many keys as it may"
)

func newMemory(processes, most int) *memory {
	return &memory{processes: float64(processes), most: most, began: time.Now(), rows: map[decide.Key]row{}}
}

func (m *memory) now() time.Time {
	return m.began.Add(time.Since(m.began)).UTC().Truncate(time.Microsecond)
}

func (m *memory) size() int {
	if m == nil {
		return 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.rows)
}

// share returns this process's part of a limit.
func (m *memory) share(limit ratelimit.Limit) ratelimit.Definition {
	d := limit.Definition()
	d.Rate /= m.processes
	d.Capacity /= m.processes
	d.MaxReserved, d.Shards = 0, 1
	return d
}

// shares returns requests to this process's part of their limits; false if one is too small for
// them. A call that takes from the first limit that can grant goes past those.
func (m *memory) shares(verb decide.Verb, requests []ratelimit.Request) (shares []ratelimit.Request, ok bool) {
	for _, r := range requests {
		switch d := m.share(r.Limit); {
		case d.Capacity >= 1:
			r.Limit = d.Limit()
			shares = append(shares, r)
		case verb != decide.First:
			return nil, false
		}
	}
	return shares, len(shares) > 0
}

// decide decides a call of valid requests without modes, or returns the reason for which it does
// not.
func (m *memory) decide(verb decide.Verb, requests []ratelimit.Request) (result ratelimit.Result, reason string) {
	shares, ok := m.shares(verb, requests)
	if !ok {
		return result, tooSmall
	}
	call, err := verb.Call(nil, nil, false, shares)
	if err != nil { // more than there can ever be in the share
		return result, tooSmall
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	view := m.view(&call, m.now())
	if verb == decide.Look {
		return ofLimits(call.Checked(view), requests), ""
	}
	changes, ok := call.Plan(view)
	if !ok {
		return ofLimits(call.Refused(view), requests), ""
	}
	if !m.room(changes, view.At) {
		return result, tooMany
	}
	for i := range changes {
		m.put(changes[i].Key, &changes[i].Definition, changes[i].After, view.At)
	}
	return ofLimits(call.Receipted(changes, m.view(&call, view.At), taker, m), requests), ""
}

// ofLimits returns a result about shares as one about the limits that were asked.
func ofLimits(result ratelimit.Result, requests []ratelimit.Request) ratelimit.Result {
	put := func(s *ratelimit.Status) {
		for i := range requests {
			if r := &requests[i]; r.Key == s.Request.Key && ratelimit.NameOf(r.Limit) == ratelimit.NameOf(s.Request.Limit) {
				s.Request.Limit = r.Limit
				return
			}
		}
	}
	put(&result.Status)
	for i := range result.Several {
		put(&result.Several[i])
	}
	return result
}

// note heeds what the database has said a while ago: the share is no larger than its part of that.
func (m *memory) note(result *ratelimit.Result, ago time.Duration) {
	if m == nil {
		return
	}
	if result.Several == nil {
		m.noteStatus(&result.Status, ago)
	}
	for i := range result.Several {
		m.noteStatus(&result.Several[i], ago)
	}
}

// isAsked reports whether a status is of the database: not that of ModeRefuse, or beside one.
func isAsked(s *ratelimit.Status) bool {
	return s.Request.Mode != ratelimit.ModeRefuse && !s.At.IsZero()
}

func (m *memory) noteStatus(status *ratelimit.Status, ago time.Duration) {
	if status.Request.Limit == nil || !isAsked(status) {
		return
	}
	m.change(status.Request.Limit, status.Request.Key, func(d *bucket.Definition, state bucket.State, now time.Time) bucket.State {
		if pause := status.PausedUntil.Sub(status.At) - ago; pause > 0 && !status.PausedUntil.IsZero() {
			state = d.Pause(state, now, now.Add(pause))
		} else if state.Paused.After(now) {
			state = d.Resume(status.Request.Key, state, now)
		}
		if over := d.ValueAt(d.Refill(state, now), now) - status.Value/m.processes; over > 0 {
			state = d.Spend(state, now, over)
		}
		return state
	})
}

// pause heeds that the database has paused a limit.
func (m *memory) pause(limit ratelimit.Limit, key string, lasts time.Duration) {
	m.change(limit, key, func(d *bucket.Definition, state bucket.State, now time.Time) bucket.State {
		if until := now.Add(lasts); until.After(state.Paused) {
			return d.Pause(state, now, until)
		}
		return state
	})
}

// resume heeds that it has ended the pause.
func (m *memory) resume(limit ratelimit.Limit, key string) {
	m.change(limit, key, func(d *bucket.Definition, state bucket.State, now time.Time) bucket.State {
		return d.Resume(key, state, now)
	})
}

// change changes a bucket by what the database has said, if there is room for it.
func (m *memory) change(limit ratelimit.Limit, key string, to func(d *bucket.Definition, state bucket.State, now time.Time) bucket.State) {
	if m == nil {
		return
	}
	d := bucket.Definition(m.share(limit))
	if d.Capacity < 1 {
		return
	}
	of := decide.Key{Name: d.Name, Key: key}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	if _, known := m.rows[of]; known || len(m.rows) < m.most || m.sweep(now) {
		m.put(of, &d, to(&d, m.state(of, &d, now), now), now)
	}
}

// settle settles what memory granted.
func (m *memory) settle(ctx context.Context, r *ratelimit.Receipt, used []float64) (result ratelimit.Result, err error) {
	var none decide.Definitions // the receipt has those that it was granted by
	settlement, err := none.Settle(r, used)
	if err != nil {
		return ratelimit.Result{}, err
	}
	err = receipt.Redeem(ctx, r, func(mark string) (string, error) {
		if mark != "" {
			return mark, ratelimit.ErrSettled
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		now := m.now()
		for i := range settlement.Changes {
			c := &settlement.Changes[i]
			if _, ok := m.rows[c.Key]; ok || c.Count > 0 { // no row is full already
				m.put(c.Key, &c.Definition, c.Refill(m.state(c.Key, &c.Definition, now), now), now)
			}
		}
		result = settlement.Result(m.view(&settlement.Call, now))
		return "settled", nil
	})
	return result, err
}

// granted reports whether memory granted what a receipt is of.
func (m *memory) granted(r *ratelimit.Receipt) bool {
	return m != nil && r != nil && receipt.Conn(r) == any(m)
}

// The methods that follow need the lock.

func (m *memory) view(call *decide.Call, now time.Time) decide.View {
	view := decide.View{States: make([][]bucket.State, len(call.Demands)), At: now}
	for i := range call.Demands {
		a := &call.Demands[i]
		view.States[i] = []bucket.State{m.state(a.KeyOf(), &a.Definition, now)}
	}
	return view
}

func (m *memory) state(key decide.Key, d *bucket.Definition, now time.Time) bucket.State {
	if r, ok := m.rows[key]; ok {
		return r.state
	}
	return d.Fresh(key.Key, now)
}

// put keeps a state, unless that is as good as none.
func (m *memory) put(key decide.Key, d *bucket.Definition, state bucket.State, now time.Time) {
	full := d.When(d.Refill(state, now), d.Capacity)
	if full.After(now) {
		m.rows[key] = row{state, full}
	} else {
		delete(m.rows, key)
	}
}

// room reports whether there is room for the rows of changes.
func (m *memory) room(changes []decide.Change, now time.Time) bool {
	missing := 0
	for i := range changes {
		if _, ok := m.rows[changes[i].Key]; !ok {
			missing++
		}
	}
	return missing == 0 || len(m.rows)+missing <= m.most || m.sweep(now) && len(m.rows)+missing <= m.most
}

// sweep forgets the keys that are full, at most once a second, and reports whether there is room
// for another one.
func (m *memory) sweep(now time.Time) bool {
	if now.Sub(m.swept) < time.Second {
		return false
	}
	m.swept = now
	for key, r := range m.rows {
		if !r.full.After(now) {
			delete(m.rows, key)
		}
	}
	return len(m.rows) < m.most
}
