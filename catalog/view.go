package catalog

import (
	"fmt"
	"hash/maphash"
	"maps"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// view is a reading of the catalog. It is immutable, but remembers the limits that its overrides
// make.
type view struct {
	limits map[string]*family // by name
	mark   mark               // the newest change in it
	at     time.Time          // of the reading, on the clock that decides
	read   time.Time          // the process's clock at the reading
}

// mark names the newest change that was read, by its version and its instant. A version alone could
// be another change: a fail-over that lost changes gives their versions out again.
type mark struct {
	version int64
	at      int64 // in microseconds since 1970
}

// family holds the rows of a name.
type family struct {
	published *published
	all       *entry
	keys      *keyed
	faults    map[string]error // of rows that are not used, by key
}

// keyed maps keys to overrides. It is immutable, and cut into parts: a changed copy shares all
// parts but those of the changed keys.
type keyed [256]map[string]*entry

var seed = maphash.MakeSeed()

func part(key string) int { return int(maphash.String(seed, key) % uint64(len(keyed{}))) }

func (k *keyed) get(key string) *entry { return k[part(key)][key] }

// entry is an override that is looked up. The fields that a look-up reads are first.
type entry struct {
	chosen atomic.Pointer[choice]
	until  int64 // the override's end in microseconds since 1970; 0 for never
	Entry
}

// choice is the limit that an override, with the override for all keys, makes of a limit in code.
type choice struct {
	of    ratelimit.Limit
	all   *entry
	limit ratelimit.Limit
	own   bool // the limit differs from that of other keys, by the key's own override
}

// place names the rows of a name and key; with AllKeys, the rows without a key.
type place struct{ name, key string }

// publishedKey stands in place of a key for the fault of a published definition.
const publishedKey = "\x00published"

// reading holds rows read from the catalog: all rows, or those that have changed.
type reading struct {
	whole     bool
	changed   []place // empty if whole
	published []published
	overrides []Entry
	broken    map[place]error // rows that are invalid
	mark      mark
	at        time.Time // on the clock that decides
}

// breaks notes that a row is invalid.
func (r *reading) breaks(at place, err error) {
	if r.broken == nil {
		r.broken = map[place]error{}
	}
	r.broken[at] = err
}

// with returns the view after a reading, and the places with faults that the reading found. asked
// is when the process began to read. It copies what has changed, and of each changed name only some
// parts.
func (v *view) with(r *reading, asked time.Time) (after *view, newFaults []place) {
	after = &view{limits: map[string]*family{}, mark: r.mark, at: r.at, read: asked}
	if v != nil && !r.whole {
		after.limits = maps.Clone(v.limits)
	}
	touched := map[string]*edition{}
	of := func(name string) *edition {
		if touched[name] == nil {
			touched[name] = after.limits[name].edition()
		}
		return touched[name]
	}
	for _, at := range r.changed {
		of(at.name).remove(at.key)
	}
	for i := range r.published {
		of(r.published[i].Name).published = &r.published[i]
	}
	for i := range r.overrides {
		of(r.overrides[i].Name).put(newEntry(&r.overrides[i]))
	}
	for at, err := range r.broken {
		of(at.name).faulty(at.key, err)
	}
	for name, e := range touched {
		f := e.finish()
		for _, key := range slices.Sorted(maps.Keys(e.newFaults)) {
			newFaults = append(newFaults, place{name, key})
		}
		if after.limits[name] = f; f.empty() && len(f.faults) == 0 {
			delete(after.limits, name)
		}
	}
	return after, newFaults
}

func newEntry(of *Entry) *entry {
	e := &entry{Entry: *of}
	switch {
	case e.Switch == Off:
		e.until = math.MinInt64
	case !e.Until.IsZero():
		e.until = e.Until.UnixMicro()
	}
	return e
}

// edition is a changed copy of a family that is being made.
type edition struct {
	family
	copied    [len(keyed{})]bool // the parts of keys that are its own
	was       *published
	fresh     []*entry        // overrides that were put
	newFaults map[string]bool // keys whose faults this edition found
}

func (f *family) edition() *edition {
	e := &edition{newFaults: map[string]bool{}, family: family{keys: new(keyed)}}
	if f != nil {
		e.was, e.published, e.all, e.faults = f.published, f.published, f.all, maps.Clone(f.faults)
		*e.keys = *f.keys
	}
	return e
}

// set sets the override of a key, in its own copy of the key's part; nil removes it.
func (e *edition) set(key string, o *entry) {
	i := part(key)
	if !e.copied[i] {
		e.keys[i], e.copied[i] = maps.Clone(e.keys[i]), true
	}
	switch {
	case o == nil:
		delete(e.keys[i], key)
	case e.keys[i] == nil:
		e.keys[i] = map[string]*entry{key: o}
	default:
		e.keys[i][key] = o
	}
}

// unset removes the override of a key.
func (e *edition) unset(key string) {
	delete(e.faults, key)
	if key == AllKeys {
		e.all = nil
	} else {
		e.set(key, nil)
	}
}

// remove removes the rows of a key; with AllKeys also the definition.
func (e *edition) remove(key string) {
	e.unset(key)
	if key == AllKeys {
		delete(e.faults, publishedKey)
		e.published = nil
	}
}

func (e *edition) put(o *entry) {
	if o.Key == AllKeys {
		e.all = o
	} else {
		e.set(o.Key, o)
	}
	e.fresh = append(e.fresh, o)
}

func (e *edition) faulty(key string, err error) {
	if e.faults == nil {
		e.faults = map[string]error{}
	}
	e.faults[key], e.newFaults[key] = err, true
}

// finish checks the new overrides, or all if the definition is new, and returns the family.
func (e *edition) finish() *family {
	check := e.fresh
	switch {
	case e.published == nil: // there is nothing to check overrides against
		maps.DeleteFunc(e.faults, func(key string, _ error) bool { return !e.newFaults[key] })
		return &e.family
	case e.was == nil || !e.was.alike(e.published):
		check = e.entries()
	}
	for _, o := range check {
		delete(e.faults, o.Key)
		if err := o.check(e.published); err != nil {
			e.faulty(o.Key, fmt.Errorf("catalog: an override is not used: %w", err))
		}
	}
	return &e.family
}

func (f *family) empty() bool {
	return f.published == nil && f.all == nil && !slices.ContainsFunc(f.keys[:], func(part map[string]*entry) bool { return len(part) > 0 })
}

// entry returns the override of a key or of AllKeys, nil if there is none.
func (f *family) entry(key string) *entry {
	switch {
	case f == nil:
		return nil
	case key == AllKeys:
		return f.all
	}
	return f.keys.get(key)
}

// entries returns the overrides of a name; that for all keys comes first.
func (f *family) entries() (entries []*entry) {
	for _, part := range f.keys {
		entries = slices.AppendSeq(entries, maps.Values(part))
	}
	slices.SortFunc(entries, func(a, b *entry) int { return strings.Compare(a.Key, b.Key) })
	if f.all != nil {
		entries = slices.Insert(entries, 0, f.all)
	}
	return entries
}

// now returns the instant that decides whether overrides have ended, in microseconds.
func (v *view) now(clock func() time.Time) int64 {
	if clock != nil {
		return clock().UnixMicro()
	}
	return v.at.UnixMicro() + time.Since(v.read).Microseconds()
}

// used returns e if it is on and has not ended, otherwise nil.
func (v *view) used(e *entry, clock func() time.Time) *entry {
	if e == nil || e.until != 0 && v.now(clock) >= e.until {
		return nil
	}
	return e
}

// choose gives a request the limit and mode for its key.
func (v *view) choose(r *ratelimit.Request, clock func() time.Time) {
	if v == nil {
		return
	}
	f := v.limits[ratelimit.NameOf(r.Limit)]
	if f == nil {
		return
	}
	all, own := v.used(f.all, clock), v.used(f.keys.get(r.Key), clock)
	if own == nil && all == nil {
		return
	}
	if mode, until := modeOf(own, all); mode != 0 {
		r.Mode, r.RefusedUntil = mode, until
	}
	if own == nil {
		own = all
	}
	c := own.chosen.Load()
	if c == nil || c.of != r.Limit || c.all != all {
		limit := value(r.Limit)
		if limit == nil {
			return
		}
		c = own.make(limit, all)
	}
	r.Limit, r.Overridden = c.limit, c.own
}

// modeOf returns the mode of a key's own override, or of that for all keys, and until when it
// refuses. Overrides that are not in use are nil. It returns 0 if neither has a mode.
func modeOf(own, all *entry) (mode ratelimit.Mode, until time.Time) {
	from := own
	if own == nil || own.Mode == 0 {
		from = all
	}
	if from == nil || from.Mode == 0 {
		return 0, until
	}
	end := from.until
	if end != 0 && from == own && all != nil && all.Mode == from.Mode { // the mode for all keys goes on
		if end = max(end, all.until); all.until == 0 {
			end = 0
		}
	}
	if from.Mode == ratelimit.ModeRefuse && end != 0 {
		until = time.UnixMicro(end).UTC()
	}
	return from.Mode, until
}

// inFlight returns the limit that holds for a key.
func (v *view) inFlight(limit ratelimit.InFlight, key string, clock func() time.Time) ratelimit.InFlight {
	if v == nil {
		return limit
	}
	f := v.limits[limit.Name]
	if f == nil {
		return limit
	}
	all, own := v.used(f.all, clock), v.used(f.keys.get(key), clock)
	for _, e := range [...]*entry{all, own} {
		if e == nil {
			continue
		}
		fields := e.Override
		fields.Mode = 0 // see below
		if made, err := fields.inFlight(limit); err == nil {
			limit = made
		}
	}
	mode, until := modeOf(own, all)
	switch mode {
	case ratelimit.ModeShadow: // from when the limit was of another kind
		limit.Mode = ratelimit.ModeEnforce
	case ratelimit.ModeEnforce, ratelimit.ModeRefuse:
		limit.Mode, limit.RefusedUntil = mode, until
	}
	return limit
}

// make makes the choice for a limit in code, and remembers it. If the overrides do not fit that
// limit, the choice is the limit itself.
func (e *entry) make(of ratelimit.Limit, all *entry) *choice {
	o, numbers := e.Override, e.without(FieldMode)
	if all != nil {
		o = e.over(all.Override)
	}
	c := &choice{of: of, all: all, own: e.Key != AllKeys && numbers.replaces()}
	var err error
	if c.limit, err = o.limit(of.Definition()); err != nil {
		c.limit, c.own = of, false
	}
	e.chosen.Store(c)
	return c
}

// value returns the value of a limit that may be a pointer, so that later changes behind it do not
// count; nil for nil.
func value(limit ratelimit.Limit) ratelimit.Limit {
	switch l := limit.(type) {
	case *ratelimit.TokenBucket:
		if l == nil {
			return nil
		}
		return *l
	case *ratelimit.FixedWindow:
		if l == nil {
			return nil
		}
		return *l
	case *ratelimit.SlidingWindow:
		if l == nil {
			return nil
		}
		return *l
	}
	return limit
}

// definitions returns every definition that rows of a name can have: the published one, and each
// override on it, including those that are off or over. A key's own overrides are returned as
// requests of that key.
func (f *family) definitions() (limits []ratelimit.Limit, overrides []ratelimit.Request) {
	if f.published == nil || f.published.inFlight != nil {
		return nil, nil
	}
	limits = append(limits, f.published.Limit())
	add := func(key string, o Override) {
		switch limit, err := o.limit(f.published.Definition); {
		case err != nil:
		case key == AllKeys:
			limits = append(limits, limit)
		default:
			overrides = append(overrides, ratelimit.Request{Limit: limit, Key: key, Overridden: true})
		}
	}
	for _, e := range f.entries() {
		add(e.Key, e.Override)
		if f.all != nil && e != f.all {
			add(e.Key, e.over(f.all.Override))
		}
	}
	return limits, overrides
}
