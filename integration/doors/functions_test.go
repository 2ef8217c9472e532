package doors

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// functions are the SQL functions of a schema as a store, with which a store in Go shares the
// rows: that is asked for what they do not know, which is the other verbs and, with definitions as
// arguments, shards, sliding windows and quotas by the calendar.
type functions struct {
	*pgstore.Store
	pool   *pgxpool.Pool
	schema string
	clock  func() time.Time // nil for the database's
	taken  map[*ratelimit.Receipt][]ratelimit.Request

	takenAt map[*ratelimit.Receipt]time.Time

	// byName has the functions find definitions in the catalog, in which they are
	// published before a call that has them otherwise, unless it is not to be changed.
	byName    bool
	published map[string]ratelimit.Definition
	catalog   *catalog.Catalog
	limits    map[string]ratelimit.Limit // that are not to be changed
}

// withFunctions makes the functions, and a catalog, in a test's schema. With a clock that
// decides, they are made with that in place of the database's.
func withFunctions(t *testing.T, db *pgtest.DB, clock func() time.Time) *functions {
	t.Helper()
	text := migrations.Functions.UpSQL()
	if clock != nil {
		inSchema(t, db, "CREATE TABLE test_clock (t timestamptz); INSERT INTO test_clock VALUES (NULL);"+
			"CREATE FUNCTION test_clock() RETURNS timestamptz LANGUAGE sql AS 'SELECT t FROM "+db.Schema+".test_clock'")
		text = strings.ReplaceAll(text, "clock_timestamp()", "@schema@.test_clock()")
	}
	inSchema(t, db, text)
	inSchema(t, db, migrations.Catalog.UpSQL())
	of, err := catalog.New(db.Pool, &catalog.Config{Schema: db.Schema, Clock: clock, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	f := &functions{pool: db.Pool, schema: db.Schema, clock: clock, catalog: of, published: map[string]ratelimit.Definition{}}
	f.empty(t)
	return f
}

// empty has the functions begin anew, with a store in Go that has seen no limits.
func (f *functions) empty(t *testing.T) {
	t.Helper()
	must(t, errOf(f.pool.Exec(t.Context(), "TRUNCATE "+f.schema+".rate_limits")))
	store, err := pgstore.New(f.pool, &pgstore.Config{Schema: f.schema, Clock: f.clock})
	must(t, err)
	f.Store, f.taken, f.takenAt = store, map[*ratelimit.Receipt][]ratelimit.Request{}, map[*ratelimit.Receipt]time.Time{}
}

// inSchema runs SQL with a test's schema in the search_path.
func inSchema(t *testing.T, db *pgtest.DB, text string) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "SET LOCAL search_path = "+db.Schema+"; "+text)
		return err
	})
	must(t, err)
}

// knows reports whether the functions have a verb for requests.
func (f *functions) knows(requests ...ratelimit.Request) bool {
	return len(requests) > 0 && !slices.ContainsFunc(requests, func(r ratelimit.Request) bool { return r.Limit == nil || !f.byName && !plain(r.Limit) })
}

// plain reports whether a limit can be told by arguments.
func plain(limit ratelimit.Limit) bool {
	d := limit.Definition()
	return d.Shards == 1 && d.Kind != ratelimit.KindSlidingWindow && d.Every == 0
}

// arguments are those of a request with its definition.
func arguments(r ratelimit.Request) map[string]any {
	d := r.Limit.Definition()
	all := map[string]any{"name": d.Name, "key": r.Key, "rate": d.Rate, "period": d.Period, "capacity": d.Capacity, "kind": d.Kind.String()}
	if !d.Start.IsZero() {
		all["start"] = d.Start
	}
	return all
}

// call calls a function, with arguments besides those that tell the limit.
func (f *functions) call(ctx context.Context, name string, r ratelimit.Request, args map[string]any) (ratelimit.Result, error) {
	if f.byName {
		return f.named(ctx, name, []any{ratelimit.NameOf(r.Limit), r.Key}, args, r)
	}
	all := arguments(r)
	maps.Copy(all, args)
	return f.named(ctx, name, nil, all, r)
}

