package pgstore_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// limitsOfAllKinds hold 12 tokens and get 12 more in a day.
func limitsOfAllKinds(name string) map[string]ratelimit.Limit {
	const day = 24 * time.Hour
	return map[string]ratelimit.Limit{
		"bucket":         ratelimit.TokenBucket{Name: name + " b", Rate: 12, Period: day},
		"window":         ratelimit.FixedWindow{Name: name + " w", Rate: 12, Period: day, Start: noon},
		"sharded bucket": ratelimit.TokenBucket{Name: name + " sb", Rate: 12, Period: day, Shards: 4},
		"sharded window": ratelimit.FixedWindow{Name: name + " sw", Rate: 12, Period: day, Start: noon, Shards: 4},
	}
}

// eachKind runs test for each kind of limit, on a clock that starts at noon.
func eachKind(t *testing.T, test func(t *testing.T, db *pgtest.DB, c *clock, store *pgstore.Store, l ratelimit.Limit)) {
	t.Helper()
	db := pgtest.New(t)
	for name, l := range limitsOfAllKinds(t.Name()) {
		t.Run(name, func(t *testing.T) {
			c := newClock()
			test(t, db, c, newStore(t, db, onClock(c)), l)
		})
	}
}

func TestCredit(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, _ *pgtest.DB, _ *clock, store *pgstore.Store, l ratelimit.Limit) {
		ctx := t.Context()
		for _, step := range []struct {
			take, credit, want float64
		}{
			{0, 5, 12}, // no row: full already
			{10, 3, 5},
			{0, 0, 5},
			{0, 100, 12}, // capped
			{12, 0.5, 0.5},
			{20, 4, -15.5}, // still in debt
		} {
			result, err := store.Reserve(ctx, l.ForN("k", step.take))
			mustTake(t, result, err)
			status, err := store.Credit(ctx, l.ForN("k", step.credit))
			if err != nil || status.Value != step.want || status.Request.Count != step.credit {
				t.Errorf("%+v: got %v of %v, error %v", step, status.Value, status.Request, err)
			}
			wantLeft(t, store, l.ForN("k", 0), step.want)
		}
	})
}

func TestCancel(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, _ *pgtest.DB, _ *clock, store *pgstore.Store, l ratelimit.Limit) {
		ctx := t.Context()
		mustAllow(t, store, l.ForN("k", 2))
		result, err := store.Reserve(ctx, l.ForN("k", 14)) // from several shards, and into debt
		mustTake(t, result, err)
		wantLeft(t, store, l.ForN("k", 0), -4)
		for _, want := range []bool{true, false, false} {
			cancelled, err := store.Cancel(ctx, result.Receipt)
			wantSaid(t, "cancel", cancelled, err, want)
			wantLeft(t, store, l.ForN("k", 0), 10)
		}
		cancelled, err := store.Cancel(ctx, nil)
		wantSaid(t, "cancel nothing", cancelled, err, false)
	})
}

func TestCancelInTransaction(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store, l ratelimit.Limit) {
		ctx := t.Context()
		result, err := store.Allow(ctx, l.ForN("k", 7))
		mustTake(t, result, err)

		tx := begin(t, db, pgx.Serializable)
		for _, want := range []bool{true, false} { // twice in the same transaction too
			cancelled, err := store.CancelTx(ctx, tx, result.Receipt)
			wantSaid(t, "in a transaction", cancelled, err, want)
		}
		if err := tx.Rollback(ctx); err != nil {
			t.Fatal(err)
		}
		wantLeft(t, store, l.ForN("k", 0), 5)

		tx = begin(t, db, pgx.ReadCommitted)
		cancelled, err := store.CancelTx(ctx, tx, result.Receipt)
		wantSaid(t, "again, after the roll-back", cancelled, err, true)
		if err := tx.Commit(ctx); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			cancelled, err = store.Cancel(ctx, result.Receipt)
			wantSaid(t, "after the commit", cancelled, err, false)
		}
		wantLeft(t, store, l.ForN("k", 0), 12)
	})
}

// TestCancelFindsItsShard: what is given back goes where it came from, so that
// all rows are as they were before.
func TestCancelFindsItsShard(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store := newStore(t, db, onClock(newClock()))
	l := slow("shards", 80)
	l.Shards = 8
	for range 30 {
		mustAllow(t, store, l.For("k"))
	}
	for _, n := range []float64{1, 7, 25, 50} {
		before := rowsOf(t, db, l.Name)
		result, err := store.Allow(t.Context(), l.ForN("k", n))
		mustTake(t, result, err)
		if slices.Equal(rowsOf(t, db, l.Name), before) {
			t.Errorf("%v tokens: nothing was taken", n)
		}
		cancelled, err := store.Cancel(t.Context(), result.Receipt)
		wantSaid(t, "cancel", cancelled, err, true)
		if got := rowsOf(t, db, l.Name); !slices.Equal(got, before) {
			t.Errorf("%v tokens: got  %q\nwant %q", n, got, before)
		}
	}
}

