package pgstore

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// sheet is the rows that some turns touch, as read and as they are to become.
type sheet struct {
	rows  []sheetRow // all shards of one limit and key are neighbours
	first map[sheetKey]int
	order []int // of rows, by name, key and shard
	at    time.Time
	asked moment
}

// sheetKey tells apart calls that see a limit with different numbers of
// shards, while a new definition is being rolled out.
type sheetKey struct {
	limitKey
	shards int
}

type sheetRow struct {
	definition ratelimit.Definition // of the shard
	key        string
	shard      int
	ctid       string          // of the version that was read, "" when there is no row
	read       ratelimit.State // what that version says
	state      ratelimit.State // what it is to become; full when there is no row
	changed    bool
	stale      bool // it was not what was read any more when it was to be written
}

func (r *sheetRow) row() row { return row{r.definition.Name, r.key, r.shard} }

func newSheet(turns []*turn) *sheet {
	sh := &sheet{first: make(map[sheetKey]int, len(turns))}
	for _, t := range turns {
		t.rows = t.rows[:0]
		for _, a := range t.call.Asks {
			t.rows = append(t.rows, sh.add(a))
		}
	}
	sh.order = make([]int, len(sh.rows))
	for i := range sh.order {
		sh.order[i] = i
	}
	slices.SortFunc(sh.order, func(i, j int) int {
		return sh.rows[i].row().compare(sh.rows[j].row())
	})
	return sh
}

func keyOf(a ratelimit.Ask) sheetKey {
	return sheetKey{limitKey{a.Definition.Name, a.Key}, a.Definition.Shards}
}

// add returns where the rows of an ask begin. When definitions differ, those of
// one key have the one with the largest capacity: what is full by that is full
// by all.
func (sh *sheet) add(a ratelimit.Ask) int {
	key, definition := keyOf(a), a.Definition.Shard()
	first, ok := sh.first[key]
	if !ok {
		first = len(sh.rows)
		sh.first[key] = first
		for shard := range key.shards {
			sh.rows = append(sh.rows, sheetRow{definition: definition, key: a.Key, shard: shard})
		}
	} else if definition.Capacity > sh.rows[first].definition.Capacity {
		for shard := range key.shards {
			sh.rows[first+shard].definition = definition
		}
	}
	return first
}

// of is the rows of a turn's i-th ask, by shard.
func (sh *sheet) of(t *turn, i int) []sheetRow {
	first := t.rows[i]
	return sh.rows[first : first+t.call.Asks[i].Definition.Shards]
}

// readSheet reads all rows of sh, in order, and the clock; with lock, in a
// transaction that it begins, and locking them.
func (s *Store) readSheet(ctx context.Context, q querier, sh *sheet, lock bool) error {
	n := len(sh.rows)
	names, keys, shards := make([]string, n), make([]string, n), make([]int32, n)
	for i, r := range sh.order {
		row := &sh.rows[r]
		names[i], keys[i], shards[i] = row.definition.Name, row.key, int32(row.shard)
	}
	sh.asked = s.refusals.moment()
	var batch pgx.Batch
	sql := s.sql.readRows
	if lock {
		batch.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
		sql = s.sql.lockRows
	}
	batch.Queue(sql, names, keys, shards, s.clock()).Query(sh.scan)
	if err := q.SendBatch(ctx, &batch).Close(); err != nil {
		return err
	}
	sh.at = sh.at.UTC()
	for i := range sh.rows {
		if row := &sh.rows[i]; row.ctid == "" {
			row.state = row.definition.Fresh(row.key, sh.at)
		}
	}
	return nil
}

func (sh *sheet) scan(rows pgx.Rows) error {
	var (
		i     int64
		ctid  *string
		value *float64
		ts    *time.Time
	)
	_, err := pgx.ForEachRow(rows, []any{&i, &ctid, &value, &ts, &sh.at}, func() error {
		if ctid != nil {
			row := &sh.rows[sh.order[i-1]]
			row.ctid = *ctid
			row.read = ratelimit.State{Value: *value, TS: *ts}
			row.state = row.read
		}
		return nil
	})
	return err
}

// complete reports whether every row is there.
func (sh *sheet) complete() bool {
	return !slices.ContainsFunc(sh.rows, func(r sheetRow) bool { return r.ctid == "" })
}