// named calls a function with arguments by place and by name.
func (f *functions) named(ctx context.Context, name string, places []any, named map[string]any, requests ...ratelimit.Request) (result ratelimit.Result, err error) {
	if f.byName {
		for _, r := range requests {
			if err := f.publish(ctx, r.Limit.Definition()); err != nil {
				return result, err
			}
		}
	}
	var list []string
	args := places
	for i := range places {
		list = append(list, fmt.Sprintf("$%d", i+1))
	}
	for _, key := range slices.Sorted(maps.Keys(named)) { // one statement text, whatever the order of the map
		args = append(args, named[key])
		list = append(list, fmt.Sprintf("%s => $%d", key, len(args)))
	}
	return f.asked(ctx, name+"("+strings.Join(list, ", ")+")", args, requests...)
}

// query reads a result, which is of one of the requests.
func (f *functions) query(ctx context.Context, call string, args []any, requests ...ratelimit.Request) (result ratelimit.Result, err error) {
	s, r := &result.Status, requests[0]
	var retryAfter, resetAfter int64
	var paused *time.Time
	var of, key string
	err = f.pool.QueryRow(ctx, `SELECT ok, (extract(epoch FROM retry_after) * 1000000)::int8, retry_at, value, remaining, capacity,
		(extract(epoch FROM reset_after) * 1000000)::int8, paused_until, at, name, key FROM `+f.schema+"."+call, args...).
		Scan(&s.OK, &retryAfter, &s.RetryAt, &s.Value, &s.Remaining, &s.Capacity, &resetAfter, &paused, &s.At, &of, &key)
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		switch pgErr.Code {
		case "22003": // numeric_value_out_of_range
			return result, &ratelimit.ExceedsCapacityError{Request: r}
		case "22023", "22021": // invalid_parameter_value, character_not_in_repertoire
			return result, &ratelimit.FieldError{Field: "Count", Value: r.Count, Reason: pgErr.Message}
		}
	}
	if paused != nil {
		s.PausedUntil = *paused
	}
	s.RetryAfter, s.ResetAfter = time.Duration(retryAfter)*time.Microsecond, time.Duration(resetAfter)*time.Microsecond
	for _, r := range requests {
		if ratelimit.NameOf(r.Limit) == of && r.Key == key {
			s.Request = r
		}
	}
	if err == nil && s.Request.Limit == nil {
		return result, fmt.Errorf("the answer is of %q and %q", of, key)
	}
	return result, err
}

// publish has the catalog know a definition.
func (f *functions) publish(ctx context.Context, d ratelimit.Definition) error {
	if f.published == nil || f.published[d.Name] == d {
		return nil
	}
	f.published[d.Name] = d
	return f.catalog.Publish(ctx, d.Limit())
}

// all calls the function for several limits.
func (f *functions) all(ctx context.Context, verb string, requests []ratelimit.Request, args map[string]any) (ratelimit.Result, error) {
	if !f.byName {
		var list []string
		var values []any
		for _, r := range requests {
			call, of := f.request(r, len(values))
			list, values = append(list, call), append(values, of...)
		}
		call := "ARRAY[" + strings.Join(list, ", ") + "]"
		for key, value := range args {
			values = append(values, value)
			call += fmt.Sprintf(", %s => $%d", key, len(values))
		}
		return f.asked(ctx, "rate_limit_"+verb+"_all("+call+")", values, requests...)
	}
	var names, keys []string
	var counts, above []float64
	for _, r := range requests {
		names, keys = append(names, ratelimit.NameOf(r.Limit)), append(keys, r.Key)
		counts, above = append(counts, r.Count), append(above, r.AboveShare)
	}
	named := map[string]any{"names": names, "keys": keys, "counts": counts}
	if verb != "reserve" {
		named["above"] = above
	}
	maps.Copy(named, args)
	return f.named(ctx, "rate_limit_"+verb+"_all", nil, named, requests...)
}

// merged adds up what is asked of one limit and key.
func merged(requests []ratelimit.Request) (some []ratelimit.Request) {
	for _, r := range requests {
		i := slices.IndexFunc(some, func(s ratelimit.Request) bool { return s.Limit == r.Limit && s.Key == r.Key })
		if i < 0 {
			some = append(some, r)
		} else {
			some[i].Count += r.Count
		}
	}
	return some
}

