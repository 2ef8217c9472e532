package inspect

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// mostChanges is the largest number of changes in a story.
const mostChanges = 5

// Known is what is known of a key of any limit.
type Known struct {
	ForKey  *catalog.Entry // the overrides, nil for none; also those that are off or have ended
	ForAll  *catalog.Entry
	Unlike  *Unlike          // nil if the key looks like those of the limit's rows
	Changes []catalog.Change // of the key, and for all keys; the newest first
}

// A Story says what is known of a key: whether and why it is refused, and until when.
type Story struct {
	Known
	Published ratelimit.Definition // of the limit
	Holds     ratelimit.Definition // of the key, after overrides

	Now     ratelimit.Status // the answer for a count of 0
	Answer  ratelimit.Status // the answer for the count asked about
	Reserve bool             // the answer for a reservation
	Never   error            // the error of a count that is never granted: ErrExceedsCapacity, or ErrInvalid

	Rows []Row
}

// A PermitStory says what is known of a key of a limit of how many at once.
type PermitStory struct {
	Known
	Key       string
	N         int                // the permits asked about
	Published ratelimit.InFlight // the limit
	Holds     ratelimit.InFlight // the limit of the key, after overrides
	Held      []ratelimit.Permit
}

// PermitStory returns what is known of a key, and the answer for n permits. It takes and locks
// nothing. Errors are those of Story.
func (d *Inspector) PermitStory(ctx context.Context, name, key string, n int) (*PermitStory, error) {
	limit, err := d.InFlight(name)
	if err != nil {
		return nil, err
	}
	s := &PermitStory{Key: key, N: n, Published: limit, Holds: d.Catalog.InFlight(limit, key)}
	if err := s.Holds.ForN(key, n).Validate(); err != nil && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
		return nil, err
	}
	if s.Held, err = d.Store.Permits().Held(ctx, s.Holds, key); err != nil {
		return nil, err
	}
	s.Known, err = d.known(ctx, name, key)
	return s, err
}

// OK reports whether the permits would be given now.
func (s *PermitStory) OK() bool {
	return s.Holds.Mode == ratelimit.ModeShadow || s.Holds.Mode != ratelimit.ModeRefuse && len(Within(s.Held, s.Holds.Limit))+s.N <= s.Holds.Limit
}

// Within returns those of held permits that count against a limit. The others have larger numbers, from
// when the limit was larger.
func Within(held []ratelimit.Permit, limit int) (within []ratelimit.Permit) {
	for _, p := range held {
		if p.Number < limit {
			within = append(within, p)
		}
	}
	return within
}

// Why says in a sentence what a caller would get now, and why.
func (s *PermitStory) Why() string {
	within := Within(s.Held, s.Holds.Limit)
	held := fmt.Sprintf("%d of %d permits are held", len(within), s.Holds.Limit)
	if beyond := len(s.Held) - len(within); beyond > 0 {
		held += fmt.Sprintf(", and %d more from when the limit was larger", beyond)
	}
	missing := len(within) + s.N - s.Holds.Limit
	switch {
	case s.Holds.Mode == ratelimit.ModeRefuse:
		return "refused: " + refusing(s.Holds.RefusedUntil)
	case s.N > s.Holds.Limit:
		return "never: " + s.Holds.ForN(s.Key, s.N).Validate().Error()
	case missing <= 0:
		return "granted: " + held
	case s.Holds.Mode == ratelimit.ModeShadow:
		return "granted, since its mode is shadow: " + held
	}
	slices.SortFunc(within, func(a, b ratelimit.Permit) int { return a.Until.Compare(b.Until) })
	ends := "the first lease ends at %s, unless it is renewed"
	if missing > 1 {
		ends = fmt.Sprint("the first ", missing, " leases end by %s, unless they are renewed")
	}
	return fmt.Sprintf("refused: %s; "+ends, held, Instant(within[missing-1].Until))
}

