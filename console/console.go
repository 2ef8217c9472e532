// Package console is a page for people who operate limits: which limits there are, how much is left
// of a key, why it was refused and until when, and every change with its author. It is an
// [http.Handler] to put into a program of your own; the command "ratelimit serve" runs it alone.
//
// It needs no JavaScript and nothing from other servers. It shows keys, which may be names of
// customers, so put your program's own authentication before it, or set [Config.Token]. If you set
// no token, name the hosts under which it is reached: see [Config.Hosts].
package console

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/pgratelimit/ratelimit/internal/inspect"
)

// Console serves the pages. It is safe for concurrent use.
type Console struct {
	site    *site
	token   [sha256.Size]byte // the hash of Config.Token
	hosts   map[string]bool   // used without a token
	handler http.Handler
}

// New returns a Console. Its errors are [ratelimit.ErrInvalid].
func New(config *Config) (*Console, error) {
	if config == nil {
		config = new(Config)
	}
	if err := config.check(); err != nil {
		return nil, err
	}
	s := &site{Config: *config, inspector: &inspect.Inspector{Pool: config.Pool, Schema: config.Schema, Store: config.Store, Catalog: config.Catalog}}
	s.Timeout, s.Logger = cmp.Or(s.Timeout, defaultTimeout), cmp.Or(s.Logger, slog.Default())
	if s.Who == nil {
		s.Who = claimed
	}
	c := &Console{site: s, token: sha256.Sum256([]byte(config.Token)), hosts: map[string]bool{"localhost": true}, handler: routes(s)}
	for _, host := range config.Hosts {
		c.hosts[strings.ToLower(host)] = true
	}
	return c, nil
}

// claimed returns the user name that a browser sent.
func claimed(r *http.Request) string {
	name, _, _ := r.BasicAuth()
	return name
}

// routes returns the handler of all pages. Only a POST changes something, and a POST from a page of
// another site is refused.
func routes(s *site) http.Handler {
	mux := http.NewServeMux()
	page := func(path string, show func(context.Context, *http.Request) (*view, error)) {
		mux.HandleFunc("GET "+s.Prefix+path, func(w http.ResponseWriter, r *http.Request) { s.show(w, r, show) })
	}
	page("/{$}", s.limits)
	page("/limit", s.limit)
	page("/key", s.key)
	page("/permits", s.permits)
	page("/refused", s.refused)
	page("/changes", s.changes)
	mux.HandleFunc("GET "+s.Prefix+"/style.css", style)
	mux.HandleFunc("POST "+s.Prefix+"/change", s.change)
	if s.Prefix != "" {
		mux.Handle("GET "+s.Prefix, http.RedirectHandler(s.Prefix+"/", http.StatusMovedPermanently))
	}
	return http.NewCrossOriginProtection().Handler(mux)
}

// ServeHTTP answers a request.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	// The page loads its style sheet only, cannot be framed, and posts forms to itself only.
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
	h.Set("X-Frame-Options", "DENY")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "same-origin") // page addresses contain keys
	h.Set("Cache-Control", "no-store")
	if !c.named(r) {
		http.Error(w, "this page is not served under the name "+strconv.Quote(r.Host)+": see console.Config.Hosts", http.StatusMisdirectedRequest)
		return
	}
	if !c.knows(r) {
		h.Set("WWW-Authenticate", `Basic realm="ratelimit", charset="UTF-8"`)
		http.Error(w, "the token is missing or wrong", http.StatusUnauthorized)
		return
	}
	c.handler.ServeHTTP(w, r)
}

// named reports whether a request names an accepted host.
func (c *Console) named(r *http.Request) bool {
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = strings.Trim(r.Host, "[]")
	}
	return c.site.Token != "" || c.hosts[strings.ToLower(host)] || net.ParseIP(host) != nil
}

// knows reports whether a request has the token, or needs none.
func (c *Console) knows(r *http.Request) bool {
	_, password, _ := r.BasicAuth()
	sum := sha256.Sum256([]byte(password))
	return c.site.Token == "" || subtle.ConstantTimeCompare(sum[:], c.token[:]) == 1
}

func style(w http.ResponseWriter, r *http.Request) {
	http.ServeFileFS(w, r, files, "templates/style.css")
}
