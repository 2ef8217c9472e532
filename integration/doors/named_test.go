package doors

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/migrations"
)

// told is an answer of a function.
type told struct {
	ok, shadowed bool
	retryAfter   time.Duration
	value        float64
	capacity     float64
	of           string
}

// tell calls a function in a schema, of which it says what it answers.
func tell(ctx context.Context, db *pgtest.DB, call string) (a told, err error) {
	var micros int64
	err = db.Pool.QueryRow(ctx, `SELECT ok, shadowed, (extract(epoch FROM retry_after) * 1000000)::int8, value, capacity, name
		FROM `+db.Schema+"."+call).Scan(&a.ok, &a.shadowed, &micros, &a.value, &a.capacity, &a.of)
	a.retryAfter = time.Duration(micros) * time.Microsecond
	return a, err
}

// answer is tell for a call that does not fail.
func answer(t *testing.T, db *pgtest.DB, call string) told {
	t.Helper()
	a, err := tell(t.Context(), db, call)
	if err != nil {
		t.Fatalf("%s: %v", call, err)
	}
	return a
}

var sending = ratelimit.TokenBucket{Name: "send_message", Rate: 3, Period: 24 * time.Hour}

// published is a schema with functions whose catalog knows limits.
func published(t *testing.T, limits ...ratelimit.Limit) (*pgtest.DB, *functions) {
	t.Helper()
	db := pgtest.New(t)
	f := withFunctions(t, db, nil)
	must(t, f.catalog.Publish(t.Context(), limits...))
	return db, f
}

// What the catalog says holds at once: a key's override before that for all keys, as long as
// it is enabled and not over.
func TestNamedHeedsTheCatalog(t *testing.T) {
	t.Parallel()
	db, f := published(t, sending)
	ctx := t.Context()
	capacity := func(key string, want float64) {
		t.Helper()
		if a := answer(t, db, "rate_limit_check('send_message', '"+key+"')"); a.capacity != want || a.of != "send_message" {
			t.Errorf("%s: got %+v, want a capacity of %v", key, a, want)
		}
	}
	set := func(_ catalog.Edit, err error) {
		t.Helper()
		must(t, err)
	}
	capacity("alice", 3)
	set(f.catalog.Set(ctx, "send_message", catalog.AllKeys, catalog.Override{Rate: 10})) // the capacity follows
	capacity("alice", 10)
	set(f.catalog.Set(ctx, "send_message", "alice", catalog.Override{Capacity: 50}))
	capacity("alice", 50)
	capacity("bob", 10)
	set(f.catalog.Set(ctx, "send_message", "alice", catalog.Override{Switch: catalog.Off}))
	capacity("alice", 10)
	set(f.catalog.Set(ctx, "send_message", "alice", catalog.Override{Switch: catalog.On, Until: time.Now().Add(-time.Hour)}))
	capacity("alice", 10)
	set(f.catalog.Set(ctx, "send_message", "alice", catalog.Override{Until: time.Now().Add(time.Hour)}))
	capacity("alice", 50)

	// One by hand that no limit can be made of is not used, as in Go.
	inSchema(t, db, "INSERT INTO rate_limit_definitions (name, key, rate) VALUES ('send_message', 'carol', 0.5); DELETE FROM rate_limit_definitions WHERE kind IS NULL AND key IS NULL")
	capacity("carol", 3)
	capacity("bob", 3)

	for i := range 5 {
		if a := answer(t, db, "rate_limit_allow('send_message', 'bob')"); a.ok != (i < 3) {
			t.Errorf("call %d: %+v", i, a)
		}
	}
	if _, err := tell(ctx, db, "rate_limit_take('send_message', 'bob')"); !hasCode(err, "PT429") {
		t.Errorf("got %v, want PT429", err)
	}
	if _, err := tell(ctx, db, "rate_limit_take_all(ARRAY['send_message'], ARRAY['bob'], state => 'AB123')"); !hasCode(err, "AB123") {
		t.Errorf("got %v, want the SQLSTATE that was chosen", err)
	}
	result, err := f.Store.Check(ctx, sending.For("bob")) // in Go, the same row
	if err != nil || result.OK || result.Remaining != 0 {
		t.Errorf("got %v, %v, want a refusal", result, err)
	}
	if a := answer(t, db, "rate_limit_credit('send_message', 'bob', 2)"); a.value < 2 || a.value > 2.1 {
		t.Errorf("after a credit of 2: %+v", a)
	}
	if a := answer(t, db, "rate_limit_settle('send_message', 'bob', 1, 2)"); a.value < 1 || a.value > 1.1 {
		t.Errorf("after settling 1 as 2: %+v", a)
	}
}

