package doors

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var calling = ratelimit.InFlight{Name: "calls", Limit: 3, Lease: time.Hour}

// permitQuerier is a pool or a transaction.
type permitQuerier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// acquire takes a permit by the SQL function.
func acquire(ctx context.Context, q permitQuerier, schema string, limit ratelimit.InFlight) (ratelimit.Permit, error) {
	s, err := acquired(ctx, q, schema+".rate_limit_acquire($1, 'k', $2, $3)", limit.Name, limit.Limit, limit.Lease)
	s.InFlight, s.Key = limit, "k"
	return s, err
}

// acquired reads the answer to a call that takes a permit.
func acquired(ctx context.Context, q permitQuerier, call string, args ...any) (s ratelimit.Permit, err error) {
	var number *int
	var fence *int64
	var until, notBefore *time.Time
	err = q.QueryRow(ctx, "SELECT ok, number, fence, at, until, not_before FROM "+call, args...).Scan(&s.OK, &number, &fence, &s.At, &until, &notBefore)
	if err == nil && s.OK {
		s.Number, s.Fence, s.Until = *number, *fence, *until
	} else if err == nil {
		s.NotBefore = *notBefore
	}
	return s, err
}

const (
	renew   = "SELECT ok FROM %s.rate_limit_renew($1, $2, $3, $4, '2 hours')"
	release = "SELECT %s.rate_limit_release($1, $2, $3, $4)"
)

// change renews or releases a permit by an SQL function, and says whether that was held.
func change(t *testing.T, db *pgtest.DB, call string, s ratelimit.Permit) (ok bool) {
	t.Helper()
	must(t, db.Pool.QueryRow(t.Context(), fmt.Sprintf(call, db.Schema), s.InFlight.Name, s.Key, s.Number, s.Fence).Scan(&ok))
	return ok
}

// Functions and Go share the permits: each is held by one, renewed and released by its fence, and
// not by a fence of before.
func TestPermitFunctions(t *testing.T) {
	t.Parallel()
	db, f := published(t)
	ctx, calling, permits := t.Context(), calling, f.Permits()
	calling.Name = db.Schema // as the functions' locks are those of all schemas
	held := map[int]ratelimit.Permit{}
	for i := range 3 {
		s, err := acquire(ctx, db.Pool, db.Schema, calling)
		if err != nil || !s.OK || s.Until.Sub(s.At) != time.Hour || s.Fence < 1 {
			t.Fatalf("permit %d: %+v, %v", i, s, err)
		}
		if _, twice := held[s.Number]; twice || s.Number < 0 || s.Number > 2 {
			t.Fatalf("permit %d is given a second time", s.Number)
		}
		held[s.Number] = s
	}
	full, err := acquire(ctx, db.Pool, db.Schema, calling)
	if err != nil || full.OK || full.NotBefore.Before(full.At) || full.NotBefore.After(full.At.Add(time.Hour)) {
		t.Errorf("the fourth: %+v, %v", full, err)
	}
	if s, err := permits.Acquire(ctx, calling.For("k")); err != nil || s.OK {
		t.Errorf("in Go: %+v, %v, want a refusal", s, err)
	}
	one := held[1]
	if !change(t, db, renew, one) {
		t.Error("what is held is not renewed")
	}
	kept, err := permits.Held(ctx, calling, "k")
	if err != nil || len(kept) != 3 || kept[1].Fence != one.Fence || kept[1].Until.Sub(one.Until) < 30*time.Minute {
		t.Errorf("%v, %v, want the second with a lease that is an hour longer", kept, err)
	}
	if err := permits.Release(ctx, one); err != nil { // what a function took Go can release
		t.Error(err)
	}
	if change(t, db, release, one) || change(t, db, renew, one) {
		t.Error("what was released is held")
	}
	again, err := acquire(ctx, db.Pool, db.Schema, calling)
	if err != nil || !again.OK || again.Number != 1 || again.Fence <= one.Fence {
		t.Errorf("after a release: %+v, %v, want permit 1 with a later fence", again, err)
	}
	if change(t, db, release, one) || !change(t, db, release, again) || change(t, db, release, again) {
		t.Error("a release is once, and by the fence of now")
	}
	wantCode(t, db, "22023", "rate_limit_acquire('', 'k', 1)", "rate_limit_acquire('l', NULL, 1)", "rate_limit_acquire('l', 'k', 0)",
		"rate_limit_acquire('l', 'k', 10001)", "rate_limit_acquire('l', 'k', NULL)", "rate_limit_acquire('l', 'k', 1, '1 month')",
		"rate_limit_acquire('l', 'k', 1, '0')", "rate_limit_acquire('l', 'k', 1, NULL)", "rate_limit_renew('l', 'k', 1, -1, '1 s')",
		"rate_limit_renew('l', 'k', 1, 1, '-1 s')", "rate_limit_release('l', 'k', 1, NULL)")
}

