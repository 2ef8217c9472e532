package console

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"html/template"
	"net/http"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
)

//go:embed templates
var files embed.FS

var templates = template.Must(template.New("").Funcs(functions).ParseFS(files, "templates/*.html"))

// site serves the pages of one database.
type site struct {
	Config    // with its defaults
	inspector *inspect.Inspector
}

// view is a page: a template and its data.
type view struct {
	template string
	Title    string
	Data     any
	Status   int // 0 means 200

	// For the frame around all pages.
	Prefix  string
	Here    *url.URL
	Refresh bool
	Edit    bool
	Done    string // the change just made
	At      time.Time
}

// refreshed is the time between refreshes of a page, in seconds.
const refreshed = "5"

// show answers with the page that make returns, or with an error page.
func (s *site) show(w http.ResponseWriter, r *http.Request, make func(context.Context, *http.Request) (*view, error)) {
	ctx, cancel := context.WithTimeout(r.Context(), s.Timeout)
	defer cancel()
	err := readForm(r)
	if err == nil {
		err = s.read(ctx)
	}
	var v *view
	if err == nil {
		v, err = make(ctx, r)
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	v.Refresh, v.Done = r.FormValue("refresh") != "", r.FormValue("done")
	if v.Refresh {
		w.Header().Set("Refresh", refreshed)
	}
	s.write(w, r, v)
}

// read reads changes of the catalog. If the table is missing there are none.
func (s *site) read(ctx context.Context) error {
	if err := s.inspector.Catalog.Refresh(ctx); !errors.Is(err, catalog.ErrNotMigrated) {
		return err
	}
	return nil
}

func (s *site) write(w http.ResponseWriter, r *http.Request, v *view) {
	v.Prefix, v.Here, v.Edit, v.At = s.Prefix, r.URL, s.Edit, time.Now()
	var page bytes.Buffer
	if err := templates.ExecuteTemplate(&page, v.template, v); err != nil {
		s.Logger.ErrorContext(r.Context(), "console: write a page", "error", err)
		http.Error(w, "this page cannot be written", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if v.Status != 0 {
		w.WriteHeader(v.Status)
	}
	_, _ = page.WriteTo(w) // the client may have gone
}

// errForbidden reports a change in a console without Config.Edit.
var errForbidden = errors.New("changes are not allowed here: the program that serves this page has not set Edit")

// fail answers with the page of an error.
func (s *site) fail(w http.ResponseWriter, r *http.Request, err error) {
	status, text := http.StatusInternalServerError, err.Error()
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, inspect.ErrUndefined), errors.Is(err, catalog.ErrUnknown):
		status = http.StatusNotFound
	case errors.Is(err, errForbidden):
		status = http.StatusForbidden
	case errors.Is(err, catalog.ErrChanged):
		status = http.StatusConflict
	case errors.Is(err, ratelimit.ErrInvalid), errors.Is(err, ratelimit.ErrExceedsCapacity):
		status = http.StatusBadRequest
	case errors.As(err, &pgErr) && pgErr.Code == "42501": // insufficient_privilege
		status = http.StatusForbidden
	default:
		status = http.StatusServiceUnavailable
		s.Logger.ErrorContext(r.Context(), "console: "+r.URL.Path, "error", err)
		text = "The database did not answer as it should: " + text
	}
	s.write(w, r, &view{template: "error.html", Title: http.StatusText(status), Data: text, Status: status})
}