// Modes are heeded: refuse refuses whatever there is, and shadow takes and refuses nothing.
func TestNamedModes(t *testing.T) {
	t.Parallel()
	other := ratelimit.FixedWindow{Name: "site", Rate: 10, Period: time.Hour}
	db, _ := published(t, sending, other)
	inSchema(t, db, "ALTER TABLE rate_limit_definitions ADD COLUMN IF NOT EXISTS mode text")
	mode := func(key, mode string) {
		t.Helper()
		inSchema(t, db, fmt.Sprintf(`DELETE FROM rate_limit_definitions WHERE name = 'send_message' AND key = '%[1]s';
			INSERT INTO rate_limit_definitions (name, key, mode, until) VALUES ('send_message', '%[1]s', '%s', clock_timestamp() + interval '90 minutes')`, key, mode))
	}
	mode("alice", "refuse")
	for _, verb := range []string{"allow", "reserve", "check", "check_reserve"} {
		if a := answer(t, db, "rate_limit_"+verb+"('send_message', 'alice')"); a.ok || a.retryAfter < 80*time.Minute || a.retryAfter > 91*time.Minute || a.capacity != 3 {
			t.Errorf("%s of what is refused: %+v", verb, a)
		}
	}
	if a := answer(t, db, "rate_limit_allow_all(ARRAY['site', 'send_message'], ARRAY['', 'alice'])"); a.ok || a.of != "send_message" {
		t.Errorf("with another one: %+v", a)
	}
	mode("alice", "shadow")
	for i := range 5 {
		if a := answer(t, db, "rate_limit_allow_all(ARRAY['site', 'send_message'], ARRAY['', 'alice'])"); !a.ok || a.shadowed != (i >= 3) || a.of != "site" {
			t.Errorf("call %d in shadow: %+v", i, a)
		}
	}
	if a := answer(t, db, "rate_limit_check('site', '')"); a.value != 5 {
		t.Errorf("the other one has %v left, want 5", a.value)
	}
	if a := answer(t, db, "rate_limit_take('send_message', 'alice')"); !a.ok || !a.shadowed || a.retryAfter != 0 {
		t.Errorf("alone in shadow: %+v", a)
	}
	if a := answer(t, db, "rate_limit_take('send_message', 'alice', 100)"); !a.ok || !a.shadowed {
		t.Errorf("more than there can be, in shadow: %+v", a)
	}
	// It takes from others only with those that refuse.
	if a := answer(t, db, "rate_limit_allow_all(ARRAY['site', 'send_message'], ARRAY['', 'dave'], ARRAY[6, 1])"); a.ok || a.of != "site" {
		t.Errorf("beside one that refuses: %+v", a)
	}
	if a := answer(t, db, "rate_limit_check('send_message', 'dave')"); a.value != 3 {
		t.Errorf("%v left after a refusal, want 3", a.value)
	}
}

