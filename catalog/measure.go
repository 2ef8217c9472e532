package catalog

import (
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// within is the time after which all processes have read an edit. Programs with a longer Config.Every
// than the default may take by the definition of before for longer.
func (c *Catalog) within() time.Duration { return 2 * max(c.config.Every, defaultEvery) }

// A keeping is an edit that keeps what was used, as far as it is known before rows are locked.
type keeping struct {
	edit    Edit
	limit   ratelimit.Limit // as it is published
	pending []pending       // of the limit, as they were read
	version int64           // of the limit's history
	at      time.Time       // by which rows are marked

	left   *Left    // of a key
	most   *pending // what is pending of it, or of most keys of an edit for all
	paused []string // of an edit for all keys: those whose rows could not be marked
}

// holds returns the limits of a key before and after the edit.
func (k *keeping) holds(key string, clock func() time.Time) (from, to ratelimit.Limit) {
	if k.limit == nil {
		return nil, nil
	}
	before := ratelimit.Request{Limit: k.limit, Key: key}
	after := before
	k.edit.before.choose(&before, clock)
	k.edit.after.choose(&after, clock)
	return before.Limit, after.Limit
}

// replacement returns the replacement of a key's limit. Its rows are measured by the least capacity by
// which some process may still take from them: while a raise is pending, that is less than those of both.
// A row that is cut at once, in the transaction of the definition, otherwise needs no mark; a sliding
// window has counts, which no definition cuts.
func (k *keeping) replacement(key string, from, to ratelimit.Limit, alone bool) ratelimit.Replacement {
	r := ratelimit.Replacement{Key: key, From: from, To: to, Marked: marked(k.pending, key)}
	d, by := from.Definition(), to.Definition()
	least := min(d.Capacity, by.Capacity)
	for _, m := range r.Marked {
		for _, l := range m.By {
			least = min(least, l.Definition().Capacity)
		}
	}
	if d.Kind == ratelimit.KindSlidingWindow || alone && by.Capacity <= least {
		return r
	}
	by.Capacity = least
	r.By, r.Mark = by.Limit(), k.at
	return r
}

// apart is the mark of rows of an edit for all keys that are measured otherwise than most.
func apart(mark time.Time) time.Time { return mark.Add(time.Microsecond) }

// own returns the marks of an edit.
func (k *keeping) own() []time.Time { return []time.Time{k.at, apart(k.at)} }

// asMost reports whether a key is measured as most keys of an edit are.
func (k *keeping) asMost(key string, is, will ratelimit.Limit) bool {
	return k.most.marks() && k.most.by[1] == is && k.most.by[2] == will &&
		!slices.ContainsFunc(k.pending, func(p pending) bool { return p.key == key })
}

// pending is rows of a limit that have a mark: by what they are measured, until they are raised to
// what holds.
type pending struct {
	id   string
	name string
	key  string // or AllKeys
	mark time.Time
	by   []ratelimit.Limit
	done string // of those of all keys: the last whose rows are completed
}

// marks reports whether rows have the mark.
func (p *pending) marks() bool { return p != nil && len(p.by) > 0 }

// cuts reports whether an edit for all keys takes from rows.
func (p *pending) cuts() bool {
	return p.marks() && p.by[2].Definition().Capacity < p.by[1].Definition().Capacity
}

// twice reports whether an edit that takes from rows leaves some measured by less than it: they are raised
// later, once no process takes by that.
func (p *pending) twice() bool {
	return p.cuts() && p.by[0].Definition().Capacity < p.by[2].Definition().Capacity
}

// marked returns how rows of a key are measured that have marks.
func marked(all []pending, key string) (of []ratelimit.Marked) {
	for _, p := range all {
		if p.key == key || p.key == AllKeys {
			of = append(of, ratelimit.Marked{Mark: p.mark, By: p.by})
		}
	}
	return of
}
