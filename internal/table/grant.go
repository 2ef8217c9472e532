package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// Grant is what several calls take together from one row: all of it or nothing.
type Grant struct {
	decide.Change         // Count is what they take together
	Need          float64 // tokens that there must be to grant all of them

	// A grant that prefetches takes more, for a lease.
	Lasts    time.Duration // of a token bucket's lease; 0 for a grant that does not prefetch
	Lowered  float64       // capacity to count with, lower by what comes in while the lease lasts
	Prefetch float64       // tokens to take besides: no more than half of what is left then, or may be out
	Out      float64       // of Count, what may still come back to memory
	Spent                  // of earlier leases

	// Brisk has a grant that waits for its row committed in the round trip that takes, so that
	// those behind it, in other processes too, wait for no other one; but it waits for a moment
	// only. Who gives up then may have taken all the same, as with any statement that is under
	// way. It is for rows that others are known to have locked no longer than that takes.
	Brisk bool

	Taken Taken
}

// Prefetched is how much a grant, which was taken, took besides.
func (g *Grant) Prefetched() float64 { return g.Taken.prefetched }

// End is when the lease ends, on the database's clock, of a grant that was taken and
// prefetched.
func (g *Grant) End() time.Time {
	return g.end(g.Taken.After.TS)
}

// end is when the lease ends that begins with a row at ts: a window's with its edge.
func (g *Grant) end(ts time.Time) time.Time { return g.Definition.End(ts, ts, g.Lasts) }

func (g *Grant) prefetches() bool { return g.Lasts > 0 }

func (g *Grant) sliding() bool { return g.Definition.Kind == bucket.SlidingWindow }

func (g *Grant) byCalendar() bool { return g.Definition.Every != 0 }

// capacity is what a grant counts with.
func (g *Grant) capacity() float64 {
	if g.prefetches() {
		return g.Lowered
	}
	return g.Definition.Capacity
}

// never reports whether a grant needs more than there can be, which statements do not ask.
func (g *Grant) never() bool { return g.Need > g.capacity() }

// grant takes what grants say, in the order of their rows, from rows that nobody has locked.
func (t plainTable) grant(ctx context.Context, q Querier, grants []Grant, now *time.Time) error {
	if g := &grants[0]; len(grants) == 1 && !g.prefetches() {
		if g.never() {
			return nil
		}
		return g.scan(q.QueryRow(ctx, t.of(&g.Definition)["grant"], g.arguments(now)...), now)
	}
	var batch pgx.Batch // of one statement mostly, and one transaction in any case
	t.queue(&batch, grants, now)
	err := q.SendBatch(ctx, &batch).Close()
	if err != nil { // nothing is taken, whatever has been read
		for i := range grants {
			grants[i].Taken = Taken{}
		}
	}
	return err
}

// grantInTurn waits for the row of a grant, among all who do, in other processes too.
func (t plainTable) grantInTurn(ctx context.Context, pool *pgxpool.Pool, g *Grant, now *time.Time) error {
	if g.never() {
		return nil
	}
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer Release(ctx, conn)
	wait := Awaited
	if g.Brisk {
		wait = brisk
	}
	batch := t.begin(wait)
	if g.prefetches() {
		t.queueMany(batch, []*Grant{g}, "_in_turn", now)
	} else {
		batch.Queue(t.of(&g.Definition)["grant_in_turn"], g.arguments(now)...).QueryRow(func(row pgx.Row) error { return g.scan(row, now) })
	}
	if g.Brisk {
		batch.Queue("COMMIT")
		return conn.SendBatch(ctx, batch).Close()
	}
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		return err
	}
	// Not with the rest: the server would go on to it when nobody waits any more.
	_, err = conn.Exec(ctx, "COMMIT")
	return err
}

// queue puts into a batch the statements for several grants.
func (t plainTable) queue(batch *pgx.Batch, grants []Grant, now *time.Time) {
	alike, others, calendars, sliding := sorts(grants, t.statistics.known(batch))
	if len(alike) > 0 {
		args := alike[0].arguments(now)
		args[1] = column(alike, true, func(g *Grant) string { return g.Key.Key })
		batch.Queue(t.of(&alike[0].Definition)["grant_alike"], args...).Query(scanAlike(alike, now))
	}
	if len(others) > 0 {
		t.queueMany(batch, others, "", now)
	}
	if len(calendars) > 0 {
		t.queueMany(batch, calendars, "", now)
	}
	if len(sliding) > 0 {
		t.queueMany(batch, sliding, "", now)
	}
}

// fewAlike is how many rows that are alike, with others, are not worth a statement of their
// own: beginning another costs the server what so many of them save.
const fewAlike = 24

