package doors

import (
	"context"
	"database/sql"
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
	"github.com/pgratelimit/ratelimit/sqltx"
)

var calling = ratelimit.InFlight{Name: "calls", Limit: 3, Lease: time.Hour}

// permitQuerier is a pool or a transaction.
type permitQuerier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// acquire takes a permit by the SQL function.
func acquire(ctx context.Context, q permitQuerier, schema string, limit ratelimit.InFlight) (s ratelimit.Permit, err error) {
	s.InFlight, s.Key = limit, "k"
	var number *int
	var fence *int64
	var until, notBefore *time.Time
	err = q.QueryRow(ctx, "SELECT ok, number, fence, at, until, not_before FROM "+schema+".rate_limit_acquire($1, 'k', $2, $3)", limit.Name, limit.Limit, limit.Lease).
		Scan(&s.OK, &number, &fence, &s.At, &until, &notBefore)
	if err == nil && s.OK {
		s.Number, s.Fence, s.Until = *number, *fence, *until
	} else if err == nil {
		s.NotBefore = *notBefore
	}
	return s, err
}

// change renews or releases a permit by an SQL function, and says whether that was held.
func change(t *testing.T, db *pgtest.DB, call string, s ratelimit.Permit) (ok bool) {
	t.Helper()
	err := db.Pool.QueryRow(t.Context(), fmt.Sprintf("SELECT %s FROM %s."+call, map[bool]string{true: "ok", false: "a"}[call[:14] == "rate_limit_ren"],
		db.Schema), s.InFlight.Name, s.Key, s.Number, s.Fence).Scan(&ok)
	if err != nil {
		t.Fatal(err)
	}
	return ok
}

const (
	renew   = "rate_limit_renew($1, $2, $3, $4, '2 hours')"
	release = "rate_limit_release($1, $2, $3, $4) AS a"
)

// Functions and Go share the permits: each is held by one, renewed and released by its fence, and
// not by a fence of before.
func TestPermitFunctions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	withFunctions(t, db, nil)
	ctx, calling := t.Context(), calling
	calling.Name = db.Schema // as the functions' locks are those of all schemas
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	if err != nil {
		t.Fatal(err)
	}
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
	if s, err := store.Permits().Acquire(ctx, calling.For("k")); err != nil || s.OK {
		t.Errorf("in Go: %+v, %v, want a refusal", s, err)
	}
	one := held[1]
	if !change(t, db, renew, one) {
		t.Error("what is held is not renewed")
	}
	permits, err := store.Permits().Held(ctx, calling, "k")
	if err != nil || len(permits) != 3 || permits[1].Fence != one.Fence || permits[1].Until.Sub(one.Until) < 30*time.Minute {
		t.Errorf("%v, %v, want the second with a lease that is an hour longer", permits, err)
	}
	if err := store.Permits().Release(ctx, one); err != nil { // what a function took Go can release
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
	for _, call := range []string{
		"rate_limit_acquire('', 'k', 1)", "rate_limit_acquire('l', NULL, 1)", "rate_limit_acquire('l', 'k', 0)", "rate_limit_acquire('l', 'k', 10001)",
		"rate_limit_acquire('l', 'k', NULL)", "rate_limit_acquire('l', 'k', 1, '1 month')", "rate_limit_acquire('l', 'k', 1, '0')", "rate_limit_acquire('l', 'k', 1, NULL)",
		"rate_limit_renew('l', 'k', 1, -1, '1 s')", "rate_limit_renew('l', 'k', 1, 1, '-1 s')", "rate_limit_release('l', 'k', 1, NULL)",
	} {
		if _, err := db.Pool.Exec(ctx, "SELECT "+db.Schema+"."+call); !hasCode(err, "22023") {
			t.Errorf("%s: got %v, want invalid_parameter_value", call, err)
		}
	}
}

