package fallback_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/fallback"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/memstore"
)

var (
	perSecond = ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Second, Capacity: 10}
	quiet     = slog.New(slog.DiscardHandler)
)

// database is a memstore whose calls and probes can be made to end in other ways.
type database struct {
	*memstore.Store
	inUse bool

	mu            sync.Mutex
	fault, probe  func(ctx context.Context) error
	calls, probes []time.Time
}

func newDatabase() *database {
	d := &database{Store: memstore.New(nil)}
	d.set(works, works)
	return d
}

// set says how calls end, if not with the store's answer, and how probes do.
func (d *database) set(fault, probe func(ctx context.Context) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fault, d.probe = fault, probe
}

func (d *database) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	d.mu.Lock()
	d.calls = append(d.calls, time.Now())
	fault := d.fault
	d.mu.Unlock()
	if err := fault(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	return d.Store.Allow(ctx, requests...)
}

func (d *database) Probe(ctx context.Context) error {
	d.mu.Lock()
	d.probes = append(d.probes, time.Now())
	probe := d.probe
	d.mu.Unlock()
	return probe(ctx)
}

func (d *database) PoolInUse() bool { return d.inUse }

func works(context.Context) error { return nil }

func (d *database) asked() (calls, probes int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.calls), len(d.probes)
}

// hang is the fault of a network that is silent, with a time-out.
func hang(ctx context.Context) error {
	<-ctx.Done()
	return fmt.Errorf("pgstore: decide: %w", ctx.Err())
}

func newStore(t *testing.T, db ratelimit.Store, config fallback.Config) *fallback.Store {
	t.Helper()
	if config.Logger == nil {
		config.Logger = quiet
	}
	s, err := fallback.New(db, &config)
	must(t, err)
	t.Cleanup(s.Close)
	return s
}

// silence makes a database silent, and returns when the stores have seen it.
func silence(t *testing.T, db *memstore.Store, stores ...*fallback.Store) {
	t.Helper()
	db.SetSilent(true)
	for _, s := range stores {
		for range 20 {
			if _, err := s.Allow(t.Context(), perSecond.For("another")); err == nil {
				t.Fatal("a silent database has answered")
			}
			time.Sleep(100 * time.Millisecond)
			if s.Stats().Silent {
				break
			}
		}
		if !s.Stats().Silent {
			t.Fatal("no silence after 20 failed calls")
		}
	}
}

func mustAllow(t *testing.T, s ratelimit.Store, want bool, requests ...ratelimit.Request) ratelimit.Result {
	t.Helper()
	result, err := s.Allow(t.Context(), requests...)
	if err != nil || result.OK != want {
		t.Fatalf("Allow() = %v, %v, want OK %v", result, err, want)
	}
	return result
}

func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := newDatabase()
		var log bytes.Buffer
		var changes []fallback.Change
		s := newStore(t, db, fallback.Config{
			Logger:  slog.New(slog.NewTextHandler(&log, nil)),
			Changed: func(c fallback.Change) { changes = append(changes, c) },
		})
		mustAllow(t, s, true, perSecond.For("k"))
		db.set(hang, hang)
		began := time.Now()
		for range 20 { // at once, as of a flood
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if _, err := s.Allow(ctx, perSecond.For("k")); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("a call before the silence: %v, want its deadline", err)
				}
			}()
		}
		time.Sleep(time.Second + 501*time.Millisecond)
		synctest.Wait()
		calls, _ := db.asked()
		var silent *fallback.SilentError
		for range 1000 {
			asked := time.Now()
			if _, err := s.Allow(t.Context(), perSecond.For("k")); !errors.As(err, &silent) || !errors.Is(err, fallback.ErrSilent) || errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("in the silence: %v, want a SilentError", err)
			}
			if waited := time.Since(asked); waited != 0 {
				t.Fatalf("waited %v in the silence", waited)
			}
			time.Sleep(10 * time.Millisecond)
		}
		if after, _ := db.asked(); after != calls {
			t.Errorf("%d calls were asked in the silence", after-calls)
		}
		if since := silent.Since.Sub(began); since < time.Second || since > 2*time.Second || !strings.Contains(silent.Error(), "since "+silent.Since.UTC().Format(time.RFC3339)) {
			t.Errorf("%v, want since a second and a half after the beginning", silent)
		}
		for i, at := range db.probes[2:] {
			if pause := at.Sub(db.probes[i+1]); pause != time.Second {
				t.Errorf("%v between probes, want a second", pause)
			}
		}
		db.set(works, works)
		time.Sleep(time.Second)
		synctest.Wait()
		mustAllow(t, s, true, perSecond.For("k"))
		if after, _ := db.asked(); after != calls+1 {
			t.Error("the first call after the silence was not the database's")
		}
		isOneSilence(t, changes, log.String())
		if stats := s.Stats(); stats.Silent || stats.Silences != 1 || stats.Failed != 1000 {
			t.Errorf("%+v", stats)
		}
	})
}

