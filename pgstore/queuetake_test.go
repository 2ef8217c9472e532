package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// sender sends a batch.
type sender interface {
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// workTable makes a table for work.
func workTable(t *testing.T, db *pgtest.DB) {
	t.Helper()
	must(t, errOf(db.Pool.Exec(t.Context(), "CREATE TABLE "+db.Schema+".work (n int)", pgx.QueryExecModeSimpleProtocol)))
}

// takeBetween sends two inserts with a take between them.
func takeBetween(ctx context.Context, db *pgtest.DB, store *pgstore.Store, by sender, requests ...ratelimit.Request) (ratelimit.Result, error) {
	insert := "INSERT INTO " + db.Schema + ".work VALUES ($1::int4)"
	var batch pgx.Batch
	batch.Queue(insert, 1)
	take, err := store.QueueTake(&batch, requests...)
	if err != nil {
		return ratelimit.Result{}, err
	}
	batch.Queue(insert, 2)
	err = by.SendBatch(ctx, &batch).Close()
	return take.Result(), err
}

func countWork(t *testing.T, db *pgtest.DB) (n int) {
	t.Helper()
	must(t, db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".work").Scan(&n))
	return n
}

// TestQueueTake sends work and takes in one round trip, by a pool and in transactions: what is there
// afterwards is the work that was granted.
func TestQueueTake(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			db, store := setUp(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode.mode }))
			workTable(t, db)
			requests := []ratelimit.Request{slow("b", 50).For("k"), slowWindow("a", 100).ForN("k", 1.5)}
			var granted, refused atomic.Int64
			var wg sync.WaitGroup
			for i := range 8 {
				wg.Go(func() {
					for n := range 10 {
						ctx := t.Context()
						send := func(by sender) error {
							result, err := takeBetween(ctx, db, store, by, requests...)
							if (err == nil) != result.OK {
								t.Errorf("got %v and %v", result, err)
							}
							return err
						}
						var err error
						if (i+n)%2 == 0 {
							err = send(db.Pool)
						} else {
							err = pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return send(tx) })
						}
						var is *ratelimit.RefusedError
						switch {
						case err == nil:
							granted.Add(1)
						case errors.As(err, &is) && is.Result.Request.Limit == requests[0].Limit && is.Result.RetryAfter > 0:
							refused.Add(1)
						default:
							t.Errorf("got %v", err)
						}
					}
				})
			}
			wg.Wait()
			if granted.Load() != 50 || refused.Load() != 30 || countWork(t, db) != 100 {
				t.Errorf("%d granted, %d refused, %d rows of work; want 50, 30, 100", granted.Load(), refused.Load(), countWork(t, db))
			}
			wantLeft(t, store, requests[0].Limit.ForN("k", 0), 0)
			wantLeft(t, store, requests[1].Limit.ForN("k", 0), 25)
		})
	}
}

// TestQueueTakeRefusal reads a refusal in each way that pgx has, and keeps its promise.
func TestQueueTakeRefusal(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	workTable(t, db)
	c := newClock()
	store := newStore(t, db, onClock(c))
	limit := ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Minute}
	mustAllow(t, store, limit.ForN(leak.Key, 9.5))

	var batch pgx.Batch
	take, err := store.QueueTake(&batch, limit.For(leak.Key))
	must(t, err)
	results := db.Pool.SendBatch(t.Context(), &batch)
	_, told := results.Exec()
	if err := results.Close(); err == nil {
		t.Error("Close has no error")
	}
	var server *pgconn.PgError
	if !errors.As(told, &server) || strings.Contains(server.Error()+server.Detail+server.Where, leak.Key) {
		t.Errorf("the server's error is %v", server)
	}
	var refused *ratelimit.RefusedError
	if !errors.As(take.Err(told), &refused) || refused.Result.RetryAfter != 3*time.Second || refused.Result.Value != 0.5 {
		t.Fatalf("got %v of %v, want a refusal for 3 s", take.Err(told), told)
	}
	if other := errors.New("other"); take.Err(other) != other || take.Err(nil) != nil || take.Result().OK {
		t.Errorf("the take has more errors than its own, or a result %v", take.Result())
	}
	for _, at := range []struct {
		time.Time
		ok bool
	}{{refused.Result.RetryAt.Add(-time.Microsecond), false}, {refused.Result.RetryAt, true}} {
		c.set(at.Time)
		if result, err := takeBetween(t.Context(), db, store, db.Pool, limit.For(leak.Key)); result.OK != at.ok {
			t.Errorf("at %v: got %v and %v, want OK %v", at.Time, result, err, at.ok)
		}
	}
}