// Functions take, renew and release several permits, all or none, and Go the same permits.
func TestSeveralPermitsByFunctions(t *testing.T) {
	t.Parallel()
	db, f := published(t)
	ctx, calling, permits := t.Context(), calling, f.Permits()
	calling.Name = db.Schema
	var numbers []int32
	var fences []int64
	take := func(n int) (ok bool) {
		t.Helper()
		err := db.Pool.QueryRow(ctx, "SELECT ok, coalesce(numbers, '{}'), coalesce(fences, '{}') FROM "+db.Schema+".rate_limit_acquire_n($1, 'k', $2, 3, '1 hour')", calling.Name, n).
			Scan(&ok, &numbers, &fences)
		must(t, err)
		return ok
	}
	wantHeld := func(want int) {
		t.Helper()
		if held, err := permits.Held(ctx, calling, "k"); err != nil || len(held) != want {
			t.Errorf("%v are held, and %v, want %d", held, err, want)
		}
	}
	ask := func(call string) (ok bool) {
		t.Helper()
		must(t, db.Pool.QueryRow(ctx, "SELECT "+fmt.Sprintf(call, db.Schema), calling.Name, numbers, fences).Scan(&ok))
		return ok
	}
	const renew, release = "(%s.rate_limit_renew_n($1, 'k', $2, $3, '1 hour')).ok", "%s.rate_limit_release_n($1, 'k', $2, $3)"
	if !take(2) || len(numbers) != 2 || numbers[0] == numbers[1] || len(fences) != 2 {
		t.Errorf("got %v and %v, want two permits", numbers, fences)
	}
	wantHeld(2)
	mine, its := numbers, fences
	if take(2) || len(numbers) != 0 {
		t.Error("two of one that is left are given")
	}
	wantHeld(2)
	numbers, fences = mine, []int64{its[0], its[1] - 1}
	if ask(renew) || ask(release) {
		t.Error("a permit that is not held is renewed or released")
	}
	wantHeld(2)
	if fences = its; !ask(renew) || !ask(release) || ask(release) {
		t.Error("what is held is not renewed and released once")
	}
	wantHeld(0)
	if permit, err := permits.Acquire(ctx, calling.ForN("k", 3)); err != nil || !permit.OK {
		t.Errorf("in Go: %v, %v, want three", permit, err)
	}
	if take(1) {
		t.Error("a fourth is given")
	}
	var after float64 // of three, two end after two hours: what the call itself took has no end
	if err := db.Pool.QueryRow(ctx, fmt.Sprintf(`WITH other AS MATERIALIZED (SELECT %[1]s.rate_limit_acquire('seen', 'k', 4, '1 hour')), others AS MATERIALIZED (
		SELECT %[1]s.rate_limit_acquire('seen', 'k', 4, '2 hours') FROM other WHERE other IS NOT NULL)
		SELECT extract(epoch FROM r.not_before - r.at) FROM others, %[1]s.rate_limit_acquire_n('seen', 'k', 3 + 0 * length(others::text), 4, '1 s') AS r`, db.Schema)).Scan(&after); err != nil || after < 3500 || after > 3600 {
		t.Errorf("a refusal's not_before is %v s away, %v, want the first lease's end", after, err)
	}
	wantCode(t, db, "22003", "rate_limit_acquire_n('l', 'k', 4, 3)")
	wantCode(t, db, "22023", "rate_limit_acquire_n('l', 'k', 0, 3)", "rate_limit_acquire_n('l', 'k', 1001, 5000)",
		"rate_limit_acquire_n('l', 'k', 1, NULL)", "rate_limit_renew_n('l', 'k', '{1}', '{}', '1 s')",
		"rate_limit_release_n('l', 'k', '{}', '{}')", "rate_limit_release_n('l', 'k', NULL, NULL)")
}