// What the functions by name cannot do is an error that says so, and takes nothing.
func TestNamedRefuses(t *testing.T) {
	t.Parallel()
	db, f := published(t, sending,
		ratelimit.SlidingWindow{Name: "sliding", Rate: 3, Period: time.Minute},
		ratelimit.TokenBucket{Name: "sharded", Rate: 30, Period: time.Minute, Shards: 3},
		ratelimit.FixedWindow{Name: "monthly", Rate: 3, Every: ratelimit.Month, Zone: "Europe/Berlin"})
	must(t, f.catalog.PublishInFlight(t.Context(), ratelimit.InFlight{Name: "exports", Limit: 3}))
	inSchema(t, db, "UPDATE rate_limit_definitions SET zone = 'Europe/Nowhere' WHERE name = 'monthly'")
	wantCodes(t, db, map[string]string{
		"rate_limit_allow('unknown', 'k')":                                      "42704",
		"rate_limit_allow(NULL, 'k')":                                           "42704",
		"rate_limit_take('exports', 'k')":                                       "0A000",
		"rate_limit_take('monthly', 'k')":                                       "22023",
		"rate_limit_take('sliding', 'k', 4)":                                    "22003",
		"rate_limit_settle('sliding', 'k', 1, NULL)":                            "22023",
		"rate_limit_take('sharded', 'k', 31)":                                   "22003",
		"rate_limit_take('send_message', NULL)":                                 "22023",
		"rate_limit_take('send_message', 'k', -1)":                              "22023",
		"rate_limit_take('send_message', 'k', 'NaN')":                           "22023",
		"rate_limit_take('send_message', 'k', 4)":                               "22003",
		"rate_limit_settle('send_message', 'k', 1, -1)":                         "22023",
		"rate_limit_allow_all('{}', '{}')":                                      "22023",
		"rate_limit_allow_all(NULL, NULL)":                                      "22023",
		"rate_limit_allow_all('{send_message}', '{a,b}')":                       "22023",
		"rate_limit_allow_all('{send_message}', '{a}', '{1,2}')":                "22023",
		"rate_limit_allow_all('{send_message}', '{a}', above => '{2}')":         "22023",
		"rate_limit_allow_all('{send_message,send_message}', '{a,a}', '{2,2}')": "22003",
		"rate_limit_allow_all('{send_message,unknown}', '{a,a}')":               "42704",
		"rate_limit_allow_all('{send_message}', '{a}', '{3}', '{0.5}')":         "22003",
		"rate_limit_allow_all(ARRAY[@rate_limit_request('l', 'k', 1, '1 s'), @rate_limit_request('l', 'k', 2, '1 s')])": "22023",
		"rate_limit_allow_all(ARRAY[@rate_limit_request('l', 'k', 0, '1 s')])":                                          "22023",
		"rate_limit_reserve_all(ARRAY[@rate_limit_request('l', 'k', 1, '1 s', above => 0.5)])":                          "22023",
		"rate_limit_allow_all(ARRAY[NULL::@rate_limit_request])":                                                        "22023",
	})
}

// Of a limit with shards the functions grant at an instant what memory does, whichever shards they
// take from, and what a refusal promises holds to the microsecond.
func TestNamedShards(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, limit := range []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "bucket", Rate: 30, Period: time.Minute, Shards: 3, MaxReserved: 15},
		ratelimit.FixedWindow{Name: "window", Rate: 30, Period: time.Minute, Capacity: 50, Shards: 4, MaxReserved: 12},
		ratelimit.FixedWindow{Name: "quota", Rate: 30, Every: ratelimit.Month, Zone: "Europe/Berlin", Shards: 4, MaxReserved: 12},
		ratelimit.SlidingWindow{Name: "sliding", Rate: 30, Period: time.Minute, Slots: 6, Shards: 3},
	} {
		t.Run(ratelimit.NameOf(limit), func(t *testing.T) {
			t.Parallel()
			now := usual
			clock := func() time.Time { return now }
			f, memory := withFunctions(t, pgtest.New(t), clock), memstore.New(clock)
			f.byName = true
			h := &history{rand: rand.New(rand.NewPCG(1, 7)), limits: []ratelimit.Limit{limit}, stores: [2]ratelimit.Store{f, memory}}
			refused, settles := 0, false
			for n := range 200 {
				if h.rand.IntN(20) == 0 { // shards are full at different times: they begin anew
					settles = !settles // what is credited takes the room of what would be settled
					now = now.Add(time.Duration(h.rand.Int64N(int64(40 * 24 * time.Hour)))).Truncate(time.Microsecond)
					must(t, errors.Join(f.Reset(t.Context(), limit, "k"), memory.Reset(t.Context(), limit, "k")))
					h.taken = nil
				}
				verb, request := pick(h.rand, "allow", "allow", "allow", "check", "reserve", "credit", "settle"), limit.ForN("k", pick(h.rand, 0, 1, 2.5, 7, 12))
				if verb == "credit" && settles || verb == "settle" && (!settles || len(h.taken) == 0) || verb != "allow" && verb != "credit" && verb != "settle" && limit.Definition().Kind == ratelimit.KindSlidingWindow {
					verb = "allow"
				}
				place, share := h.rand.IntN(len(h.taken)+1)%max(len(h.taken), 1), h.rand.Float64()*3
				var replies [2]reply
				for i, store := range h.stores {
					h.noText = i == 0
					replies[i] = h.put(t.Context(), store, verb, []ratelimit.Request{request}, func() ratelimit.Result { return h.taken[place][i] }, 0, share)
				}
				got, want := replies[0], replies[1]
				if verb == "settle" {
					h.taken = slices.Delete(h.taken, place, place+1)
				} else if got.result.Receipt != nil && want.result.Receipt != nil {
					h.taken = append(h.taken, [2]ratelimit.Result{got.result, want.result})
				}
				if got.err != nil || want.err != nil || got.result.OK != want.result.OK || math.Abs(got.result.Value-want.result.Value) > 1e-6 {
					t.Fatalf("call %d, %s %v: got %v, %v, want %v, %v", n, verb, request, got.result, got.err, want.result, want.err)
				}
				if !got.result.OK && (verb == "allow" || verb == "reserve") {
					refused++
					check, before := map[string]func(context.Context, ...ratelimit.Request) (ratelimit.Result, error){"allow": f.Check, "reserve": f.CheckReserve}[verb], now
					for early, ok := range map[time.Duration]bool{0: true, time.Microsecond: false} {
						now = got.result.RetryAt.Add(-early)
						if later, err := check(t.Context(), request); err != nil || later.OK != ok {
							t.Fatalf("call %d, %s %v: %v, asked %v before that: %v, %v, want %v", n, verb, request, got.result, early, later, err, ok)
						}
					}
					now = before
				}
			}
			if refused < 10 {
				t.Errorf("%d refusals, want at least 10", refused)
			}
		})
	}
}