// take is a verb that takes, or a check of one.
func (f *functions) take(ctx context.Context, verb string, requests []ratelimit.Request, args map[string]any) (result ratelimit.Result, err error) {
	r := requests[0]
	if reserves := args["reserve"] == true; len(requests) > 1 || f.byName && r.AboveShare > 0 {
		result, err = f.all(ctx, verb, requests, args)
	} else if f.byName && reserves {
		result, err = f.call(ctx, "rate_limit_check_reserve", r, map[string]any{"count": r.Count})
	} else {
		of := map[string]any{"count": r.Count}
		maps.Copy(of, args)
		if verb == "reserve" || reserves {
			of["max_reserved"] = r.Limit.Definition().MaxReserved
		}
		if r.AboveShare != 0 {
			of["above"] = r.AboveShare
		}
		if f.byName {
			of = map[string]any{"count": r.Count}
		}
		result, err = f.call(ctx, "rate_limit_"+verb, r, of)
	}
	if err != nil {
		return result, err
	}
	some := merged(requests)
	result.Several = nil
	if len(requests) > 1 {
		for _, r := range some {
			result.Several = append(result.Several, ratelimit.Status{Request: r})
		}
	}
	if result.OK && verb != "check" {
		for _, s := range some {
			if result.Request.Limit == s.Limit && result.Request.Key == s.Key {
				result.Taken = s.Count
			}
		}
		result.Receipt = new(ratelimit.Receipt)
		f.taken[result.Receipt], f.takenAt[result.Receipt] = some, result.RetryAt
	}
	return result, nil
}

func (f *functions) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if !f.knows(requests...) {
		return f.Store.Allow(ctx, requests...)
	}
	return f.take(ctx, "allow", requests, nil)
}

func (f *functions) Reserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if !f.knows(requests...) || requests[0].AboveShare > 0 {
		return f.Store.Reserve(ctx, requests...)
	}
	return f.take(ctx, "reserve", requests, nil)
}

func (f *functions) Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if !f.knows(requests...) {
		return f.Store.Check(ctx, requests...)
	}
	return f.take(ctx, "check", requests, nil)
}

func (f *functions) CheckReserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if !f.knows(requests...) || requests[0].AboveShare > 0 {
		return f.Store.CheckReserve(ctx, requests...)
	}
	return f.take(ctx, "check", requests, map[string]any{"reserve": true})
}

// Change is by the definition that the catalog had, read before another one is published, or by arguments.
func (f *functions) Change(ctx context.Context, from, to ratelimit.Limit, key string) (ratelimit.Status, error) {
	before, after := ratelimit.Request{Limit: from, Key: key}, ratelimit.Request{Limit: to, Key: key}
	if !f.knows(before, after) || from.Definition().Shards > 1 || to.Definition().Shards > 1 || from.Definition().Kind == ratelimit.KindSlidingWindow {
		return f.Store.Change(ctx, from, to, key)
	}
	if !f.byName {
		var calls []string
		var values []any
		for _, r := range []ratelimit.Request{before, after} {
			call, of := f.request(r, len(values))
			calls, values = append(calls, call), append(values, of...)
		}
		result, err := f.asked(ctx, "rate_limit_change("+strings.Join(calls, ", ")+")", values, after)
		return result.Status, err
	}
	var was string
	err := f.publish(ctx, from.Definition())
	if err == nil {
		err = f.pool.QueryRow(ctx, "SELECT "+f.schema+".rate_limit_named($1, $2, 0)::text", ratelimit.NameOf(from), key).Scan(&was)
	}
	if err == nil {
		err = f.publish(ctx, to.Definition())
	}
	if err != nil {
		return ratelimit.Status{}, err
	}
	result, err := f.asked(ctx, fmt.Sprintf("rate_limit_change($1::text::%[1]s.rate_limit_request, %[1]s.rate_limit_named($2, $3, 0))", f.schema), []any{was, ratelimit.NameOf(to), key}, after)
	return result.Status, err
}

// request is an SQL expression of a request, with its definition in arguments after so many others.
func (f *functions) request(r ratelimit.Request, others int) (call string, values []any) {
	of := arguments(r)
	of["count"], of["max_reserved"], of["above"] = r.Count, r.Limit.Definition().MaxReserved, r.AboveShare
	var named []string
	for key, value := range of {
		values = append(values, value)
		named = append(named, fmt.Sprintf("%s => $%d", key, others+len(values)))
	}
	return f.schema + ".rate_limit_request(" + strings.Join(named, ", ") + ")", values
}