// TestQueueTakeDigits has a session that writes numbers as text with one digit: a refusal is told as
// Allow tells it, to the last bit.
func TestQueueTakeDigits(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes[:3] { // in the others Allow reads numbers from text
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["extra_float_digits"], c.ConnConfig.DefaultQueryExecMode = "-15", mode.mode
			}))
			workTable(t, db)
			c := newClock()
			store := newStore(t, db, onClock(c))
			for _, limit := range []ratelimit.Limit{
				ratelimit.TokenBucket{Name: "bucket", Rate: 7, Period: time.Hour},
				ratelimit.FixedWindow{Name: "window", Rate: 7, Period: time.Hour + time.Microsecond},
				ratelimit.FixedWindow{Name: "calendar", Rate: 7, Every: ratelimit.Month},
			} {
				for _, paused := range []time.Duration{0, 99*365*24*time.Hour + time.Microsecond} {
					mustAllow(t, store, limit.ForN("k", 6.123456789))
					if paused > 0 {
						wantPaused(t, store, limit, "k", c.now(), c.now().Add(paused))
						if _, err := store.Credit(t.Context(), limit.ForN("k", 5)); err != nil { // which the pause alone keeps
							t.Fatal(err)
						}
					}
					c.add(1234567 * time.Microsecond)
					var refused *ratelimit.RefusedError
					_, err := takeBetween(t.Context(), db, store, db.Pool, limit.ForN("k", 4))
					want, wantErr := store.Allow(t.Context(), limit.ForN("k", 4))
					if !errors.As(err, &refused) || wantErr != nil || !refused.Result.RetryAt.Equal(want.RetryAt) || refused.Result.Value != want.Value || !refused.Result.PausedUntil.Equal(want.PausedUntil) {
						t.Errorf("%v: got %v, want %+v, %v", limit, err, want, wantErr)
					}
					mustReset(t, store, limit, "k")
				}
			}
		})
	}
}

// TestQueueTakeForged has a statement of the caller's fail of a text that has the marks that follow
// those of a refusal: it is no refusal.
func TestQueueTakeForged(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit := slow("api", 10)
	mustAllow(t, store, limit.ForN("k", 10))
	send := func(key string, work ...string) (*pgstore.QueuedTake, error) {
		var batch pgx.Batch
		take, err := store.QueueTake(&batch, limit.For(key))
		must(t, err)
		for _, text := range work {
			batch.Queue("SELECT ($1::text)::float8", text)
		}
		results := db.Pool.SendBatch(t.Context(), &batch)
		for err == nil {
			_, err = results.Exec()
		}
		_ = results.Close()
		return take, err
	}
	_, told := send("k")
	mark := regexp.MustCompile(`ratelimit refused (\w+)\.0`).FindStringSubmatch(told.Error())
	if mark == nil {
		t.Fatal(told)
	}
	number, err := strconv.ParseUint(mark[1], 10, 64)
	if err != nil {
		number, _ = strconv.ParseUint(mark[1], 16, 64)
	}
	var forged strings.Builder
	for range 1000 { // others in this process take as well
		number++
		fmt.Fprintf(&forged, "ratelimit refused %d.0 0 0 0 - . ratelimit refused %016x.0 0 . ", number, number)
	}
	take, err := send("other", forged.String())
	if codeOf(err) != "22P02" || take.Err(err) != err {
		t.Errorf("an error of the caller's is taken for %v", take.Err(err))
	}
	for _, text := range []string{mark[0], mark[0] + " "} {
		if _, err := send("other", text); codeOf(err) != "22P02" {
			t.Errorf("got %v", err)
		}
	}
}

