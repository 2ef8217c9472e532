package catalog

import (
	"context"
	"encoding/json"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// memory is the catalog in memory.
type memory struct {
	keeping   sync.Mutex // held during an edit that changes rows
	editing   sync.Mutex // held while an edit reads and writes
	mu        sync.Mutex // guards the fields below
	published map[string]published
	overrides map[place]Entry
	changes   []Change
	version   int64
	clock     func() time.Time
}

func newMemory(clock func() time.Time) *memory {
	if clock == nil {
		clock = time.Now
	}
	return &memory{published: map[string]published{}, overrides: map[place]Entry{}, clock: clock}
}

// read reads everything, since copying everything costs no more than copying the changes.
func (m *memory) read() *reading {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := &reading{whole: true, mark: mark{version: m.version}, at: m.clock()}
	for _, d := range m.published {
		r.published = append(r.published, d)
	}
	for _, e := range m.overrides {
		r.overrides = append(r.overrides, e)
	}
	return r
}

func (m *memory) lock(context.Context, pgx.Tx) (unlock func(), err error) {
	m.editing.Lock()
	return m.editing.Unlock, nil
}

// as does nothing: log looks into the context.
func (m *memory) as(context.Context, pgx.Tx, string) error { return nil }

func (m *memory) rowsOf(_ context.Context, _ pgx.Tx, names []string, key string) (*reading, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := &reading{whole: true, at: m.clock()}
	for _, name := range names {
		if d, ok := m.published[name]; ok {
			r.published = append(r.published, d)
		}
		if e, ok := m.overrides[place{name, AllKeys}]; ok {
			r.overrides = append(r.overrides, e)
		}
		if e, ok := m.overrides[place{name, key}]; ok && key != AllKeys {
			r.overrides = append(r.overrides, e)
		}
	}
	return r, nil
}

func (m *memory) publish(ctx context.Context, _ pgx.Tx, p *published) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	was, ok := m.published[p.Name]
	m.log(ctx, place{p.Name, AllKeys}, jsonOf(was, ok), jsonOf(*p, true))
	m.published[p.Name] = *p
	return nil
}

func (m *memory) set(ctx context.Context, _ pgx.Tx, e *Entry) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	at, of := place{e.Name, e.Key}, *e
	was, ok := m.overrides[at]
	of.UpdatedAt = m.clock()
	m.log(ctx, at, jsonOf(was.Override, ok), jsonOf(of.Override, true))
	m.overrides[at] = of
	return nil
}

func (m *memory) unset(ctx context.Context, _ pgx.Tx, at place) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if was, ok := m.overrides[at]; ok {
		m.log(ctx, at, jsonOf(was.Override, true), nil)
		delete(m.overrides, at)
	}
	return nil
}

func (m *memory) forget(ctx context.Context, _ pgx.Tx, name string) (n int64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d, ok := m.published[name]; ok {
		m.log(ctx, place{name, AllKeys}, jsonOf(d, true), nil)
		delete(m.published, name)
		n++
	}
	for at, e := range m.overrides {
		if at.name == name {
			m.log(ctx, at, jsonOf(e.Override, true), nil)
			delete(m.overrides, at)
			n++
		}
	}
	return n, nil
}

// log writes a change into the history. It needs mu.
func (m *memory) log(ctx context.Context, at place, was, became json.RawMessage) {
	if slices.Equal(was, became) {
		return
	}
	m.version++
	m.changes = append(m.changes, Change{Version: m.version, At: m.clock(), Role: "memory", Who: whoOf(ctx), Name: at.name, Key: at.key, Was: was, Became: became})
}

func (m *memory) history(ctx context.Context, name string, key *string, most int) (changes []Change, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range slices.Backward(m.changes) {
		if most > 0 && len(changes) == most {
			break
		}
		if (name == "" || c.Name == name) && (key == nil || c.Key == AllKeys || c.Key == *key) {
			changes = append(changes, c)
		}
	}
	return changes, ctx.Err()
}

func (m *memory) pruneHistory(ctx context.Context, age time.Duration) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before, had := m.clock().Add(-age), len(m.changes)
	m.changes = slices.DeleteFunc(m.changes, func(c Change) bool { return c.At.Before(before) && c.Version < m.version })
	return int64(had - len(m.changes)), ctx.Err()
}

// jsonOf returns a definition or an override as the history stores it, in the words of the table;
// nil without one.
func jsonOf[T published | Override](v T, ok bool) json.RawMessage {
	if !ok {
		return nil
	}
	row := map[string]any{}
	put := func(name string, given bool, v any) {
		if given {
			row[name] = v
		}
	}
	switch v := any(v).(type) {
	case published:
		row["kind"] = v.kind()
		if v.inFlight != nil {
			row["at_once"], row["lease"] = v.inFlight.Limit, v.inFlight.Lease.String()
			break
		}
		row["rate"], row["period"], row["shards"] = v.Rate, v.Period.String(), v.Shards
		put("capacity", v.Capacity != v.Rate, v.Capacity)
		row["max_reserved"] = finite(v.MaxReserved)
		put("start", !v.Start.IsZero(), v.Start)
		put("slots", v.Slots != 0, v.Slots)
		put("every", v.Every != 0, v.Every.String())
		put("zone", v.Every != 0, v.Zone)
		put("anchor", v.Every != 0, v.Anchor.String())
		put("time", v.Time != 0, bucket.TimeOfDay(v.Time))
	case Override:
		put("rate", v.Rate != 0, v.Rate)
		put("period", v.Period != 0, v.Period.String())
		put("capacity", v.Capacity != 0, orZero(v.Capacity))
		put("max_reserved", v.MaxReserved != 0, finite(orZero(v.MaxReserved)))
		put("slots", v.Slots != 0, v.Slots)
		put("at_once", v.AtOnce != 0, v.AtOnce)
		put("lease", v.Lease != 0, v.Lease.String())
		put("mode", v.Mode != 0, v.Mode)
		put("until", !v.Until.IsZero(), v.Until)
		put("note", v.Note != "", v.Note)
		row["enabled"] = v.Switch != Off
	}
	text, _ := json.Marshal(row) // it has nothing that JSON lacks
	return text
}

// finite returns a number for JSON, which has no infinity.
func finite(v float64) any {
	if math.IsInf(v, 0) {
		return "Infinity"
	}
	return v
}
