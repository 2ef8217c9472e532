package catalog

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

const (
	// keptAtOnce is how many keys are changed in one transaction of an edit for all keys.
	keptAtOnce = 100

	// leased is how long no other process works on an entry.
	leased = 30 * time.Second

	// unsure makes the entry of a key due together with that of the edit for all keys that wrote
	// it.
	unsure = time.Duration(-1)
)

// pendingNow is the clock that decides: $1, or if that is NULL the database's.
const pendingNow = `coalesce($1::timestamptz, clock_timestamp())`

const readPending = `SELECT (extract(epoch FROM ` + pendingNow + `) * 1000000)::int8,
	(SELECT max(h.version) FROM rate_limit_history AS h WHERE h.name = $2::text AND ($3::text IS NULL OR h.key IS NULL OR h.key = $3::text)),
	p.id::text, p.key, (extract(epoch FROM p.mark) * 1000000)::int8, p.measured
FROM (SELECT) AS one LEFT JOIN rate_limit_pending AS p ON p.name = $2::text AND ($3::text IS NULL OR p.key IS NULL OR p.key = $3::text) ORDER BY p.id`

// pending reads the entries that concern a key, the newest version in its history, and the clock.
// For AllKeys it reads those of all keys of the limit.
func (t *table) pending(ctx context.Context, q querier, name, key string, clock func() time.Time) (all []pending, version int64, at time.Time, err error) {
	rows, err := q.Query(ctx, t.sql(readPending), clockArg(clock), name, keyArg(key))
	if err != nil {
		return nil, 0, at, fault("read what is pending", err)
	}
	var now, newest, mark *int64
	var id, of *string
	var measured []byte
	_, err = pgx.ForEachRow(rows, []any{&now, &newest, &id, &of, &mark, &measured}, func() (err error) {
		if version, at = or(newest), instant(now); id == nil {
			return nil
		}
		p := pending{id: *id, name: name, key: keyOf(of), mark: instant(mark)}
		p.by, err = limitsOf(measured)
		all = append(all, p)
		return err
	})
	return all, version, at, fault("read what is pending", err)
}

// pendingOfAll reads the entries of all keys of a limit, as pending does.
func (c *Catalog) pendingOfAll(ctx context.Context, name string) (all []pending, version int64, at time.Time, err error) {
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	return c.table.pending(ctx, c.table.pool, name, AllKeys, c.config.Clock)
}

const changedSince = `SELECT DISTINCT h.key FROM rate_limit_history AS h WHERE h.name = $1::text AND h.version > $2::int8`

// changedSince returns the keys of a limit that have changed since a version.
func (c *Catalog) changedSince(ctx context.Context, name string, version int64) (keys []string, err error) {
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	rows, err := c.table.pool.Query(ctx, c.table.sql(changedSince), name, version)
	var key *string
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&key}, func() error { keys = append(keys, keyOf(key)); return nil })
	}
	return keys, fault("read what has changed", err)
}

const readPendingOfOthers = `SELECT (SELECT max(h.version) FROM rate_limit_history AS h WHERE h.name = $1::text AND ($3::text IS NULL OR h.key IS NULL OR h.key = $3::text)),
	array(SELECT p.id::text FROM rate_limit_pending AS p
		WHERE p.name = $1::text AND ($3::text IS NULL OR p.key IS NULL OR p.key = $3::text) AND p.mark <> ALL ($2::timestamptz[]) ORDER BY p.id)`

// pendingOfOthers reads the entries of other edits that concern an edit's key, and the newest
// version in its history.
func (t *table) pendingOfOthers(ctx context.Context, q querier, k *keeping) (ids []string, version int64, err error) {
	var newest *int64
	rows, err := q.Query(ctx, t.sql(readPendingOfOthers), k.edit.Name, k.own(), keyArg(k.edit.Key))
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&newest, &ids}, func() error { return nil })
	}
	return ids, or(newest), fault("read what is pending", err)
}