// isOneSilence checks what was told of a silence of ten seconds.
func isOneSilence(t *testing.T, changes []fallback.Change, log string) {
	t.Helper()
	if len(changes) != 2 || !changes[0].Silent || changes[1].Silent || changes[1].Since != changes[0].Since || changes[1].Lasted < 10*time.Second || changes[0].Err == nil {
		t.Errorf("changes %+v, want the begin and the end", changes)
	}
	if lines := strings.Count(log, "\n"); lines != 2 {
		t.Errorf("%d lines in the log, want 2:\n%s", lines, log)
	}
}

type stateError string

func (e stateError) Error() string    { return "state " + string(e) }
func (e stateError) SQLState() string { return string(e) }

// What a call ends with that is a sign makes the probe ask, and what is none does not.
func TestSigns(t *testing.T) {
	refused := &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	tests := []struct {
		name string
		err  error
		sign bool
	}{
		{"time-out", fmt.Errorf("pgstore: %w", context.DeadlineExceeded), true},
		{"refused", fmt.Errorf("pgstore: %w", refused), true},
		{"cut", io.ErrUnexpectedEOF, true},
		{"08006", stateError("08006"), true},
		{"53300", stateError("53300"), true},
		{"57P03", stateError("57P03"), true},
		{"57014", stateError("57014"), false},
		{"40001", stateError("40001"), false},
		{"42P01", stateError("42P01"), false},
		{"invalid", ratelimit.ErrInvalid, false},
		{"too large", ratelimit.ErrExceedsCapacity, false},
		{"refusal", &ratelimit.RefusedError{}, false},
		{"a wait too long", &ratelimit.WaitError{Err: context.DeadlineExceeded}, false},
		{"another", errors.New("of the store"), false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				db := newDatabase()
				s := newStore(t, db, fallback.Config{})
				end := func(context.Context) error { return test.err }
				db.set(end, end)
				for range 10 {
					_, err := s.Allow(t.Context(), perSecond.For("k"))
					if !errors.Is(err, test.err) && !errors.Is(err, fallback.ErrSilent) {
						t.Fatal(err)
					}
					time.Sleep(200 * time.Millisecond)
				}
				if _, probes := db.asked(); s.Stats().Silent != test.sign || (probes > 0) != test.sign {
					t.Errorf("silent %v after %d probes, want %v", s.Stats().Silent, probes, test.sign)
				}
			})
		})
	}
}

// The database is asked by the probe whether it is silent: a row that is locked for long, a pool
// that the application has used up, a few calls that were answered meanwhile, are no silence.
func TestNoSilence(t *testing.T) {
	t.Run("the probe is answered", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			db := newDatabase()
			s := newStore(t, db, fallback.Config{})
			db.inUse = true
			db.set(hang, works)
			for range 20 {
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				_, err := s.Allow(ctx, perSecond.For("k"))
				if !errors.Is(err, fallback.ErrBusy) || !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("%v, want ErrBusy and the deadline", err)
				}
				cancel()
			}
			synctest.Wait()
			if _, probes := db.asked(); probes < 1 || probes > 3 {
				t.Errorf("%d probes within 2 s, want one a second", probes)
			}
			if stats := s.Stats(); stats.Silences > 0 || stats.Busy != 20 {
				t.Errorf("%+v, want no silence and 20 of a pool in use", stats)
			}
		})
	})
	t.Run("a caller gives up", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			db := newDatabase()
			s := newStore(t, db, fallback.Config{})
			db.set(hang, hang)
			for range 10 {
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(100*time.Millisecond, cancel)
				if _, err := s.Allow(ctx, perSecond.For("k")); !errors.Is(err, context.Canceled) {
					t.Fatal(err)
				}
			}
			if _, probes := db.asked(); probes > 0 {
				t.Errorf("%d probes", probes)
			}
		})
	})
	t.Run("others are answered", func(t *testing.T) { // such as on connections that a full server has
		synctest.Test(t, func(t *testing.T) {
			db := newDatabase()
			s := newStore(t, db, fallback.Config{})
			full := func(context.Context) error { return stateError("53300") }
			for i := range 100 {
				if db.set(works, full); i%3 == 0 {
					db.set(full, full)
				}
				_, _ = s.Allow(t.Context(), perSecond.For("k"))
				time.Sleep(10 * time.Millisecond)
			}
			if n := s.Stats().Silences; n > 0 {
				t.Errorf("%d silences", n)
			}
		})
	})
}