// asked is query by the clock that decides.
func (f *functions) asked(ctx context.Context, call string, args []any, requests ...ratelimit.Request) (result ratelimit.Result, err error) {
	if f.clock != nil {
		_, err = f.pool.Exec(ctx, "UPDATE "+f.schema+".test_clock SET t = $1", f.clock())
	}
	if err != nil {
		return result, err
	}
	return f.query(ctx, call, args, requests...)
}

func (f *functions) Credit(ctx context.Context, r ratelimit.Request) (ratelimit.Status, error) {
	if !f.knows(r) || r.AboveShare > 0 {
		return f.Store.Credit(ctx, r)
	}
	result, err := f.call(ctx, "rate_limit_credit", r, map[string]any{"count": r.Count})
	return result.Status, err
}

// Settle settles one limit after another. Of several, what it returns is of the first. What a
// program in Go takes it settles by the definition of then, so by name that is done only as
// long as it holds.
func (f *functions) Settle(ctx context.Context, r *ratelimit.Receipt, used ...float64) (result ratelimit.Result, err error) {
	taken, ok := f.taken[r]
	switch {
	case ok && taken == nil:
		return ratelimit.Result{}, ratelimit.ErrSettled
	case !ok || len(used) != len(taken):
		return f.Store.Settle(ctx, r, used...)
	}
	for i, t := range taken {
		of, settling := *f, map[string]any{"taken": t.Count, "used": used[i]}
		of.byName = f.byName && !f.changed(t)
		if of.byName {
			settling["taken_at"] = f.takenAt[r]
		}
		one, err := of.call(ctx, "rate_limit_settle", t, settling)
		if err != nil {
			return ratelimit.Result{}, err
		}
		if one.Taken = used[i]; i == 0 {
			result = one
		}
	}
	f.taken[r] = nil
	return result, nil
}

// changed reports whether the catalog has another definition by now than that by which was taken.
func (f *functions) changed(taken ratelimit.Request) bool {
	return f.limits != nil && f.catalog.For(f.limits[ratelimit.NameOf(taken.Limit)], taken.Key).Limit != taken.Limit
}

func (f *functions) Cancel(ctx context.Context, r *ratelimit.Receipt) (bool, error) {
	taken, ok := f.taken[r]
	if !ok {
		return f.Store.Cancel(ctx, r)
	}
	_, err := f.Settle(ctx, r, make([]float64, len(taken))...)
	if errors.Is(err, ratelimit.ErrSettled) {
		return false, nil
	}
	return err == nil, err
}

// eachWay runs a test of the functions with definitions as arguments, and by name.
func eachWay(t *testing.T, test func(t *testing.T, byName bool)) {
	t.Helper()
	t.Parallel()
	for _, byName := range []bool{false, true} {
		t.Run(map[bool]string{false: "arguments", true: "by name"}[byName], func(t *testing.T) {
			t.Parallel()
			test(t, byName)
		})
	}
}

func TestFunctionScenarios(t *testing.T) {
	eachWay(t, func(t *testing.T, byName bool) {
		db := pgtest.New(t)
		var clock func() time.Time
		f := withFunctions(t, db, func() time.Time { return clock() })
		f.byName = byName
		scenarios(t, func(c func() time.Time) ratelimit.Store {
			clock = c
			f.empty(t)
			return f
		})
	})
}

