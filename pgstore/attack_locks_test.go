package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// What a row that somebody keeps locked does to those who ask for it, and what
// it must not do to all others.

// scene is a store, and the same schema seen past the store's pool, which those
// who wait may have taken.
type scene struct {
	*pgtest.DB
	store *pgstore.Store
	side  *pgtest.DB
}

func newScene(t *testing.T, conns int32, change ...func(*pgstore.Config)) *scene {
	t.Helper()
	return sceneOn(t, pgtest.New(t, maxConns(conns)), change...)
}

func sceneOn(t *testing.T, db *pgtest.DB, change ...func(*pgstore.Config)) *scene {
	t.Helper()
	s := &scene{db, newStore(t, db, change...), beside(t, db)}
	mustAllow(t, newStore(t, s.side), leaders()...)
	return s
}

// held is a limit of 10 tokens of which a transaction has taken 3 for each of
// some keys, whose rows it so keeps locked.
type held struct {
	limit ratelimit.TokenBucket
	keys  []string
	had   float64 // tokens of each key before
	tx    pgx.Tx
}

// hold takes from keys whose rows are there, or are not: a row that the holder
// has inserted itself nobody else can see.
func (s *scene) hold(t *testing.T, rows int, there bool) *held {
	t.Helper()
	tx, err := connect(t, s.URL).Begin(t.Context())
	must(t, err)
	h, store := &held{limit: slow("the held limit", 10), had: 10, tx: tx}, newStore(t, s.side)
	for i := range rows {
		h.keys = append(h.keys, fmt.Sprint("held key ", i))
		if there {
			mustAllow(t, store, h.limit.For(h.keys[i]))
			h.had = 9
		}
		takeIn(t, store, h.tx, h.limit.ForN(h.keys[i], 3))
	}
	return h
}

// eachRow runs test with rows that are there, and with rows that are not
// committed.
func eachRow(t *testing.T, test func(t *testing.T, there bool)) {
	t.Helper()
	for name, there := range map[string]bool{"a row": true, "a row not committed": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, there)
		})
	}
}

// asked is a call that came back.
type asked struct {
	takenLater
	late time.Duration // after its deadline
}

// before is a limit that is locked before the held one.
func before(h *held) ratelimit.Request { return slow("a limit before", 1e6).For("of " + h.keys[0]) }

// ask has calls for each held key wait: for it alone, and with another limit
// that is locked before it or after it. Each takes one token of the key.
func (s *scene) ask(t *testing.T, h *held, patience time.Duration) (calls []<-chan asked) {
	t.Helper()
	for _, key := range h.keys {
		before, behind := before(h).Limit.For("of "+key), slow("v limit behind", 10).For("of "+key)
		calls = append(calls,
			s.allow(t, patience, h.limit.For(key)),
			s.allow(t, patience, before, h.limit.For(key)),
			s.allow(t, patience, h.limit.For(key), behind))
	}
	waitFor(t, s.side, h.tx, 1)
	return calls
}

// allow takes in a goroutine of its own.
func (s *scene) allow(t *testing.T, patience time.Duration, requests ...ratelimit.Request) <-chan asked {
	done := make(chan asked, 1)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	deadline, _ := ctx.Deadline()
	go func() {
		defer cancel()
		result, err := s.store.Allow(ctx, requests...)
		done <- asked{takenLater{result, err}, time.Since(deadline)}
	}()
	return done
}

// wantUndisturbed has callers of other keys ask a few times, in all manners, and
// wants all of them answered in a moment.
func (s *scene) wantUndisturbed(t *testing.T) {
	t.Helper()
	plain, other, shards := slow("one", 1e6), slow("other", 1e6), shardedSlow("shards", 1e6, 4)
	undisturbed(t, func(ctx context.Context, key string) (ratelimit.Result, error) {
		return s.store.Allow(ctx, plain.For(key))
	}, func(ctx context.Context, key string) (ratelimit.Result, error) {
		return s.store.Allow(ctx, plain.For(key), other.For(key))
	}, func(ctx context.Context, key string) (ratelimit.Result, error) {
		return s.store.Check(ctx, plain.For(key))
	}, func(ctx context.Context, key string) (ratelimit.Result, error) {
		return s.store.Reserve(ctx, shards.For(key))
	})
}

// undisturbed has callers ask for keys at random a few times, each until a call
// of its is not granted in a moment.
func undisturbed(t *testing.T, manners ...func(context.Context, string) (ratelimit.Result, error)) {
	t.Helper()
	const callers, each = 12, 24
	var calls, failed atomic.Int64
	together(callers, func(caller int) {
		for i := range each {
			ctx, cancel := context.WithTimeout(t.Context(), aMoment)
			result, err := manners[(caller+i)%len(manners)](ctx, fmt.Sprint(rand.IntN(1000)))
			cancel()
			calls.Add(1)
			if err != nil || !result.OK {
				failed.Add(1)
				return
			}
		}
	})
	if n := failed.Load(); n > 0 {
		t.Errorf("%d of %d callers of other keys failed, after %d calls together", n, callers, calls.Load()-n)
	}
}

