package catalog_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// seen is a row of rate_limits_now.
type seen struct {
	Name, Key, Kind                     string
	Value, Capacity, Share, Debt, Ahead float64
	PausedUntil                         *time.Time
	FullAt                              time.Time
	Overridden                          bool
	Mode                                string
}

func viewAt(tb testing.TB, db *pgtest.DB, at time.Time, where string) []seen {
	tb.Helper()
	rows, err := db.Pool.Query(tb.Context(), "SELECT * FROM "+db.Schema+".rate_limits_at($1) "+where, at)
	must(tb, err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[seen])
	must(tb, err)
	return all
}

// kinds are limits of all kinds, with and without shards, for random histories.
var kinds = []ratelimit.Limit{
	ratelimit.TokenBucket{Name: "bucket", Rate: 7, Period: time.Minute, Capacity: 20, MaxReserved: 30},
	ratelimit.TokenBucket{Name: "bucket, sharded", Rate: 60, Period: time.Minute, Shards: 4, MaxReserved: 30},
	ratelimit.TokenBucket{Name: "bucket, empty", Rate: 3, Period: time.Second, Capacity: ratelimit.None, MaxReserved: 30},
	ratelimit.FixedWindow{Name: "window", Rate: 10, Period: time.Minute, Capacity: 25, MaxReserved: 30},
	ratelimit.FixedWindow{Name: "window, sharded", Rate: 10, Period: time.Minute, Shards: 3, MaxReserved: 30, Start: noon},
	ratelimit.FixedWindow{Name: "month", Rate: 10, Capacity: 25, MaxReserved: 30, Every: ratelimit.Month, Zone: "Europe/Berlin", Anchor: ratelimit.Date{Year: 2026, Month: 1, Day: 31}},
	ratelimit.FixedWindow{Name: "week, sharded", Rate: 10, Every: ratelimit.Week, Zone: "America/New_York", Shards: 3, MaxReserved: 30},
	ratelimit.FixedWindow{Name: "day", Rate: 10, Every: ratelimit.Day, MaxReserved: 30},
	ratelimit.FixedWindow{Name: "year", Rate: 10, Capacity: 25, MaxReserved: 30, Every: ratelimit.Year, Anchor: ratelimit.Date{Year: 2024, Month: 2, Day: 29}},
	ratelimit.SlidingWindow{Name: "sliding", Rate: 10, Period: time.Minute, Slots: 7, MaxReserved: 30},
	ratelimit.SlidingWindow{Name: "sliding, sharded", Rate: 12, Period: time.Minute, Slots: 12, Shards: 2, MaxReserved: 30, Start: noon.Add(7 * time.Second)},
}

var noon = time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)

// The views say of each key what Rows says, for every kind, after random histories in which the
// catalog changes, edges are moved, limits are paused and the clock goes back.
func TestViewsAgreeWithRows(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for round := range 2 {
		seed := uint64(time.Now().UnixNano()) + uint64(round)
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			h := newHistory(t, rand.New(rand.NewPCG(seed, 0)))
			for range 60 {
				for range 5 {
					h.step()
				}
				h.compare()
				if t.Failed() {
					return
				}
			}
		})
	}
}

// history is a random history.
type history struct {
	*testing.T
	rand  *rand.Rand
	db    *pgtest.DB
	c     *catalog.Catalog
	store *pgstore.Store
	now   time.Time
	kinds []ratelimit.Limit
	log   []string
}

func newHistory(t *testing.T, r *rand.Rand) *history {
	h := &history{T: t, rand: r, db: newDB(t), now: noon, kinds: slices.Clone(kinds)}
	clock := func() time.Time { return h.now }
	h.c, _ = newCatalog(t, h.db, func(c *catalog.Config) { c.Clock = clock })
	h.store = newStore(t, h.db, pgstore.Config{Clock: clock})
	must(t, h.c.Publish(t.Context(), h.kinds...))
	return h
}

