package console

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/parked"
	"github.com/pgratelimit/ratelimit/internal/visible"
	"github.com/pgratelimit/ratelimit/refusals"
)

const (
	perPage    = 50     // keys of a page
	mostLooked = 10_000 // keys that a page searches for short ones
	changesOf  = 200    // changes on the page of all changes
)

// limits returns the page of all limits.
func (s *site) limits(ctx context.Context, _ *http.Request) (*view, error) {
	all, err := s.inspector.Limits(ctx)
	return &view{template: "limits.html", Title: "Limits", Data: all}, err
}

// overrides shows some overrides of a limit.
type overrides struct {
	Name   string
	Some   []catalog.Entry
	More   int            // overrides that are not in Some
	ForAll *catalog.Entry // the override for all keys, or nil
	Page   string         // the path of the page of a key
}

func (s *site) overridesOf(name, page string) overrides {
	all := s.inspector.Catalog.Overrides(name)
	o := overrides{Name: name, Some: all[:min(len(all), perPage)], Page: s.Prefix + page}
	o.More = len(all) - len(o.Some)
	if len(all) > 0 && all[0].Key == catalog.AllKeys {
		o.ForAll = &all[0]
	}
	return o
}

// limitPage is the content of the page of a limit.
type limitPage struct {
	Name       string
	Definition ratelimit.Definition
	Overrides  overrides
	Form       overrideForm // for all keys
	Prefix     string
	Short      bool // show only keys that are limited now
	Keys       []inspect.Key
	Looked     int    // keys that were read
	Next       string // the last key if there may be more; else ""
}

// limit returns the page of a limit with some of its keys.
func (s *site) limit(ctx context.Context, r *http.Request) (*view, error) {
	name := r.FormValue("name")
	limit, err := s.inspector.Limit(name)
	if err != nil {
		return nil, err
	}
	p := limitPage{
		Name: name, Definition: limit.Definition(), Overrides: s.overridesOf(name, "/key"),
		Prefix: r.FormValue("prefix"), Short: r.FormValue("short") != "",
	}
	p.Form = newForm(&p.Definition, nil, p.Overrides.ForAll)
	if err := p.find(ctx, s.inspector, limit, r.FormValue("after")); err != nil {
		return nil, err
	}
	return &view{template: "limit.html", Title: visible.Text(name), Data: &p}, nil
}

// find reads the page's keys.
func (p *limitPage) find(ctx context.Context, inspector *inspect.Inspector, limit ratelimit.Limit, after string) error {
	most := perPage
	if p.Short {
		most = mostLooked
	}
	for key, err := range inspector.Keys(ctx, limit, ratelimit.Page{Prefix: p.Prefix, After: after, Most: most}) {
		if err != nil {
			return err
		}
		p.Looked++
		if !p.Short || key.Short() {
			p.Keys = append(p.Keys, key)
		}
		if p.Looked == most || len(p.Keys) == perPage {
			p.Next = key.Request.Key
			break
		}
	}
	return nil
}

// keyPage is the content of the page of a key.
type keyPage struct {
	Name, Key string
	Count     float64
	Story     *inspect.Story
	Picture   *picture
	Form      overrideForm
}

// key returns the page of a key: the tokens left, why it is refused, and until when.
func (s *site) key(ctx context.Context, r *http.Request) (*view, error) {
	p := keyPage{Name: r.FormValue("name"), Key: r.FormValue("key"), Count: 1}
	if n := r.FormValue("count"); n != "" {
		var err error
		if p.Count, err = read("count", n, inspect.Number); err != nil {
			return nil, err
		}
	}
	var err error
	if p.Story, err = s.inspector.Story(ctx, p.Name, p.Key, p.Count, r.FormValue("reserve") != ""); err != nil {
		return nil, err
	}
	p.Form = newForm(&p.Story.Published, nil, p.Story.ForKey)
	p.Picture, err = s.draw(ctx, p.Story)
	return &view{template: "key.html", Title: visible.Text(p.Name) + " · " + visible.Text(p.Key), Data: &p}, err
}

// permitsPage is the content of the page of a limit of how many at once.
type permitsPage struct {
	InFlight  ratelimit.InFlight
	Overrides overrides
	All       overrideForm // for all keys
	Prefix    string
	Key       string // for the page of one key
	One       bool
	Form      overrideForm // for Key
	Unlike    []inspect.Unlike
	Keys      []permitKey
	Next      string // the last key if there may be more; else ""
}