// Random histories, of one limit and of several in one call; by name with overrides that
// change between calls, for keys and for all.
func TestFunctionHistories(t *testing.T) {
	pgtest.Long(t)
	const calls = 60
	seeds := uint64(16)
	if testing.Short() {
		seeds = 8
	}
	eachWay(t, func(t *testing.T, byName bool) {
		db := pgtest.New(t)
		var h *history
		clock := func() time.Time { return h.now }
		f := withFunctions(t, db, clock)
		f.byName = byName
		took, several, overridden, kinds := 0, 0, 0, map[string]int{}
		for seed := range seeds {
			h = newHistory(seed)
			h.limits = h.limits[:2+h.rand.IntN(2)]
			f.empty(t)
			h.worst, h.noText = true, true
			h.stores = [2]ratelimit.Store{f, memstore.New(clock)}
			if byName {
				// A credit brings a row in memory to its instant, and one in PostgreSQL not, which
				// the other limits that the row has had here show once the clock goes back.
				h.onward, h.moves = true, seed%2 == 0
				h.limits = append(h.limits, quota(h))
				h.keeps = func(taken ratelimit.Result) bool {
					return !h.moves || !slices.ContainsFunc(taken.Each(), func(s ratelimit.Status) bool { return !plain(s.Request.Limit) })
				}
				must(t, f.anew(t.Context(), h.limits))
				h.before = func(requests []ratelimit.Request) error {
					changed, err := f.override(t.Context(), h)
					if changed {
						overridden++
					}
					for i, r := range requests {
						r.Limit = f.limits[ratelimit.NameOf(r.Limit)]
						requests[i] = f.catalog.Resolve(r)
					}
					return err
				}
			}
			for n := range calls {
				if err := h.step(t.Context()); err != nil {
					t.Fatalf("seed %d, call %d: %v", seed, n, err)
				}
			}
			for _, taken := range f.taken {
				for _, r := range taken {
					kinds[ratelimit.NameOf(r.Limit)]++
				}
				if took++; len(taken) > 1 {
					several++
				}
			}
		}
		for _, name := range []string{"bucket", "window", "sliding", "quota"} {
			if byName && kinds[name] == 0 {
				t.Errorf("the functions took from %v, want also from %s", kinds, name)
			}
		}
		if least := 5 * int(seeds); took < least || several < int(seeds) || byName && overridden < int(seeds) {
			t.Errorf("the functions took %d times, %d of several limits, with %d overrides, want at least %d, %d, %[5]d", took, several, overridden, least, seeds)
		}
	})
}

// anew has the catalog know limits, and no overrides.
func (f *functions) anew(ctx context.Context, limits []ratelimit.Limit) error {
	f.published, f.limits = nil, map[string]ratelimit.Limit{}
	for _, limit := range limits {
		f.limits[ratelimit.NameOf(limit)] = limit
	}
	_, err := f.pool.Exec(ctx, "TRUNCATE "+f.schema+".rate_limit_definitions")
	for _, limit := range limits {
		err = errors.Join(err, f.catalog.Publish(ctx, limit))
	}
	return errors.Join(err, f.catalog.Refresh(ctx))
}

// quota is a random one by the calendar, and at random instants a history with it leaps.
func quota(h *history) ratelimit.Limit {
	h.leaps = true
	rate := pick(h.rand, 3, 10, 7.77)
	return ratelimit.FixedWindow{
		Name: "quota", Rate: rate, Capacity: rate * pick(h.rand, 1, 1, 2.5, 90), MaxReserved: 3 * rate,
		Every:  pick(h.rand, ratelimit.Day, 5*ratelimit.Day, ratelimit.Week, 2*ratelimit.Week, ratelimit.Month, 3*ratelimit.Month, ratelimit.Year),
		Zone:   pick(h.rand, "UTC", "Europe/Berlin", "America/New_York", "Asia/Beirut", "Pacific/Auckland"),
		Anchor: ratelimit.DateOf(usual.AddDate(0, 0, h.rand.IntN(800)-400)),
		Time:   pick(h.rand, 0, 9*time.Hour, 150*time.Minute),
	}
}

// override changes an override of one of a history's limits now and then.
func (f *functions) override(ctx context.Context, h *history) (changed bool, err error) {
	if h.rand.IntN(4) > 0 {
		return false, nil
	}
	i := h.rand.IntN(len(h.limits))
	d := h.limits[i].Definition()
	if !plain(h.limits[i]) && !h.moves {
		return false, nil
	}
	if d.Every != 0 && h.rand.IntN(2) == 0 {
		moved := quota(h).Definition()
		moved.Rate, moved.Capacity, moved.MaxReserved, moved.Every, moved.Period = d.Rate, d.Capacity, d.MaxReserved, d.Every, d.Period
		h.limits[i] = moved.Limit()
		f.limits[d.Name] = h.limits[i]
		return true, errors.Join(f.catalog.Publish(ctx, h.limits[i]), f.catalog.Refresh(ctx))
	}
	o := catalog.Override{
		Rate: pick(h.rand, 0, d.Rate*2, d.Rate/2), Capacity: pick(h.rand, 0, ratelimit.None, max(1, d.Rate*3)),
		MaxReserved: pick(h.rand, 0, ratelimit.None, d.Rate), Switch: pick(h.rand, catalog.On, catalog.On, catalog.On, catalog.Off),
		Clear: catalog.AllFields,
	}
	if d.Kind == ratelimit.KindSlidingWindow {
		o.Rate, o.Capacity, o.Slots = pick(h.rand, 0, d.Rate*2, max(1, d.Rate/2)), 0, pick(h.rand, 0, 1, 5, 12)
	}
	if h.rand.IntN(4) == 0 {
		o.Until = h.now.Add(d.Period / 2)
	}
	switch h.rand.IntN(4) {
	case 0:
		_, err = f.catalog.Set(ctx, d.Name, catalog.AllKeys, o)
	case 1:
		_, err = f.catalog.Unset(ctx, d.Name, "a")
	default:
		_, err = f.catalog.Set(ctx, d.Name, "a", o)
	}
	if errors.Is(err, ratelimit.ErrInvalid) { // such as a rate below 1, and no capacity
		err = nil
	}
	return true, errors.Join(err, f.catalog.Refresh(ctx))
}

