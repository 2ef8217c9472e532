package refusals

import (
	"cmp"
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

	mostLimits = 1000 // most names that are counted between two writes
	timeout    = 5 * time.Second
)

// Config configures a [Recorder]. Its zero value holds the defaults.
type Config struct {
	// Schema is the schema that has the table. The default, "", leaves it to the connection's
	// search_path.
	Schema string

	// Keys is the number of keys whose refusals a process counts for each limit between two writes.
	// The default is 200.
	Keys int

	// Every is the time between two writes. The default is 5 seconds.
	Every time.Duration

	// Rows is the number of rows that the table keeps, those of the keys with the most refusals;
	// the rows of the current minute are kept besides. The default is 10,000.
	Rows int

	// Logger gets the errors of writing. The counts are written with the next ones. The default is
	// slog.Default().
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
	writing chan struct{} // holds a value while a write is under way
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
	c.Keys, c.Every, c.Rows = cmp.Or(c.Keys, defaultKeys), cmp.Or(c.Every, defaultEvery), cmp.Or(c.Rows, defaultRows)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return r, nil
}

// String keeps the keys out of logs.
func (r *Recorder) String() string { return "refusals.Recorder" }

// Observe counts the refusals of a store, those of paused limits and of permits included. Pass it
// as a store's Config.Observe, or join it with others by [ratelimit.Observers]. It never asks the
// database. Checks and the events of middlewares are not counted.
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

// Run writes the counts every Config.Every until ctx ends or [Recorder.Close] is called, and once
// more at the end. It logs errors. Close writes what is refused afterwards, while a server shuts
// down.
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

// Close ends Run and writes what has been counted. Call it after closing the stores that report to
// the Recorder, and before closing the pool. It takes at most 5 seconds. Errors are those of
// [Recorder.Write]. Later counts are lost.
func (r *Recorder) Close(ctx context.Context) error {
	r.ending.Do(func() { close(r.closed) })
	return r.writeWithin(ctx)
}

// writeWithin calls Write with a time-out.
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

// Write writes the counts since the last write in one statement, if there are any, and now and then
// deletes old rows. After an error the counts stay for the next write; if the server's answer was
// lost, they may be counted twice. Errors are [ErrNotMigrated] and those of PostgreSQL and pgx.
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

// keep puts back the counts of a failed write.
func (r *Recorder) keep(limits map[string]limit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, l := range limits {
		for key, c := range l {
			r.add(name, key, *c)
		}
	}
}