// known reads what is known of a key. A file of definitions has no changes.
func (d *Inspector) known(ctx context.Context, name, key string) (k Known, err error) {
	if e, ok := d.Catalog.Override(name, key); ok {
		k.ForKey = &e
	}
	if e, ok := d.Catalog.Override(name, catalog.AllKeys); ok {
		k.ForAll = &e
	}
	unlike, err := d.Unlike(ctx, name, key)
	if len(unlike) > 0 {
		k.Unlike = &unlike[0]
	}
	if err == nil && !d.Catalog.InMemory() {
		k.Changes, err = d.Catalog.KeyHistory(ctx, name, key, mostChanges)
	}
	return k, err
}

// A Row is a row of the table, as stored.
type Row struct {
	Shard   int       `json:"shard"`
	Value   float64   `json:"value"`
	TS      time.Time `json:"ts"`
	Paused  time.Time `json:"paused,omitzero"` // zero if it was never paused
	Ahead   float64   `json:"ahead,omitempty"` // tokens that processes hold in memory
	*Holder           // the transaction that has the row locked, if the server tells
}

// A Holder is a transaction that has rows locked.
type Holder struct {
	PID         int           `json:"lockedBy"`
	Application string        `json:"-"`
	User        string        `json:"-"`
	State       string        `json:"lockedByState"` // for example "idle in transaction"
	Since       time.Time     `json:"lockedSince"`   // when it began
	Lasts       time.Duration `json:"-"`             // on the server's clock
}

// Text returns the holder in a line.
func (h *Holder) Text() string {
	by := strings.TrimSpace(h.User + " " + h.Application)
	return fmt.Sprintf("process %d (%s), %s, its transaction began %s ago", h.PID, by, h.State, h.Lasts.Round(time.Millisecond))
}

// Story returns what is known of a key, and the answer for a count. It takes and locks nothing.
// Errors are [ErrUndefined], [ratelimit.ErrInvalid] for a bad key, and those of PostgreSQL and pgx.
func (d *Inspector) Story(ctx context.Context, name, key string, count float64, reserve bool) (*Story, error) {
	limit, err := d.Limit(name)
	if err != nil {
		return nil, err
	}
	asked := d.Catalog.ForN(limit, key, count)
	s := &Story{Published: limit.Definition(), Holds: asked.Limit.Definition(), Reserve: reserve}
	if err := d.ask(ctx, s, asked); err != nil {
		return nil, err
	}
	if s.Rows, err = d.Rows(ctx, name, key); err != nil {
		return nil, err
	}
	s.Known, err = d.known(ctx, name, key)
	return s, err
}

// ask checks a count of 0 and the count asked about.
func (d *Inspector) ask(ctx context.Context, s *Story, asked ratelimit.Request) error {
	check := d.Store.Check
	if s.Reserve {
		check = d.Store.CheckReserve
	}
	result, err := check(ctx, ratelimit.Request{Limit: asked.Limit, Key: asked.Key, Overridden: asked.Overridden})
	if err != nil {
		return err
	}
	s.Now = result.Status
	result, err = check(ctx, asked)
	if errors.Is(err, ratelimit.ErrExceedsCapacity) || errors.Is(err, ratelimit.ErrInvalid) {
		s.Never = err
		return nil
	}
	s.Answer = result.Status
	return err
}

// Rows reads a key's rows and the open transaction that changed or locked each. The row's xmax is
// that transaction or a subtransaction, whose number its process has locked. A server hides other
// roles' statements from roles without pg_read_all_stats. Of a distributed table the transactions are
// another node's, and not told.
func (d *Inspector) Rows(ctx context.Context, name, key string) ([]Row, error) {
	rows, _ := d.Pool.Query(ctx, `WITH r AS MATERIALIZED (
	SELECT shard, value, ts, paused, ahead, xmax AS changer FROM `+d.Table()+` WHERE name = $1::text AND key = $2::text
)
SELECT r.shard, r.value, r.ts, r.paused,
	CASE WHEN r.ahead[2] > extract(epoch FROM clock_timestamp()) - 946684800 THEN r.ahead[1] ELSE 0 END,
	a.pid, coalesce(a.application_name, ''), coalesce(a.usename::text, ''), coalesce(a.state, ''), a.xact_start,
	extract(epoch FROM clock_timestamp() - a.xact_start)::float8
FROM r LEFT JOIN pg_locks AS l
	ON NOT $3::bool AND l.transactionid = r.changer AND l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
ORDER BY r.shard`, name, key, d.Store.Portable())
	read, err := pgx.CollectRows(rows, scanRow)
	if err != nil {
		return nil, fmt.Errorf("read rows: %w", err)
	}
	return read, nil
}

