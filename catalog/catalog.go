package catalog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
)

const (
	defaultEvery   = 5 * time.Second
	defaultTimeout = 5 * time.Second
)

// ErrNotReady reports a Catalog that has not been read yet.
var ErrNotReady = errors.New("catalog: not read yet")

// Config says how a [Catalog] works.
type Config struct {
	// Schema is the schema that holds the tables, as it is stored. The default is the
	// connection's search_path.
	Schema string

	// Every is how often [Catalog.Run] looks for changes. The default is 5 seconds. A raise is
	// complete after ten seconds, or after twice the Every of the process that makes it if that is
	// longer. A process that looks more rarely may cut it back to the earlier capacity.
	Every time.Duration

	// Store changes rows as their limits are edited, so that what was used stays used.
	// [Catalog.Run] then completes raises. Without a Store, edits leave rows as they are.
	Store Store

	// Timeout bounds a statement without a deadline in its context. The default is 5 seconds.
	Timeout time.Duration

	// Clock, for tests, is the clock by which overrides end and raises are due, in place of the
	// database's.
	Clock func() time.Time

	// Logger logs when the database does not answer and when it answers again, overrides that do
	// not fit their limits, and changes of a kind. The default is slog.Default().
	Logger *slog.Logger
}

// Catalog holds definitions from the database, as this process has read them. It owns no goroutine:
// the caller runs [Catalog.Run].
type Catalog struct {
	config Config
	rows   rows
	table  *table  // nil in memory
	memory *memory // nil in PostgreSQL

	view    atomic.Pointer[view]
	reading sync.Mutex // one reading at a time
	failed  atomic.Pointer[error]
}

// New makes a Catalog that knows nothing yet: call [Catalog.Publish] or [Catalog.Refresh], and
// run [Catalog.Run]. A nil config means the defaults. An error is [ratelimit.ErrInvalid].
func New(pool *pgxpool.Pool, config *Config) (*Catalog, error) {
	if pool == nil {
		return nil, invalid("Pool", nil, "must not be nil")
	}
	c, err := newCatalog(config)
	if err != nil {
		return nil, err
	}
	c.table = newTable(pool, c.config.Schema)
	c.rows = c.table
	return c, nil
}

// NewInMemory makes a Catalog without a database, for tests beside package memstore. Its verbs with
// Tx make changes at once. A rollback of the transaction, which may be nil, does not undo them.
func NewInMemory(config *Config) (*Catalog, error) {
	c, err := newCatalog(config)
	if err != nil {
		return nil, err
	}
	c.memory = newMemory(c.config.Clock)
	c.rows = c.memory
	return c, nil
}

func newCatalog(config *Config) (*Catalog, error) {
	var c Catalog
	if config != nil {
		c.config = *config
	}
	if c.config.Every < 0 {
		return nil, invalid("Every", c.config.Every, "must not be negative")
	}
	if c.config.Timeout < 0 {
		return nil, invalid("Timeout", c.config.Timeout, "must not be negative")
	}
	c.config.Every, c.config.Timeout = cmp.Or(c.config.Every, defaultEvery), cmp.Or(c.config.Timeout, defaultTimeout)
	c.config.Logger = cmp.Or(c.config.Logger, slog.Default())
	return &c, nil
}

// invalid returns an error for an invalid value of a field of this package.
func invalid(field string, value any, reason string) error {
	return &ratelimit.FieldError{Package: "catalog", Field: field, Value: value, Reason: reason}
}

func (c *Catalog) usable() error {
	if c == nil || c.table == nil && c.memory == nil {
		return invalid("Catalog", nil, "must come from catalog.New")
	}
	return nil
}

// inTx returns the rows of the catalog, for use in tx.
func (c *Catalog) inTx(tx pgx.Tx) (rows, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}
	if v := reflect.ValueOf(tx); c.memory == nil && (tx == nil || v.Kind() == reflect.Pointer && v.IsNil()) {
		return nil, invalid("Tx", nil, "must not be nil")
	}
	return c.rows, nil
}

// For returns the request for one token of key, by the limit of that key: limit itself, or limit as
// an override changes it. It is a look-up in memory. Before the first reading it is limit.
//
// An override replaces the fields that it has, and keeps the others of limit, so each version of a
// program uses its own definition. If an override does not fit limit, only its Mode is used.
func (c *Catalog) For(limit ratelimit.Limit, key string) ratelimit.Request {
	return c.ForN(limit, key, 1)
}

// ForN is [Catalog.For] for n tokens.
func (c *Catalog) ForN(limit ratelimit.Limit, key string, n float64) ratelimit.Request {
	return c.Resolve(ratelimit.Request{Limit: limit, Key: key, Count: n})
}

// Resolve returns r with the limit of its key, as [Catalog.For] makes it: for requests that
// exist already. It makes c a [ratelimit.Catalog], which httplimit and riverlimit take.
func (c *Catalog) Resolve(r ratelimit.Request) ratelimit.Request {
	if c != nil {
		c.view.Load().choose(&r, c.config.Clock)
	}
	return r
}

// ForTx is [Catalog.ForN] by the overrides as tx sees them, for a transaction that needs the
// current overrides and not those of up to Config.Every ago. It costs one more statement.
func (c *Catalog) ForTx(ctx context.Context, tx pgx.Tx, limit ratelimit.Limit, key string, n float64) (ratelimit.Request, error) {
	request := ratelimit.Request{Limit: limit, Key: key, Count: n}
	of, err := c.inTx(tx)
	if err == nil {
		err = request.Validate()
	}
	if err != nil {
		return request, err
	}
	r, err := of.rowsOf(ctx, tx, []string{ratelimit.NameOf(limit)}, key)
	if err != nil {
		return request, err
	}
	v, _ := (*view)(nil).with(r, time.Now())
	v.choose(&request, c.config.Clock)
	return request, nil
}