// sorts divides grants into those that take the same from rows of one limit, if that is
// wanted, others, those of quotas by the calendar, and those of sliding windows; each in
// the order given.
func sorts(grants []Grant, scan bool) (alike, others, calendars, sliding []*Grant) {
	var common *Grant
	if scan {
		common, alike = usual(grants), make([]*Grant, 0, len(grants))
	} else {
		others = make([]*Grant, 0, len(grants))
	}
	for i := range grants {
		switch g := &grants[i]; {
		case g.never():
		case g.sliding():
			sliding = append(sliding, g)
		case g.byCalendar():
			calendars = append(calendars, g)
		case scan && g.alike(common):
			alike = append(alike, g)
		default:
			others = append(others, g)
		}
	}
	if len(others) > 0 && len(alike) > 0 && len(alike) <= fewAlike {
		others = append(others, alike...)
		slices.SortFunc(others, func(g, h *Grant) int { return g.Row.Compare(h.Row) })
		alike = nil
	}
	return alike, others, calendars, sliding
}

// usual is the grant that most of grants are like; any, if there is no such majority.
func usual(grants []Grant) (usual *Grant) {
	votes := 0
	for i := range grants {
		switch g := &grants[i]; {
		case votes == 0:
			usual, votes = g, 1
		case g.alike(usual):
			votes++
		default:
			votes--
		}
	}
	return usual
}

// alike reports whether two grants are the same but for the key.
func (g *Grant) alike(h *Grant) bool {
	return g.Count == h.Count && g.Need == h.Need && g.Shard == h.Shard && !g.prefetches() && !h.prefetches() && g.Definition == h.Definition
}

// arguments are those of a grant of one row.
func (g *Grant) arguments(now *time.Time) []any {
	d := &g.Definition
	args := []any{g.Name, g.Key.Key, int32(g.Shard), g.Count, g.Need}
	switch {
	case g.byCalendar():
		edges, had := d.Edges(around(now))
		return append(args, d.Capacity, d.Rate, now, edges, had)
	case g.sliding():
		args = append(args, d.Rate, tick(d), int32(d.Slots+2))
	default:
		args = append(args, d.Capacity, d.Rate, micros(d.Period))
	}
	return append(args, now)
}

// scan reads the row that a grant returned, if it did.
func (g *Grant) scan(row pgx.Row, now *time.Time) error {
	var r returned
	err := row.Scan(r.fields(g)...)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err == nil {
		r.tell(g, now)
	}
	return err
}

// returned is a row that a grant returned.
type returned struct {
	value  float64
	ts, at time.Time
	slots  []float64
	more   *float64 // that was prefetched
}

// fields are where a row of such a grant is read to.
func (r *returned) fields(g *Grant, more ...any) []any {
	fields := append(make([]any, 0, 6), &r.value, &r.ts, &r.at)
	if g.sliding() {
		fields = append(fields, &r.slots)
	}
	return append(fields, more...)
}

// tell tells a grant that it was taken.
func (r *returned) tell(g *Grant, now *time.Time) {
	g.Taken = Taken{OK: true, After: bucket.State{Value: r.value, TS: r.ts}, At: r.at}
	if g.sliding() {
		g.Taken.After.Slots = slots.Read(r.slots, r.value)
		r.slots = nil // of which it has a part
	}
	if g.prefetches() && r.more != nil {
		g.Taken.prefetched = *r.more
	}
	g.Taken.charge(&g.Definition, now)
}

// scanAlike reads the rows that a statement for grants that are alike returned: those of an
// index, mostly in its order.
func scanAlike(grants []*Grant, now *time.Time) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var (
			r    returned
			key  pgtype.DriverBytes
			next int
		)
		fields := r.fields(grants[0], &key)
		for rows.Next() {
			if err := rows.Scan(fields...); err != nil {
				return err
			}
			if next == len(grants) || grants[next].Key.Key != string(key) {
				i, ok := slices.BinarySearchFunc(grants, string(key), func(g *Grant, key string) int { return strings.Compare(g.Key.Key, key) })
				if !ok {
					return fmt.Errorf("key %q was not asked for", key)
				}
				next = i
			}
			r.tell(grants[next], now)
			next++
		}
		return rows.Err()
	}
}

// scanGrants reads the rows that a statement for several grants of like kinds returned, which
// may have prefetched.
func scanGrants(grants []*Grant, prefetch bool, now *time.Time) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var (
			r returned
			i int64
		)
		fields := r.fields(grants[0])
		if prefetch {
			fields = append(fields, &r.more)
		}
		fields = append(fields, &i)
		for rows.Next() {
			if err := rows.Scan(fields...); err != nil {
				return err
			}
			r.tell(grants[i-1], now)
		}
		return rows.Err()
	}
}

