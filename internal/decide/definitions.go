package decide

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Definitions is the definitions that a store has met, by name. Its zero value is ready,
// and it is safe for concurrent use.
type Definitions struct {
	mu       sync.RWMutex
	byName   map[string]*family
	inFlight map[string]bool // names of limits of how many at once
}

// family is the definitions of one name.
type family struct {
	all    []bucket.Definition
	newest bucket.Definition // of those that were called
}

// Note remembers the definition of a call, unless the name belongs to a limit of another kind:
// the two would misread each other's rows. The error is ErrInvalid.
//
// Definitions that differ in Rate and Capacity only are kept as one, the slowest to fill and
// the largest: a row that is full by that is full by each of them, and so the memory does not
// grow with the number of plans.
func (s *Definitions) Note(d bucket.Definition) error {
	s.mu.RLock()
	f := s.byName[d.Name]
	known := f != nil && (f.newest == d || alike(f.newest, d) && f.covers(d))
	s.mu.RUnlock()
	if known {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inFlight[d.Name] {
		return inUse(d.Name, "Kind", d.Kind, "limit of how many at once")
	}
	f = s.family(d.Name)
	if len(f.all) > 0 && f.all[0].Kind != d.Kind {
		return inUse(d.Name, "Kind", d.Kind, f.all[0].Kind.String())
	}
	f.add(d)
	f.newest = d
	return nil
}

// NoteInFlight is Note of the name of a limit of how many at once.
func (s *Definitions) NoteInFlight(name string) error {
	s.mu.RLock()
	known := s.inFlight[name]
	s.mu.RUnlock()
	if known {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.byName[name]; f != nil && len(f.all) > 0 {
		return inUse(name, "Name", name, f.all[0].Kind.String())
	}
	if s.inFlight == nil {
		s.inFlight = make(map[string]bool)
	}
	s.inFlight[name] = true
	return nil
}

// inUse returns the error of a limit with the name of a limit of another kind.
func inUse(name, field string, value any, kind string) error {
	return &ratelimit.FieldError{
		Limit: name, Field: field, Value: value,
		Reason: fmt.Sprintf("is not that of the %s of this name, which is in use: give this limit another name", kind),
	}
}

// NoteCall is Note of the definitions of a call.
func (s *Definitions) NoteCall(c *Call) error {
	for i := range c.Demands {
		if err := s.Note(c.Demands[i].Definition); err != nil {
			return err
		}
	}
	return nil
}

// family is the definitions of a name, under the lock.
func (s *Definitions) family(name string) *family {
	f := s.byName[name]
	if f == nil {
		if s.byName == nil {
			s.byName = make(map[string]*family)
		}
		f = &family{}
		s.byName[name] = f
	}
	return f
}

func (f *family) covers(d bucket.Definition) bool {
	return slices.ContainsFunc(f.all, func(e bucket.Definition) bool { return covers(e, d) })
}

func (f *family) add(d bucket.Definition) {
	for i, e := range f.all {
		if alike(e, d) {
			f.all[i].Rate, f.all[i].Capacity = min(e.Rate, d.Rate), max(e.Capacity, d.Capacity)
			return
		}
	}
	f.all = append(f.all, d)
}

// NoteAll remembers the definitions of the limits that a Prune names, and returns
// their names. There must be one, and all must be sound.
func (s *Definitions) NoteAll(limits []ratelimit.Limit) (names map[string]bool, err error) {
	if len(limits) == 0 {
		return nil, &ratelimit.FieldError{Field: "Limits", Value: 0, Reason: "there must be at least one"}
	}
	for _, l := range limits {
		if err := (ratelimit.Request{Limit: l}).Validate(); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range limits {
		if d := l.Definition(); s.inFlight[d.Name] {
			return nil, inUse(d.Name, "Kind", d.Kind, "limit of how many at once")
		}
	}
	names = make(map[string]bool, len(limits))
	for _, l := range limits {
		d := bucket.Definition(l.Definition())
		s.family(d.Name).add(d)
		names[d.Name] = true
	}
	return names, nil
}

// alike reports whether two definitions fill in the same ticks and rows.
func alike(d, e bucket.Definition) bool {
	return d.Kind == e.Kind && d.Period == e.Period && d.Start.Equal(e.Start) && d.Shards == e.Shards && d.Slots == e.Slots &&
		d.Every == e.Every && d.Zone == e.Zone && d.Anchor == e.Anchor && d.Time == e.Time
}

// covers reports whether every row that is full by e is full by d.
func covers(e, d bucket.Definition) bool {
	return alike(e, d) && e.Rate <= d.Rate && e.Capacity >= d.Capacity
}

// Of is the definitions of a name that were noted.
func (s *Definitions) Of(name string) []bucket.Definition {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if f := s.byName[name]; f != nil {
		return slices.Clone(f.all)
	}
	return nil
}

// Idle reports whether a row in a state means the same as no row, by all of the
// definitions.
func Idle(definitions []bucket.Definition, key string, s bucket.State, now time.Time) bool {
	for i := range definitions {
		if !definitions[i].Shard().Idle(key, s, now) {
			return false
		}
	}
	return true
}

// newest is the definition of a name that was called last.
func (s *Definitions) newest(name string) (d bucket.Definition, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	f := s.byName[name]
	if f == nil || f.newest.Shards == 0 {
		return d, false
	}
	return f.newest, true
}