// Refresh reads the changes since the last reading, at first everything. If nothing has changed, it
// is one statement that reads two rows of an index, and locks and writes nothing.
//
// If it fails, the Catalog keeps the last reading. A catalog that was emptied is read as empty.
func (c *Catalog) Refresh(ctx context.Context) error {
	if err := c.usable(); err != nil {
		return err
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	c.reading.Lock()
	defer c.reading.Unlock()
	err := c.refresh(ctx)
	c.tell(ctx, err)
	return err
}

func (c *Catalog) refresh(ctx context.Context) error {
	asked, known := time.Now(), c.view.Load()
	if c.memory != nil {
		c.see(ctx, c.memory.read(), asked)
		return nil
	}
	since := mark{}
	if known != nil {
		since = known.mark
	}
	r, at, err := c.table.read(ctx, since)
	if err != nil {
		return err
	}
	if r == nil {
		same := *known
		same.at, same.read = at, asked
		c.view.Store(&same)
		return nil
	}
	c.see(ctx, r, asked)
	return nil
}

// see makes a reading the current one, and logs its rows that cannot be used.
func (c *Catalog) see(ctx context.Context, r *reading, asked time.Time) {
	after, newFaults := c.view.Load().with(r, asked)
	c.view.Store(after)
	for _, at := range newFaults {
		c.config.Logger.WarnContext(ctx, after.limits[at.name].faults[at.key].Error(), slog.String("limit", at.name))
	}
}

// tell logs when the database begins to fail, and when it answers again.
func (c *Catalog) tell(ctx context.Context, err error) {
	before := c.failed.Load()
	switch {
	case err != nil:
		c.failed.Store(&err)
		if before == nil {
			c.config.Logger.ErrorContext(ctx, "catalog: the database could not be read; going on with what is known",
				slog.Duration("age", c.Age()), slog.String("error", err.Error()))
		}
	case before != nil:
		c.failed.Store(nil)
		c.config.Logger.InfoContext(ctx, "catalog: the database is read again")
	}
}

// bounded returns ctx with the timeout, unless it has a deadline.
func (c *Catalog) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.config.Timeout)
}

// Ready returns [ErrNotReady], with the reason if there is one, until the Catalog has been read
// once. It is for readiness probes. Afterwards it returns nil, however old the reading is; see
// [Catalog.Age].
func (c *Catalog) Ready() error {
	if err := c.usable(); err != nil {
		return err
	}
	if c.view.Load() != nil {
		return nil
	}
	if err := c.failed.Load(); err != nil {
		return fmt.Errorf("%w: %w", ErrNotReady, *err)
	}
	return ErrNotReady
}

// Age returns the age of the Catalog's knowledge: the time since the last reading that
// succeeded began. It is the longest time.Duration if there was none.
func (c *Catalog) Age() time.Duration {
	if c == nil {
		return forever
	}
	v := c.view.Load()
	if v == nil {
		return forever
	}
	return time.Since(v.read)
}

// Definitions returns the limits that programs have published, as they were last read, by name.
// [Catalog.InFlights] has those of how many at once.
func (c *Catalog) Definitions() (definitions []ratelimit.Definition) {
	for _, f := range c.families() {
		if f.published != nil && f.published.inFlight == nil {
			definitions = append(definitions, f.published.Definition)
		}
	}
	slices.SortFunc(definitions, func(a, b ratelimit.Definition) int { return strings.Compare(a.Name, b.Name) })
	return definitions
}

// InFlights returns the limits of how many at once that programs have published, as they were last
// read, by name.
func (c *Catalog) InFlights() (limits []ratelimit.InFlight) {
	for _, f := range c.families() {
		if f.published != nil && f.published.inFlight != nil {
			limits = append(limits, *f.published.inFlight)
		}
	}
	slices.SortFunc(limits, func(a, b ratelimit.InFlight) int { return strings.Compare(a.Name, b.Name) })
	return limits
}

// Overrides returns the overrides of a limit as they were last read, including those that are off
// or over. The one for all keys comes first, then the others in the order of keys.
func (c *Catalog) Overrides(name string) (overrides []Entry) {
	if f := c.families()[name]; f != nil {
		for _, e := range f.entries() {
			overrides = append(overrides, e.Entry)
		}
	}
	return overrides
}

// Override returns the override of a limit for one key, or for [AllKeys], as it was last read. It
// reports false if there is none.
func (c *Catalog) Override(name, key string) (Entry, bool) {
	if e := c.families()[name].entry(key); e != nil {
		return e.Entry, true
	}
	return Entry{}, false
}

// Ignored returns the faults of rows that are not used, as they were last read. The database
// refuses most invalid rows, but not an override that does not fit its limit, such as a rate below
// 1 where the capacity is the rate.
func (c *Catalog) Ignored() (faults []error) {
	for _, f := range c.families() {
		for _, key := range slices.Sorted(maps.Keys(f.faults)) {
			faults = append(faults, f.faults[key])
		}
	}
	return faults
}

func (c *Catalog) families() map[string]*family {
	if c == nil {
		return nil
	}
	if v := c.view.Load(); v != nil {
		return v.limits
	}
	return nil
}

// String is for logs: without it they would show keys.
func (c *Catalog) String() string { return "catalog.Catalog" }
