// Package console is a page for people who operate limits: which limits there are, how much is
// left of a key, why it was refused and until when, and every change with its author. It is an
// [http.Handler] to put into a program of your own; the command "ratelimit serve" runs it alone.
//
// It needs no JavaScript and nothing from other servers. It shows keys, which may be names of
// customers, so put your program's own authentication before it, or set [Config.Token]. Without a
// token name the hosts under which it is reached: see [Config.Hosts].
package console

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Config configures a [Console]. Pool, Store and Catalog are required.
type Config struct {
	// Pool is of the database that holds the limits, and Store is on it, in the schema Schema;
	// "" is the connections' search_path.
	Pool   *pgxpool.Pool
	Store  *pgstore.Store
	Schema string

	// Catalog has the definitions. Each page reads its changes. A limit that it does not
	// know is shown by its name only. A catalog in memory will do; see [catalog.NewInMemory].
	Catalog *catalog.Catalog

	// Prefix is the path at which the Console is served, such as "/ratelimit"; "" is the root.
	// Do not strip it from requests.
	Prefix string

	// Edit allows changes: of keys (credit, reset, pause, resume) and of the catalog. Each has to
	// be confirmed. Without it every change is answered 403.
	Edit bool

	// Token is a password that browsers ask for, with any name, see Who; "" asks for none.
	Token string

	// Hosts are the names under which browsers reach the page, without ports. Others are answered
	// 421, unless there is a Token: a stranger may give a name of his own this server's address,
	// and so have browsers that reach it ask for what his page wants to know. "localhost" and IP
	// addresses are always accepted.
	Hosts []string

	// Who returns the name of the person who makes a change, for the catalog's history, by what your
	// program knows of the request; see [catalog.WithWho]. The default is the name that the browser
	// gave with the Token, which nobody has checked.
	Who func(*http.Request) string

	// Timeout bounds a page's wait for the database; 0 is 5 s.
	Timeout time.Duration

	// Logger logs each change, without the key, and errors; nil is slog.Default().
	Logger *slog.Logger
}

// Console serves the page. All methods are safe for concurrent use.
type Console struct {
	guarded bool              // by a token
	token   [sha256.Size]byte // its hash
	hosts   map[string]bool   // without a token
	handler http.Handler
}

// New returns a Console. Errors are [ratelimit.ErrInvalid].
func New(config *Config) (*Console, error) {
	if config == nil {
		config = new(Config)
	}
	if err := config.check(); err != nil {
		return nil, err
	}
	s := &site{
		desk:   &inspect.Inspector{Pool: config.Pool, Schema: config.Schema, Store: config.Store, Catalog: config.Catalog},
		prefix: config.Prefix, editable: config.Edit,
		who: config.Who, timeout: cmp.Or(config.Timeout, defaultTimeout),
		logger: cmp.Or(config.Logger, slog.Default()),
	}
	if s.who == nil {
		s.who = claimed
	}
	c := &Console{handler: routes(s), hosts: map[string]bool{"localhost": true}}
	for _, host := range config.Hosts {
		c.hosts[strings.ToLower(host)] = true
	}
	if config.Token != "" {
		c.token = sha256.Sum256([]byte(config.Token))
		c.guarded = true
	}
	return c, nil
}

// claimed returns the name that a browser gives with a token.
func claimed(r *http.Request) string {
	name, _, _ := r.BasicAuth()
	return name
}

// prefix is a path that needs no escaping.
var prefix = regexp.MustCompile(`^(/[\w.~-]+)*$`)

const defaultTimeout = 5 * time.Second

func (c *Config) check() error {
	switch {
	case c.Pool == nil:
		return bad("Pool", nil, "is required")
	case c.Store == nil:
		return bad("Store", nil, "is required")
	case c.Catalog == nil:
		return bad("Catalog", nil, "is required")
	case !prefix.MatchString(c.Prefix):
		return bad("Prefix", c.Prefix, "must begin with a slash, end without one, and need no escaping")
	case slices.ContainsFunc(c.Hosts, func(host string) bool { return host == "" || strings.ContainsAny(host, ":/") }):
		return bad("Hosts", strings.Join(c.Hosts, " "), "must be names without ports, such as limits.example.com")
	case c.Timeout < 0:
		return bad("Timeout", c.Timeout, "must not be negative")
	}
	return nil
}

// routes returns the handler of all pages. A page changes nothing unless it is posted to, and
// a browser that posts for another site is refused.
func routes(s *site) http.Handler {
	mux := http.NewServeMux()
	page := func(path string, show func(context.Context, *http.Request) (*view, error)) {
		mux.HandleFunc("GET "+s.prefix+path, func(w http.ResponseWriter, r *http.Request) { s.show(w, r, show) })
	}
	page("/{$}", s.limits)
	page("/limit", s.limit)
	page("/key", s.key)
	page("/permits", s.permits)
	page("/refused", s.refused)
	page("/changes", s.changes)
	mux.HandleFunc("GET "+s.prefix+"/style.css", style)
	mux.HandleFunc("POST "+s.prefix+"/change", s.change)
	if s.prefix != "" {
		mux.Handle("GET "+s.prefix, http.RedirectHandler(s.prefix+"/", http.StatusMovedPermanently))
	}
	return http.NewCrossOriginProtection().Handler(mux)
}

// ServeHTTP answers a request.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	// Nothing is loaded but the style sheet, nobody frames the page, and its forms post to it.
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
	h.Set("X-Frame-Options", "DENY")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "same-origin") // addresses of pages have keys in them
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

// named reports whether a request is for a name of this server's.
func (c *Console) named(r *http.Request) bool {
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = strings.Trim(r.Host, "[]")
	}
	return c.guarded || c.hosts[strings.ToLower(host)] || net.ParseIP(host) != nil
}

// knows reports whether a request has the token, if one is wanted.
func (c *Console) knows(r *http.Request) bool {
	if !c.guarded {
		return true
	}
	_, password, _ := r.BasicAuth()
	sum := sha256.Sum256([]byte(password))
	return subtle.ConstantTimeCompare(sum[:], c.token[:]) == 1
}

func style(w http.ResponseWriter, r *http.Request) {
	http.ServeFileFS(w, r, files, "templates/style.css")
}
