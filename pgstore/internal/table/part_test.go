package table

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// What a part's statements grant to many rows is what the algebra grants, whether the rows are there
// or not, and of limits with several definitions. What they cannot tell apart they leave.
func TestPartGrantAgrees(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	table, now := New(db.Schema, true, time.Second), quarterPast
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "a", Rate: 7, Period: time.Minute, Capacity: 20},
		ratelimit.TokenBucket{Name: "b", Rate: 3, Period: time.Second, Capacity: 0.3},
		ratelimit.FixedWindow{Name: "c", Rate: 7, Period: time.Minute, Capacity: 20},
	}
	random := rand.New(rand.NewPCG(3, 14))
	outcomes := make(map[bool]int)
	for range 20 {
		var grants []Grant
		var before []bucket.State
		for i := range random.IntN(100) {
			limit := limits[random.IntN(len(limits))]
			grants = append(grants, grantOf(limit.ForN(fmt.Sprint(i), limit.Definition().Capacity*float64(random.IntN(12))/10)))
		}
		slices.SortFunc(grants, func(a, b Grant) int { return a.Compare(b.Row) })
		noError(t, errOf(db.Pool.Exec(t.Context(), "DELETE FROM "+db.Schema+".rate_limits")))
		for i := range grants {
			g := &grants[i]
			state := bucket.State{Value: g.Definition.Capacity * (random.Float64()*2 - 1), TS: now.Add(-time.Duration(random.IntN(100)) * time.Second)}
			if g.Definition.Stepped() && random.IntN(4) > 0 {
				state.TS = g.Definition.Fresh(g.Key.Key, state.TS).TS
			}
			switch random.IntN(4) {
			case 0: // there is no row
				before = append(before, g.Definition.Fresh(g.Key.Key, now))
				continue
			case 1:
				state.Paused = now.Add(time.Duration(random.IntN(2)) * time.Second)
			}
			before = append(before, state)
			putAll(t, db, table, grants[i:i+1], before[i:])
		}
		noError(t, table.Part().Grant(t.Context(), db.Pool, grants, false, &now))
		for i := range grants {
			g := &grants[i]
			want, ok := g.Definition.Take(before[i], now, g.Count, 0)
			edge := func(at time.Time) time.Time { return g.Definition.Fresh(g.Key.Key, at).TS } // of a bucket, it is the instant
			ok = ok && g.inPart() && !before[i].Paused.After(edge(now)) && before[i].TS.Equal(edge(before[i].TS))
			if got := g.Taken; got.OK != ok || ok && (got.After.Value != want.Value || !got.After.TS.Equal(want.TS) || !got.At.Equal(now)) {
				t.Fatalf("%v of %s with %v: got %v, want %v %v", g.Count, g.Name, before[i], got, want, ok)
			}
			outcomes[ok]++
		}
	}
	if outcomes[true] < 100 || outcomes[false] < 100 {
		t.Errorf("%d taken and %d refused, so this test tells little", outcomes[true], outcomes[false])
	}
}

// The statements have the rows in their order, each text a power of 2 of them, and the transaction has a
// lock_timeout: other orders are deadlocks beside other transactions, and a locked row would stop its part.
func TestPartStatements(t *testing.T) {
	table := New("s", true, time.Second)
	var grants []Grant
	for i := range 87 {
		grants = append(grants, grantOf(ratelimit.TokenBucket{Name: "l", Rate: 7, Period: time.Minute}.For(fmt.Sprintf("%03d", i))))
	}
	var batch pgx.Batch
	partTable{distributedTable{table}}.queueParts(&batch, grants, nil)
	var keys []string
	var rows []int
	for _, q := range batch.QueuedQueries {
		own := q.Arguments[5:]
		rows = append(rows, len(own)/3)
		for i := 0; i < len(own); i += 3 {
			keys = append(keys, own[i].(string))
		}
	}
	if len(keys) != len(grants) || !slices.IsSorted(keys) || !slices.Equal(rows, []int{64, 22, 1}) {
		t.Errorf("statements with %v rows, of %v", rows, keys)
	}
}

// A row that stays locked has the whole transaction take nothing, and say so soon.
func TestPartWaitsShortly(t *testing.T) {
	db := pgtest.New(t)
	table := New(db.Schema, true, time.Second)
	var grants []Grant
	for _, key := range []string{"free", "held"} {
		grants = append(grants, grantOf(ratelimit.TokenBucket{Name: "l", Rate: 7, Period: time.Minute}.For(key)))
	}
	putAll(t, db, table, grants[1:], []bucket.State{grants[1].Definition.Fresh("", time.Now())})
	tx, err := db.Pool.Begin(t.Context())
	noError(t, err)
	noError(t, errOf(tx.Exec(t.Context(), "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE")))
	if err := table.Part().Grant(t.Context(), db.Pool, grants, false, nil); !conn.TimedOut(err) || grants[0].Taken.OK {
		t.Errorf("got %v, OK %v, want a lock_timeout and nothing taken", err, grants[0].Taken.OK)
	}
	noError(t, tx.Rollback(t.Context()))
	if err := table.Part().Grant(t.Context(), db.Pool, grants, false, nil); err != nil || grants[0].Taken.After.Value != 6 || grants[1].Taken.After.Value != 6 {
		t.Errorf("got %v, %v, %v", err, grants[0].Taken, grants[1].Taken)
	}
}