// Rows that a transaction keeps locked disturb nobody who asks for others,
// however many there are, whatever those who wait ask for besides, and however
// few connections the pool has. Those who wait keep no other row locked: not from decisions
// on their own, of this store and another, nor from transactions.
func TestLockedRowsDisturbNobodyElse(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, conns := range []int32{4, 16} {
		for _, rows := range []int{1, 7} {
			t.Run(fmt.Sprintf("%d rows, %d connections", rows, conns), func(t *testing.T) {
				t.Parallel()
				eachRow(t, func(t *testing.T, there bool) {
					s := newScene(t, conns)
					h := s.hold(t, rows, there)
					calls := s.ask(t, h, forLong)
					s.wantUndisturbed(t)
					other := newStore(t, s.side)
					undisturbed(t, func(ctx context.Context, _ string) (ratelimit.Result, error) {
						return s.store.Allow(ctx, before(h)) // which those who wait have not locked
					}, func(ctx context.Context, _ string) (ratelimit.Result, error) {
						return other.Allow(ctx, before(h))
					}, func(ctx context.Context, _ string) (ratelimit.Result, error) {
						return allowAt(pgx.ReadCommitted)(ctx, s.side.Pool, other, before(h))
					})
					must(t, h.tx.Commit(t.Context()))
					for _, call := range calls {
						got := <-call
						mustTake(t, got.Result, got.err)
					}
					for _, key := range h.keys {
						wantLeft(t, s.store, h.limit.ForN(key, 0), h.had-3-3)
					}
				})
			})
		}
	}
}

// A call that waits for a lock, and whose context ends, says so: that it was a
// lock, and of which limit, without the key; and no later than a moment after.
func TestWaitingForALockSaysSo(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, verb := range waiting {
		t.Run(verb.name, func(t *testing.T) {
			t.Parallel()
			eachRow(t, func(t *testing.T, there bool) {
				if verb.name == "Reset" && !there {
					return // there is nothing to delete, and so to wait for
				}
				s := newScene(t, 4)
				h := s.hold(t, 1, there)
				must(t, connectAll(t.Context(), s.Pool)) // or that is what it may wait for
				err := untilLocked(t, h.limit, func(ctx context.Context) error {
					err := verb.do(ctx, s.store, h.limit, h.keys[0])
					if deadline, _ := ctx.Deadline(); time.Since(deadline) > aMoment {
						t.Errorf("returned %v after the deadline", time.Since(deadline))
					}
					return err
				})
				wantLocked(t, err, h)
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
				}
			})
		})
	}
}

// untilLocked asks for a limit's row that is locked, until that is the error, or it is granted:
// a machine that is busy may not have come to the row when a short time is over, nor have ended
// the attempt before, which keeps other rows of the call locked. It returns the last error.
func untilLocked(t *testing.T, limit ratelimit.Limit, ask func(context.Context) error) (err error) {
	t.Helper()
	for patience := 100 * time.Millisecond; patience < forLong; patience *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		err = ask(ctx)
		cancel()
		if err == nil || isLocked(err) && strings.Contains(err.Error(), ratelimit.NameOf(limit)) {
			break
		}
	}
	return err
}

// waiting are verbs on their own that wait for a row that is locked.
var waiting = func() (all []waitingVerb) {
	for _, name := range []string{"Allow", "Reserve", "Credit", "Allow several", "Cancel", "Reset", "Pause"} {
		all = append(all, waitingVerb{name, func(ctx context.Context, s *pgstore.Store, l ratelimit.Limit, key string) error {
			return errOf(verbNamed(name).do(ctx, s, l.For(key)))
		}})
	}
	return all
}()

type waitingVerb struct {
	name string
	do   func(context.Context, *pgstore.Store, ratelimit.Limit, string) error
}

func wantLocked(t *testing.T, err error, h *held) {
	t.Helper()
	if !isLocked(err) {
		t.Errorf("got %v, want ErrLocked", err)
	} else if said := err.Error(); strings.Contains(said, h.keys[0]) || !strings.Contains(said, "lock") || !strings.Contains(said, h.limit.Name) {
		t.Errorf("got %v, want it to name the lock and %q, and no key", err, h.limit.Name)
	}
}

// A call on its own within a transaction of the caller's that has the row waits
// for what will not come. Without a deadline it ends with the store's time-out.
// (TestNoTimeout shows that it disturbs nobody until then.)
func TestWaitingForOneselfEnds(t *testing.T) {
	t.Parallel()
	const timeout = 2 * time.Second
	eachRow(t, func(t *testing.T, there bool) {
		s := newScene(t, 4, withTimeout(timeout))
		h := s.hold(t, 1, there)
		ctx, cancel := context.WithCancel(t.Context()) // has no deadline
		defer cancel()
		time.AfterFunc(timeout+aMoment, cancel)
		begun := time.Now()
		wantLocked(t, errOf(s.store.Allow(ctx, h.limit.For(h.keys[0]))), h)
		if took := time.Since(begun); took < timeout-50*time.Millisecond || ctx.Err() != nil {
			t.Errorf("ended after %v, want %v", took, timeout)
		}
		should(t, h.tx.Commit(t.Context()))
		wantLeft(t, newStore(t, s.side), h.limit.ForN(h.keys[0], 0), h.had-3)
	})
}