// permitKey is a key with permits, now or before.
type permitKey struct {
	Key   string
	Limit int // as the definition for this key has it
	Held  []ratelimit.Permit
	Line  parked.Line // waiting jobs of River, for the longest lines
}

// Full reports whether no permit would be given now.
func (k permitKey) Full() bool { return len(inspect.Within(k.Held, k.Limit)) >= k.Limit }

// permits returns the page of a limit of how many at once, for one key or with some of its keys.
func (s *site) permits(ctx context.Context, r *http.Request) (*view, error) {
	limit, err := s.inspector.InFlight(r.FormValue("name"))
	if err != nil {
		return nil, err
	}
	p := permitsPage{
		InFlight: limit, Overrides: s.overridesOf(limit.Name, "/permits"),
		Prefix: r.FormValue("prefix"), Key: r.FormValue("key"), One: r.Form.Has("key"),
	}
	p.All = newForm(nil, &limit, p.Overrides.ForAll)
	if err := limit.ValidateKey(p.Key); err != nil {
		return nil, err
	}
	keys := []string{p.Key}
	if p.One {
		p.Form = newForm(nil, &limit, nil)
		if e, ok := s.inspector.Catalog.Override(limit.Name, p.Key); ok {
			p.Form = newForm(nil, &limit, &e)
		}
		if p.Unlike, err = s.inspector.Unlike(ctx, limit.Name, p.Key); err != nil {
			return nil, err
		}
	} else if keys, err = s.inspector.PermitKeys(ctx, limit.Name, ratelimit.Page{Prefix: p.Prefix, After: r.FormValue("after"), Most: perPage}); err != nil {
		return nil, err
	}
	lines, err := parked.Lines(ctx, s.inspector.Pool, s.inspector.Schema, limit.Name, 10*perPage)
	if err != nil {
		return nil, err
	}
	waiting := make(map[string]parked.Line, len(lines))
	for _, l := range lines {
		waiting[l.Key] = l
	}
	for _, key := range keys {
		holds := s.inspector.Catalog.InFlight(limit, key)
		held, err := s.inspector.Store.Permits().Held(ctx, holds, key)
		if err != nil {
			return nil, err
		}
		p.Keys = append(p.Keys, permitKey{key, holds.Limit, held, waiting[key]})
	}
	if len(keys) == perPage {
		p.Next = keys[perPage-1]
	}
	return &view{template: "permits.html", Title: visible.Text(limit.Name), Data: &p}, nil
}

// refusedPage is the content of the page of the most refused keys.
type refusedPage struct {
	Limit    string
	Since    time.Duration
	Migrated bool
	Keys     []refusals.Key
	Rates    map[string]bool // names of limits whose keys have pages
}

// refused returns the page of the keys that were refused most, by all processes together.
func (s *site) refused(ctx context.Context, r *http.Request) (_ *view, err error) {
	p := refusedPage{Limit: r.FormValue("limit"), Since: time.Minute, Rates: map[string]bool{}}
	if since := r.FormValue("since"); since != "" {
		if p.Since, err = read("since", since, inspect.Duration); err != nil {
			return nil, err
		}
	}
	p.Keys, err = refusals.Top(ctx, s.inspector.Pool, s.inspector.Schema, refusals.Query{Limit: p.Limit, Since: p.Since, Most: perPage})
	if p.Migrated = !errors.Is(err, refusals.ErrNotMigrated); !p.Migrated {
		err = nil
	}
	for _, d := range s.inspector.Catalog.Definitions() {
		p.Rates[d.Name] = true
	}
	return &view{template: "refused.html", Title: "Refused most", Data: &p}, err
}

// changes returns the page of changes to the catalog.
func (s *site) changes(ctx context.Context, _ *http.Request) (*view, error) {
	if s.inspector.Catalog.InMemory() { // its history only says that a file was read
		return &view{template: "changes.html", Title: "Changes", Data: []catalog.Change(nil)}, nil
	}
	all, err := s.inspector.Catalog.History(ctx, "", changesOf)
	return &view{template: "changes.html", Title: "Changes", Data: all}, err
}