// limitsOf reads limits as they are stored.
func limitsOf(text []byte) (limits []ratelimit.Limit, err error) {
	var all []ratelimit.Definition
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, err
	}
	for _, d := range all {
		limits = append(limits, d.Limit())
	}
	return limits, nil
}

const (
	dropPending = `DELETE FROM rate_limit_pending AS p WHERE p.name = $1::text AND p.key = $2::text`
	addPending  = `INSERT INTO rate_limit_pending AS p (name, key, mark, measured, due)
VALUES ($2::text, $3::text, $4::timestamptz, $5::text::jsonb, coalesce(` + pendingNow + ` + $6::float8 * interval '1 microsecond', 'infinity'))
RETURNING p.id::text`
	putOffPending = `UPDATE rate_limit_pending AS p SET due = ` + pendingNow + ` + $4::float8 * interval '1 microsecond', done = $5::text
WHERE p.name = $2::text AND p.key IS NULL AND p.mark = $3::timestamptz`
	// releasePending makes the unsure entries with a mark due after a time; a NULL mark means all
	// marks. An entry that lowers the capacity is due at once.
	releasePending = `UPDATE rate_limit_pending AS p SET due = ` + pendingNow + ` +
	CASE WHEN replace(p.measured->2->>'capacity', 'none', '0')::float8 < replace(p.measured->1->>'capacity', 'none', '0')::float8 THEN 0 ELSE $4::float8 END * interval '1 microsecond'
WHERE p.name = $2::text AND p.due = 'infinity' AND ($3::timestamptz IS NULL OR p.mark = $3::timestamptz)`
	cutPending = `UPDATE rate_limit_pending AS p SET measured = jsonb_set(p.measured, '{1}', p.measured->2) || (p.measured->1), done = NULL, due = ` + pendingNow + ` + $3::float8 * interval '1 microsecond'
WHERE p.id = $2::uuid`
	endPending   = `DELETE FROM rate_limit_pending AS p WHERE p.id = $1::uuid`
	claimPending = `UPDATE rate_limit_pending AS p SET due = ` + pendingNow + ` + $2::float8 * interval '1 microsecond'
WHERE p.id = (SELECT d.id FROM rate_limit_pending AS d WHERE d.due <= ` + pendingNow + ` ORDER BY d.due LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING p.id::text, p.name, p.key, (extract(epoch FROM p.mark) * 1000000)::int8, p.measured, coalesce(p.done, '')`
)

// putPending replaces the entry of a key. The new one is due after a time.
func (t *table) putPending(ctx context.Context, q querier, p *pending, after time.Duration, clock func() time.Time) error {
	if _, err := q.Exec(ctx, t.sql(dropPending), p.name, p.key); err != nil || len(p.by) == 0 {
		return fault("write what is pending", err)
	}
	return t.addPending(ctx, q, p, after, clock)
}

// addPending writes an entry, and leaves others.
func (t *table) addPending(ctx context.Context, q querier, p *pending, after time.Duration, clock func() time.Time) error {
	all := make([]ratelimit.Definition, len(p.by))
	for i, l := range p.by {
		all[i] = l.Definition()
	}
	text, err := json.Marshal(all)
	var due *float64
	if after != unsure {
		due = notZero(float64(after.Microseconds()))
	}
	var rows pgx.Rows
	if err == nil {
		rows, err = q.Query(ctx, t.sql(addPending), clockArg(clock), p.name, keyArg(p.key), p.mark, string(text), due)
	}
	if err == nil {
		p.id, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	}
	return fault("write what is pending", err)
}

// release makes the unsure entries of an edit for all keys due after a time. With a zero mark it
// releases those of all such edits.
func (t *table) release(ctx context.Context, q querier, name string, mark time.Time, after time.Duration, clock func() time.Time) error {
	_, err := q.Exec(ctx, t.sql(releasePending), clockArg(clock), name, orNull(mark), float64(after.Microseconds()))
	return fault("write what is pending", err)
}

