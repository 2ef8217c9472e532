package table

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Rows holds rows to read, lock, make or write.
type Rows struct {
	Rows   []decide.Row
	States []bucket.State // as read, or to write
	Found  []bool         // which rows were read
	At     time.Time      // when they were read
}

// columns returns the rows as arrays. Statements have them behind sub-selects, which hide their
// lengths from the planner. For a short array it would find a better plan, but plan each time,
// which costs more.
func (r *Rows) columns() (names, keys []string, shards []int32) {
	names, keys, shards = make([]string, len(r.Rows)), make([]string, len(r.Rows)), make([]int32, len(r.Rows))
	for i, row := range r.Rows {
		names[i], keys[i], shards[i] = row.Name, row.Key.Key, int32(row.Shard)
	}
	return names, keys, shards
}

func (r *Rows) states() (values []float64, ts []time.Time, paused []*time.Time) {
	values, ts, paused = make([]float64, len(r.Rows)), make([]time.Time, len(r.Rows)), make([]*time.Time, len(r.Rows))
	for i, s := range r.States {
		values[i], ts[i], paused[i] = s.Value, s.TS, orNull(s.Paused)
	}
	return values, ts, paused
}

// scan returns the function that reads rows in the order given.
func (r *Rows) scan(now *time.Time) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		r.States, r.Found = make([]bucket.State, len(r.Rows)), make([]bool, len(r.Rows))
		var (
			s state
			i int64
		)
		_, err := pgx.ForEachRow(rows, s.fields(&i, &r.At), func() error {
			r.States[i-1], r.Found[i-1] = s.get()
			return nil
		})
		r.At = instant(now, r.At).UTC()
		return err
	}
}

// Read reads rows without locking them.
func (t *Table) Read(ctx context.Context, q Querier, r *Rows, now *time.Time) error {
	var batch pgx.Batch
	t.QueueRead(&batch, r, now)
	return q.SendBatch(ctx, &batch).Close()
}

// QueueRead puts into a batch the reading of rows: by one statement, or of a distributed table by
// one for each key.
func (t *Table) QueueRead(batch *pgx.Batch, r *Rows, now *time.Time) {
	if !t.distributed {
		names, keys, shards := r.columns()
		batch.Queue(t.common["read"], names, keys, shards).Query(r.scan(now))
		return
	}
	r.States, r.Found = make([]bucket.State, len(r.Rows)), make([]bool, len(r.Rows))
	for first, last := 0, 0; first < len(r.Rows); first = last {
		key := r.Rows[first].Key
		for last < len(r.Rows) && r.Rows[last].Key == key {
			last++
		}
		batch.Queue(t.common["find"], key.Name, key.Key).Query(r.scanKey(first, last))
	}
	QueueNow(batch, now, &r.At)
}

// scanKey returns the function that reads the rows of a key, and keeps those from first up to last.
func (r *Rows) scanKey(first, last int) func(pgx.Rows) error {
	var (
		s     state
		shard int
	)
	return each(s.fields(&shard), func() {
		read, _ := s.get()
		for i := first; i < last; i++ {
			if r.Rows[i].Shard == shard {
				r.States[i], r.Found[i] = read, true
			}
		}
	})
}

// QueueAwait puts into a batch the wait for a row that another transaction has locked. At levels
// above READ COMMITTED it finds no row, since it would leave a predicate lock.
func (t *Table) QueueAwait(batch *pgx.Batch, row decide.Row) {
	batch.Queue(t.common["await"], row.Name, row.Key.Key, int32(row.Shard))
}

// queueFill puts into a batch the making of missing rows, with one definition for each.
func (t *Table) queueFill(batch *pgx.Batch, rows []decide.Row, definitions []bucket.Definition, now *time.Time) {
	n, r := len(rows), Rows{Rows: rows}
	names, keys, shards := r.columns()
	capacities, ticks, origins := make([]float64, n), make([]float64, n), make([]time.Time, n)
	for i := range definitions {
		d := &definitions[i]
		capacities[i], ticks[i], origins[i] = d.Capacity, tick(d), origin(d, rows[i].Key.Key, time.Time{}, now)
	}
	batch.Queue(t.common["fill"], names, keys, shards, capacities, ticks, origins, now)
}

// queueWrite puts into a batch the writing of locked rows.
func (t *Table) queueWrite(batch *pgx.Batch, r *Rows) {
	names, keys, shards := r.columns()
	values, ts, paused := r.states()
	var texts []*string
	if slices.ContainsFunc(r.States, func(s bucket.State) bool { return s.Slots != nil }) {
		texts = make([]*string, len(r.States))
		for i := range r.States {
			texts[i] = slotsText(&r.States[i])
		}
	}
	batch.Queue(t.common["write"], names, keys, shards, values, ts, paused, texts)
}

// Now reads the clock, unless now is given.
func Now(ctx context.Context, q Querier, now *time.Time) (at time.Time, err error) {
	var batch pgx.Batch
	if QueueNow(&batch, now, &at); batch.Len() > 0 {
		err = q.SendBatch(ctx, &batch).Close()
	}
	return at, err
}

// QueueNow puts into a batch the reading of the clock, unless now is given.
func QueueNow(batch *pgx.Batch, now, at *time.Time) {
	if now != nil {
		*at = *now
		return
	}
	batch.Queue("SELECT clock_timestamp()").QueryRow(func(row pgx.Row) error {
		err := row.Scan(at)
		*at = at.UTC()
		return err
	})
}