// By name there are as many as the catalog says for the key, in its mode, as in Go.
func TestPermitsByName(t *testing.T) {
	t.Parallel()
	db, f := published(t, sending)
	ctx := t.Context()
	calls := ratelimit.InFlight{Name: "calls", Limit: 1, Lease: time.Hour}
	must(t, f.catalog.PublishInFlight(ctx, calls))
	set := func(key string, o catalog.Override) {
		t.Helper()
		must(t, errOf(f.catalog.Set(ctx, "calls", key, o)))
	}
	until := time.Now().Add(time.Hour).Truncate(time.Microsecond)
	set("alice", catalog.Override{AtOnce: 2, Lease: time.Minute})
	set("off", catalog.Override{Mode: ratelimit.ModeRefuse})
	set("off for an hour", catalog.Override{Mode: ratelimit.ModeRefuse, Until: until})
	take := func(key string) ratelimit.Permit {
		t.Helper()
		s, err := acquired(ctx, db.Pool, db.Schema+".rate_limit_acquire('calls', $1)", key)
		must(t, err)
		return s
	}
	for _, want := range []struct {
		key   string
		ok    bool
		lease time.Duration
	}{{"bob", true, time.Hour}, {"bob", false, 0}, {"alice", true, time.Minute}, {"alice", true, time.Minute}, {"alice", false, 0}} {
		if s := take(want.key); s.OK != want.ok || s.OK && s.Until.Sub(s.At) != want.lease {
			t.Errorf("%s: got %v, want %v, %v", want.key, s, want.ok, want.lease)
		}
	}
	if got := take("off"); got.OK || got.NotBefore.Sub(got.At) != ratelimit.RefusedFor {
		t.Errorf("got %+v, want a refusal for a minute", got)
	}
	if got := take("off for an hour"); got.OK || !got.NotBefore.Equal(until) {
		t.Errorf("got %+v, want a refusal until %v", got, until)
	}
	set(catalog.AllKeys, catalog.Override{Mode: ratelimit.ModeRefuse})
	set("enforced", catalog.Override{Mode: ratelimit.ModeEnforce})
	if first, second := take("enforced"), take("enforced"); !first.OK || second.OK {
		t.Errorf("got %+v and %+v, want the second refused", first, second)
	}
	if err := f.catalog.Refresh(ctx); err != nil || f.catalog.InFlight(calls, "enforced").Mode != ratelimit.ModeEnforce {
		t.Errorf("in Go got %v, %v", f.catalog.InFlight(calls, "enforced"), err)
	}
	var renewed bool
	if err := db.Pool.QueryRow(ctx, "SELECT (SELECT ok AND until > at + interval '59 minutes' FROM "+db.Schema+".rate_limit_renew(name, key, shard, value::bigint)) FROM "+
		db.Schema+".rate_limits WHERE key = 'bob'").Scan(&renewed); err != nil || !renewed {
		t.Errorf("got %v, %v, want a renewed permit", renewed, err)
	}
	wantCode(t, db, "42704", "rate_limit_acquire('send_message', 'k')", "rate_limit_acquire('unknown', 'k')", "rate_limit_renew('unknown', 'k', 0, 1)")
	wantCode(t, db, "0A000", "rate_limit_allow('calls', 'k')")
}

