package console

import (
	"log/slog"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Config configures a [Console]. Pool, Store and Catalog are required.
type Config struct {
	// Pool is a pool of the database with the limits. Store uses that database, and the schema
	// Schema; "" means the connections' search_path.
	Pool   *pgxpool.Pool
	Store  *pgstore.Store
	Schema string

	// Catalog has the definitions; every page reads its changes. A limit that it does not know is
	// shown by name only. A catalog in memory works; see [catalog.NewInMemory].
	Catalog *catalog.Catalog

	// Prefix is the path under which the Console is served, such as "/ratelimit"; "" is the root.
	// Do not strip it from requests.
	Prefix string

	// Edit allows changes: of keys (credit, reset, pause, resume, free permits) and of the catalog.
	// The page asks before each change. Without Edit every change is answered 403.
	Edit bool

	// Token is a password that browsers ask for, with any user name (see Who). The default "" asks
	// for none.
	Token string

	// Hosts are the names under which browsers reach the page, without ports. A request for another
	// name is answered 421. Otherwise a stranger could point a name of his own at this server, and
	// his page could read this one from a visitor's browser. With a Token any name is accepted.
	// "localhost" and IP addresses are always accepted.
	Hosts []string

	// Who returns the name of the person who makes a change, for the catalog's history; see
	// [catalog.WithWho]. The default is the user name that the browser sent with the Token, which
	// is not checked.
	Who func(*http.Request) string

	// Timeout bounds how long a page waits for the database. The default is 5 s.
	Timeout time.Duration

	// Logger logs errors, and each change without its key. The default is slog.Default().
	Logger *slog.Logger
}

// prefix matches paths that need no escaping.
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
