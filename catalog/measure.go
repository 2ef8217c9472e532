package catalog

import (
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// within returns the time after which all processes have read an edit. A program with a longer
// Config.Every than this one may take by the earlier definition for longer.
func (c *Catalog) within() time.Duration { return 2 * max(c.config.Every, defaultEvery) }

// A keeping is an edit that keeps what was used, and what is known of its rows.
type keeping struct {
	edit    Edit
	limit   ratelimit.Limit // as published
	pending []pending       // entries of the limit, as they were read
	version int64           // newest in the limit's history
	at      time.Time       // the mark of its rows

	left   *Left    // for an edit of one key
	most   *pending // the pending entry of its key; for all keys, of most keys
	paused []string // for all keys: keys with rows that could not be marked
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

// replacement returns the replacement of a key's limit. Rows are measured by the least capacity by
// which a process may still take from them. While a raise is pending, that may be less than the
// capacities before and after. A row needs no mark if it is cut at once, with its definition. Nor
// does a sliding window, whose counts no definition cuts.
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

// apart returns the mark, in an edit for all keys, of the rows that are measured by other
// definitions than most rows.
func apart(mark time.Time) time.Time { return mark.Add(time.Microsecond) }

// own returns the marks that an edit uses.
func (k *keeping) own() []time.Time { return []time.Time{k.at, apart(k.at)} }

// asMost reports whether a key is measured by the same definitions as most keys of an edit.
func (k *keeping) asMost(key string, is, will ratelimit.Limit) bool {
	return k.most.marks() && k.most.by[1] == is && k.most.by[2] == will &&
		!slices.ContainsFunc(k.pending, func(p pending) bool { return p.key == key })
}

// pending is an entry for marked rows of a limit. It has the definitions by which they are
// measured, until they are raised to the definition in force.
type pending struct {
	id   string
	name string
	key  string // or AllKeys
	mark time.Time
	by   []ratelimit.Limit
	done string // of an entry for all keys: the last key that is completed
}

// marks reports whether rows have the mark.
func (p *pending) marks() bool { return p != nil && len(p.by) > 0 }

// cuts reports whether an edit lowers the capacity.
func (p *pending) cuts() bool {
	return p.marks() && p.by[2].Definition().Capacity < p.by[1].Definition().Capacity
}

// twice reports whether a cut leaves rows at less than the capacity that it cuts to. They are
// raised later, once no process takes by less.
func (p *pending) twice() bool {
	return p.cuts() && p.by[0].Definition().Capacity < p.by[2].Definition().Capacity
}

// marked returns the marks that rows of a key may have, with the definitions by which each
// measures.
func marked(all []pending, key string) (of []ratelimit.Marked) {
	for _, p := range all {
		if p.key == key || p.key == AllKeys {
			of = append(of, ratelimit.Marked{Mark: p.mark, By: p.by})
		}
	}
	return of
}
