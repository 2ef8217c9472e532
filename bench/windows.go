package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/chart"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

const windowsHelp = `Usage: go run ./bench windows [flags]

Attacks limits of 100 a minute, and says how much of what a third party allows in
any minute they let through, and what that costs:

  most in any minute   the most that was granted in any window of a minute,
                       wherever it begins, as a share of the 100: the worst of
                       all attacks. Each of these takes at once what is there, at
                       some phase of the minute, and then asks all the time
  flood                what a flood that never ends gets, as a share of 100 a minute
  one key              decisions a second of 64 goroutines for one key, combined
  each                 the same over 10,000 keys with one statement each
  row                  bytes of a row that is in use

The attacks run in memory, on a clock of their own; the rest on a throwaway
PostgreSQL. "two weighted counters" is the usual approximation of a sliding window:
what the last window had, weighted with how much of it is still in sight, and what
this one has. It is written by hand, as one upsert, and so is not combined.

Flags:
`

const (
	allowed      = 100 // by the third party
	windowPeriod = time.Minute
)

// limiter is one of those that are attacked. It has a definition of ours, or is the
// one that is written by hand.
type limiter struct {
	name  string
	limit ratelimit.Limit
}

var limiters = []limiter{
	{"fixed window", ratelimit.FixedWindow{Name: "fixed", Rate: allowed, Period: windowPeriod, Start: windowStart}},
	{"two weighted counters", nil},
	{"token bucket", ratelimit.TokenBucket{Name: "bucket", Rate: allowed, Period: windowPeriod}},
	{"token bucket, half of both", ratelimit.TokenBucket{Name: "half", Rate: allowed / 2, Period: windowPeriod, Capacity: allowed / 2}},
	{"sliding window, 16 slots", ratelimit.SlidingWindow{Name: "sliding", Rate: allowed, Period: windowPeriod, Start: windowStart}},
	{"sliding window, 60 slots", ratelimit.SlidingWindow{Name: "sliding60", Rate: allowed, Period: windowPeriod, Slots: 60, Start: windowStart}},
}

// windowStart is when a window begins, and a history.
var windowStart = time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)

// weighted is two weighted counters.
type weighted struct {
	window    int64
	last, now float64
}

func (w *weighted) take(at time.Time) bool {
	past := at.Sub(windowStart)
	window := int64(past / windowPeriod)
	switch window - w.window {
	case 0:
	case 1:
		w.window, w.last, w.now = window, w.now, 0
	default:
		w.window, w.last, w.now = window, 0, 0
	}
	inSight := 1 - float64(past%windowPeriod)/float64(windowPeriod)
	if w.last*inSight+w.now+1 > allowed {
		return false
	}
	w.now++
	return true
}

// taker returns a fresh limiter's way to take one at an instant.
func (l limiter) taker() func(at time.Time) (bool, error) {
	if l.limit == nil {
		w := &weighted{}
		return func(at time.Time) (bool, error) { return w.take(at), nil }
	}
	now := windowStart
	store := memstore.New(func() time.Time { return now })
	return func(at time.Time) (bool, error) {
		now = at
		result, err := store.Allow(context.Background(), l.limit.For(""))
		return result.OK, err
	}
}

const (
	attacked = 3   // periods
	polls    = 960 // in a period, of a flood: slots begin when one is due
	settling = 3   // periods, until saved-up tokens are gone
)

// effort is how hard limits are attacked.
type effort struct {
	phases  int // at which an attack begins
	asks    int // in a period, of an attack
	flooded int // periods
}

var thorough = effort{phases: 40, asks: 3000, flooded: 17 * 61}

// attack takes all tokens at a phase of the second period, then asks again and again for some
// periods, and returns its grants.
func (l limiter) attack(phase float64, periods, asks int) (events []curve.Event, err error) {
	take := l.taker()
	begin := windowStart.Add(windowPeriod + time.Duration(phase*float64(windowPeriod)).Truncate(time.Microsecond))
	for i := range periods * asks {
		at := begin.Add(time.Duration(i) * windowPeriod / time.Duration(asks)).Truncate(time.Microsecond)
		for {
			ok, err := take(at)
			if err != nil {
				return nil, err
			}
			if !ok {
				break
			}
			events = append(events, curve.Event{At: at, Count: 1})
		}
	}
	return events, nil
}

