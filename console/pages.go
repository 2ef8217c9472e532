package console

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
	"github.com/pgratelimit/ratelimit/refusals"
)

const (
	perPage    = 50     // keys of a page
	mostLooked = 10_000 // keys that a page looks through for those that are short
	changesOf  = 200    // changes of the page of all of them
)

// limits is the page of all limits.
func (s *site) limits(ctx context.Context, _ *http.Request) (*view, error) {
	all, err := s.desk.Limits(ctx)
	return &view{template: "limits.html", Title: "Limits", Data: all}, err
}

// limitPage is the content of the page of a limit.
type limitPage struct {
	Name       string
	Definition ratelimit.Definition
	Overrides  []catalog.Entry
	Prefix     string
	Short      bool // only keys that are limited now
	Keys       []inspect.Key
	Looked     int    // keys that were looked at
	Next       string // the last of them, if there may be more; else ""
}

// limit is the page of a limit, with some of its keys.
func (s *site) limit(ctx context.Context, r *http.Request) (*view, error) {
	name := r.FormValue("name")
	limit, err := s.desk.Limit(name)
	if err != nil {
		return nil, err
	}
	p := limitPage{
		Name: name, Definition: limit.Definition(), Overrides: s.desk.Catalog.Overrides(name),
		Prefix: r.FormValue("prefix"), Short: r.FormValue("short") != "",
	}
	if err := p.find(ctx, s.desk, limit, r.FormValue("after")); err != nil {
		return nil, err
	}
	return &view{template: "limit.html", Title: visible.Text(name), Data: &p}, nil
}

// find finds the page's keys.
func (p *limitPage) find(ctx context.Context, desk *inspect.Inspector, limit ratelimit.Limit, after string) error {
	most := perPage
	if p.Short {
		most = mostLooked
	}
	for key, err := range desk.Keys(ctx, limit, ratelimit.Page{Prefix: p.Prefix, After: after, Most: most}) {
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
}

// key is the page of a key: the tokens left, why it is refused, and until when.
func (s *site) key(ctx context.Context, r *http.Request) (*view, error) {
	p := keyPage{Name: r.FormValue("name"), Key: r.FormValue("key"), Count: 1}
	if n := r.FormValue("count"); n != "" {
		var err error
		if p.Count, err = number("count", n); err != nil {
			return nil, err
		}
	}
	var err error
	if p.Story, err = s.desk.Story(ctx, p.Name, p.Key, p.Count, r.FormValue("reserve") != ""); err != nil {
		return nil, err
	}
	p.Picture, err = s.draw(ctx, p.Story)
	return &view{template: "key.html", Title: visible.Text(p.Name) + " · " + visible.Text(p.Key), Data: &p}, err
}

// permitsPage is the content of the page of a limit of how many at once.
type permitsPage struct {
	InFlight  ratelimit.InFlight
	Overrides []catalog.Entry
	Prefix    string
	Keys      []permitKey
	Next      string // the last of the keys, if there may be more; else ""
}

// permitKey is a key that has or had permits.
type permitKey struct {
	Key     string
	Limit   int // by the definition for the key
	Permits []ratelimit.Permit
}

// permits is the page of a limit of how many at once, with some of its keys.
func (s *site) permits(ctx context.Context, r *http.Request) (*view, error) {
	limit, err := s.desk.InFlight(r.FormValue("name"))
	if err != nil {
		return nil, err
	}
	p := permitsPage{InFlight: limit, Overrides: s.desk.Catalog.Overrides(limit.Name), Prefix: r.FormValue("prefix")}
	keys, err := s.desk.PermitKeys(ctx, limit.Name, ratelimit.Page{Prefix: p.Prefix, After: r.FormValue("after"), Most: perPage})
	if err != nil {
		return nil, err
	}
	for _, key := range keys {
		held := s.desk.Catalog.InFlight(limit, key)
		permits, err := s.desk.Store.Permits().Held(ctx, held, key)
		if err != nil {
			return nil, err
		}
		p.Keys = append(p.Keys, permitKey{key, held.Limit, permits})
	}
	if len(keys) == perPage {
		p.Next = keys[perPage-1]
	}
	return &view{template: "permits.html", Title: visible.Text(limit.Name), Data: &p}, nil
}

// refusedPage is the content of the page of the keys that are refused most.
type refusedPage struct {
	Limit    string
	Since    time.Duration
	Migrated bool
	Keys     []refusals.Key
	Rates    map[string]bool // names of the limits with pages for keys
}

// refused is the page of the keys that are refused most, in all processes.
func (s *site) refused(ctx context.Context, r *http.Request) (_ *view, err error) {
	p := refusedPage{Limit: r.FormValue("limit"), Since: time.Minute, Rates: map[string]bool{}}
	if since := r.FormValue("since"); since != "" {
		if p.Since, err = duration("since", since); err != nil {
			return nil, err
		}
	}
	p.Keys, err = refusals.Top(ctx, s.desk.Pool, s.desk.Schema, refusals.Query{Limit: p.Limit, Since: p.Since, Most: perPage})
	if p.Migrated = !errors.Is(err, refusals.ErrNotMigrated); !p.Migrated {
		err = nil
	}
	for _, d := range s.desk.Catalog.Definitions() {
		p.Rates[d.Name] = true
	}
	return &view{template: "refused.html", Title: "Refused most", Data: &p}, err
}

// changes is the page of the catalog's changes.
func (s *site) changes(ctx context.Context, _ *http.Request) (*view, error) {
	all, err := s.desk.Catalog.History(ctx, "", changesOf)
	return &view{template: "changes.html", Title: "Changes", Data: all}, err
}

// number reads a number of a form.
func number(field, text string) (float64, error) {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0, &ratelimit.FieldError{Package: "console", Field: field, Value: text, Reason: "must be a number"}
	}
	return v, nil
}

// duration reads a duration of a form, as Go writes it.
func duration(field, text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, &ratelimit.FieldError{Package: "console", Field: field, Value: text, Reason: `must be a duration, such as "90s" or "2h"`}
	}
	return d, nil
}
