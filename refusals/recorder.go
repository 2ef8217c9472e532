package refusals

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
)

const (
	defaultKeys  = 200
	defaultEvery = 5 * time.Second
	defaultRows  = 10_000

	mostLimits = 1000 // names that are counted between two writes
	timeout    = 5 * time.Second
)

// Config says how a [Recorder] works. The zero value is a good one.
type Config struct {
	// Schema is the schema that has the table. The default, "", leaves it to the connection's
	// search_path.
	Schema string

	// Keys is of how many keys of each limit refusals are counted between two writes. The
	// default is 200.
	Keys int

	// Every is the time between two writes. The default is 5 seconds.
	Every time.Duration

	// Rows is how many rows the table keeps, of the keys that were refused most. Those that are
	// written in a minute are beside them. The default is 10,000.
	Rows int

	// Logger gets the faults of writing, which is tried again with later counts. The
	// default is slog.Default().
	Logger *slog.Logger
}

func (c *Config) validate() error {
	bad := func(field string, value any) error {
		return &ratelimit.FieldError{Package: "refusals", Field: field, Value: value, Reason: "must not be negative"}
	}
	switch {
	case c.Keys < 0:
		return bad("Keys", c.Keys)
	case c.Every < 0:
		return bad("Every", c.Every)
	case c.Rows < 0:
		return bad("Rows", c.Rows)
	}
	return nil
}

// Recorder counts refusals, and writes them. It is safe for concurrent use.
type Recorder struct {
	pool    *pgxpool.Pool
	config  Config
	writing chan struct{} // has room for who writes
	closed  chan struct{}
	ending  sync.Once

	mu     sync.Mutex
	limits map[string]limit
	writes int
}

// New returns a Recorder. A nil config means the defaults. An error is [ratelimit.ErrInvalid].
func New(pool *pgxpool.Pool, config *Config) (*Recorder, error) {
	if pool == nil {
		return nil, &ratelimit.FieldError{Package: "refusals", Field: "Pool", Value: nil, Reason: "must not be nil"}
	}
	r := &Recorder{pool: pool, limits: make(map[string]limit), writing: make(chan struct{}, 1), closed: make(chan struct{})}
	if config != nil {
		r.config = *config
	}
	c := &r.config
	if err := c.validate(); err != nil {
		return nil, err
	}
	if c.Keys == 0 {
		c.Keys = defaultKeys
	}
	if c.Every == 0 {
		c.Every = defaultEvery
	}
	if c.Rows == 0 {
		c.Rows = defaultRows
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return r, nil
}

// String is for logs: without it they would show the keys.
func (r *Recorder) String() string { return "refusals.Recorder" }

// Observe counts the refusals of a store, those of limits that are paused and of permits too. It
// is for Config.Observe of a store, see [ratelimit.Observers], and asks nobody. Checks and
// events of middlewares are not counted.
func (r *Recorder) Observe(_ context.Context, e ratelimit.Event) {
	if e.Door != "" || !e.Verb.Takes() || e.Outcome != ratelimit.OutcomeRefused && e.Outcome != ratelimit.OutcomePaused {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.Permit != nil {
		if e.Permit.Rates.Request.Limit == nil { // otherwise it is a rate that refused, and told by itself
			r.add(e.Permit.InFlight.Name, e.Permit.Key, count{times: 1, last: e.Permit.At})
		}
		return
	}
	for p := range e.Each() {
		if p.Outcome == ratelimit.OutcomeRefused || p.Outcome == ratelimit.OutcomePaused {
			r.add(p.Name(), p.Status.Request.Key, count{times: 1, last: p.Status.At, retryAt: p.Status.RetryAt})
		}
	}
}

// add counts refusals. It needs mu.
func (r *Recorder) add(name, key string, c count) {
	l := r.limits[name]
	if l == nil {
		if len(r.limits) >= mostLimits {
			return
		}
		l = make(limit)
		r.limits[name] = l
	}
	l.add(key, c, r.config.Keys)
}

// Run writes the counts until ctx is over, and once more then, or until [Recorder.Close]. Errors are
// logged. What is refused after that, while a server is shut down, Close writes.
func (r *Recorder) Run(ctx context.Context) {
	ticker := time.NewTicker(r.config.Every)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			r.log(ctx, r.writeWithin(ctx))
		case <-ctx.Done():
			last := context.WithoutCancel(ctx)
			r.log(last, r.writeWithin(last))
			return
		case <-r.closed:
			return
		}
	}
}

// Close ends Run, and writes what has been counted: call it when the stores are closed that tell the
// Recorder, and before the pool is. It takes 5 seconds at most, and an error is that of
// [Recorder.Write]. What is counted later is written by no one.
func (r *Recorder) Close(ctx context.Context) error {
	r.ending.Do(func() { close(r.closed) })
	return r.writeWithin(ctx)
}

// writeWithin is Write within the time-out.
func (r *Recorder) writeWithin(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return r.Write(ctx)
}

func (r *Recorder) log(ctx context.Context, err error) {
	if err != nil && ctx.Err() == nil {
		r.config.Logger.ErrorContext(ctx, "refusals: what was counted could not be written; it is kept", slog.String("error", err.Error()))
	}
}

// Write writes the counts since the last time, by one statement if there is anything, and
// now and then deletes old rows. After an error the counts are written the next time;
// when the answer of the server was lost, it can be there twice. An error is [ErrNotMigrated],
// or those of PostgreSQL and pgx.
func (r *Recorder) Write(ctx context.Context) error {
	select {
	case r.writing <- struct{}{}:
		defer func() { <-r.writing }()
	case <-ctx.Done():
		return fault("wait for another write", context.Cause(ctx))
	}
	r.mu.Lock()
	limits, writes := r.limits, r.writes
	r.limits = make(map[string]limit)
	r.writes++
	r.mu.Unlock()
	err := write(ctx, r.pool, r.config.Schema, limits)
	if err != nil {
		r.keep(limits)
	}
	perMinute := max(1, int(time.Minute/r.config.Every))
	if writes%perMinute == 0 {
		err = errors.Join(err, prune(ctx, r.pool, r.config.Schema, r.config.Rows))
	}
	return err
}

// keep adds counts that could not be written.
func (r *Recorder) keep(limits map[string]limit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, l := range limits {
		for key, c := range l {
			r.add(name, key, *c)
		}
	}
}
