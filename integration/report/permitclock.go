package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrations"
)

// fakeTimes is where libfaketime may be, which has a program read another clock.
var fakeTimes = []string{"/usr/lib/*/faketime/libfaketime.so.1", "/usr/local/lib/faketime/libfaketime.so.1"}

// setPermitsClock has processes hold permits while the clock of the server is set forward and back
// by more than leases last.
func setPermitsClock(ctx context.Context, l *site, c *chapter) error {
	const what = "A server whose clock is set"
	library := ""
	for _, glob := range fakeTimes {
		if found, _ := filepath.Glob(glob); len(found) > 0 {
			library = found[0]
		}
	}
	if library == "" {
		c.notRun(what, "there is no libfaketime")
		return nil
	}
	c.say("Then the same runs on a server whose clock is set forward and back by up to six leases (libfaketime), so leases end before their holders know it.")
	clock, err := newSetClock()
	if err != nil {
		return err
	}
	defer os.RemoveAll(filepath.Dir(clock.file))
	server, err := throwaway.StartWith(ctx, throwaway.Options{Fsync: true, BinDir: l.bin, Settings: settings, Env: []string{
		"LD_PRELOAD=" + library, "FAKETIME_TIMESTAMP_FILE=" + clock.file, "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1",
	}})
	if err != nil {
		return err
	}
	defer func() { _ = server.Close() }()
	conn, err := pgx.Connect(ctx, server.URL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, migrations.UpSQL()); err != nil {
		return err
	}
	h := &holders{site: l, url: server.URL, schema: "public", last: beliefs{}}
	if err := h.start(ctx, permitHolders); err != nil {
		return err
	}
	defer h.killAll()
	forward, back, err := clock.wander(ctx, conn, l.seconds(40, 5))
	if err != nil {
		return err
	}
	h.killAll()
	h.mu.Lock()
	defer h.mu.Unlock()
	const when = ", clock set"
	h.last.judgeFences(c, when)
	_, lost := h.last.overlaps()
	c.happened(count{"permits held" + when, len(h.last)}, count{"told that they have lost theirs" + when, lost}, count{"server's clock set forward", forward}, count{"server's clock set back", back})
	return nil
}

// setClock is the clock of a server, in a file that libfaketime reads.
type setClock struct{ file string }

func newSetClock() (*setClock, error) {
	dir, err := os.MkdirTemp("", "ratelimit-clock")
	if err != nil {
		return nil, err
	}
	c := &setClock{filepath.Join(dir, "clock")}
	return c, errors.Join(os.Chmod(dir, 0o755), c.set(0)) // the server is another user's
}

// set sets the clock so far ahead of the machine's.
func (c *setClock) set(ahead time.Duration) error {
	next := c.file + ".next"
	if err := os.WriteFile(next, fmt.Appendf(nil, "%+f\n", ahead.Seconds()), 0o644); err != nil {
		return err
	}
	return os.Rename(next, c.file)
}

// check returns an error if the server has another clock.
func (c *setClock) check(ctx context.Context, conn *pgx.Conn, ahead time.Duration) error {
	before := time.Now()
	var at time.Time
	if err := conn.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at); err != nil {
		return err
	}
	const exact = 20 * time.Millisecond
	if at.Before(before.Add(ahead-exact)) || at.After(time.Now().Add(ahead+exact)) {
		return fmt.Errorf("the server's clock was set %v ahead, and is %v ahead", ahead, at.Sub(before))
	}
	return nil
}

// wander sets the clock forward and back for a while, and counts both.
func (c *setClock) wander(ctx context.Context, conn *pgx.Conn, lasts time.Duration) (forward, back int, err error) {
	for end, was := time.Now().Add(lasts), time.Duration(0); time.Now().Before(end); {
		time.Sleep(permitLimit.Lease)
		ahead := time.Duration(rand.Int64N(int64(6*permitLimit.Lease))) - 3*permitLimit.Lease
		if err := errors.Join(c.set(ahead), c.check(ctx, conn, ahead)); err != nil {
			return 0, 0, err
		}
		if ahead > was {
			forward++
		} else {
			back++
		}
		was = ahead
	}
	return forward, back, nil
}