func TestPause(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, _ *pgtest.DB, c *clock, store *pgstore.Store, l ratelimit.Limit) {
		ctx := t.Context()
		until := noon.Add(90 * time.Minute)
		wantPaused(t, store, l, "k", noon, until) // a key without a row
		wantLeft(t, store, l.ForN("k", 0), 0)

		status, err := store.Credit(ctx, l.ForN("k", 4))
		if err != nil || status.Value != 4 {
			t.Errorf("credit while paused: got %v, error %v, want 4", status.Value, err)
		}
		c.add(time.Hour)
		wantLeft(t, store, l.ForN("k", 0), 4) // nothing came in
		result, err := store.Allow(ctx, l.ForN("k", 4))
		if err != nil || result.OK || result.RetryAfter != 30*time.Minute || !result.PausedUntil.Equal(until) {
			t.Errorf("allowed %v, wait %v, paused until %v, error %v, want a refusal until the pause's end", result.OK, result.RetryAfter, result.PausedUntil, err)
		}

		result, err = store.Reserve(ctx, l.ForN("k", 6)) // due after the pause, and debt stays
		mustTake(t, result, err)
		if !result.At.Equal(noon.Add(time.Hour)) {
			t.Errorf("decided at %v, want %v: not at the pause's end", result.At, noon.Add(time.Hour))
		}
		if result.RetryAt.Before(until) {
			t.Errorf("due at %v, within the pause until %v", result.RetryAt, until)
		}
		wantPaused(t, store, l, "k", c.now(), until.Add(time.Hour))
		wantLeft(t, store, l.ForN("k", 0), -2)

		if err := store.Reset(ctx, l, "k"); err != nil {
			t.Fatal(err)
		}
		wantLeft(t, store, l.ForN("k", 0), 12)
	})
}

func TestPauseDoesNotShorten(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store, l ratelimit.Limit) {
		wantPaused(t, store, l, "k", noon, noon.Add(3*time.Hour))
		before := rowsOf(t, db, l.Definition().Name)
		until, err := store.Pause(t.Context(), l, "k", time.Hour)
		if err != nil || !until.Equal(noon.Add(3*time.Hour)) {
			t.Errorf("shorter pause: until %v, error %v, want the longer one's end", until, err)
		}
		if got := rowsOf(t, db, l.Definition().Name); !slices.Equal(got, before) {
			t.Errorf("got  %q\nwant %q", got, before)
		}
	})
}

// TestWindowAfterPause follows a fixed window whose edges a pause has moved.
func TestWindowAfterPause(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	c := newClock()
	store := newStore(t, db, onClock(c))
	l := ratelimit.FixedWindow{Name: "w", Rate: 10, Period: time.Hour, Start: noon}
	wantPaused(t, store, l, "k", noon, noon.Add(70*time.Minute))
	for _, step := range []struct {
		minute int
		count  float64
		ok     bool
		left   float64
		wait   time.Duration
	}{
		{60, 1, false, 0, 10 * time.Minute}, // an edge by Start, not by the pause
		{69, 1, false, 0, time.Minute},
		{70, 4, true, 6, 0},
		{120, 7, false, 6, 10 * time.Minute}, // its own edges stay
		{130, 10, true, 0, 0},
		{189, 1, false, 0, time.Minute},
		{190, 1, true, 9, 0},
	} {
		c.set(noon.Add(time.Duration(step.minute) * time.Minute))
		got, err := store.Allow(t.Context(), l.ForN("k", step.count))
		if err != nil || got.OK != step.ok || got.Value != step.left || got.RetryAfter != step.wait {
			t.Errorf("%+v: got OK %v, %v left, wait %v, error %v", step, got.OK, got.Value, got.RetryAfter, err)
		}
	}
}

// TestWindowStartChanged: a live row keeps its edges, a new one has the new.
func TestWindowStartChanged(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	c := newClock()
	store := newStore(t, db, onClock(c))
	before := ratelimit.FixedWindow{Name: "w", Rate: 10, Period: time.Hour, Start: noon}
	after := before
	after.Start = noon.Add(15 * time.Minute)
	mustAllow(t, store, before.ForN("live", 10))
	for _, step := range []struct {
		minute int
		key    string
		ok     bool
		wait   time.Duration
	}{
		{20, "live", false, 40 * time.Minute},
		{20, "new", true, 0},
		{59, "live", false, time.Minute},
		{60, "live", true, 0},
		{61, "live", false, 59 * time.Minute},
		{74, "new", false, time.Minute},
		{75, "new", true, 0},
	} {
		c.set(noon.Add(time.Duration(step.minute) * time.Minute))
		got, err := store.Allow(t.Context(), after.ForN(step.key, 10))
		if err != nil || got.OK != step.ok || got.RetryAfter != step.wait {
			t.Errorf("%+v: got OK %v, wait %v, error %v", step, got.OK, got.RetryAfter, err)
		}
	}
}

func TestReset(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store, l ratelimit.Limit) {
		ctx := t.Context()
		for _, key := range []string{"k", "other"} {
			result, err := store.Reserve(ctx, l.ForN(key, 30))
			mustTake(t, result, err)
		}
		if err := store.Reset(ctx, l, "k"); err != nil {
			t.Fatal(err)
		}
		if err := store.Reset(ctx, l, "no row"); err != nil {
			t.Error(err)
		}
		wantLeft(t, store, l.ForN("k", 0), 12)
		wantLeft(t, store, l.ForN("other", 0), -18)
		var rows int
		err := db.Pool.QueryRow(ctx, `SELECT count(*) FROM `+db.Schema+`.rate_limits WHERE name = $1 AND key = 'k'`, l.Definition().Name).Scan(&rows)
		if err != nil || rows != 0 {
			t.Errorf("%d rows, error %v", rows, err)
		}
	})
}

// TestCountZero: it is granted unless there is debt, and takes nothing.
func TestCountZero(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, _ *pgtest.DB, _ *clock, store *pgstore.Store, l ratelimit.Limit) {
		ctx := t.Context()
		for _, step := range []struct {
			take float64
			ok   bool
			left float64
		}{{0, true, 12}, {12, true, 0}, {5, false, -5}} {
			result, err := store.Reserve(ctx, l.ForN("k", step.take))
			mustTake(t, result, err)
			got, err := store.Allow(ctx, l.ForN("k", 0))
			if err != nil || got.OK != step.ok || got.Value != step.left || (got.RetryAfter > 0) == step.ok {
				t.Errorf("%+v: got OK %v, %v left, wait %v, error %v", step, got.OK, got.Value, got.RetryAfter, err)
			}
			wantLeft(t, store, l.ForN("k", 0), step.left)
		}
	})
}

// TestCheckOnlyLooks: it writes nothing, gets no transaction ID, waits for no
// lock and leaves none behind.
func TestCheckOnlyLooks(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store, l ratelimit.Limit) {
		ctx := t.Context()
		mustAllow(t, store, l.ForN("k", 5))
		before := tableOf(t, db)

		holder := begin(t, db, pgx.ReadCommitted)
		lockRows := `SELECT FROM ` + db.Schema + `.rate_limits FOR UPDATE NOWAIT`
		mustExec(t, holder, lockRows)
		tx := begin(t, db, pgx.Serializable)
		mustExec(t, tx, "SET LOCAL lock_timeout = '1ms'")
		for _, key := range []string{"k", "no row"} {
			for _, n := range []float64{0, 1, 12} {
				for _, call := range []func() (ratelimit.Result, error){
					func() (ratelimit.Result, error) { return store.CheckTx(ctx, tx, l.ForN(key, n)) },
					func() (ratelimit.Result, error) { return store.CheckReserveTx(ctx, tx, l.ForN(key, n)) },
					func() (ratelimit.Result, error) { return store.Check(ctx, l.ForN(key, n)) },
					func() (ratelimit.Result, error) { return store.CheckReserve(ctx, l.ForN(key, n)) },
				} {
					if got, err := call(); err != nil || got.Receipt != nil {
						t.Errorf("%s %v: receipt %v, error %v", key, n, got.Receipt, err)
					}
				}
			}
		}
		var noXID bool
		if err := tx.QueryRow(ctx, "SELECT pg_current_xact_id_if_assigned() IS NULL").Scan(&noXID); err != nil || !noXID {
			t.Errorf("has no transaction ID: %v, error %v", noXID, err)
		}
		if err := holder.Rollback(ctx); err != nil {
			t.Fatal(err)
		}
		other := begin(t, db, pgx.ReadCommitted) // while tx is open
		mustExec(t, other, lockRows)
		if got := tableOf(t, db); !slices.Equal(got, before) {
			t.Errorf("got  %q\nwant %q", got, before)
		}
	})
}