// granted floods stores for a while, and returns how many calls they have granted.
func granted(t *testing.T, lasts time.Duration, request ratelimit.Request, stores ...*fallback.Store) (n int) {
	t.Helper()
	for end := time.Now().Add(lasts); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		for _, s := range stores {
			result, err := s.Allow(t.Context(), request)
			must(t, err)
			if result.OK {
				n++
			}
		}
	}
	return n
}

// However many processes there are, up to the number that was stated, they grant together no more
// than the limit does.
func TestNeverOver(t *testing.T) {
	const lasts = 12 * time.Second
	limits := map[ratelimit.Limit]int{ // the most in that time
		perSecond: 130,
		ratelimit.FixedWindow{Name: "l", Rate: 12, Period: 5 * time.Second, Capacity: 24}:                            24 + 3*12,
		ratelimit.SlidingWindow{Name: "l", Rate: 32, Period: 4 * time.Second}:                                        3 * 32,
		ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Second, Capacity: 10, Shards: 4, MaxReserved: 1_000}: 130,
	}
	for limit, most := range limits {
		for _, processes := range []int{1, 3} {
			t.Run(fmt.Sprint(limit, processes), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					db := memstore.New(nil)
					var stores []*fallback.Store
					for range processes {
						s := newStore(t, db, fallback.Config{Processes: processes})
						mustAllow(t, s, true, perSecond.For("another"))
						stores = append(stores, s)
					}
					silence(t, db, stores...)
					if n := granted(t, lasts, limit.For("k"), stores...); n > most || n < most*6/10 {
						t.Errorf("granted %d, want at most %d and not much less", n, most)
					}
				})
			})
		}
	}
}

// The buckets outlive a silence, or one that comes and goes would fill them each time.
func TestFlicker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := memstore.New(nil)
		s := newStore(t, db, fallback.Config{Processes: 1})
		limit := ratelimit.TokenBucket{Name: "l", Rate: 1, Period: time.Second, Capacity: 100}
		mustAllow(t, s, true, limit.For("other"))
		began, sum := time.Now(), 0
		for range 10 {
			silence(t, db, s)
			sum += granted(t, time.Second, limit.For("k"), s)
			db.SetSilent(false)
			time.Sleep(1100 * time.Millisecond) // until after the probe
		}
		if most := 100 + int(time.Since(began).Seconds()); sum > most || sum < 90 {
			t.Errorf("granted %d in ten silences, want at most %d", sum, most)
		}
	})
}

// What the database has said last of a key is what a bucket begins with.
func TestLastKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := memstore.New(nil)
		s := newStore(t, db, fallback.Config{Processes: 2})
		slow := ratelimit.TokenBucket{Name: "slow", Rate: 1, Period: time.Hour, Capacity: 10}
		window := ratelimit.SlidingWindow{Name: "window", Rate: 10, Period: time.Hour}
		mustAllow(t, s, true, slow.ForN("k", 6), window.ForN("k", 6))
		mustAllow(t, s, true, perSecond.For("paused"))
		must(t, errOf(db.Pause(t.Context(), perSecond, "paused", time.Minute)))
		mustAllow(t, s, false, perSecond.For("paused"))
		silence(t, db, s)
		for range 2 { // half of the four that were left
			mustAllow(t, s, true, slow.For("k"))
			mustAllow(t, s, true, window.For("k"))
		}
		mustAllow(t, s, false, slow.For("k"))
		mustAllow(t, s, false, window.For("k"))
		if result := mustAllow(t, s, false, perSecond.For("paused")); result.PausedUntil.IsZero() {
			t.Errorf("%v, want a pause", result)
		}
		if result, err := s.Check(t.Context(), slow.For("unknown")); err != nil || result.Value != 5 {
			t.Errorf("a key that is not known: %v, %v, want half of the limit", result.Value, err)
		}
	})
}