// putOff makes an entry due after a time, and writes how far it is completed. It reports false if
// the entry is gone.
func (t *table) putOff(ctx context.Context, q querier, p *pending, after time.Duration, clock func() time.Time) (bool, error) {
	tag, err := q.Exec(ctx, t.sql(putOffPending), clockArg(clock), p.name, p.mark, float64(after.Microseconds()), notZero(p.done))
	return tag.RowsAffected() > 0, fault("write what is pending", err)
}

// endPending ends an entry. If it is completed twice, it becomes a raise instead, due after a time.
func (t *table) endPending(ctx context.Context, q querier, p *pending, after time.Duration, clock func() time.Time) (err error) {
	if p.twice() {
		_, err = q.Exec(ctx, t.sql(cutPending), clockArg(clock), p.id, float64(after.Microseconds()))
	} else {
		_, err = q.Exec(ctx, t.sql(endPending), p.id)
	}
	return fault("write what is pending", err)
}

// claim returns an entry that is due and that no process works on; nil if there is none.
func (t *table) claim(ctx context.Context, clock func() time.Time) (*pending, error) {
	rows, err := t.pool.Query(ctx, t.sql(claimPending), clockArg(clock), float64(leased.Microseconds()))
	if err != nil {
		return nil, fault("look for what is due", err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p pending, err error) {
		var key *string
		var mark *int64
		var measured []byte
		if err := row.Scan(&p.id, &p.name, &key, &mark, &measured, &p.done); err != nil {
			return p, err
		}
		p.key, p.mark = keyOf(key), instant(mark)
		p.by, err = limitsOf(measured)
		return p, err
	})
	if err != nil || len(all) == 0 {
		return nil, fault("look for what is due", err)
	}
	return &all[0], nil
}

const overdue = `SELECT p.name, count(*)::int8 FROM rate_limit_pending AS p WHERE p.due < ` + pendingNow + ` - $2::float8 * interval '1 microsecond' GROUP BY p.name ORDER BY p.name`

// Overdue returns the names of limits with raises that are overdue for longer than since.
func (c *Catalog) Overdue(ctx context.Context, since time.Duration) (names []string, err error) {
	if err := c.usable(); err != nil || c.memory != nil {
		return nil, err
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	rows, err := c.table.pool.Query(ctx, c.table.sql(overdue), clockArg(c.config.Clock), float64(since.Microseconds()))
	if err != nil {
		return nil, fault("look for what is due", err)
	}
	var name string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&name, &n}, func() error {
		names = append(names, name)
		return nil
	})
	return names, fault("look for what is due", err)
}

// Complete raises the rows that wait for a raise, once all processes know of it. It returns how
// many keys' rows it looked at. [Catalog.Run] calls it if there is a Config.Store. Several
// processes share the work. If a process dies, another goes on within 30 seconds.
func (c *Catalog) Complete(ctx context.Context) (keys int, err error) {
	if err := c.usable(); err != nil || c.memory != nil {
		return 0, err
	}
	if c.config.Store == nil {
		return 0, invalid("Store", nil, "must not be nil, for rows to be changed")
	}
	for {
		bounded, cancel := c.bounded(ctx)
		p, err := c.table.claim(bounded, c.config.Clock)
		cancel()
		if err != nil || p == nil {
			return keys, err
		}
		n, err := c.complete(ctx, p)
		if keys += n; err != nil {
			return keys, err
		}
	}
}

