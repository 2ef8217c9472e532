package console

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// An action is a change that a form asks for: its description, for confirmation,
// and how it is done.
type action struct {
	does string // such as "Empty alice of send_message and let nothing through for 1m0s"
	do   func(ctx context.Context) error
}

// actions make the changes by their names in forms. They check the form's values, so that
// nobody confirms a change that cannot be made.
var actions = map[string]func(s *site, t target, form url.Values) (action, error){
	"reset": func(s *site, t target, _ url.Values) (action, error) {
		return action{"Fill " + t.String() + " up, and forget its pause and its debt", func(ctx context.Context) error {
			return s.desk.Store.Reset(ctx, t.limit, t.key)
		}}, nil
	},
	"credit": func(s *site, t target, form url.Values) (action, error) {
		n, err := number("tokens", form.Get("tokens"))
		if err == nil && n <= 0 {
			err = &ratelimit.FieldError{Package: "console", Field: "tokens", Value: n, Reason: "must be positive"}
		}
		return action{fmt.Sprintf("Give %s to %s", inspect.Amount(n), t), func(ctx context.Context) error {
			_, err := s.desk.Store.Credit(ctx, t.limit.ForN(t.key, n))
			return err
		}}, err
	},
	"pause": func(s *site, t target, form url.Values) (action, error) {
		lasts, err := duration("for", form.Get("for"))
		if err == nil && lasts <= 0 {
			err = &ratelimit.FieldError{Package: "console", Field: "for", Value: lasts, Reason: "must be positive"}
		}
		return action{fmt.Sprintf("Empty %s, and let nothing through for %s", t, lasts), func(ctx context.Context) error {
			_, err := s.desk.Store.Pause(ctx, t.limit, t.key, lasts)
			return err
		}}, err
	},
	"resume": func(s *site, t target, _ url.Values) (action, error) {
		return action{"End the pause of " + t.String(), func(ctx context.Context) error {
			return s.desk.Store.Resume(ctx, t.limit, t.key)
		}}, nil
	},
	"set": func(s *site, t target, form url.Values) (action, error) {
		o, err := override(form)
		return action{fmt.Sprintf("Override %s: %s", t, inspect.Override(&o)), func(ctx context.Context) error {
			if t.all {
				return s.desk.Catalog.SetAll(ctx, t.name, o)
			}
			return s.desk.Catalog.Set(ctx, t.name, t.key, o)
		}}, err
	},
	"free": func(s *site, t target, _ url.Values) (action, error) {
		return action{"Free all permits of " + t.String() + ": their holders find them lost, and may be at work still", func(ctx context.Context) error {
			return s.desk.Store.Permits().Reset(ctx, t.inFlight, t.key)
		}}, nil
	},
	"unset": func(s *site, t target, _ url.Values) (action, error) {
		return action{"Remove the override of " + t.String(), func(ctx context.Context) (err error) {
			if t.all {
				_, err = s.desk.Catalog.UnsetAll(ctx, t.name)
			} else {
				_, err = s.desk.Catalog.Unset(ctx, t.name, t.key)
			}
			return err
		}}, nil
	},
}

// ofKey are the actions that change a key's rows, and so are not for all keys.
var ofKey = map[string]bool{"reset": true, "credit": true, "pause": true, "resume": true, "free": true}

// ofPermits are the actions for limits of how many at once.
var ofPermits = map[string]bool{"free": true, "set": true, "unset": true}

// A target is the thing to change: a key, or all keys of a limit.
type target struct {
	name, key string
	all       bool
	limit     ratelimit.Limit    // as it holds for the key, unless it is
	inFlight  ratelimit.InFlight // one of how many at once
}

func (t target) String() string {
	if t.all {
		return "all keys of " + visible.Text(t.name)
	}
	return visible.Text(t.key) + " of " + visible.Text(t.name)
}