// What this process has done by other verbs than those of a decision is known as well.
func TestLastDone(t *testing.T) {
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
	all := limit.ForN("k", 10)
	window := ratelimit.FixedWindow{Name: "window", Rate: 10, Period: 24 * time.Hour}
	for _, test := range []struct {
		name   string
		do     func(ctx context.Context, s *fallback.Store) error
		paused bool
		of     ratelimit.Request
		want   float64
	}{
		{"Pause", func(ctx context.Context, s *fallback.Store) error { return errOf(s.Pause(ctx, limit, "k", time.Hour)) }, true, limit.For("k"), 0},
		{"Pause of a window", func(ctx context.Context, s *fallback.Store) error { return errOf(s.Pause(ctx, window, "k", time.Hour)) }, true, window.For("k"), 0},
		{"a shorter Pause", func(ctx context.Context, s *fallback.Store) error {
			return errors.Join(errOf(s.Pause(ctx, limit, "k", time.Hour)), errOf(s.Pause(ctx, limit, "k", time.Second)))
		}, true, limit.For("k"), 0},
		{"Pause, heard of, and Resume", func(ctx context.Context, s *fallback.Store) error {
			return errors.Join(errOf(s.Pause(ctx, limit, "k", time.Hour)), errOf(s.Check(ctx, limit.For("k"))), s.Resume(ctx, limit, "k"))
		}, false, limit.For("k"), 0},
		{"Wait", func(ctx context.Context, s *fallback.Store) error { return errOf(s.Wait(ctx, all)) }, false, limit.For("k"), 0},
		{"Wait through a pause", func(ctx context.Context, s *fallback.Store) error {
			return errors.Join(errOf(s.Pause(ctx, limit, "k", time.Minute)), errOf(s.Wait(ctx, limit.For("k"))))
		}, false, limit.For("k"), 4},
		{"CheckReserve", func(ctx context.Context, s *fallback.Store) error {
			return errors.Join(errOf(s.Reserve(ctx, all)), errOf(s.CheckReserve(ctx, limit.For("k"))))
		}, false, limit.For("k"), 0},
		{"Settle", func(ctx context.Context, s *fallback.Store) error {
			result, err := s.Allow(ctx, limit.For("k"))
			if err == nil {
				_, err = s.Settle(ctx, result.Receipt, 10)
			}
			return err
		}, false, limit.For("k"), 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			db := memstore.New(nil)
			s := newStore(t, db, fallback.Config{Processes: 2})
			if err := test.do(t.Context(), s); err != nil {
				t.Fatal(test.name, err)
			}
			silence(t, db, s)
			result, err := s.Check(t.Context(), test.of)
			if err != nil || math.Floor(result.Value) > test.want || result.PausedUntil.IsZero() == test.paused {
				t.Errorf("after %s: %v tokens, paused until %v, %v; want at most %v, and a pause: %v", test.name, result.Value, result.PausedUntil, err, test.want, test.paused)
			}
			if left := result.PausedUntil.Sub(result.At); test.paused && left < 59*time.Minute {
				t.Errorf("after %s: paused for another %v, want an hour", test.name, left)
			}
		})
	}
}

func TestStaysClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := memstore.New(nil)
		fresh := newStore(t, db, fallback.Config{Processes: 2})
		s := newStore(t, db, fallback.Config{Processes: 4, Keys: 3})
		result := mustAllow(t, s, true, perSecond.For("settled"))
		for _, key := range []string{"a", "b", "settled"} { // which are as many as are remembered
			mustAllow(t, s, true, ratelimit.TokenBucket{Name: "hour", Rate: 10, Period: time.Hour}.ForN(key, 10))
		}
		db.SetSilent(true)
		for range 8 {
			_, _ = fresh.Allow(t.Context(), perSecond.For("k"))
			_, _ = s.Allow(t.Context(), perSecond.For("settled"))
			time.Sleep(60 * time.Millisecond)
		}
		closed := func(name string, err error, reason string) {
			t.Helper()
			var silent *fallback.SilentError
			if !errors.As(err, &silent) || !strings.Contains(silent.Reason, reason) {
				t.Errorf("%s: %v, want a SilentError with %q", name, err, reason)
			}
		}
		closed("a process that has not reached the database", errOf(fresh.Allow(t.Context(), perSecond.For("k"))), "not reached")
		closed("a share below one", errOf(s.Allow(t.Context(), ratelimit.TokenBucket{Name: "s", Rate: 3, Period: time.Second}.For("a"))), "too small")
		closed("a count above the share", errOf(s.Allow(t.Context(), ratelimit.TokenBucket{Name: "hour", Rate: 10, Period: time.Hour}.ForN("a", 5))), "too small")
		closed("too many keys", errOf(s.Allow(t.Context(), perSecond.For("new"))), "as many keys")
		closed("Reserve", errOf(s.Reserve(t.Context(), perSecond.For("a"))), "")
		closed("Wait", errOf(s.Wait(t.Context(), perSecond.For("a"))), "")
		closed("CheckReserve", errOf(s.CheckReserve(t.Context(), perSecond.For("a"))), "")
		closed("Credit", errOf(s.Credit(t.Context(), perSecond.For("a"))), "")
		closed("Pause", errOf(s.Pause(t.Context(), perSecond, "a", time.Second)), "")
		closed("Resume", s.Resume(t.Context(), perSecond, "a"), "")
		closed("Reset", s.Reset(t.Context(), perSecond, "a"), "")
		closed("Settle", errOf(s.Settle(t.Context(), result.Receipt, 0)), "")
		closed("Cancel", errOf(s.Cancel(t.Context(), result.Receipt)), "")
		if _, err := s.Allow(t.Context(), perSecond.ForN("a", 11)); !errors.Is(err, ratelimit.ErrExceedsCapacity) {
			t.Errorf("%v, want ErrExceedsCapacity", err)
		}
		if _, err := s.Allow(t.Context(), perSecond.ForN("a", -1)); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%v, want ErrInvalid", err)
		}
		if n := s.Stats().Keys; n > 3 {
			t.Errorf("%d keys are remembered, want at most 3", n)
		}
		time.Sleep(time.Hour) // the three are full again, and make room
		mustAllow(t, s, true, perSecond.For("new"))
	})
}

func TestVerbsOfMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := memstore.New(nil)
		var events []ratelimit.Event
		s := newStore(t, db, fallback.Config{Processes: 2, Observe: func(_ context.Context, e ratelimit.Event) { events = append(events, e) }})
		limit := ratelimit.TokenBucket{Name: "a", Rate: 10, Period: time.Hour, Shards: 2}
		other := ratelimit.TokenBucket{Name: "b", Rate: 4, Period: time.Hour}
		mustAllow(t, s, true, perSecond.For("k"))
		silence(t, db, s)
		events = nil
		if r, err := s.AllowAtMost(t.Context(), limit.ForN("k", 8)); err != nil || r.Taken != 5 || r.Request.Limit != limit || r.Capacity != 5 {
			t.Errorf("AllowAtMost() = %+v, %v, want the 5 of the share", r, err)
		}
		if r, err := s.AllowFirst(t.Context(), limit.For("k"), other.For("k")); err != nil || !r.OK || r.Request.Limit != other {
			t.Errorf("AllowFirst() = %v, %v, want of the second", r, err)
		}
		if r := mustAllow(t, s, false, limit.For("k"), other.For("k")); len(r.Several) != 2 || r.Request.Limit != limit {
			t.Errorf("%v, want a refusal of the first", r)
		}
		mustAllow(t, s, true, limit.For("k").In(ratelimit.ModeShadow), other.For("k"))
		if r, err := s.Check(t.Context(), other.For("k")); err != nil || r.OK || r.RetryAfter != 30*time.Minute {
			t.Errorf("Check() = %v, %v, want a token of the share in half an hour", r, err)
		}
		if err := s.Take(t.Context(), other.For("k")); !errors.Is(err, ratelimit.ErrRefused) {
			t.Errorf("Take() = %v", err)
		}
		mustAllow(t, s, false, other.For("new").In(ratelimit.ModeRefuse))
		for _, e := range events {
			if e.Form != ratelimit.FormMemory || e.Err != nil {
				t.Errorf("%v", e)
			}
		}
		if _, err := s.Reserve(t.Context(), other.For("k")); err == nil {
			t.Error("Reserve() = nil")
		}
		if last := events[len(events)-1]; len(events) != 8 || last.ErrorClass != "silent" {
			t.Errorf("%d events, the last %v, want 8 and one of class silent", len(events), last)
		}
	})
}