// queueMany puts into a batch grants of several rows, which are all of sliding windows or
// none is, and so for quotas by the calendar; in turn or not.
func (t plainTable) queueMany(batch *pgx.Batch, grants []*Grant, inTurn string, now *time.Time) {
	if grants[0].byCalendar() {
		t.queueCalendars(batch, grants, inTurn, now)
		return
	}
	var all definitions
	places := make([]int32, len(grants))
	sharded, less, prefetch, windows := false, false, false, false
	for i, g := range grants {
		places[i] = all.place(g)
		sharded, less = sharded || g.Shard != 0, less || g.Need != g.Count
		prefetch, windows = prefetch || g.prefetches(), windows || g.Definition.Kind != bucket.TokenBucket
	}
	args := append(
		make([]any, 0, 17),
		column(grants, true, func(g *Grant) string { return g.Key.Key }), places,
		column(grants, sharded, func(g *Grant) int32 { return int32(g.Shard) }),
		column(grants, true, func(g *Grant) float64 { return g.Count }),
		column(grants, less, func(g *Grant) float64 { return g.Need }),
		all.names, all.capacities, all.rates, all.periods, now,
	)
	name, sliding := "grant_many", grants[0].sliding()
	if prefetch && !sliding {
		name = "prefetch_many"
	}
	if windows || prefetch {
		args = append(args, all.ticks)
	}
	if prefetch || sliding {
		args = append(
			args,
			column(grants, prefetch, (*Grant).leased),
			column(grants, prefetch, func(g *Grant) float64 { return g.Prefetch }),
			column(grants, prefetch, func(g *Grant) float64 { return g.Out }),
			column(grants, prefetch, func(g *Grant) float64 { return g.Spent.Spent }),
			column(grants, prefetch, func(g *Grant) *time.Time { return orNull(counted(&g.Definition, g.SpentEnd)) }),
		)
	}
	if sliding {
		args = append(args, all.totals)
	}
	s := t.of(&grants[0].Definition)
	if !sliding && (windows || prefetch) {
		s = t.windows
	}
	batch.Queue(s[name+inTurn], args...).Query(scanGrants(grants, prefetch || sliding, now))
}

// queueCalendars is queueMany for quotas by the calendar.
func (t plainTable) queueCalendars(batch *pgx.Batch, grants []*Grant, inTurn string, now *time.Time) {
	var all definitions
	places, each := make([]int32, len(grants)), 0
	sharded, less, prefetch := false, false, false
	for i, g := range grants {
		places[i] = all.place(g)
		sharded, less, prefetch = sharded || g.Shard != 0, less || g.Need != g.Count, prefetch || g.prefetches()
		each = max(each, g.Definition.Sent())
	}
	var edges, had []time.Time
	for _, d := range all.of {
		e, h := d.EdgesFrom(around(now), each)
		edges, had = append(edges, e...), append(had, h...)
	}
	batch.Queue(
		t.calendars["grant_many"+inTurn],
		column(grants, true, func(g *Grant) string { return g.Key.Key }), places,
		column(grants, sharded, func(g *Grant) int32 { return int32(g.Shard) }),
		column(grants, true, func(g *Grant) float64 { return g.Count }),
		column(grants, less, func(g *Grant) float64 { return g.Need }),
		all.names, all.capacities, all.rates, edges, had, int32(each), now,
		column(grants, prefetch, (*Grant).more),
		column(grants, prefetch, func(g *Grant) float64 { return g.Out }),
		column(grants, prefetch, func(g *Grant) float64 { return g.Spent.Spent }),
		column(grants, prefetch, func(g *Grant) *time.Time { return orNull(counted(&g.Definition, g.SpentEnd)) }),
	).Query(scanGrants(grants, true, now))
}

// more is what a grant takes for its lease; nil without any.
func (g *Grant) more() *float64 {
	if !g.prefetches() {
		return nil
	}
	return &g.Prefetch
}

// leased is how long a grant's lease lasts, in microseconds; nil without any.
func (g *Grant) leased() *float64 {
	if !g.prefetches() {
		return nil
	}
	lasts := micros(g.end(longAgo).Sub(longAgo))
	return &lasts
}

// column is what grants have one of each; nil if that is of no use.
func column[T any](grants []*Grant, use bool, of func(*Grant) T) []T {
	if !use {
		return nil
	}
	values := make([]T, len(grants))
	for i, g := range grants {
		values[i] = of(g)
	}
	return values
}

// definitions are those of several grants, one after another: of most they are the same.
type definitions struct {
	last                              *Grant
	of                                []*bucket.Definition
	names                             []string
	capacities, rates, periods, ticks []float64
	totals                            []int32
}

// place is where the definition of a grant is, from 1.
func (s *definitions) place(g *Grant) int32 {
	if s.last == nil || s.last.Definition != g.Definition || s.last.capacity() != g.capacity() {
		d := &g.Definition
		s.last = g
		s.of, s.names = append(s.of, d), append(s.names, d.Name)
		s.capacities, s.rates = append(s.capacities, g.capacity()), append(s.rates, d.Rate)
		s.periods, s.ticks = append(s.periods, micros(d.Period)), append(s.ticks, tick(d))
		s.totals = append(s.totals, int32(d.Slots+2))
	}
	return int32(len(s.names))
}