// step does one thing.
func (h *history) step() {
	ctx, limit, key := h.Context(), h.kinds[h.rand.IntN(len(kinds))], string(rune('a'+h.rand.IntN(3)))
	name := ratelimit.NameOf(limit)
	request := h.c.ForN(limit, key, float64(1+h.rand.IntN(6)))
	switch h.rand.IntN(4) {
	case 0:
		h.now = h.now.Add(time.Duration(h.rand.Int64N(int64(20 * time.Second)))).Truncate(time.Microsecond)
	case 1:
		h.now = h.now.Add(time.Duration(h.rand.Int64N(int64(3 * time.Second)))).Truncate(time.Microsecond)
	}
	switch h.rand.IntN(60) {
	case 0, 1:
		h.now = h.now.Add(-30 * time.Second)
	case 2:
		h.now = h.now.Add(time.Duration(h.rand.Int64N(int64(40 * 24 * time.Hour)))).Truncate(time.Microsecond)
	case 3:
		h.now = h.now.AddDate(0, 0, -h.rand.IntN(9))
	}
	if h.rand.IntN(20) == 0 {
		h.move()
	}
	var err error
	what := h.rand.IntN(20)
	h.log = append(h.log, fmt.Sprintf("%v %d %v %s", h.now.Sub(noon), what, request, key))
	switch what {
	case 0:
		o := catalog.Override{Clear: catalog.AllFields, Rate: float64(4 + h.rand.IntN(30))}
		if limit.Definition().Kind == ratelimit.KindSlidingWindow {
			o.Slots = h.rand.IntN(9)
		}
		if h.rand.IntN(2) == 0 {
			o.Until = h.now.Add(time.Duration(h.rand.IntN(40)) * time.Second)
		}
		if h.rand.IntN(3) == 0 && limit.Definition().Every == 0 {
			o.Period = time.Duration(20+h.rand.IntN(90)) * time.Second
		}
		if h.rand.IntN(3) == 0 {
			o.Mode = ratelimit.Mode(h.rand.IntN(4))
		}
		h.log = append(h.log, fmt.Sprintf("%+v", o))
		if h.rand.IntN(3) == 0 {
			err = errOf(h.c.Set(ctx, name, catalog.AllKeys, o))
		} else {
			err = errOf(h.c.Set(ctx, name, key, o))
		}
	case 1:
		if h.rand.IntN(3) == 0 {
			_, err = h.c.Unset(ctx, name, catalog.AllKeys)
		} else {
			_, err = h.c.Unset(ctx, name, key)
		}
	case 2:
		_, err = h.store.Pause(ctx, request.Limit, key, time.Duration(1+h.rand.IntN(30))*time.Second)
	case 3:
		err = h.store.Resume(ctx, request.Limit, key)
	case 4:
		_, err = h.store.Credit(ctx, request)
	case 5: // as Prune does, when it is full
		_, err = h.db.Pool.Exec(ctx, "DELETE FROM "+h.db.Schema+".rate_limits WHERE name = $1 AND key = $2 AND shard = $3", name, key, h.rand.IntN(4))
	case 6, 7, 8, 9:
		_, err = h.store.Reserve(ctx, request)
	default:
		_, err = h.store.Allow(ctx, request)
	}
	if errors.Is(err, ratelimit.ErrExceedsCapacity) {
		err = nil
	}
	must(h, err)
}

// move has a quota by the calendar other edges, on which the rows that are there do not stand.
func (h *history) move() {
	i := h.rand.IntN(len(h.kinds))
	quota, ok := h.kinds[i].(ratelimit.FixedWindow)
	if !ok || quota.Every == 0 {
		return
	}
	quota.Zone = []string{"UTC", "Europe/Berlin", "America/New_York", "Pacific/Auckland"}[h.rand.IntN(4)]
	quota.Anchor = ratelimit.DateOf(h.now.AddDate(0, 0, h.rand.IntN(400)-200))
	h.kinds[i] = quota
	h.log = append(h.log, fmt.Sprintf("%+v", quota))
	must(h, h.c.Publish(h.Context(), quota))
}

// compare compares the view with Rows, key by key.
func (h *history) compare() {
	var short int
	shown := viewAt(h, h.db, h.now, "")
	keys := 0
	must(h, h.db.Pool.QueryRow(h.Context(), "SELECT count(DISTINCT (name, key)) FROM "+h.db.Schema+".rate_limits").Scan(&keys))
	if len(shown) != keys {
		h.Errorf("the view has %d keys, and the table %d", len(shown), keys)
	}
	for _, row := range shown {
		i := slices.IndexFunc(h.kinds, func(limit ratelimit.Limit) bool { return ratelimit.NameOf(limit) == row.Name })
		holds := h.c.For(h.kinds[i], row.Key)
		if row.Mode != holds.Mode.String() {
			h.Errorf("%q of %q: got mode %s, want %v", row.Key, row.Name, row.Mode, holds.Mode)
		}
		for want, err := range h.store.Rows(h.Context(), holds.Limit, ratelimit.Page{Prefix: row.Key, Most: 1}) {
			must(h, err)
			h.same(row, want)
		}
		if row.Value < 1 || row.PausedUntil != nil || row.Mode == "refuse" {
			short++
		}
	}
	if got := len(viewAt(h, h.db, h.now, "WHERE value < 1 OR paused_until IS NOT NULL OR mode = 'refuse'")); got != short {
		h.Errorf("got %d that are short, want %d", got, short)
	}
}

