package decide

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/valid"
)

// Definitions remembers the definitions with which a store was called, by name. The zero value is
// ready to use. It is safe for concurrent use.
type Definitions struct {
	mu       sync.RWMutex
	byName   map[string]*family
	inFlight map[string]bool // names of limits of how many at once
}

// Plain returns the Plain call of a request, if its limit was called before. It reuses the slice
// demands if it is large enough.
func (s *Definitions) Plain(verb Verb, reserve bool, demands []Demand, requests []ratelimit.Request) (call Call, ok bool) {
	if verb != All || reserve || len(requests) != 1 {
		return call, false
	}
	v := s.of(requests[0])
	if v == nil || !v.allows(&requests[0]) {
		return call, false
	}
	return Call{Plain: true, Demands: append(demands[:0], Demand{Request: requests[0], Definition: v.definition, noted: true})}, true
}

// allows reports whether r, an allow, makes a Plain call and needs no other checks.
func (v *validated) allows(r *ratelimit.Request) bool {
	return r.Count >= 1 && r.Count <= v.most && r.AboveShare == 0 && r.Mode <= ratelimit.ModeEnforce &&
		valid.Text(r.Key, ratelimit.MaxKeyLength) == ""
}

// of returns the limit of a request, nil if it must be validated or noted. It must if it was not
// called before, if the key has another definition, or if it is behind a pointer and may have
// changed.
func (s *Definitions) of(r ratelimit.Request) *validated {
	name, ok := Constant(r.Limit)
	if !ok || r.Overridden {
		return nil
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	f := s.byName[name]
	if f == nil || f.own[r.Key] != nil {
		return nil
	}
	for i := range f.valid {
		if v := &f.valid[i]; v.limit == r.Limit && (f.newest == v.definition || alike(f.newest, v.definition)) {
			return v // which never changes
		}
	}
	return nil
}

// Call returns the call of requests without modes, and notes its definitions. It reuses the slice demands
// if it is large enough.
func (s *Definitions) Call(verb Verb, reserve bool, demands []Demand, requests []ratelimit.Request) (Call, error) {
	call, err := verb.Call(s, demands, reserve, requests)
	if err != nil {
		return Call{}, err
	}
	return call, s.NoteCall(&call)
}

// family holds the definitions of one name, or of one key of it.
type family struct {
	kind   bucket.Kind
	all    []bucket.Definition
	newest bucket.Definition  // of the last call
	own    map[string]*family // of a name: overrides, which bind their key only

	valid []validated // of a name: some of the limits that were called
}

// mostValid bounds how many limits of a name, such as plans, are remembered as valid.
const mostValid = 8

// mostOwn is the number of keys of a name whose overrides are kept apart. Further overrides bind
// every key, as plans do. Then Prune keeps more rows than it must, and never too few.
const mostOwn = 100_000

// note remembers the definition of a call of a key; own says that it is an override. It returns
// ErrInvalid if the name belongs to a limit of another kind: the two would misread each other's
// rows.
//
// Definitions that differ in Rate and Capacity only are kept as one, with the lowest Rate and the
// largest Capacity. A row that is full by that is full by each of them. So the memory does not grow
// with the number of plans.
func (s *Definitions) note(d *bucket.Definition, key string, own bool) error {
	s.mu.RLock()
	f := s.byName[d.Name]
	known := f != nil && f.knows(d, key, own)
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
	if f.kind != 0 && f.kind != d.Kind {
		return inUse(d.Name, "Kind", d.Kind, f.kind.String())
	}
	f.note(d, key, own)
	return nil
}

// NoteInFlight remembers the name of a limit of how many at once.
func (s *Definitions) NoteInFlight(name string) error {
	s.mu.RLock()
	known := s.inFlight[name]
	s.mu.RUnlock()
	if known {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.byName[name]; f != nil && f.kind != 0 {
		return inUse(name, "Name", name, f.kind.String())
	}
	if s.inFlight == nil {
		s.inFlight = make(map[string]bool)
	}
	s.inFlight[name] = true
	return nil
}

// NotePermits validates a request for permits, and remembers the names of its limits.
func (s *Definitions) NotePermits(request *ratelimit.PermitRequest) error {
	if err := request.Validate(); err != nil {
		return err
	}
	for _, r := range request.Parts() {
		if err := s.NoteInFlight(r.Limit.Name); err != nil {
			return err
		}
	}
	return nil
}

// inUse returns the error of a limit with the name of a limit of another kind.
func inUse(name, field string, value any, kind string) error {
	return &ratelimit.FieldError{
		Limit: name, Field: field, Value: value,
		Reason: fmt.Sprintf("is not that of the %s of this name, which is in use: give this limit another name", kind),
	}
}

// NoteCall remembers the definitions of a call. An override binds its key only.
func (s *Definitions) NoteCall(c *Call) error {
	for i := range c.Demands {
		a := &c.Demands[i]
		if a.noted {
			continue
		}
		if err := s.note(&a.Definition, a.Key, a.Overridden); err != nil {
			return err
		}
		if !a.Overridden {
			s.remember(a.Limit, &a.Definition)
		}
	}
	return nil
}

// NoteEdit remembers the definitions of an edit, which bind its keys only.
func (s *Definitions) NoteEdit(c *Call) error {
	for i := range c.Demands {
		if err := s.note(&c.Demands[i].Definition, c.Demands[i].Key, true); err != nil {
			return err
		}
	}
	return nil
}

// Constant returns the name of a limit that can be compared and never changes: a value of one of
// the kinds. A caller's type that embeds one may hold it behind a pointer, or may not be
// comparable.
func Constant(limit ratelimit.Limit) (name string, ok bool) {
	switch l := limit.(type) {
	case ratelimit.TokenBucket:
		return l.Name, true
	case ratelimit.FixedWindow:
		return l.Name, true
	case ratelimit.SlidingWindow:
		return l.Name, true
	}
	return "", false
}

// remember remembers that a limit is valid. Its definition was noted before.
func (s *Definitions) remember(limit ratelimit.Limit, d *bucket.Definition) {
	if _, ok := Constant(limit); !ok {
		return
	}
	s.mu.RLock()
	full := len(s.byName[d.Name].valid) == mostValid
	s.mu.RUnlock()
	if full {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.byName[d.Name]
	same := func(v validated) bool { return v.limit == limit }
	if len(f.valid) < mostValid && !slices.ContainsFunc(f.valid, same) {
		v := validated{limit: limit, definition: *d}
		if d.Shards == 1 && !d.Slotted() {
			v.most = d.Most(0)
		}
		f.valid = append(f.valid, v)
	}
}

// family returns the definitions of a name, and adds it if it is missing. It needs mu.
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

// knows reports whether noting a definition would change nothing.
func (f *family) knows(d *bucket.Definition, key string, own bool) bool {
	of := f.own[key]
	switch {
	case of == nil: // what binds every key binds this one
		return f.has(d)
	case own:
		return of.has(d)
	}
	return alike(of.newest, *d) && f.has(d)
}

// has reports whether a definition is like the last one, and known.
func (f *family) has(d *bucket.Definition) bool {
	return f.newest == *d || alike(f.newest, *d) && slices.ContainsFunc(f.all, func(e bucket.Definition) bool {
		return alike(e, *d) && e.Rate <= d.Rate && e.Capacity >= d.Capacity // full by e is full by d
	})
}

// note remembers the definition of a call of a key.
func (f *family) note(d *bucket.Definition, key string, own bool) {
	of := f.own[key]
	if of == nil && own && len(f.own) < mostOwn {
		if f.own == nil {
			f.own = make(map[string]*family)
		}
		of = &family{}
		f.own[key] = of
	}
	if f.kind = d.Kind; of != nil {
		of.newest = *d
	}
	if of != nil && own {
		of.add(*d)
		return
	}
	f.add(*d)
	f.newest = *d
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

// NoteAll remembers the definitions of the limits that a Prune names. It returns each name with its
// overrides. There must be at least one limit, and all must be valid.
func (s *Definitions) NoteAll(overrides []ratelimit.Request, limits []ratelimit.Limit) (map[string]Overrides, error) {
	if len(limits) == 0 {
		return nil, &ratelimit.FieldError{Field: "Limits", Value: 0, Reason: "there must be at least one"}
	}
	for _, l := range limits {
		if err := (ratelimit.Request{Limit: l}).Validate(); err != nil {
			return nil, err
		}
	}
	for i := range overrides {
		if err := overrides[i].Validate(); err != nil {
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
	names := make(map[string]Overrides, len(limits))
	for _, l := range limits {
		d := bucket.Definition(l.Definition())
		f := s.family(d.Name)
		f.add(d)
		f.kind, names[d.Name] = cmp.Or(f.kind, d.Kind), Overrides{}
	}
	for _, r := range overrides {
		d := bucket.Definition(r.Limit.Definition())
		if of, ok := names[d.Name]; ok {
			of[r.Key] = append(of[r.Key], d)
		}
	}
	return names, nil
}

// Overrides holds the definitions of overrides that a Prune names, by key.
type Overrides map[string][]bucket.Definition

// alike reports whether two definitions differ at most in name, rate, capacity and debt.
func alike(d, e bucket.Definition) bool {
	return d.Kind == e.Kind && d.Period == e.Period && d.Start.Equal(e.Start) && d.Shards == e.Shards && d.Slots == e.Slots &&
		d.Every == e.Every && d.Zone == e.Zone && d.Anchor == e.Anchor && d.Time == e.Time
}

// Idle reports whether the row of a key in a state means the same as no row, by all definitions
// that bind the key: those of its name that were noted, and those of its own overrides that were
// noted or are given.
func (s *Definitions) Idle(at Key, overrides Overrides, state bucket.State, now time.Time) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	f := s.byName[at.Name]
	if f == nil {
		return false
	}
	busy := func(d bucket.Definition) bool { return !d.Shard().Idle(at.Key, state, now) }
	own := f.own[at.Key]
	return !slices.ContainsFunc(f.all, busy) && (own == nil || !slices.ContainsFunc(own.all, busy)) &&
		!slices.ContainsFunc(overrides[at.Key], busy)
}

// newest returns the definition of a key's last call: that of its override, if it has one, or of
// its name.
func (s *Definitions) newest(at Key) (d bucket.Definition, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	f := s.byName[at.Name]
	if f == nil {
		return d, false
	}
	if own := f.own[at.Key]; own != nil {
		f = own
	}
	return f.newest, f.newest.Shards != 0
}