// A transaction that takes in two steps cannot deadlock with calls on their own
// for one key each: none of them keeps the one while it waits for the other.
func TestTwoStepsMeetNoDeadlock(t *testing.T) {
	t.Parallel()
	var errs errorResponses
	s := sceneOn(t, pgtest.New(t, maxConns(4), pgtest.WithConfig(errs.watch)))
	h := s.hold(t, 1, true)
	limit := slow("l", 10) // comes after the held one, in the order of locks
	first := slow("a limit before", 10)
	for i := range 8 {
		mustAllow(t, s.store, first.For(fmt.Sprint(i)), limit.For(fmt.Sprint(i)))
	}
	g := gather(t, s.Pool)
	g.lead(s.store)
	one := func(r ratelimit.Request) {
		g.call(forLong, func(ctx context.Context) { should(t, s.store.Take(ctx, r)) })
	}
	for i := range 8 {
		one(first.For(fmt.Sprint(i)))
		one(limit.For(fmt.Sprint(i)))
	}
	one(h.limit.For(h.keys[0]))
	g.release()
	waitFor(t, s.side, h.tx, 1)

	store := newStore(t, s.side)
	for i := range 8 {
		must(t, store.TakeTx(t.Context(), h.tx, first.For(fmt.Sprint(i))))
	}
	should(t, h.tx.Commit(t.Context()))
	g.calls.Wait()
	for _, err := range errs.all() { // a store may try again after one
		if strings.Contains(err, deadlockDetected) {
			t.Errorf("PostgreSQL reported %s", err)
		}
	}
}

// A check waits for nobody who has the row, whoever it is decided together with,
// and says what there is but for what is not committed.
func TestCheckTogetherWaitsForNobody(t *testing.T) {
	t.Parallel()
	eachRow(t, func(t *testing.T, there bool) {
		s := newScene(t, 4)
		h := s.hold(t, 8, there)
		one, other := slow("one", 10), slow("other", 10)
		g := gather(t, s.Pool)
		g.lead(s.store)
		var failed atomic.Int64
		for i, key := range h.keys {
			g.call(aMoment, func(ctx context.Context) { _, _ = s.store.Allow(ctx, one.For(fmt.Sprint(i)), other.For(fmt.Sprint(i))) })
			g.call(aMoment, func(ctx context.Context) {
				result, err := s.store.Check(ctx, h.limit.For(key))
				if err != nil || !result.OK || result.Remaining != int64(h.had) {
					failed.Add(1)
				}
			})
		}
		g.decide()
		if n := failed.Load(); n > 0 {
			t.Errorf("%d of %d checks failed", n, len(h.keys))
		}
	})
}

// A call that takes nothing writes into no shard that somebody else has locked: what
// stands for that shard meanwhile is not what is in it.
func TestCountZeroLeavesALockedShardAlone(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit := shardedSlow("l", 10, 2)
	mustAllow(t, store, limit.ForN("k", 7)) // from both
	want := statesOf(t, db)
	holder := begin(t, db, pgx.ReadCommitted)
	mustExec(t, holder, "SELECT FROM "+db.Schema+".rate_limits WHERE shard = 0 FOR UPDATE")
	for range 3 {
		if err := untilLocked(t, limit, func(ctx context.Context) error { return errOf(store.Allow(ctx, limit.ForN("k", 0))) }); err != nil && !isLocked(err) {
			t.Errorf("got error %v", err)
		}
	}
	must(t, holder.Rollback(t.Context()))
	store.Close() // whatever was under way has ended
	wantLeft(t, newStore(t, db), limit.ForN("k", 0), 3)
	if got := statesOf(t, db); len(got) != len(want) {
		t.Errorf("got rows %q, want %q", got, want)
	}
}

// Whoever gave up waiting for a locked row is not charged once it is free.
func TestGivingUpChargesNothing(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit := slow("l", 10)
	mustAllow(t, store, limit.For("k"))
	holder := begin(t, db, pgx.ReadCommitted)
	takeIn(t, store, holder, limit.For("k"))
	for range 3 {
		if err := untilLocked(t, limit, func(ctx context.Context) error {
			result, err := store.Allow(ctx, limit.For("k"))
			if result.OK {
				t.Errorf("got OK with error %v", err)
			}
			return err
		}); !isLocked(err) {
			t.Errorf("got error %v, want %v", err, pgstore.ErrLocked)
		}
	}
	must(t, holder.Rollback(t.Context()))
	store.Close()
	wantLeft(t, newStore(t, db), limit.ForN("k", 0), 9)
}

// While a limit's number of shards changes, a transaction can meet both.
func TestTwoNumbersOfShardsInOneTransaction(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	for range 20 {
		tx := begin(t, db, pgx.ReadCommitted)
		for _, shards := range []int{8, 2, 8} {
			takeIn(t, store, tx, shardedSlow("l", 1000, shards).For("k"))
		}
		must(t, tx.Rollback(t.Context()))
	}
}