func (h *history) same(got seen, want ratelimit.Status) {
	near := func(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, math.Abs(a), math.Abs(b)) }
	var paused time.Time
	if got.PausedUntil != nil {
		paused = *got.PausedUntil
	}
	d := want.Request.Limit.Definition()
	if !near(got.Value, want.Value) || got.Capacity != want.Capacity || !near(got.Share, want.Share()) || !near(got.Debt, max(0, -want.Value)) ||
		!paused.Equal(want.PausedUntil) || got.FullAt.Sub(want.FullAt()).Abs() > time.Microsecond || got.Kind != d.Kind.String() || got.Ahead != 0 {
		h.Errorf("%q at %v: got %+v, want value %g of %g, paused until %v, full at %v\nby %v\n%s", got.Key, h.now, got,
			want.Value, want.Capacity, want.PausedUntil, want.FullAt(), d, strings.Join(h.log[max(0, len(h.log)-60):], "\n"))
	}
}

// What the server counts by its own zones' data are the edges that Go computes: where summer
// time begins or ends at midnight, so that a day begins at 01:00 or its midnight is shown twice, too.
// A zone that the server does not know is as UTC.
func TestViewsKnowTheCalendar(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	type window struct{ At, From, To int64 }
	windows := func(q ratelimit.FixedWindow, instants ...int64) []window {
		t.Helper()
		rows, err := db.Pool.Query(t.Context(), inSchema(db, `
			SELECT i.at, rate_limits_edge($1, $2, $3, $4, n), rate_limits_edge($1, $2, $3, $4, n + 1)
			FROM unnest($5::int8[]) AS i (at), rate_limits_edges($1, $2, $3, $4, i.at) AS n`),
			q.Every.String(), q.Zone, q.Anchor.String(), fmt.Sprintf("%02d:%02d", int(q.Time.Hours()), int(q.Time.Minutes())%60), instants)
		must(t, err)
		all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[window])
		must(t, err)
		return all
	}
	for _, zone := range []string{"UTC", "Europe/Berlin", "America/New_York", "Asia/Beirut", "America/Havana", "Atlantic/Azores", "Asia/Kathmandu", "Australia/Lord_Howe"} {
		for _, q := range []ratelimit.FixedWindow{
			{Every: ratelimit.Day, Anchor: ratelimit.Date{Year: 2024, Month: 1, Day: 1}},
			{Every: ratelimit.Week, Anchor: ratelimit.Date{Year: 2030, Month: 3, Day: 31}},
			{Every: ratelimit.Month, Anchor: ratelimit.Date{Year: 2026, Month: 1, Day: 31}},
			{Every: ratelimit.Year, Anchor: ratelimit.Date{Year: 2024, Month: 2, Day: 29}},
			{Every: ratelimit.Day, Anchor: ratelimit.Date{Year: 2024, Month: 1, Day: 1}, Time: 150 * time.Minute},
			{Every: ratelimit.Day, Anchor: ratelimit.Date{Year: 2024, Month: 1, Day: 1}, Time: time.Hour},
			{Every: ratelimit.Month, Anchor: ratelimit.Date{Year: 2026, Month: 1, Day: 31}, Time: 23*time.Hour + 59*time.Minute},
			{Every: 3 * ratelimit.Month, Anchor: ratelimit.Date{Year: 2031, Month: 4, Day: 30}, Time: 9 * time.Hour},
			{Every: 2 * ratelimit.Week, Anchor: ratelimit.Date{Year: 2030, Month: 3, Day: 31}},
			{Every: 5 * ratelimit.Day, Anchor: ratelimit.Date{Year: 2024, Month: 1, Day: 1}, Time: 12 * time.Hour},
			{Every: 2 * ratelimit.Year, Anchor: ratelimit.Date{Year: 2025, Month: 2, Day: 28}},
		} {
			q.Name, q.Rate, q.Zone = "quota", 1, zone
			d := q.Definition()
			var want []window
			var instants []int64
			for _, next := d.Window("", time.Date(2019, 12, 31, 0, 0, 0, 0, time.UTC)); next.Year() < 2021; {
				for _, at := range []time.Time{next.Add(-time.Microsecond), next, next.Add(time.Hour)} {
					from, to := d.Window("", at)
					want, instants = append(want, window{at.UnixMicro(), from.UnixMicro(), to.UnixMicro()}), append(instants, at.UnixMicro())
				}
				_, next = d.Window("", next)
			}
			if got := windows(q, instants...); !slices.Equal(got, want) {
				t.Errorf("%v: got %v, want %v", d, got, want)
			}
		}
	}
	unknown := ratelimit.FixedWindow{Every: ratelimit.Month, Zone: "Europe/Nowhere", Anchor: ratelimit.Date{Year: 2024, Month: 1, Day: 1}}
	if got := windows(unknown, noon.UnixMicro())[0].From; got != time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC).UnixMicro() {
		t.Errorf("in a zone that the server does not know the month began at %v", time.UnixMicro(got))
	}
}