// The phase of a window is the same in SQL: also of keys that are not ASCII, and where backslashes escape.
func TestFunctionPhase(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store := withFunctions(t, db, nil).Store
	for i, key := range []string{"", "a", "Ünïcode 語", strings.Repeat("x", 300)} {
		limit := ratelimit.FixedWindow{Name: fmt.Sprintf("window %d", i), Rate: 1, Period: 7919 * time.Second}
		must(t, store.Take(t.Context(), limit.For(key)))
		var apart float64
		err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "SET LOCAL standard_conforming_strings = off"); err != nil {
				return err
			}
			return tx.QueryRow(t.Context(), `SELECT mod((extract(epoch FROM ts - `+db.Schema+`.rate_limit_origin(name, key, 7919e6, NULL)) * 1000000), 7919000000)
				FROM `+db.Schema+`.rate_limits WHERE name = $1`, limit.Name).Scan(&apart)
		})
		if err != nil || apart != 0 {
			t.Errorf("key %q: the edges are %v microseconds apart, %v", key, apart, err)
		}
	}
}

// What a call must not have is an error, and changes nothing.
func TestFunctionsRefuseBadInput(t *testing.T) {
	t.Parallel()
	db, _ := published(t)
	wantCodes(t, db, map[string]string{
		"rate_limit_allow('', 'k', 1, '1 s')":                                   "22023",
		"rate_limit_allow(NULL, 'k', 1, '1 s')":                                 "22023",
		"rate_limit_allow('l', NULL, 1, '1 s')":                                 "22023",
		"rate_limit_allow('l', repeat('k', 2049), 1, '1 s')":                    "22023",
		"rate_limit_allow('l', 'k', 0, '1 s')":                                  "22023",
		"rate_limit_allow('l', 'k', 'NaN', '1 s')":                              "22023",
		"rate_limit_allow('l', 'k', 'Infinity', '1 s')":                         "22023",
		"rate_limit_allow('l', 'k', 0.5, '1 s')":                                "22023",
		"rate_limit_allow('l', 'k', 1, '0 s')":                                  "22023",
		"rate_limit_allow('l', 'k', 1, '1 month')":                              "22023",
		"rate_limit_allow('l', 'k', 1, NULL)":                                   "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', count => -1)":                     "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', count => 'NaN')":                  "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', count => NULL)":                   "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', capacity => -1)":                  "22023",
		"rate_limit_allow('l', 'k', 1, '36500 days', capacity => 2)":            "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', kind => 'sliding window')":        "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', start => now())":                  "22023",
		"rate_limit_allow('l', 'k', 1, '1 s', count => 2)":                      "22003",
		"rate_limit_reserve('l', 'k', 1, '1 s', count => 3, max_reserved => 1)": "22003",
		"rate_limit_reserve('l', 'k', 1, '1 s', max_reserved => -1)":            "22023",
		"rate_limit_settle('l', 'k', 1, '1 s', taken => 1, used => -1)":         "22023",
		"rate_limit_settle('l', 'k', 1, '1 s', taken => 1, used => 'Infinity')": "22023",
		"rate_limit_take('l', 'k', 1, '1 s', count => 2)":                       "22003",

		"rate_limit_change(NULL, NULL)": "22023",
		"rate_limit_change(@rate_limit_request('l', 'k', 1, '1 s'), @rate_limit_request('l', 'other', 1, '1 s'))":                     "22023",
		"rate_limit_change(@rate_limit_request('l', 'k', 1, '1 s'), @rate_limit_request('l', 'k', 1, '1 s', kind => 'fixed window'))": "22023",
	})
}

