package fallback

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
)

const (
	// few is how many signs in a row are a silence.
	few = 3

	// retry is the time between two probes before the silence.
	retry = 50 * time.Millisecond
)

// silence is a silence under way.
type silence struct {
	since time.Time
	err   error // the probe's
}

// detector finds out whether a database is silent, by how calls end and by a probe.
type detector struct {
	config    Config
	poolInUse func() bool

	quiet   atomic.Pointer[silence] // nil while the database answers
	signs   atomic.Int64            // in a row
	reached atomic.Bool             // the database, at some time

	silences, busy atomic.Int64

	mu      sync.Mutex
	probing bool
	asked   time.Time // when the last probe was answered
	closed  context.Context
	close   context.CancelFunc
	ended   sync.WaitGroup
}

func newDetector(store ratelimit.Store, config Config) *detector {
	d := &detector{config: config, poolInUse: func() bool { return false }}
	if config.Probe == nil {
		d.config.Probe = probeOf(store)
	}
	if of, ok := store.(interface{ PoolInUse() bool }); ok {
		d.poolInUse = of.PoolInUse
	}
	d.closed, d.close = context.WithCancel(context.Background())
	return d
}

// stop ends the probe.
func (d *detector) stop() {
	d.mu.Lock()
	d.close()
	d.mu.Unlock()
	d.ended.Wait()
	d.quiet.Store(nil)
}

// kind is what the end of a call says about the database.
type kind int

const (
	nothing kind = iota
	answer
	sign
)

// kindOf returns what an error of a call with ctx says about the database.
func kindOf(ctx context.Context, err error) kind {
	var wait *ratelimit.WaitError
	var server interface{ SQLState() string }
	var network net.Error
	switch {
	case err == nil, errors.Is(err, ratelimit.ErrRefused), errors.Is(err, ratelimit.ErrSettled):
		return answer
	case errors.Is(err, ratelimit.ErrInvalid), errors.Is(err, ratelimit.ErrExceedsCapacity), errors.As(err, &wait):
		return nothing
	case errors.Is(ctx.Err(), context.Canceled):
		return nothing
	case errors.As(err, &server) && len(server.SQLState()) == 5:
		return kindOfState(server.SQLState())
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &network), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return sign
	}
	return nothing
}

// kindOfState returns what an SQLSTATE says.
func kindOfState(state string) kind {
	for _, class := range []string{"08", "53", "57P"} {
		if strings.HasPrefix(state, class) {
			return sign
		}
	}
	return answer
}

// hear heeds the end of a call that the store was asked. It returns the error for the caller.
func (d *detector) hear(ctx context.Context, err error) error {
	switch kindOf(ctx, err) {
	case answer:
		d.answered()
	case sign:
		d.signs.Add(1)
		d.suspect()
		if errors.Is(err, context.DeadlineExceeded) && d.poolInUse() {
			d.busy.Add(1)
			return fmt.Errorf("%w: %w", ErrBusy, err)
		}
	}
	return err
}

// answered notes that the database has answered.
func (d *detector) answered() {
	if !d.reached.Load() {
		d.reached.Store(true)
	}
	if d.signs.Load() != 0 {
		d.signs.Store(0)
	}
}

// suspect starts the probe, unless it runs, or was answered within the last second.
func (d *detector) suspect() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.probing || d.closed.Err() != nil || !d.asked.IsZero() && time.Since(d.asked) < every {
		return
	}
	d.probing = true
	d.ended.Go(d.probe)
}

// probe asks the database until it answers, or until it is clear that there is no silence. Nothing
// but the probe begins or ends one.
func (d *detector) probe() {
	for {
		begun, before := time.Now(), d.signs.Load()
		ctx, cancel := context.WithTimeout(d.closed, d.config.ProbeTimeout)
		err := d.config.Probe(ctx)
		says := kindOf(ctx, err)
		cancel()
		signs := d.signs.Add(1)
		quiet := d.quiet.Load()
		switch {
		case d.closed.Err() != nil:
			return
		case says == answer:
			d.answered()
			d.end(quiet)
			return
		case says == nothing, quiet == nil && signs <= before: // then a call was answered meanwhile
			d.end(quiet)
			return
		case quiet == nil && signs >= few:
			d.begin(err)
		}
		pause := every
		if d.quiet.Load() == nil {
			pause = retry
		}
		if !d.sleep(time.Until(begun.Add(pause))) {
			return
		}
	}
}

// sleep returns after a pause, or false once the Store is closed.
func (d *detector) sleep(pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-d.closed.Done():
		return false
	}
}

// begin begins a silence.
func (d *detector) begin(err error) {
	since := time.Now()
	d.quiet.Store(&silence{since, err})
	d.silences.Add(1)
	answers := "an error"
	if d.config.Processes > 0 {
		answers = fmt.Sprintf("memory, by 1/%d of each limit", d.config.Processes)
	}
	d.config.Logger.Error("fallback: the database is silent", slog.String("error", err.Error()), slog.String("answers", answers))
	d.changed(Change{Silent: true, Since: since, Err: err})
}

// end ends the probe, and the silence, if there is one.
func (d *detector) end(quiet *silence) {
	d.mu.Lock()
	d.probing, d.asked = false, time.Now()
	d.quiet.Store(nil)
	d.mu.Unlock()
	if quiet == nil {
		return
	}
	lasted := time.Since(quiet.since)
	d.config.Logger.Info("fallback: the database answers again", slog.Duration("lasted", lasted))
	d.changed(Change{Since: quiet.since, Lasted: lasted, Err: quiet.err})
}

func (d *detector) changed(c Change) {
	if d.config.Changed != nil {
		d.config.Changed(c)
	}
}

// probed is a limit of no row, for stores without a Probe.
var probed = ratelimit.TokenBucket{Name: "ratelimit_probe", Rate: 1, Period: time.Second}

// probeOf returns the default of Config.Probe.
func probeOf(store ratelimit.Store) func(context.Context) error {
	if own, ok := store.(interface{ Probe(context.Context) error }); ok {
		return own.Probe
	}
	return func(ctx context.Context) error {
		_, err := store.Check(ctx, probed.For(""))
		return err
	}
}