// A customer who has moved to the west is shown what he has: the edge that he has had elsewhere
// does not refill his quota again.
func TestViewsOfACustomerWhoMoved(t *testing.T) {
	t.Parallel()
	ctx, db := t.Context(), newDB(t)
	c, _ := newCatalog(t, db)
	now := time.Date(2026, 3, 31, 22, 30, 0, 0, time.UTC) // April in Berlin
	store := newStore(t, db, pgstore.Config{Clock: func() time.Time { return now }})
	quota := ratelimit.FixedWindow{Name: "quota", Rate: 10, Every: ratelimit.Month, Zone: "Europe/Berlin"}
	must(t, c.Publish(ctx, quota))
	must(t, store.Take(ctx, c.ForN(quota, "k", 10)))
	quota.Zone = "America/New_York"
	must(t, c.Publish(ctx, quota))
	now = now.Add(6 * time.Hour) // April in New York
	shown := viewAt(t, db, now, "")
	if want := time.Date(2026, 5, 1, 4, 0, 0, 0, time.UTC); len(shown) != 1 || shown[0].Value != 0 || !shown[0].FullAt.Equal(want) {
		t.Errorf("got %+v, want nothing left until %v", shown, want)
	}
}

// What processes hold in memory is told beside the value, until its end.
func TestViewsTellWhatIsAhead(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	c, _ := newCatalog(t, db)
	limit := ratelimit.TokenBucket{Name: "hot", Rate: 1000, Period: time.Hour, Capacity: 1000}
	must(t, c.Publish(ctx, limit))
	store := newStore(t, db, pgstore.Config{Escrow: 10 * time.Second})
	for range 200 {
		must(t, errOf(store.Allow(ctx, limit.For(""))))
	}
	var value, ahead, stored float64
	must(t, db.Pool.QueryRow(ctx, inSchema(db, // at one instant: the store may be prefetching
		"SELECT n.value, n.ahead, coalesce(r.ahead[1], 0) FROM rate_limits_now n JOIN rate_limits r USING (name, key)")).Scan(&value, &ahead, &stored))
	if ahead == 0 || ahead != stored || value+ahead > 1000 {
		t.Errorf("got value %g and %g ahead, of which the row has %g", value, ahead, stored)
	}
	later := viewAt(t, db, time.Now().Add(time.Minute), "")
	if len(later) != 1 || later[0].Ahead != 0 {
		t.Errorf("after its end: got %+v", later)
	}
}

// A name and a prefix are looked up in the index, however many rows there are.
func TestViewsUseTheIndex(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const many = 100_000
	db := newDB(t)
	ctx := t.Context()
	c, _ := newCatalog(t, db)
	must(t, c.Publish(ctx, api, signUp))
	exec(t, db, "INSERT INTO rate_limits (name, key, shard, value, ts) SELECT 'api', lpad(i::text, 7, '0'), 0, -1e6, now() FROM generate_series(1, $1::int4) AS i", many)
	exec(t, db, "INSERT INTO rate_limit_definitions (name, key, rate) SELECT 'api', lpad(i::text, 7, '0'), i FROM generate_series(1, 10000) AS i")
	exec(t, db, "ANALYZE rate_limits")
	exec(t, db, "ANALYZE rate_limit_definitions")
	for what, query := range map[string]string{
		"a key":    "SELECT * FROM rate_limits_now WHERE name = 'api' AND key = '0000077'",
		"a prefix": "SELECT * FROM rate_limits_now WHERE name = 'api' AND key LIKE '00001%'",
		"a page":   "SELECT * FROM rate_limits_short WHERE name = 'api' AND key > '0005000' ORDER BY name, key LIMIT 50",
	} {
		rows, err := db.Pool.Query(ctx, inSchema(db, "EXPLAIN "+query))
		must(t, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		must(t, err)
		if plan := strings.Join(lines, "\n"); !strings.Contains(plan, "rate_limits_pkey on rate_limits r") || strings.Contains(plan, "Seq Scan on rate_limits r") {
			t.Errorf("%s: %s", what, plan)
		}
	}
}