// TestQueueTakeTold has each end told once, however it was read, and whatever was sent before.
func TestQueueTakeTold(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var h heard
	store := newStore(t, db, observed(&h))
	wantTold := func(what string, wanted ...ratelimit.Outcome) {
		t.Helper()
		var got []ratelimit.Outcome
		for _, e := range h.take() {
			got = append(got, e.Outcome)
		}
		if !slices.Equal(got, wanted) {
			t.Errorf("%s: heard %q, want %q", what, got, wanted)
		}
	}
	queue := func(requests ...ratelimit.Request) (*pgx.Batch, *pgstore.QueuedTake) {
		t.Helper()
		var batch pgx.Batch
		take, err := store.QueueTake(&batch, requests...)
		must(t, err)
		return &batch, take
	}

	batch, take := queue(slow("a", 2).For("k"), slow("b", 2).For("k"), slow("c", 5).For("k"))
	for i := range 3 { // pgx does not promise that this goes well
		err := db.Pool.SendBatch(t.Context(), batch).Close()
		if granted := i < 2; granted != (err == nil) || granted != take.Result().OK || granted != (len(take.Result().Each()) == 3) {
			t.Errorf("sent %d times: got %v and %v", i+1, take.Result(), err)
		}
	}
	wantTold("sent thrice", ratelimit.OutcomeGranted, ratelimit.OutcomeGranted, ratelimit.OutcomeRefused)

	batch, take = queue(slow("a", 2).For("k"))
	results := db.Pool.SendBatch(t.Context(), batch)
	_, err := results.Exec()
	for _, err := range []error{err, results.Close()} {
		if !errors.Is(take.Err(err), ratelimit.ErrRefused) {
			t.Errorf("got %v", take.Err(err))
		}
	}
	wantTold("read by hand", ratelimit.OutcomeRefused)

	batch, take = queue(slow("a", 2).For("k").In(ratelimit.ModeShadow))
	if err := db.Pool.SendBatch(t.Context(), batch).Close(); err != nil || !take.Result().OK || !take.Result().Shadowed {
		t.Errorf("in shadow alone: got %+v and %v", take.Result(), err)
	}
	wantTold("in shadow alone", ratelimit.OutcomeGranted)
}

// unbatched are requests that no batch can have, with their errors.
var unbatched = map[error][]ratelimit.Request{
	ratelimit.ErrExceedsCapacity: {slow("api", 10).ForN("k", 11)},
	ratelimit.ErrInvalid:         {slow("api", 10).ForN("k", -1), shardedSlow("sharded", 10, 2).For("k"), slowSliding("sliding", 10).For("k")},
	ratelimit.ErrRefused:         {slow("api", 10).For("k").In(ratelimit.ModeRefuse)},
}

// TestQueueTakeBeforeSending has requests that no batch can have: they are errors, and queue nothing.
func TestQueueTakeBeforeSending(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit := slow("api", 10)
	wantNone := func(store *pgstore.Store, r ratelimit.Request, want error) {
		t.Helper()
		var batch pgx.Batch
		if take, err := store.QueueTake(&batch, slow("first", 5).For("k"), r); !errors.Is(err, want) || take != nil || batch.Len() != 0 {
			t.Errorf("%v: got %v, %v and %d statements, want %v", r, take, err, batch.Len(), want)
		}
	}
	for want, requests := range unbatched {
		for _, r := range requests {
			wantNone(store, r, want)
		}
	}
	wantNone(newStore(t, db, portable), slowWindow("window", 10).For("k"), ratelimit.ErrInvalid)
	if _, err := store.QueueTake(nil, limit.For("k")); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("without a batch: %v", err)
	}
	if _, err := store.QueueTake(new(pgx.Batch)); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("without a request: %v", err)
	}
}

// TestQueueTakeShadow has a limit in ModeShadow that is short, beside one that is enforced.
func TestQueueTakeShadow(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	workTable(t, db)
	store := newStore(t, db)
	trial, enforced := slow("trial", 1).For("k").In(ratelimit.ModeShadow), slow("enforced", 2).For("k")
	for i := range 3 {
		result, err := takeBetween(t.Context(), db, store, db.Pool, trial, enforced)
		switch {
		case i == 2:
			if !errors.Is(err, ratelimit.ErrRefused) {
				t.Errorf("the third: got %v and %v", result, err)
			}
		case err != nil || !result.OK || result.Shadowed != (i == 1) || len(result.Each()) != 2 || result.Each()[0].OK != (i == 0):
			t.Errorf("take %d: got %+v and %v", i, result, err)
		}
	}
	never := slow("trial", 1).ForN("k", 2).In(ratelimit.ModeShadow)
	if result, err := takeBetween(t.Context(), db, store, db.Pool, never); err != nil || !result.OK || !result.Shadowed {
		t.Errorf("one that can never grant: got %+v and %v", result, err)
	}
	wantLeft(t, store, slow("enforced", 2).ForN("k", 0), 0)
	if n := countWork(t, db); n != 6 {
		t.Errorf("%d rows of work, want 6", n)
	}
}