// judged is the verdict on a limiter.
type judged struct {
	limiter
	most, flood  float64
	oneKey, each float64 // decisions a second
	row          int     // bytes
}

func (l limiter) judge(e effort) (j judged, err error) {
	j.limiter = l
	for i := range e.phases + 1 {
		phase := min(float64(i)/float64(e.phases), 0.99999) // and right before the edge
		events, err := l.attack(phase, attacked, e.asks)
		if err != nil {
			return j, err
		}
		j.most = max(j.most, curve.Judge(events, curve.Within(allowed, windowPeriod)).Share)
	}
	events, err := l.attack(0, settling+e.flooded, polls)
	settled := windowStart.Add((1 + settling) * windowPeriod)
	granted := 0.0
	for _, e := range events {
		if !e.At.Before(settled) {
			granted++
		}
	}
	j.flood = granted / float64(allowed*e.flooded)
	return j, err
}

const weightedSQL = `INSERT INTO weighted_counters AS w (name, key, win, last, now)
VALUES ($1::text, $2::text, floor(extract(epoch FROM clock_timestamp()) / 60), 0, 1)
ON CONFLICT (name, key) DO UPDATE SET
	last = CASE excluded.win - w.win WHEN 0 THEN w.last WHEN 1 THEN w.now ELSE 0 END,
	now = CASE excluded.win - w.win WHEN 0 THEN w.now ELSE 0 END + 1,
	win = excluded.win
WHERE CASE excluded.win - w.win WHEN 0 THEN w.last WHEN 1 THEN w.now ELSE 0 END
		* (1 - extract(epoch FROM clock_timestamp() - to_timestamp(excluded.win * 60)) / 60)
	+ CASE excluded.win - w.win WHEN 0 THEN w.now ELSE 0 END + 1 <= 1e9
RETURNING 1`

// plentiful returns a limiter's limit with a rate that does not bind, for its speed.
func (l limiter) plentiful() ratelimit.Limit {
	switch limit := l.limit.(type) {
	case ratelimit.FixedWindow:
		limit.Rate = 1e9
		return limit
	case ratelimit.TokenBucket:
		limit.Rate, limit.Capacity = 1e9, 1e9
		return limit
	case ratelimit.SlidingWindow:
		limit.Rate = 1e9
		return limit
	}
	return nil
}

// contenders returns the contenders that decide one key, combined, and many, with one statement
// each; the first is missing where there is no such thing.
func (l limiter) contenders(p *postgresServer) (oneKey, each *contender, err error) {
	limit := l.plentiful()
	if limit == nil {
		return nil, &contender{decide: func(ctx context.Context, key string) (bool, error) {
			tag, err := p.many.Exec(ctx, weightedSQL, l.name, key)
			return tag.RowsAffected() == 1, err
		}}, nil
	}
	combined, err := pgstore.New(p.few, nil)
	if err != nil {
		return nil, nil, err
	}
	portable, err := pgstore.New(p.many, &pgstore.Config{Portable: true})
	if err != nil {
		return nil, nil, err
	}
	by := func(store *pgstore.Store) *contender {
		return &contender{decide: func(ctx context.Context, key string) (bool, error) {
			result, err := store.Allow(ctx, limit.For(key))
			return result.OK, err
		}, close: store.Close}
	}
	return by(combined), by(portable), nil
}