// What memory granted is settled there, also when the database is back, and by no other store.
func TestSettleInMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := memstore.New(nil)
		s := newStore(t, db, fallback.Config{Processes: 1})
		limit := ratelimit.TokenBucket{Name: "a", Rate: 1, Period: time.Hour, Capacity: 10}
		mustAllow(t, s, true, perSecond.For("k"))
		silence(t, db, s)
		first, second := mustAllow(t, s, true, limit.ForN("k", 4)), mustAllow(t, s, true, limit.ForN("k", 6))
		if r, err := s.Settle(t.Context(), first.Receipt, 1); err != nil || r.Remaining != 3 {
			t.Errorf("Settle() = %v, %v, want 3 left", r, err)
		}
		if _, err := s.Settle(t.Context(), first.Receipt, 0); !errors.Is(err, ratelimit.ErrSettled) {
			t.Errorf("Settle() again = %v", err)
		}
		if ok, err := s.Cancel(t.Context(), first.Receipt); ok || err != nil {
			t.Errorf("Cancel() of what is settled = %v, %v", ok, err)
		}
		if text, err := second.Receipt.MarshalText(); err == nil {
			t.Errorf("the receipt has a text, %s", text)
		}
		db.SetSilent(false)
		time.Sleep(2 * time.Second)
		before := mustAllow(t, db, true, limit.ForN("k", 5))
		if ok, err := s.Cancel(t.Context(), second.Receipt); !ok || err != nil {
			t.Errorf("Cancel() after the silence = %v, %v", ok, err)
		}
		if after, err := db.Check(t.Context(), limit.For("k")); err != nil || math.Abs(after.Value-before.Value) > 0.01 {
			t.Errorf("the database has %v, %v, want %v as before", after.Value, err, before.Value)
		}
	})
}

func TestNewInvalid(t *testing.T) {
	for field, config := range map[string]fallback.Config{
		"Processes":    {Processes: -1},
		"Keys":         {Keys: -1},
		"ProbeTimeout": {ProbeTimeout: 2 * time.Second},
	} {
		var bad *ratelimit.FieldError
		if _, err := fallback.New(memstore.New(nil), &config); !errors.As(err, &bad) || bad.Field != field || bad.Package != "fallback" {
			t.Errorf("%v, want one of %s", err, field)
		}
	}
	if _, err := fallback.New(nil, nil); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Error(err)
	}
}

// A caller that has given up before the call takes nothing, from memory neither.
func TestGaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := memstore.New(nil)
		s := newStore(t, db, fallback.Config{Processes: 1})
		mustAllow(t, s, true, perSecond.For("k"))
		silence(t, db, s)
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if result, err := s.Allow(gone, perSecond.For("gone")); result.OK || !errors.Is(err, context.Canceled) {
			t.Errorf("got OK %v, %v, want context.Canceled", result.OK, err)
		}
		late, cancel := context.WithDeadline(t.Context(), time.Now())
		defer cancel()
		if result, err := s.Allow(late, perSecond.For("gone")); result.OK || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got OK %v, %v, want context.DeadlineExceeded", result.OK, err)
		}
		if result, err := s.Check(t.Context(), perSecond.For("gone")); err != nil || result.Value != 10 {
			t.Errorf("%v are left, %v, want all", result.Value, err)
		}
	})
}

