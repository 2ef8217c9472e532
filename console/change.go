package console

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// An action is a change that a form asks for: the questions to agree to, in order, and the change
// itself.
type action struct {
	asks []string // such as "Empty alice of send_message, and let nothing through for 1m"
	note string
	do   func(ctx context.Context) error
}

func ask(text string, do func(ctx context.Context) error) action {
	return action{asks: []string{text}, do: do}
}

// action returns the change that a form names. It checks the form's values first, so nobody agrees to a
// change that cannot be made.
func (s *site) action(ctx context.Context, t target, form url.Values) (action, error) {
	named, store := form.Get("action"), s.inspector.Store
	switch named {
	case "set":
		o, err := editOf(form, time.Now())
		if err != nil {
			return action{}, err
		}
		return s.edit(ctx, t, form, &o)
	case "on":
		return s.edit(ctx, t, form, &catalog.Override{Switch: catalog.On})
	case "off":
		return s.edit(ctx, t, form, &catalog.Override{Switch: catalog.Off})
	case "unset":
		return s.edit(ctx, t, form, nil)
	}
	if t.all || (t.limit == nil) != (named == "free") { // the others change one key's rows
		named = ""
	}
	switch named {
	case "reset":
		return ask("Fill "+t.String()+" up, and forget its pause and its debt", func(ctx context.Context) error { return store.Reset(ctx, t.limit, t.key) }), nil
	case "credit":
		n, err := read("tokens", form.Get("tokens"), inspect.Number)
		if err == nil && n <= 0 {
			err = bad("tokens", n, "must be positive")
		}
		return ask(fmt.Sprintf("Give %s to %s", visible.Amount(n), t), func(ctx context.Context) error {
			_, err := store.Credit(ctx, t.limit.ForN(t.key, n))
			return err
		}), err
	case "pause":
		lasts, err := read("for", form.Get("for"), inspect.Duration)
		if err == nil && lasts <= 0 {
			err = bad("for", lasts, "must be positive")
		}
		return ask(fmt.Sprintf("Empty %s, and let nothing through for %s", t, visible.Period(lasts)), func(ctx context.Context) error {
			_, err := store.Pause(ctx, t.limit, t.key, lasts)
			return err
		}), err
	case "resume":
		return ask("End the pause of "+t.String(), func(ctx context.Context) error { return store.Resume(ctx, t.limit, t.key) }), nil
	case "free":
		return ask("Free all permits of "+t.String()+": their holders find them lost, and may be at work still", func(ctx context.Context) error {
			return store.Permits().Reset(ctx, t.inFlight, t.key)
		}), nil
	}
	return action{}, bad("action", form.Get("action"), "is none of those of the page")
}

// edit returns the action of an edit of the catalog; a nil by removes the override. If the edit
// grants less than the program has published, the action asks once more.
func (s *site) edit(ctx context.Context, t target, form url.Values, by *catalog.Override) (action, error) {
	key := t.key
	if t.all {
		key = catalog.AllKeys
	}
	edit, err := s.inspector.Catalog.Preview(ctx, t.name, key, by)
	if err == nil && !edit.Changes() {
		err = bad("override", inspect.Edit(&edit), "is so already")
	}
	if err != nil {
		return action{}, err
	}
	text := "Change the override of " + t.String() + ": " + inspect.Edit(&edit)
	if edit.AsIs = form.Get("as_is") != ""; edit.AsIs {
		text += ", and leave what is left as it is"
	}
	a := ask(text, func(ctx context.Context) error {
		if t.all { // rows of many keys are changed in batches; finish once begun
			ctx = context.WithoutCancel(ctx)
		}
		return s.inspector.Catalog.Apply(ctx, &edit)
	})
	if edit.Left != nil && !edit.AsIs { // it may differ by the time it is agreed to
		a.note = visible.Text(t.key) + ": " + edit.Left.String() + "."
	}
	if lower := inspect.Lower(&edit); lower != "" {
		a.asks = append(a.asks, "Go on although "+lower)
	}
	if t.all {
		a.note = "Now: " + s.inspector.ReachText(ctx, &edit) + "."
	}
	return a, nil
}

// A target is what to change: a key, or all keys of a limit.
type target struct {
	name, key string
	all       bool
	limit     ratelimit.Limit    // by the definition for the key; nil if inFlight is set
	inFlight  ratelimit.InFlight // a limit of how many at once
}

func (t target) String() string {
	if t.all {
		return "all keys of " + visible.Text(t.name)
	}
	return visible.Text(t.key) + " of " + visible.Text(t.name)
}

// page returns the address of the target's page, which shows the change.
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

// mostForm bounds the size of a form: a few fields beside a key, all escaped.
const mostForm = 64 << 10

// confirmPage asks for agreement to a change.
type confirmPage struct {
	Ask, Note string
	Anew      bool       // the change differs from the one agreed to
	Form      url.Values // to post again
	Back      string
}

// agreed is the form's field with the questions agreed to.
const agreed = "agreed"

// change makes a change once all its questions are agreed to.
func (s *site) change(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), s.Timeout)
	defer cancel()
	if !s.Edit {
		s.fail(w, r, errForbidden)
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, mostForm)
	if err := readForm(r); err != nil {
		s.fail(w, r, err)
		return
	}
	form := r.PostForm
	t, a, err := s.asked(ctx, form)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	n := 0
	for n < len(a.asks) && n < len(form[agreed]) && form[agreed][n] == a.asks[n] {
		n++
	}
	if n < len(a.asks) {
		p := confirmPage{Ask: a.asks[n], Note: a.note, Anew: n < len(form[agreed]), Form: form, Back: t.page(s.Prefix, "")}
		form[agreed] = append(form[agreed][:n:n], a.asks[n])
		s.write(w, r, &view{template: "confirm.html", Title: "Are you sure?", Data: &p})
		return
	}
	who := s.Who(r)
	if err := a.do(catalog.WithWho(ctx, who)); err != nil {
		s.fail(w, r, err)
		return
	}
	s.Logger.InfoContext(ctx, "console: a change", "who", who, "action", form.Get("action"), "limit", t.name, "all", t.all)
	http.Redirect(w, r, t.page(s.Prefix, form.Get("action")), http.StatusSeeOther)
}

// asked returns the target and action that a form asks for.
func (s *site) asked(ctx context.Context, form url.Values) (t target, a action, err error) {
	if err := s.read(ctx); err != nil {
		return t, a, err
	}
	// Browsers change line ends in posted fields, so pages write keys as visible.Text does.
	key, err := visible.Parse(form.Get("key"))
	if err != nil || key == catalog.AllKeys {
		return t, a, bad("key", size(len(form.Get("key"))), "is no key")
	}
	t = target{name: form.Get("name"), key: key, all: form.Get("all") != ""}
	if t.inFlight, err = s.inspector.InFlight(t.name); err != nil {
		limit, err := s.inspector.Limit(t.name)
		if err != nil {
			return t, a, err
		}
		t.limit = s.inspector.Catalog.For(limit, t.key).Limit
	}
	a, err = s.action(ctx, t, form)
	return t, a, err
}
