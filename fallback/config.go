package fallback

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

const (
	defaultKeys         = 10_000
	defaultProbeTimeout = 500 * time.Millisecond

	// every is the time from one probe to the next during a silence, and the least between two
	// probes that are answered.
	every = time.Second
)

// Config says how a Store answers during a silence. The zero value answers with errors.
type Config struct {
	// Processes is how many processes share the limits, at most: each has this part of them in
	// memory during a silence. Count those that a deployment runs beside the old ones. The default,
	// 0, answers with a [SilentError].
	Processes int

	// Keys is how many limits and keys are remembered at most, some 400 bytes each. Those that are
	// full again make room. The default is 10,000.
	Keys int

	// Probe asks the database a statement of its own. The default is the method Probe of the store,
	// which *pgstore.Store has; or a Check of a limit "ratelimit_probe".
	Probe func(ctx context.Context) error

	// ProbeTimeout is how long the probe waits for an answer, at most a second. The default is 500
	// milliseconds. Let it be several times what it takes to connect.
	ProbeTimeout time.Duration

	// Changed hears of each silence when it begins and when it ends. It must not block.
	Changed func(Change)

	// Observe hears of the calls that are not the database's to answer, with
	// [ratelimit.FormMemory]. The store's own Observe hears of the others, so one function can be
	// given to both. It must not block, and be safe for concurrent use.
	Observe ratelimit.Observe

	// Logger has a line when a silence begins and one when it ends. The default is slog.Default().
	Logger *slog.Logger
}

func (c *Config) validate() error {
	bad := func(field string, value any, reason string) error {
		return &ratelimit.FieldError{Package: "fallback", Field: field, Value: value, Reason: reason}
	}
	switch {
	case c.Processes < 0:
		return bad("Processes", c.Processes, "must not be negative")
	case c.Keys < 0:
		return bad("Keys", c.Keys, "must not be negative")
	case c.ProbeTimeout < 0 || c.ProbeTimeout > every:
		return bad("ProbeTimeout", c.ProbeTimeout, "must be from 0 (the default) to "+every.String())
	}
	return nil
}

func (c *Config) setDefaults() {
	c.Keys = cmp.Or(c.Keys, defaultKeys)
	c.ProbeTimeout = cmp.Or(c.ProbeTimeout, defaultProbeTimeout)
	c.Logger = cmp.Or(c.Logger, slog.Default())
}

// Change is the begin or the end of a silence.
type Change struct {
	Silent bool          // begins, or else ends
	Since  time.Time     // when it began, on this machine's clock
	Lasted time.Duration // 0 when it begins
	Err    error         // the probe's, with which it began
}

// Stats is counters since New, and what holds now.
type Stats struct {
	Silent   bool
	Since    time.Time // when the silence began; zero without one
	Silences int64     // that began
	Granted  int64     // calls that memory granted
	Refused  int64     // calls that memory refused
	Failed   int64     // calls that ended with a SilentError
	Busy     int64     // calls that ended with ErrBusy
	Keys     int       // that are remembered
}

// fault is an error of this package, and its class for [ratelimit.Event].
type fault struct{ class, text string }

func (f *fault) Error() string      { return "fallback: " + f.text }
func (f *fault) ErrorClass() string { return f.class }

var (
	// ErrSilent is a [SilentError]. Its class is "silent".
	ErrSilent error = &fault{watch.Silent, "the database is silent"}

	// ErrBusy is the error of a call that met its deadline while the application had all connections
	// of the pool in use, as the store's method PoolInUse says. The time-out is within reach as well.
	// Give the limits a pool of their own. Its class is "pool_in_use".
	ErrBusy error = &fault{"pool_in_use", "all connections of the pool are in use"}
)

// SilentError is the error of a call during a silence. It is ErrSilent. Nothing was taken.
type SilentError struct {
	Since  time.Time // when the silence began, on this machine's clock
	Err    error     // the probe's, with which it began
	Reason string    // why memory does not answer instead; "" without Config.Processes
}

func (e *SilentError) Error() string {
	text := fmt.Sprintf("%v since %s", ErrSilent, e.Since.UTC().Format(time.RFC3339))
	if e.Reason != "" {
		text += ", and " + e.Reason
	}
	return fmt.Sprintf("%s: %v", text, e.Err)
}

// MarshalJSON returns Error as a JSON string.
func (e *SilentError) MarshalJSON() ([]byte, error) { return json.Marshal(e.Error()) }

// Unwrap makes errors.Is(err, ErrSilent) true. The probe's error is not within reach: a deadline
// that it met is not the caller's.
func (e *SilentError) Unwrap() error { return ErrSilent }