// Functions take, renew and release several permits, all or none, and Go the same permits.
func TestSeveralPermitsByFunctions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	withFunctions(t, db, nil)
	ctx, calling := t.Context(), calling
	calling.Name = db.Schema
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	if err != nil {
		t.Fatal(err)
	}
	var numbers []int32
	var fences []int64
	take := func(n int) (ok bool) {
		t.Helper()
		err := db.Pool.QueryRow(ctx, "SELECT ok, coalesce(numbers, '{}'), coalesce(fences, '{}') FROM "+db.Schema+".rate_limit_acquire_n($1, 'k', $2, 3, '1 hour')", calling.Name, n).
			Scan(&ok, &numbers, &fences)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	wantHeld := func(want int) {
		t.Helper()
		if held, err := store.Permits().Held(ctx, calling, "k"); err != nil || len(held) != want {
			t.Errorf("%v are held, and %v, want %d", held, err, want)
		}
	}
	ask := func(call string) (ok bool) {
		t.Helper()
		if err := db.Pool.QueryRow(ctx, "SELECT "+fmt.Sprintf(call, db.Schema), calling.Name, numbers, fences).Scan(&ok); err != nil {
			t.Fatal(err)
		}
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
	if permit, err := store.Permits().Acquire(ctx, calling.ForN("k", 3)); err != nil || !permit.OK {
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
	for call, code := range map[string]string{
		"rate_limit_acquire_n('l', 'k', 4, 3)": "22003", "rate_limit_acquire_n('l', 'k', 0, 3)": "22023", "rate_limit_acquire_n('l', 'k', 1001, 5000)": "22023",
		"rate_limit_acquire_n('l', 'k', 1, NULL)": "22023", "rate_limit_renew_n('l', 'k', '{1}', '{}', '1 s')": "22023", "rate_limit_release_n('l', 'k', '{}', '{}')": "22023",
		"rate_limit_release_n('l', 'k', NULL, NULL)": "22023",
	} {
		if _, err := db.Pool.Exec(ctx, "SELECT "+db.Schema+"."+call); !hasCode(err, code) {
			t.Errorf("%s: got %v, want %s", call, err, code)
		}
	}
}

// By name there are as many as the catalog says for the key.
func TestPermitsByName(t *testing.T) {
	t.Parallel()
	db, f := published(t, sending)
	ctx := t.Context()
	if err := f.catalog.PublishInFlight(ctx, ratelimit.InFlight{Name: "calls", Limit: 1, Lease: time.Hour}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.catalog.Set(ctx, "calls", "alice", catalog.Override{AtOnce: 2, Lease: time.Minute}); err != nil {
		t.Fatal(err)
	}
	take := func(key string) (ok bool, lease float64, err error) {
		err = db.Pool.QueryRow(ctx, "SELECT ok, coalesce(extract(epoch FROM until - at), 0)::float8 FROM "+db.Schema+".rate_limit_acquire('calls', $1)", key).Scan(&ok, &lease)
		return ok, lease, err
	}
	for _, want := range []struct {
		key   string
		ok    bool
		lease float64
	}{{"bob", true, 3600}, {"bob", false, 0}, {"alice", true, 60}, {"alice", true, 60}, {"alice", false, 0}} {
		if ok, lease, err := take(want.key); err != nil || ok != want.ok || lease != want.lease {
			t.Errorf("%s: got %v, %v, %v, want %v, %v", want.key, ok, lease, err, want.ok, want.lease)
		}
	}
	var renewed bool
	if err := db.Pool.QueryRow(ctx, "SELECT (SELECT ok AND until > at + interval '59 minutes' FROM "+db.Schema+".rate_limit_renew(name, key, shard, value::bigint)) FROM "+
		db.Schema+".rate_limits WHERE key = 'bob'").Scan(&renewed); err != nil || !renewed {
		t.Errorf("got %v, %v, want a renewed permit", renewed, err)
	}
	for _, call := range []string{"rate_limit_acquire('send_message', 'k')", "rate_limit_acquire('unknown', 'k')", "rate_limit_renew('unknown', 'k', 0, 1)"} {
		if _, err := db.Pool.Exec(ctx, "SELECT "+db.Schema+"."+call); !hasCode(err, "42704") {
			t.Errorf("%s: got %v, want undefined_object", call, err)
		}
	}
	if _, err := db.Pool.Exec(ctx, "SELECT "+db.Schema+".rate_limit_allow('calls', 'k')"); !hasCode(err, "0A000") {
		t.Errorf("got %v, want feature_not_supported", err)
	}
}

// A permit that another open transaction has taken is passed over, in Go and in SQL, whether the
// store names the schema; and what is rolled back is free.
func TestPermitsOfOpenTransactions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	withFunctions(t, db, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// A name of its own: the locks of stores that name no schema are those of all schemas.
	limit := ratelimit.InFlight{Name: db.Schema, Limit: 1, Lease: time.Hour}
	unnamed, err := pgstore.New(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
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
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.Background()) }()
			if _, err := tx.Exec(ctx, "SET LOCAL search_path = "+db.Schema+"; SET LOCAL lock_timeout = '10s'"); err != nil {
				t.Fatal(err)
			}
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
	db := pgtest.New(t)
	withFunctions(t, db, nil)
	stranger, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stranger.Rollback(context.Background()) }()
	if _, err := stranger.Exec(t.Context(), "SELECT pg_advisory_xact_lock("+db.Schema+".rate_limit_lock(home, $2, 'k', n)) FROM generate_series(0, 2) AS n, unnest(ARRAY['', $1::text]) AS home", db.Schema, calling.Name); err != nil {
		t.Fatal(err)
	}
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
	db := pgtest.New(t)
	withFunctions(t, db, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	own, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	if err != nil {
		t.Fatal(err)
	}
	pool := drivers[3].open(t, db)
	calling := calling
	calling.Name = db.Schema
	through := map[string]func() (ratelimit.Permit, error){
		"SQL":   func() (ratelimit.Permit, error) { return acquire(ctx, db.Pool, db.Schema, calling) },
		"SQL 2": func() (ratelimit.Permit, error) { return acquire(ctx, db.Pool, db.Schema, calling) },
		"own":   func() (ratelimit.Permit, error) { return own.Permits().Acquire(ctx, calling.For("k")) },
		"database/sql": func() (s ratelimit.Permit, err error) {
			tx, err := pool.BeginTx(ctx, nil)
			if err != nil {
				return s, err
			}
			defer func() { _ = tx.Rollback() }()
			if s, err = own.Permits().AcquireTx(ctx, sqltx.Of(tx), calling.For("k")); err != nil {
				return s, err
			}
			return s, tx.Commit()
		},
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
					err = own.Permits().Release(ctx, s)
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

// In a transaction of database/sql a permit is held with its commit, and free with its roll-back.
func TestPermitsInTransactions(t *testing.T) {
	eachDriver(t, func(t *testing.T, db *pgtest.DB, pool *sql.DB) {
		ctx, store := t.Context(), newStore(t, db, nil)
		limit := ratelimit.InFlight{Name: "calls", Limit: 1, Lease: time.Hour}
		rate := ratelimit.TokenBucket{Name: "one", Rate: 10, Period: 24 * time.Hour}
		for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelSerializable} {
			tx := begin(t, pool, level)
			s, err := store.Permits().AcquireTx(ctx, sqltx.Of(tx), limit.For("k"), rate.For("k"))
			if err != nil || !s.OK || !s.Rates.OK {
				t.Fatalf("%v: %+v, %v", level, s, err)
			}
			other := begin(t, pool, level)
			if s, err := store.Permits().AcquireTx(ctx, sqltx.Of(other), limit.For("k")); err != nil || s.OK {
				t.Errorf("%v: another got %+v, %v, want a refusal", level, s, err)
			}
			for _, tx := range []*sql.Tx{other, tx} {
				if err := tx.Rollback(); err != nil {
					t.Fatal(err)
				}
			}
			tx = begin(t, pool, level)
			again, err := store.Permits().AcquireTx(ctx, sqltx.Of(tx), limit.For("k"), rate.For("k"))
			if err != nil || !again.OK {
				t.Fatalf("%v: after a roll-back %+v, %v", level, again, err)
			}
			commit(t, tx)
			if got := left(t, db); got < 9 || got > 9.1 {
				t.Errorf("%v: %v tokens left, want 9", level, got)
			}
			tx = begin(t, pool, level)
			of := sqltx.Of(tx)
			refused, err := store.Permits().AcquireTx(ctx, of, limit.For("k"), rate.For("k"))
			if err != nil || refused.OK {
				t.Errorf("%v: while it is held %+v, %v", level, refused, err)
			}
			if err := store.Permits().ReleaseTx(ctx, of, again); err != nil {
				t.Errorf("%v: %v", level, err)
			}
			if err := store.Permits().ReleaseTx(ctx, of, again); !errors.Is(err, ratelimit.ErrLeaseLost) {
				t.Errorf("%v: released twice, %v", level, err)
			}
			commit(t, tx) // the refusal took no token
			if got := left(t, db); got < 9 || got > 9.1 {
				t.Errorf("%v: %v tokens left after a refusal, want 9", level, got)
			}
			inSchema(t, db, "TRUNCATE rate_limits")
		}
	})
}

// By name permits are acquired in the mode that the catalog says, as in Go.
func TestPermitsByNameInModes(t *testing.T) {
	t.Parallel()
	db, f := published(t, sending)
	ctx := t.Context()
	one := ratelimit.InFlight{Name: "calls", Limit: 1, Lease: time.Hour}
	if err := f.catalog.PublishInFlight(ctx, one); err != nil {
		t.Fatal(err)
	}
	until := time.Now().Add(time.Hour).Truncate(time.Microsecond)
	for key, o := range map[string]catalog.Override{
		catalog.AllKeys:   {Mode: ratelimit.ModeRefuse},
		"off":             {Mode: ratelimit.ModeRefuse},
		"off for an hour": {Mode: ratelimit.ModeRefuse, Until: until},
		"enforced":        {Mode: ratelimit.ModeEnforce},
	} {
		if _, err := f.catalog.Set(ctx, "calls", key, o); err != nil {
			t.Fatal(err)
		}
	}
	take := func(key string) (permit ratelimit.Permit) {
		t.Helper()
		var number, fence *int64
		var notBefore *time.Time
		err := db.Pool.QueryRow(ctx, "SELECT ok, number, fence, at, not_before FROM "+db.Schema+".rate_limit_acquire('calls', $1)", key).
			Scan(&permit.OK, &number, &fence, &permit.At, &notBefore)
		if err != nil {
			t.Fatal(err)
		}
		if notBefore != nil {
			permit.NotBefore = *notBefore
		}
		if fence != nil {
			permit.Number, permit.Fence = int(*number), *fence
		}
		return permit
	}
	if got := take("off"); got.OK || got.NotBefore.Sub(got.At) != ratelimit.RefusedFor {
		t.Errorf("got %+v, want a refusal for a minute", got)
	}
	if got := take("off for an hour"); got.OK || !got.NotBefore.Equal(until) {
		t.Errorf("got %+v, want a refusal until %v", got, until)
	}
	if first, second := take("enforced"), take("enforced"); !first.OK || second.OK {
		t.Errorf("got %+v and %+v, want the second refused", first, second)
	}
	if err := f.catalog.Refresh(ctx); err != nil || f.catalog.InFlight(one, "enforced").Mode != ratelimit.ModeEnforce {
		t.Errorf("in Go got %v, %v", f.catalog.InFlight(one, "enforced"), err)
	}
}

// Who may release what is held changes no row of a bucket by that: neither one that a pause keeps
// in the future, nor a key that has none.
func TestReleaseLeavesBucketsAlone(t *testing.T) {
	t.Parallel()
	db, f := published(t, sending)
	inSchema(t, db, "GRANT EXECUTE ON FUNCTION rate_limit_release(text, text, int4, int8) TO "+newRole(t, db))
	_, as := asRole(t, db)
	if _, err := f.Store.Allow(t.Context(), sending.ForN("alice", 2)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Store.Pause(t.Context(), sending, "alice", time.Hour); err != nil {
		t.Fatal(err)
	}
	inSchema(t, db, "INSERT INTO rate_limits (name, key, shard, value, ts) VALUES ('send_message', 'rich', 0, 1e12, now() + interval '1 hour')")
	rows := func() (all string) {
		err := db.Pool.QueryRow(t.Context(), "SELECT string_agg(r::text, '; ' ORDER BY r.key) FROM "+db.Schema+".rate_limits AS r").Scan(&all)
		if err != nil {
			t.Fatal(err)
		}
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