// Several limits take together or not at all, and what was taken in vain is there again, to
// the last bit; callers that name them in other orders do not wait for each other for ever.
func TestSeveral(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db, _ := published(t, sending,
		ratelimit.FixedWindow{Name: "all", Rate: 100, Period: time.Hour},
		ratelimit.TokenBucket{Name: "zone", Rate: 1.0 / 3, Period: time.Second, Capacity: 20})
	rows := func() (text string) {
		t.Helper()
		must(t, db.Pool.QueryRow(t.Context(), "SELECT string_agg(concat_ws(' ', name, key, value, ts, paused), E'\\n' ORDER BY name, key) FROM "+db.Schema+".rate_limits").Scan(&text))
		return text
	}
	all := "rate_limit_allow_all(ARRAY['zone', 'send_message', 'all'], ARRAY['z', 'alice', ''], ARRAY[0.1, 1, 1.7])"
	for range 3 {
		if a := answer(t, db, all); !a.ok || a.of != "send_message" {
			t.Fatalf("%+v", a)
		}
	}
	before := rows()
	if a := answer(t, db, all); a.ok || a.of != "send_message" {
		t.Errorf("%+v, want a refusal of send_message", a)
	}
	if after := rows(); after != before {
		t.Errorf("after a refusal:\n%s\nwant\n%s", after, before)
	}
	if _, err := tell(t.Context(), db, "rate_limit_take_all(ARRAY['all', 'send_message'], ARRAY['', 'alice'])"); !hasCode(err, "PT429") {
		t.Errorf("got %v, want PT429", err)
	}
	if after := rows(); after != before {
		t.Errorf("after an error:\n%s\nwant\n%s", after, before)
	}

	var callers sync.WaitGroup
	for i := range 6 {
		names, keys := "'all', 'zone'", "'', 'z'"
		if i%2 == 0 {
			names, keys = "'zone', 'all'", "'z', ''"
		}
		callers.Go(func() {
			for range 20 {
				if _, err := tell(t.Context(), db, "rate_limit_allow_all(ARRAY["+names+"], ARRAY["+keys+"], ARRAY[0.5, 0.5])"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	callers.Wait()
}

// A role that may call the functions by name has what the catalog says, and no more: it cannot
// choose a definition, change the catalog or have its own taken for it.
func TestNamedAreSafe(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db, f := published(t, sending)
	inSchema(t, db, `GRANT EXECUTE ON FUNCTION rate_limit_take(text, text, float8), rate_limit_allow(text, text, float8),
		rate_limit_take_all(text[], text[], float8[], float8[], text) TO `+newRole(t, db))
	as := wantSafe(t, db, "SELECT ok FROM {schema}.rate_limit_allow('send_message', 'alice')", []bool{true, true, true, false}, []string{
		"CREATE TEMP TABLE rate_limit_definitions (name text, key text, kind text, rate float8, period interval, capacity float8, max_reserved float8, shards int, start timestamptz, every text, enabled boolean DEFAULT true, until timestamptz)",
		"INSERT INTO rate_limit_definitions (name, kind, rate, period, max_reserved, shards) VALUES ('send_message', 'token bucket', 1e6, '1 s', 0, 1)",
		"CREATE FUNCTION {role}.rate_limit_named(text, text, float8) RETURNS {schema}.rate_limit_request LANGUAGE sql AS $$SELECT {schema}.rate_limit_request('send_message', 'alice', 1000, '1 s')$$",
		"CREATE FUNCTION {role}.coalesce(float8, float8, float8) RETURNS float8 LANGUAGE sql AS 'SELECT 1e9::float8'",
	}, []string{
		"SELECT {schema}.rate_limit_reserve('send_message', 'alice')",
		"SELECT {schema}.rate_limit_credit('send_message', 'alice')",
		"SELECT {schema}.rate_limit_settle('send_message', 'alice', 1, 0)",
		"SELECT {schema}.rate_limit_allow_all(ARRAY[({schema}.rate_limit_request('send_message', 'alice', 1000, '1 s'))])",
		"SELECT {schema}.rate_limit_calls('allow', NULL)",
		"SELECT {schema}.rate_limit_or_raise(NULL, 'PT429')",
		"SELECT {schema}.rate_limit_acquire('send_message', 'alice', 1)",
		"SELECT {schema}.rate_limit_named('send_message', 'alice', 1)",
		"SELECT * FROM {schema}.rate_limit_definitions", "UPDATE {schema}.rate_limit_definitions SET rate = 100",
		"INSERT INTO {schema}.rate_limit_definitions (name, key, rate) VALUES ('send_message', 'alice', 100)",
	})
	if err := as("SELECT {schema}.rate_limit_take('send_message', 'alice')"); !hasCode(err, "PT429") {
		t.Errorf("got %v, want PT429", err)
	}
	// An override for the key is heeded, whoever calls.
	must(t, errOf(f.catalog.Set(t.Context(), "send_message", "alice", catalog.Override{Capacity: 10, Rate: 86400})))
	eventually(t, func() bool { return as("SELECT {schema}.rate_limit_take('send_message', 'alice')") == nil })
}

// eventually waits for something that time brings about.
func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it has not happened in 30 s")
		}
	}
}

// newRole makes a role, which a schema's functions can be granted to.
func newRole(t *testing.T, db *pgtest.DB) (role string) {
	t.Helper()
	role = "caller_of_" + db.Schema
	inSchema(t, db, "CREATE ROLE "+role+"; GRANT USAGE ON SCHEMA "+db.Schema+" TO "+role)
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	})
	return role
}