// A permit that another open transaction has taken is passed over, in Go and in SQL, whether the
// store names the schema; and what is rolled back is free.
func TestPermitsOfOpenTransactions(t *testing.T) {
	t.Parallel()
	db, _ := published(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// A name of its own: the locks of stores that name no schema are those of all schemas.
	limit := ratelimit.InFlight{Name: db.Schema, Limit: 1, Lease: time.Hour}
	unnamed, err := pgstore.New(nil, nil)
	must(t, err)
	named := newStore(t, db, nil)
	inGo := func(store *pgstore.Store) func(tx pgx.Tx) (ratelimit.Permit, error) {
		return func(tx pgx.Tx) (ratelimit.Permit, error) { return store.Permits().AcquireTx(ctx, tx, limit.For("k")) }
	}
	inSQL := func(tx pgx.Tx) (ratelimit.Permit, error) { return acquire(ctx, tx, db.Schema, limit) }
	for name, takers := range map[string][2]func(tx pgx.Tx) (ratelimit.Permit, error){
		"SQL before SQL":              {inSQL, inSQL},
		"Go before SQL":               {inGo(named), inSQL},
		"Go without schema before it": {inGo(unnamed), inSQL},
		"SQL before Go":               {inSQL, inGo(named)},
		"SQL before Go without it":    {inSQL, inGo(unnamed)},
	} {
		var open [2]pgx.Tx
		for i := range open {
			tx, err := db.Pool.Begin(ctx)
			must(t, err)
			defer func() { _ = tx.Rollback(context.Background()) }()
			must(t, errOf(tx.Exec(ctx, "SET LOCAL search_path = "+db.Schema+"; SET LOCAL lock_timeout = '10s'")))
			open[i] = tx
		}
		if s, err := takers[0](open[0]); err != nil || !s.OK {
			t.Errorf("%s: %+v, %v, want a permit", name, s, err)
		}
		if s, err := takers[1](open[1]); err != nil || s.OK {
			t.Errorf("%s: the second got %+v, %v, want a refusal without a wait", name, s, err)
		}
		for _, tx := range open {
			if err := tx.Rollback(ctx); err != nil {
				t.Error(err)
			}
		}
	}
}

// Any role may have the locks of free permits: they are taken without them. Functions mean the same
// whatever the session's settings.
func TestPermitsHiddenFromFunctions(t *testing.T) {
	t.Parallel()
	db, _ := published(t)
	stranger, err := db.Pool.Begin(t.Context())
	must(t, err)
	defer func() { _ = stranger.Rollback(context.Background()) }()
	must(t, errOf(stranger.Exec(t.Context(), "SELECT pg_advisory_xact_lock("+db.Schema+".rate_limit_lock(home, $2, 'k', n)) FROM generate_series(0, 2) AS n, unnest(ARRAY['', $1::text]) AS home", db.Schema, calling.Name)))
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "SET LOCAL standard_conforming_strings = off; SET LOCAL lock_timeout = '17s'"); err != nil {
			return err
		}
		for n := range calling.Limit + 1 {
			if s, err := acquire(t.Context(), tx, db.Schema, calling); err != nil || s.OK != (n < calling.Limit) {
				t.Errorf("permit %d: %v, %v", n, s, err)
			}
		}
		var bound string
		err := tx.QueryRow(t.Context(), "SHOW lock_timeout").Scan(&bound)
		if bound != "17s" {
			t.Errorf("lock_timeout is %q afterwards, want 17s", bound)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// Never more than so many at a time, by functions, database/sql and Go at once.
func TestPermitsNeverOver(t *testing.T) {
	t.Parallel()
	db, f := published(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	calling, permits := calling, f.Permits()
	calling.Name = db.Schema
	through := map[string]func() (ratelimit.Permit, error){
		"SQL":   func() (ratelimit.Permit, error) { return acquire(ctx, db.Pool, db.Schema, calling) },
		"SQL 2": func() (ratelimit.Permit, error) { return acquire(ctx, db.Pool, db.Schema, calling) },
		"own":   func() (ratelimit.Permit, error) { return permits.Acquire(ctx, calling.For("k")) },
	}
	for _, d := range drivers {
		c := committed{pool: d.open(t, db)}
		through[d.name] = func() (ratelimit.Permit, error) {
			return in(ctx, c, func(tx pgx.Tx) (ratelimit.Permit, error) { return permits.AcquireTx(ctx, tx, calling.For("k")) })
		}
	}
	var holding, most atomic.Int64
	var callers sync.WaitGroup
	for name, take := range through {
		callers.Go(func() {
			for got := 0; got < 25; {
				s, err := take()
				if err != nil {
					t.Errorf("%s: %v", name, err)
					return
				}
				if !s.OK {
					time.Sleep(time.Millisecond)
					continue
				}
				got++
				if n := holding.Add(1); n > most.Load() {
					most.Store(n)
				}
				time.Sleep(time.Millisecond) // of work
				holding.Add(-1)
				if name == "own" {
					err = permits.Release(ctx, s)
				} else if !change(t, db, release, s) {
					err = errors.New("it was not held")
				}
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
	callers.Wait()
	if most.Load() > 3 {
		t.Errorf("%d at a time, want at most 3", most.Load())
	}
}

// Who may release what is held changes no row of a bucket by that: neither one that a pause keeps
// in the future, nor a key that has none.
func TestReleaseLeavesBucketsAlone(t *testing.T) {
	t.Parallel()
	db, f := published(t, sending)
	inSchema(t, db, "GRANT EXECUTE ON FUNCTION rate_limit_release(text, text, int4, int8) TO "+newRole(t, db))
	_, as := asRole(t, db)
	must(t, errOf(f.Store.Allow(t.Context(), sending.ForN("alice", 2))))
	must(t, errOf(f.Store.Pause(t.Context(), sending, "alice", time.Hour)))
	inSchema(t, db, "INSERT INTO rate_limits (name, key, shard, value, ts) VALUES ('send_message', 'rich', 0, 1e12, now() + interval '1 hour')")
	rows := func() (all string) {
		must(t, db.Pool.QueryRow(t.Context(), "SELECT string_agg(r::text, '; ' ORDER BY r.key) FROM "+db.Schema+".rate_limits AS r").Scan(&all))
		return all
	}
	before := rows()
	for _, call := range []string{
		"SELECT {schema}.rate_limit_release('send_message', l.key, 0, l.fence) FROM (SELECT 'alice' AS key, n AS fence FROM generate_series(1, 10) AS n UNION ALL SELECT 'rich', 1000000000000) AS l",
		"SELECT {schema}.rate_limit_release('send_message', 'bob', 0, 1)",
		"SELECT {schema}.rate_limit_release('send_message', 'bob', 0, (extract(epoch FROM now()) * 1000000)::int8)",
		"SELECT {schema}.rate_limit_release('send_message', 'alice', 0, (extract(epoch FROM now()) * 1000000)::int8)",
	} {
		if err := as(call); err != nil {
			t.Errorf("%s: %v", call, err)
		}
	}
	if got := rows(); got != before {
		t.Errorf("got rows\n%s\nwant\n%s", got, before)
	}
}