// measureWindows fills in the cost of a limiter: the best of the rounds, in which the limiters
// take turns.
func measureWindows(ctx context.Context, p *postgresServer, all []judged, rounds int, duration time.Duration) error {
	const table = `CREATE TABLE weighted_counters (name text, key text, win bigint NOT NULL, last float8 NOT NULL, now float8 NOT NULL,
PRIMARY KEY (name, key)) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0.05)`
	if _, err := p.many.Exec(ctx, table); err != nil {
		return fmt.Errorf("making a table: %w", err)
	}
	keys := userKeys(10_000)
	for n := range rounds {
		for i := range all {
			oneKey, each, err := all[i].contenders(p)
			if err != nil {
				return err
			}
			for _, m := range []struct {
				c    *contender
				keys []string
				into *float64
			}{{oneKey, keys[:1], &all[i].oneKey}, {each, keys, &all[i].each}} {
				if m.c == nil {
					continue
				}
				_, pace, err := compared(ctx, p, *m.c, m.keys, n, duration)
				if err != nil {
					return err
				}
				*m.into = max(*m.into, pace)
				if m.c.close != nil {
					m.c.close()
				}
			}
		}
	}
	return measureRows(ctx, p, all)
}

// measureRows fills in the size of a row as PostgreSQL stores it.
func measureRows(ctx context.Context, p *postgresServer, all []judged) error {
	for i := range all {
		sql, name := `SELECT max(pg_column_size(r)) FROM weighted_counters AS r WHERE name = $1`, all[i].name
		if all[i].limit != nil {
			sql, name = `SELECT max(pg_column_size(r)) FROM rate_limits AS r WHERE name = $1`, ratelimit.NameOf(all[i].limit)
		}
		if err := p.many.QueryRow(ctx, sql, name).Scan(&all[i].row); err != nil {
			return fmt.Errorf("measuring a row of %s: %w", all[i].name, err)
		}
	}
	return nil
}

func runWindows(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	return attackWindows(ctx, thorough, args, stdout, stderr)
}

func attackWindows(ctx context.Context, e effort, args []string, stdout, stderr io.Writer) (err error) {
	o, err := parseComparison("windows", windowsHelp, time.Second, args, stderr)
	if err != nil {
		return err
	}
	all := make([]judged, len(limiters))
	for i, l := range limiters {
		if all[i], err = l.judge(e); err != nil {
			return fmt.Errorf("%s: %w", l.name, err)
		}
	}
	p, err := startPostgres(ctx, durable)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := measureWindows(ctx, p, all, o.rounds, o.round); err != nil {
		return err
	}
	if err := printWindows(stdout, all); err != nil {
		return err
	}
	if o.file != "" {
		if err := drawWindows(o.file, all); err != nil {
			return err
		}
	}
	for _, j := range all {
		if _, ok := j.limit.(ratelimit.SlidingWindow); ok && j.most > 1 {
			return fmt.Errorf("%s: %.3f of what is allowed in a window", j.name, j.most)
		}
	}
	return nil
}

func printWindows(w io.Writer, all []judged) error {
	p := printer{w: w}
	p.linef("%-28s %18s %7s %10s %10s %6s", "", "most in any minute", "flood", "one key", "each", "row")
	for _, j := range all {
		oneKey := "-"
		if j.oneKey > 0 {
			oneKey = thousands(j.oneKey)
		}
		p.linef("%-28s %18.2f %7.2f %10s %10s %6d", j.name, j.most, j.flood, oneKey, thousands(j.each), j.row)
	}
	return p.err
}

// drawWindows draws a panel of bars for each figure: sliding windows blue, and red what exceeds the limit.
func drawWindows(file string, all []judged) error {
	panel := func(label string, limit float64, value func(judged) float64) chart.FiguresPanel {
		return panelOf(label, limit, all, func(j judged) (string, float64, bool) {
			_, ours := j.limit.(ratelimit.SlidingWindow)
			return j.name, value(j), ours
		})
	}
	return drawFigures(
		file, "Six limiters of 100 a minute, attacked",
		panel("most granted in any minute; 100 are allowed", allowed, func(j judged) float64 { return allowed * j.most }),
		panel("what a flood gets, a minute", 0, func(j judged) float64 { return allowed * j.flood }),
		panel("decisions a second over 10,000 keys, one statement each", 0, func(j judged) float64 { return j.each }),
	)
}