// wantCode makes calls, which have @ for the schema, and wants each to end with an SQLSTATE.
func wantCode(t *testing.T, db *pgtest.DB, code string, calls ...string) {
	t.Helper()
	for _, call := range calls {
		call = strings.ReplaceAll("SELECT @"+call, "@", db.Schema+".")
		if _, err := db.Pool.Exec(t.Context(), call); !hasCode(err, code) {
			t.Errorf("%s: got %v, want %s", call, err, code)
		}
	}
}

// wantCodes is wantCode for calls that have codes of their own, and that leave no row.
func wantCodes(t *testing.T, db *pgtest.DB, calls map[string]string) {
	t.Helper()
	for call, code := range calls {
		wantCode(t, db, code, call)
	}
	var rows int
	if err := db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".rate_limits").Scan(&rows); err != nil || rows != 0 {
		t.Errorf("%d rows, %v, want none", rows, err)
	}
}

// A role that may call one function, and nothing else, is limited by what that says: it cannot
// reach the table, the other functions, or have its own tables and functions taken for ours.
func TestFunctionsAreSafe(t *testing.T) {
	t.Parallel()
	db, _ := published(t)
	inSchema(t, db, strings.NewReplacer("{role}", newRole(t, db), "{schema}", db.Schema).Replace(`GRANT CREATE ON SCHEMA {schema} TO {role};
		CREATE FUNCTION send_message(who text) RETURNS boolean LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
			SELECT ok FROM {schema}.rate_limit_allow('send_message', who, rate => 2, period => '1 day')
		$$;
		REVOKE EXECUTE ON FUNCTION send_message FROM PUBLIC;
		GRANT EXECUTE ON FUNCTION send_message TO {role};`))
	wantSafe(t, db, "SELECT {schema}.send_message('alice')", []bool{true, true, false, false}, []string{
		"CREATE FUNCTION {role}.least(float8, float8) RETURNS float8 LANGUAGE sql AS 'SELECT 1e9::float8'",
		"CREATE FUNCTION {role}.date_part(text, interval) RETURNS float8 LANGUAGE sql AS 'SELECT 1e9::float8'",
	}, []string{
		"SELECT {schema}.rate_limit_credit('send_message', 'alice', 2, '1 day')",
		"SELECT {schema}.rate_limit_put('send_message', 'alice', 0, 9, now(), NULL, NULL)",
		"SELECT {schema}.rate_limit_call('allow', {schema}.rate_limit_request('send_message', 'alice', 1, '1 s'))",
		"SELECT {schema}.rate_limit_back('credit', {schema}.rate_limit_request('send_message', 'alice', 1, '1 s'), NULL, NULL)",
	})
}