// asRole is a connection of the role, which has a schema of its own.
func asRole(t *testing.T, db *pgtest.DB) (conn *pgxpool.Conn, as func(text string, args ...any) error) {
	t.Helper()
	conn, err := db.Pool.Acquire(t.Context())
	must(t, err)
	role := "caller_of_" + db.Schema
	t.Cleanup(func() { _ = conn.Hijack().Close(context.Background()) }) // with what is set in it
	as = func(text string, args ...any) error {
		_, err := conn.Exec(t.Context(), strings.NewReplacer("{schema}", db.Schema, "{role}", role).Replace(text), args...)
		return err
	}
	for _, text := range []string{"CREATE SCHEMA AUTHORIZATION {role}", "SET ROLE {role}"} {
		if err := as(text); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	return conn, as
}

// The owner of the functions needs DELETE on the table too, for what is not there.
func TestFunctionsOfAnotherOwner(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	role := newRole(t, db)
	inSchema(t, db, "GRANT CREATE ON SCHEMA "+db.Schema+" TO "+role+"; GRANT SELECT, INSERT, UPDATE ON rate_limits TO "+role)
	inSchema(t, db, "SET LOCAL ROLE "+role+"; "+migrations.Functions.UpSQL())
	_, as := asRole(t, db)
	for _, call := range []string{
		"renew('p', 'none', 0, 1790000000000000, '1 s')", "release('p', 'none', 0, 1790000000000000)",
		"change({schema}.rate_limit_request('a', 'none', 1, '1 s'), {schema}.rate_limit_request('a', 'none', 2, '1 s'))",
	} {
		if err := as("SELECT {schema}.rate_limit_" + call); !hasCode(err, "42501") {
			t.Errorf("%s without DELETE: got %v, want insufficient_privilege", call, err)
		}
		inSchema(t, db, "GRANT DELETE ON rate_limits TO "+role)
		if err := as("SELECT {schema}.rate_limit_" + call); err != nil {
			t.Errorf("%s with DELETE: %v", call, err)
		}
		inSchema(t, db, "REVOKE DELETE ON rate_limits FROM "+role)
	}
}