// decide decides every turn in order, each on what the ones before it left.
// It reports whether one takes from several rows.
func (sh *sheet) decide(s *Store, turns []*turn) (multiple bool) {
	for _, t := range turns {
		t.refused = nil
		f := sh.found(t)
		parts, ok := f.plan(t.call)
		if !ok || t.check {
			t.result = f.result(t.call)
			if !ok && !t.check {
				refused := f // f itself would be allocated for those that are granted, too
				t.refused = &refused
			}
			continue
		}
		outcomes := make([]outcome, len(parts))
		for i, p := range parts {
			row := &sh.of(t, p.ask)[p.shard]
			settled := p.definition.Settle(row.state, sh.at)
			settled.Value -= p.count
			row.state, row.changed = settled, true
			outcomes[i] = outcome{after: settled, taken: true}
		}
		t.result = s.granted(t.call, parts, outcomes, sh.at)
		multiple = multiple || len(parts) > 1
	}
	return multiple
}

// found is the states of a turn's rows.
func (sh *sheet) found(t *turn) found {
	f := found{states: make([][]ratelimit.State, len(t.rows)), at: sh.at}
	for i := range t.rows {
		rows := sh.of(t, i)
		f.states[i] = make([]ratelimit.State, len(rows))
		for j := range rows {
			f.states[i][j] = rows[j].state
		}
	}
	return f
}

// insertRows writes the changed rows that were not there. Those that are there
// by now are stale.
func (s *Store) insertRows(ctx context.Context, q querier, sh *sheet) error {
	w := sh.changes(false)
	if len(w.rows) == 0 {
		return nil
	}
	rows, err := q.Query(ctx, s.sql.insertRows, w.names, w.keys, w.shards, w.values, w.instants)
	if err != nil {
		return err
	}
	inserted := make(map[row]bool, len(w.rows))
	var one row
	if _, err := pgx.ForEachRow(rows, []any{&one.name, &one.key, &one.shard}, func() error {
		inserted[one] = true
		return nil
	}); err != nil {
		return err
	}
	for _, r := range w.rows {
		r.stale = !inserted[r.row()]
		delete(inserted, r.row()) // another with it, of another number of shards, was not
	}
	return nil
}

// updateRows writes the changed rows that were there, each if it is still the
// version that was read; the others are stale.
func (s *Store) updateRows(ctx context.Context, q querier, sh *sheet, commit bool) error {
	w := sh.changes(true)
	var batch pgx.Batch
	if len(w.rows) > 0 {
		for _, r := range w.rows {
			r.stale = true
		}
		batch.Queue(s.sql.updateRows, w.ctids, w.names, w.keys, w.shards, w.reads, w.readInstants, w.values, w.instants).
			Query(func(rows pgx.Rows) error {
				var i int64
				_, err := pgx.ForEachRow(rows, []any{&i}, func() error {
					w.rows[i-1].stale = false
					return nil
				})
				return err
			})
	}
	if commit {
		batch.Queue("COMMIT")
	}
	if batch.Len() == 0 {
		return nil
	}
	return q.SendBatch(ctx, &batch).Close()
}

// changes are the columns of rows to write, in the order of locking.
type changes struct {
	rows                   []*sheetRow
	ctids, names, keys     []string
	shards                 []int32
	reads, values          []float64
	readInstants, instants []time.Time
}

// changes gathers the changed rows that were there, or that were not.
func (sh *sheet) changes(there bool) changes {
	var w changes
	for _, r := range sh.order {
		row := &sh.rows[r]
		if !row.changed || (row.ctid != "") != there {
			continue
		}
		w.rows = append(w.rows, row)
		w.ctids = append(w.ctids, row.ctid)
		w.names = append(w.names, row.definition.Name)
		w.keys = append(w.keys, row.key)
		w.shards = append(w.shards, int32(row.shard))
		w.reads = append(w.reads, row.read.Value)
		w.readInstants = append(w.readInstants, row.read.TS)
		w.values = append(w.values, row.state.Value)
		w.instants = append(w.instants, row.state.TS)
	}
	return w
}

// fill has every row that was not there written as it is: full.
func (sh *sheet) fill() {
	for i := range sh.rows {
		sh.rows[i].changed = sh.rows[i].ctid == ""
	}
}

// finish gives the turns their answers, but for those that saw a row that is
// stale. Only then is a refusal remembered: what it saw is in the database.
func (sh *sheet) finish(s *Store, turns []*turn) {
	for _, t := range turns {
		if sh.stale(t) {
			continue
		}
		if t.refused != nil {
			s.refusals.note(t.call, *t.refused, sh.asked)
		}
		t.finish(t.result, nil)
	}
}

// stale reports whether a turn saw a row that is.
func (sh *sheet) stale(t *turn) bool {
	for i := range t.rows {
		if slices.ContainsFunc(sh.of(t, i), func(r sheetRow) bool { return r.stale }) {
			return true
		}
	}
	return false
}