// wantSafe has a role make shadows of what the functions use, before it in the search_path. A call that
// it may make is granted as before; others it may not make, and it cannot reach the table. It returns
// what runs a statement as the role.
func wantSafe(t *testing.T, db *pgtest.DB, call string, granted []bool, shadows, others []string) (as func(text string, args ...any) error) {
	t.Helper()
	conn, as := asRole(t, db)
	for _, text := range append(shadows,
		"CREATE TEMP TABLE rate_limits (name text, key text, shard int, value float8, ts timestamptz, paused timestamptz, slots float8[], ahead float8[], PRIMARY KEY (name, key, shard))",
		"SET search_path = pg_temp, {role}, {schema}, pg_catalog",
		"CREATE FUNCTION {role}.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT '2100-01-01'::timestamptz$$",
		"CREATE FUNCTION {role}.more(float8, float8) RETURNS boolean LANGUAGE sql AS 'SELECT true'",
		"CREATE OPERATOR {role}.>= (LEFTARG = float8, RIGHTARG = float8, FUNCTION = {role}.more)",
	) {
		if err := as(text); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	for i, want := range granted {
		var ok bool
		if err := conn.QueryRow(t.Context(), strings.ReplaceAll(call, "{schema}", db.Schema)).Scan(&ok); err != nil || ok != want {
			t.Errorf("call %d: got %v, %v, want %v", i, ok, err, want)
		}
	}
	for _, text := range append(others,
		"SELECT * FROM {schema}.rate_limits", "DELETE FROM {schema}.rate_limits", "UPDATE {schema}.rate_limits SET value = 9",
		"SELECT {schema}.rate_limit_allow('send_message', 'alice', 1000, '1 s')",
		"SELECT {schema}.rate_limit_take('send_message', 'alice', 1000, '1 s'::interval)",
	) {
		if err := as(text); !hasCode(err, "42501") { // insufficient_privilege
			t.Errorf("%s: got %v, want insufficient_privilege", text, err)
		}
	}
	var left int
	if err := conn.QueryRow(t.Context(), "SELECT pg_catalog.count(*) FROM pg_temp.rate_limits").Scan(&left); err != nil || left != 0 {
		t.Errorf("%d rows in the role's own table, %v, want none", left, err)
	}
	return as
}

// A trigger limits inserts, whoever makes them, and raises the SQLSTATE that was chosen; what
// is refused is not there, and what is rolled back costs nothing.
func TestTrigger(t *testing.T) {
	t.Parallel()
	db, f := published(t)
	inSchema(t, db, strings.ReplaceAll(`CREATE TABLE messages (sender text NOT NULL);
		CREATE FUNCTION limit_messages() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
		BEGIN
			PERFORM {schema}.rate_limit_take('send_message', NEW.sender, rate => 3, period => '1 day');
			RETURN NEW;
		END $$;
		CREATE TRIGGER limit_messages BEFORE INSERT ON messages FOR EACH ROW EXECUTE FUNCTION limit_messages();`, "{schema}", db.Schema))
	insert := func(values string) error {
		_, err := db.Pool.Exec(t.Context(), "INSERT INTO "+db.Schema+".messages VALUES "+values)
		return err
	}
	must(t, insert("('alice'), ('alice')"))
	if err := insert("('alice'), ('alice')"); !hasCode(err, "PT429") { // the first of them is undone
		t.Errorf("got %v, want PT429", err)
	}
	if err := insert("('alice'), ('bob')"); err != nil {
		t.Error(err)
	}
	var pgErr *pgconn.PgError
	if err := insert("('alice')"); !errors.As(err, &pgErr) || pgErr.Code != "PT429" || !strings.HasPrefix(pgErr.Detail, "Try again in ") || strings.Contains(pgErr.Message, "alice") {
		t.Errorf("got %+v, want PT429 without the key, and when to try again", pgErr)
	}
	var messages int
	if err := db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".messages").Scan(&messages); err != nil || messages != 4 {
		t.Errorf("%d messages, %v, want 4", messages, err)
	}
	limit := ratelimit.TokenBucket{Name: "send_message", Rate: 3, Period: 24 * time.Hour}
	result, err := f.Store.Check(t.Context(), limit.For("alice")) // in Go, the same row
	if err != nil || result.OK || result.Remaining != 0 {
		t.Errorf("got %v, %v, want a refusal", result, err)
	}
	_, err = db.Pool.Exec(t.Context(), "SELECT "+db.Schema+".rate_limit_take('other', 'k', 1, '1 day', state => 'AB123') FROM generate_series(1, 2)")
	if !hasCode(err, "AB123") {
		t.Errorf("got %v, want the SQLSTATE that was chosen", err)
	}
}

// Nobody but the owner may call a new function. They go as they came, and leave the table and a function
// of somebody else's.
func TestFunctionsDown(t *testing.T) {
	t.Parallel()
	db, _ := published(t)
	inSchema(t, db, "CREATE FUNCTION rate_limit_ours() RETURNS int4 LANGUAGE sql AS 'SELECT 1'")
	var all, granted int
	count := `SELECT count(*), count(*) FILTER (WHERE has_function_privilege('public', oid, 'EXECUTE'))
		FROM pg_proc WHERE pronamespace = $1::regnamespace AND proname ~ '^rate_limit_(?!definitions|history)'`
	if err := db.Pool.QueryRow(t.Context(), count, db.Schema).Scan(&all, &granted); err != nil || all < 100 || granted != 1 {
		t.Fatalf("%d functions, %d for everybody, %v", all, granted, err)
	}
	inSchema(t, db, migrations.Functions.DownSQL())
	if err := db.Pool.QueryRow(t.Context(), count, db.Schema).Scan(&all, &granted); err != nil || all != 1 {
		t.Errorf("%d functions left, %v, want 1", all, err)
	}
	inSchema(t, db, migrations.Functions.UpSQL())
	if math.IsNaN(left(t, db)) {
		t.Error("the table is gone")
	}
}