// complete completes an entry that was claimed. Rows lose their mark when they are raised, so none
// is raised twice. If the entry is a cut that was made while a raise was pending, complete first
// cuts the rows that are uncut.
func (c *Catalog) complete(ctx context.Context, p *pending) (keys int, err error) {
	if err := c.Refresh(ctx); err != nil {
		return 0, err
	}
	f := c.families()[p.name]
	if f == nil || f.published == nil || f.published.inFlight != nil || len(p.by) == 0 {
		p.by = nil
		return 0, c.transact(ctx, func(ctx context.Context, tx pgx.Tx) error { return c.table.endPending(ctx, tx, p, 0, nil) })
	}
	limit := f.published.Limit()
	raise := func(some []string, last bool) error {
		err := c.config.Store.ReplaceFunc(ctx, requests(limit, some), func(ctx context.Context, tx pgx.Tx) error {
			all := make([]ratelimit.Replacement, len(some))
			for i, key := range some {
				all[i] = p.replacement(c.Resolve(ratelimit.Request{Limit: limit, Key: key}))
			}
			if _, err := c.config.Store.ReplaceTx(ctx, tx, all...); err != nil {
				return err
			}
			if last {
				return c.table.endPending(ctx, tx, p, c.within(), c.config.Clock)
			}
			p.done = some[len(some)-1]
			_, err := c.table.putOff(ctx, tx, p, leased, c.config.Clock)
			return err
		})
		if err == nil {
			keys += len(some)
		}
		return err
	}
	if p.key != AllKeys {
		err = raise([]string{p.key}, true)
		return keys, err
	}
	if err = c.completeEach(ctx, limit, p, func(some []string) error { return raise(some, false) }); err != nil {
		return keys, err
	}
	return keys, c.transact(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if err := c.table.release(ctx, tx, p.name, apart(p.mark), 0, c.config.Clock); err != nil {
			return err
		}
		return c.table.endPending(ctx, tx, p, c.within(), c.config.Clock)
	})
}

// completeEach completes an entry for all keys by raise, some keys at a time. A row that stays
// locked holds up no other: its key gets an entry of its own.
func (c *Catalog) completeEach(ctx context.Context, limit ratelimit.Limit, p *pending, raise func(some []string) error) error {
	return c.eachKeys(ctx, limit, p.done, func(some []string) error {
		err := raise(some)
		if !timedOut(ctx, err) {
			return err
		}
		for _, key := range some {
			if err = raise([]string{key}); timedOut(ctx, err) {
				bounded, cancel := c.bounded(ctx)
				err = c.table.addPending(bounded, c.table.pool, &pending{name: p.name, key: key, mark: p.mark, by: p.by}, leased, c.config.Clock)
				cancel()
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// timedOut reports whether an error comes from a timeout other than the caller's.
func timedOut(ctx context.Context, err error) bool {
	return errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil
}

// replacement returns how the marked rows of a key are completed by the limit in force.
func (p *pending) replacement(holds ratelimit.Request) ratelimit.Replacement {
	r := ratelimit.Replacement{Key: holds.Key, From: holds.Limit, To: holds.Limit, Marked: []ratelimit.Marked{{Mark: p.mark, By: p.by}}, Only: true}
	if d := holds.Limit.Definition(); p.twice() {
		d.Capacity = min(d.Capacity, p.by[0].Definition().Capacity)
		r.By, r.Mark = d.Limit(), p.mark
	}
	return r
}

// eachKeys calls do with the keys of a limit that have rows, in order and some at a time, beginning
// after one.
func (c *Catalog) eachKeys(ctx context.Context, limit ratelimit.Limit, after string, do func(keys []string) error) error {
	for {
		var keys []string
		for status, err := range c.config.Store.Rows(ctx, limit, ratelimit.Page{After: after, Most: keptAtOnce}) {
			if err != nil {
				return err
			}
			keys = append(keys, status.Request.Key)
		}
		if len(keys) > 0 {
			if err := do(keys); err != nil {
				return err
			}
			after = keys[len(keys)-1]
		}
		if len(keys) < keptAtOnce {
			return nil
		}
	}
}

// requests returns the requests of some keys of a limit.
func requests(limit ratelimit.Limit, keys []string) []ratelimit.Request {
	all := make([]ratelimit.Request, len(keys))
	for i, key := range keys {
		all[i] = ratelimit.Request{Limit: limit, Key: key}
	}
	return all
}

// clockArg returns the clock of tests as an argument; NULL for the database's.
func clockArg(clock func() time.Time) *time.Time {
	if clock == nil {
		return nil
	}
	now := clock()
	return &now
}