// page is the address of the target's page, which shows the change.
func (t target) page(prefix, done string) string {
	query := url.Values{"name": {t.name}, "done": {done}}
	path := "/limit"
	switch {
	case t.limit == nil:
		path = "/permits"
	case !t.all:
		query.Set("key", t.key)
		path = "/key"
	}
	return prefix + path + "?" + query.Encode()
}

// mostForm is how large a form may be: some fields beside a key, with everything escaped.
const mostForm = 64 << 10

// confirmPage asks whether a change is to be made.
type confirmPage struct {
	Does string
	Form url.Values // to be posted again
	Back string
}

// change makes a change, once it is confirmed.
func (s *site) change(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), s.timeout)
	defer cancel()
	if !s.edit {
		s.fail(w, r, errForbidden)
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, mostForm)
	if err := r.ParseForm(); err != nil {
		s.fail(w, r, &ratelimit.FieldError{Package: "console", Field: "form", Value: r.ContentLength, Reason: err.Error()})
		return
	}
	t, a, err := s.asked(ctx, r.PostForm)
	if err == nil && r.PostForm.Get("confirmed") == "yes" {
		if err = a.do(ctx); err == nil {
			s.logger.InfoContext(ctx, "console: a change", "action", r.PostForm.Get("action"), "limit", t.name, "all", t.all)
			http.Redirect(w, r, t.page(s.prefix, r.PostForm.Get("action")), http.StatusSeeOther)
			return
		}
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	s.write(w, r, &view{template: "confirm.html", Title: "Are you sure?", Data: confirmPage{a.does, r.PostForm, t.page(s.prefix, "")}})
}

// asked returns the change for which a form asks.
func (s *site) asked(ctx context.Context, form url.Values) (t target, a action, err error) {
	if err := s.read(ctx); err != nil {
		return t, a, err
	}
	t = target{name: form.Get("name"), key: form.Get("key"), all: form.Get("all") != ""}
	if t.inFlight, err = s.desk.InFlight(t.name); err != nil {
		limit, err := s.desk.Limit(t.name)
		if err != nil {
			return t, a, err
		}
		t.limit = s.desk.Catalog.For(limit, t.key).Limit
	}
	named := form.Get("action")
	find, ok := actions[named]
	if !ok || t.all && ofKey[named] || (t.limit == nil) != ofPermits[named] && named != "set" && named != "unset" {
		return t, a, &ratelimit.FieldError{Package: "console", Field: "action", Value: named, Reason: "is none of those of the page"}
	}
	a, err = find(s, t, form)
	return t, a, err
}

// override reads the fields of an override from a form, where an empty one is left out.
func override(form url.Values) (o catalog.Override, err error) {
	read := func(field string, into *float64) {
		text := strings.TrimSpace(form.Get(field))
		switch {
		case text == "" || err != nil:
		case text == "none":
			*into = ratelimit.None
		case text == "unlimited":
			*into = math.Inf(1)
		default:
			*into, err = number(field, text)
		}
	}
	read("rate", &o.Rate)
	read("capacity", &o.Capacity)
	read("max_reserved", &o.MaxReserved)
	if text := form.Get("mode"); text != "" && err == nil {
		o.Mode, err = ratelimit.ParseMode(text)
	}
	if text := form.Get("at_once"); text != "" && err == nil {
		if o.AtOnce, err = strconv.Atoi(text); err != nil {
			err = &ratelimit.FieldError{Package: "console", Field: "at_once", Value: text, Reason: "must be a whole number"}
		}
	}
	if text := form.Get("lease"); text != "" && err == nil {
		o.Lease, err = duration("lease", text)
	}
	if text := form.Get("period"); text != "" && err == nil {
		o.Period, err = duration("period", text)
	}
	if text := form.Get("for"); text != "" && err == nil {
		var lasts time.Duration
		lasts, err = duration("for", text)
		o.Until = time.Now().Add(lasts)
	}
	o.Note = form.Get("note")
	return o, err
}