func scanRow(row pgx.CollectableRow) (r Row, err error) {
	var h Holder
	var paused, since *time.Time
	var pid *int
	var lasts *float64
	err = row.Scan(&r.Shard, &r.Value, &r.TS, &paused, &r.Ahead, &pid, &h.Application, &h.User, &h.State, &since, &lasts)
	r.TS = r.TS.UTC()
	if paused != nil {
		r.Paused = paused.UTC()
	}
	if pid != nil && since != nil {
		h.PID, h.Since, h.Lasts = *pid, since.UTC(), time.Duration(*lasts*float64(time.Second))
		r.Holder = &h
	}
	return r, err
}

// Why says in a sentence the answer for the count, and why.
func (s *Story) Why() string {
	a := &s.Answer
	count := visible.Amount(a.Request.Count)
	switch {
	case s.Never != nil:
		return "never: " + s.Never.Error()
	case a.Request.Mode == ratelimit.ModeRefuse:
		return "refused: " + refusing(a.Request.RefusedUntil)
	case a.Shadowed:
		return fmt.Sprintf("granted, since its mode is shadow: %s wanted, %s left", count, visible.Amount(a.Value))
	case a.OK && a.RetryAfter > 0:
		return fmt.Sprintf("a reservation of %s would be due at %s, in %s", count, Instant(a.RetryAt), Span(a.RetryAfter))
	case a.OK:
		return fmt.Sprintf("granted: %s would be taken of %s", count, visible.Amount(a.Value))
	case !a.PausedUntil.IsZero() && !s.Reserve:
		return fmt.Sprintf("refused: it is paused until %s; %s would be granted at %s, in %s", Instant(a.PausedUntil), count, Instant(a.RetryAt), Span(a.RetryAfter))
	case s.Reserve:
		return fmt.Sprintf("refused: %s left, and debt may be at most %s; a reservation of %s would be accepted at %s, in %s",
			visible.Amount(a.Value), visible.Amount(s.Holds.MaxReserved), count, Instant(a.RetryAt), Span(a.RetryAfter))
	}
	return fmt.Sprintf("refused: %s wanted, %s left; %s would be granted at %s, in %s", count, visible.Amount(a.Value), count, Instant(a.RetryAt), Span(a.RetryAfter))
}

// refusing says until when a mode refuses.
func refusing(until time.Time) string {
	if until.IsZero() {
		return "its mode is refuse, until that is changed"
	}
	return "its mode is refuse until " + Instant(until)
}

// Holders returns idle open transactions that have rows of the table locked, oldest first. A server
// hides other roles' from roles without pg_read_all_stats.
func (d *Inspector) Holders(ctx context.Context) ([]Holder, error) {
	rows, _ := d.Pool.Query(ctx, `SELECT a.pid, coalesce(a.application_name, ''), coalesce(a.usename::text, ''), a.state, a.xact_start,
	extract(epoch FROM clock_timestamp() - a.xact_start)::float8
FROM pg_stat_activity AS a
WHERE a.state LIKE 'idle in transaction%' AND EXISTS (
	SELECT FROM pg_locks AS l WHERE l.pid = a.pid AND l.relation = $1::regclass AND l.mode IN ('RowExclusiveLock', 'RowShareLock') AND l.granted)
ORDER BY a.xact_start`, d.Table())
	holders, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (h Holder, err error) {
		var lasts float64
		err = row.Scan(&h.PID, &h.Application, &h.User, &h.State, &h.Since, &lasts)
		h.Since, h.Lasts = h.Since.UTC(), time.Duration(lasts*float64(time.Second))
		return h, err
	})
	if err != nil {
		return nil, fmt.Errorf("look for transactions: %w", err)
	}
	return holders, nil
}