// Permits end at once during a silence, which they notice by themselves; before it and afterwards they
// are the store's, and memory knows of the rates that were taken with them.
func TestPermits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := memstore.New(nil)
		var events []ratelimit.Event
		s := newStore(t, db, fallback.Config{Processes: 1, Observe: func(_ context.Context, e ratelimit.Event) { events = append(events, e) }})
		p := s.Permits(db.Permits())
		exports := ratelimit.InFlight{Name: "exports", Limit: 2, Lease: time.Hour}
		held, err := p.Acquire(t.Context(), exports.For("k"), perSecond.ForN("k", 10))
		if err != nil || !held.OK {
			t.Fatal(held, err)
		}
		db.SetSilent(true)
		calls := map[string]func() error{
			"Acquire":     func() error { return errOf(p.Acquire(t.Context(), exports.For("k"))) },
			"AcquireWait": func() error { return errOf(p.AcquireWait(t.Context(), exports.For("k"))) },
			"Renew":       func() error { return errOf(p.Renew(t.Context(), held)) },
			"Release":     func() error { return p.Release(t.Context(), held) },
			"Hold": func() error {
				return p.Hold(t.Context(), exports.For("k"), func(context.Context, ratelimit.Permit) error { t.Error("ran"); return nil })
			},
		}
		for range 3 {
			if err := calls["Acquire"](); err == nil {
				t.Fatal("a silent database has answered")
			}
		}
		time.Sleep(100 * time.Millisecond)             // for the probe
		mustAllow(t, s, false, perSecond.ForN("k", 2)) // as the database has granted all 10
		events = nil
		for name, call := range calls {
			if err := call(); !errors.Is(err, fallback.ErrSilent) {
				t.Errorf("%s: %v, want ErrSilent", name, err)
			}
		}
		for _, e := range events {
			if e.ErrorClass != "silent" || e.Permit == nil || e.Permit.InFlight.Name != "exports" {
				t.Errorf("told of %v, class %q", e, e.ErrorClass)
			}
		}
		if len(events) != len(calls) {
			t.Errorf("%d events of %d calls", len(events), len(calls))
		}
		db.SetSilent(false)
		time.Sleep(2 * time.Second)
		if err := p.Release(t.Context(), held); err != nil {
			t.Errorf("afterwards: %v", err)
		}
		if s.Permits(nil) != nil {
			t.Error("permits of no store are some")
		}
		if _, err := (*fallback.Store)(nil).Permits(db.Permits()).Acquire(t.Context(), exports.For("k")); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("a nil Store: %v", err)
		}
	})
}

// A Store that New has not made returns errors.
func TestNotMade(t *testing.T) {
	for _, s := range []*fallback.Store{nil, {}} {
		r := perSecond.For("k")
		for _, err := range []error{
			errOf(s.Allow(t.Context(), r)), errOf(s.AllowFirst(t.Context(), r)), errOf(s.AllowAtMost(t.Context(), r)), errOf(s.Check(t.Context(), r)),
			errOf(s.Reserve(t.Context(), r)), errOf(s.Settle(t.Context(), nil)), errOf(s.Cancel(t.Context(), nil)), s.Reset(t.Context(), perSecond, "k"),
		} {
			if !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("got %v, want ErrInvalid", err)
			}
		}
		if stats := s.Stats(); stats != (fallback.Stats{}) {
			t.Errorf("%+v", stats)
		}
		s.Close()
	}
}

func TestNoTypeShowsKeys(t *testing.T) {
	s := newStore(t, memstore.New(nil), fallback.Config{Processes: 1})
	mustAllow(t, s, true, perSecond.For(leak.Key))
	leak.Check(t, ".", map[string]any{
		"Store": s, "Config": fallback.Config{}, "Stats": s.Stats(),
		"Change": fallback.Change{Silent: true}, "SilentError": &fallback.SilentError{Err: io.EOF},
	})
	synctest.Test(t, func(t *testing.T) {
		allow := func(s *fallback.Store) error {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			return errOf(s.Allow(ctx, perSecond.For(leak.Key)))
		}
		busy, silent := newDatabase(), memstore.New(nil)
		busy.inUse = true
		busy.set(hang, works)
		dead := newStore(t, silent, fallback.Config{})
		silence(t, silent, dead)
		err := allow(dead)
		leak.Errors(t, ".", map[string]leak.Provoked{
			"ErrSilent": {Is: fallback.ErrSilent, Err: err}, "SilentError": {Err: err},
			"ErrBusy": {Is: fallback.ErrBusy, Err: allow(newStore(t, busy, fallback.Config{}))},
		})
	})
}

func Example() {
	calls := ratelimit.TokenBucket{Name: "calls", Rate: 10, Period: time.Hour}
	database := memstore.New(nil) // in a program, a *pgstore.Store
	ended := make(chan struct{})
	store, err := fallback.New(database, &fallback.Config{
		Processes: 2,
		Changed:   func(fallback.Change) { ended <- struct{}{} },
		Logger:    slog.New(slog.DiscardHandler),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	ctx := context.Background()
	result, err := store.AllowAtMost(ctx, calls.ForN("alice", 4))
	fmt.Println(result.Remaining, "of", result.Capacity, err)

	database.SetSilent(true)
	for range 3 {
		_, err = store.Allow(ctx, calls.For("alice"))
	}
	fmt.Println(err)
	<-ended
	result, err = store.Allow(ctx, calls.For("alice"))
	fmt.Println(result.Remaining, "of", result.Capacity, err)
	// Output:
	// 6 of 10 <nil>
	// memstore: silent, as a test has asked
	// 2 of 5 <nil>
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }
