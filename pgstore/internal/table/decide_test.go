package table

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// decision is one on rows of a limit's keys, of which none is missing.
func decision(limit ratelimit.Limit, keys ...string) *Decision {
	d := &Decision{}
	for _, key := range keys {
		d.Rows = append(d.Rows, decide.Row{Key: decide.Key{Name: limit.Definition().Name, Key: key}})
		d.Definitions = append(d.Definitions, bucket.Definition(limit.Definition()))
	}
	return d
}

// valuesOf are the values of a decision's rows, as they are read; -1 for one that is not there.
func valuesOf(t *testing.T, db *pgtest.DB, table *Table, d *Decision) []float64 {
	t.Helper()
	rows, now := Rows{Rows: d.Rows}, quarterPast
	noError(t, table.Read(t.Context(), db.Pool, &rows, &now))
	values := make([]float64, len(d.Rows))
	for i := range values {
		if values[i] = rows.States[i].Value; !rows.Found[i] {
			values[i] = -1
		}
	}
	return values
}

// spend is a decision's that takes from the rows that are found.
func spend(n float64, found *[]bool) func(*Rows) ([]int, error) {
	return func(read *Rows) (changed []int, err error) {
		*found = slices.Clone(read.Found)
		for i := range read.Rows {
			if read.Found[i] {
				read.States[i].Value -= n
				changed = append(changed, i)
			}
		}
		return changed, nil
	}
}

// Rows that are there, missing or awaited are found and written; one that is none of these
// is not made, and nothing is written when the decision fails.
func TestDecide(t *testing.T) {
	db, now := pgtest.New(t), quarterPast
	for name, table := range map[string]*Table{"plain": New(db.Schema, false, time.Second), "distributed": New(db.Schema, true, time.Second)} {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket{Name: name + " bucket", Rate: 10, Period: time.Minute},
			ratelimit.FixedWindow{Name: name + " window", Rate: 10, Period: time.Minute},
		} {
			t.Run(limit.Definition().Name, func(t *testing.T) {
				d := decision(limit, "absent", "awaited", "missing", "there")
				var batch pgx.Batch
				table.QueuePut(&batch, d.Rows[3], bucket.State{Value: 7, TS: d.Definitions[3].Fresh("there", now).TS})
				noError(t, db.Pool.SendBatch(t.Context(), &batch).Close())
				failed := errors.New("failed")
				d.Await, d.Missing = &d.Rows[1], d.Rows[2:3]
				d.Decide = func(*Rows) ([]int, error) { return []int{3}, failed }
				if err := table.Decider().Decide(t.Context(), db.Pool, d, &now); !errors.Is(err, failed) {
					t.Errorf("got %v, want what the decision said", err)
				}
				if got := valuesOf(t, db, table, d); got[3] != 7 {
					t.Errorf("after one that failed: %v", got)
				}
				var found []bool
				d.Decide = spend(2, &found)
				noError(t, table.Decider().Decide(t.Context(), db.Pool, d, &now))
				if want := []bool{false, true, true, true}; !slices.Equal(found, want) {
					t.Errorf("found %v, want %v", found, want)
				}
				if got, want := valuesOf(t, db, table, d), []float64{-1, 8, 8, 5}; !slices.Equal(got, want) {
					t.Errorf("got %v, want %v", got, want)
				}
			})
		}
	}
}

// A decision must not change what it has not locked.
func TestDecideRefusesWhatIsNotLocked(t *testing.T) {
	db, now := pgtest.New(t), quarterPast
	for _, distributed := range []bool{false, true} {
		table := New(db.Schema, distributed, time.Second)
		d := decision(ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Minute}, "k")
		d.Decide = func(*Rows) ([]int, error) { return []int{0}, nil }
		if err := table.Decider().Decide(t.Context(), db.Pool, d, &now); err == nil {
			t.Errorf("distributed %v: no error", distributed)
		}
		if got := valuesOf(t, db, table, d); got[0] != -1 {
			t.Errorf("distributed %v: there is a row with %v", distributed, got)
		}
	}
}
