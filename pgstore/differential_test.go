package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// The arithmetic stands in Go and in SQL. Here the same random histories go
// through both, memstore and pgstore on one injected clock, and must get the
// same answer to every call.

// verbs is what memstore and pgstore have in common.
type verbs interface {
	ratelimit.Store
	Prune(ctx context.Context, limits ...ratelimit.Limit) (int64, error)
}

// txVerbs is a store's verbs in one transaction. Prune has no such form.
type txVerbs struct {
	*pgstore.Store
	tx pgx.Tx
}

func (v txVerbs) in() pgx.Tx { return v.tx }

func (v txVerbs) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return v.AllowTx(ctx, v.tx, requests...)
}

func (v txVerbs) Take(ctx context.Context, requests ...ratelimit.Request) error {
	return v.TakeTx(ctx, v.tx, requests...)
}

func (v txVerbs) Reserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return v.ReserveTx(ctx, v.tx, requests...)
}

func (v txVerbs) Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return v.CheckTx(ctx, v.tx, requests...)
}

func (v txVerbs) CheckReserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return v.CheckReserveTx(ctx, v.tx, requests...)
}

func (v txVerbs) AllowAtMost(ctx context.Context, r ratelimit.Request) (ratelimit.Result, error) {
	return v.AllowAtMostTx(ctx, v.tx, r)
}

func (v txVerbs) AllowFirst(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return v.AllowFirstTx(ctx, v.tx, requests...)
}

func (v txVerbs) Settle(ctx context.Context, r *ratelimit.Receipt, used ...float64) (ratelimit.Result, error) {
	return v.SettleTx(ctx, v.tx, r, used...)
}

func (v txVerbs) Credit(ctx context.Context, r ratelimit.Request) (ratelimit.Status, error) {
	return v.CreditTx(ctx, v.tx, r)
}

func (v txVerbs) Cancel(ctx context.Context, r *ratelimit.Receipt) (bool, error) {
	return v.CancelTx(ctx, v.tx, r)
}

func (v txVerbs) Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (time.Time, error) {
	return v.PauseTx(ctx, v.tx, limit, key, lasts)
}

func (v txVerbs) Resume(ctx context.Context, limit ratelimit.Limit, key string) error {
	return v.ResumeTx(ctx, v.tx, limit, key)
}

func (v txVerbs) Reset(ctx context.Context, limit ratelimit.Limit, key string) error {
	return v.ResetTx(ctx, v.tx, limit, key)
}

func (v txVerbs) Change(ctx context.Context, from, to ratelimit.Limit, key string) (ratelimit.Status, error) {
	return v.ChangeTx(ctx, v.tx, from, to, key)
}

// queuedVerbs is txVerbs that allow by QueueTake, as far as that can. It does not tell how a limit in
// ModeShadow stands that refuses.
type queuedVerbs struct{ txVerbs }

func (v queuedVerbs) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	var (
		batch   pgx.Batch
		refused *ratelimit.RefusedError
		field   *ratelimit.FieldError
	)
	if slices.ContainsFunc(requests, func(r ratelimit.Request) bool { return r.Mode == ratelimit.ModeShadow }) {
		return v.txVerbs.Allow(ctx, requests...)
	}
	take, err := v.QueueTake(&batch, requests...)
	if errors.As(err, &refused) {
		return refused.Result, nil
	}
	if errors.As(err, &field) && strings.Contains(field.Reason, "in a batch") {
		return v.txVerbs.Allow(ctx, requests...)
	}
	if err != nil {
		return ratelimit.Result{}, err
	}
	savepoint, err := v.tx.Begin(ctx)
	if err != nil {
		return ratelimit.Result{}, err
	}
	if err = savepoint.SendBatch(ctx, &batch).Close(); err == nil {
		return take.Result(), savepoint.Commit(ctx)
	}
	if err := savepoint.Rollback(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	if behind := strings.Contains(err.Error(), "not decided in a batch"); behind || len(requests) > 1 { // whose refusal is of one of them
		return v.txVerbs.Allow(ctx, requests...)
	}
	if !errors.As(err, &refused) {
		return ratelimit.Result{}, err
	}
	return refused.Result, nil
}

// verbs are those of a transaction in the history's form.
func (h *history) verbs(store *pgstore.Store, tx pgx.Tx) verbs {
	if h.form.queued {
		return queuedVerbs{txVerbs{store, tx}}
	}
	return txVerbs{store, tx}
}

type verb string

const (
	allow        verb = "allow"
	reserve      verb = "reserve"
	check        verb = "check"
	checkReserve verb = "check reserve"
	atMost       verb = "at most"
	first        verb = "first"
	credit       verb = "credit"
	settle       verb = "settle"
	cancel       verb = "cancel"
	pause        verb = "pause"
	resume       verb = "resume"
	reset        verb = "reset"
	change       verb = "change"
	prune        verb = "prune"
)

var allVerbs = []verb{allow, reserve, check, checkReserve, atMost, first, credit, settle, cancel, pause, resume, reset, change, prune}

// op is one call of a history.
type op struct {
	at       time.Time
	verb     verb
	requests []ratelimit.Request
	lasts    time.Duration     // of pause
	target   int               // of cancel and settle: whose result, as an index into the history
	used     []float64         // of settle
	text     bool              // of settle: by a copy of the receipt that was read from text
	limits   []ratelimit.Limit // of prune; of change, the one that is replaced
}

func (o op) String() string {
	return fmt.Sprintf("%v %s %+v lasts=%v target=%d used=%v text=%v limits=%+v", o.at, o.verb, o.requests, o.lasts, o.target, o.used, o.text, o.limits)
}

// reply is what a call said. What a verb does not say is zero.
type reply struct {
	result ratelimit.Result // of a credit, the status
	said   bool
	until  time.Time
	pruned int64
	err    error
}

// do runs o on v. The results are those of the history so far.
func (o op) do(ctx context.Context, v verbs, results []ratelimit.Result) (a reply) {
	switch o.verb {
	case allow:
		a.result, a.err = v.Allow(ctx, o.requests...)
	case reserve:
		a.result, a.err = v.Reserve(ctx, o.requests...)
	case check:
		a.result, a.err = v.Check(ctx, o.requests...)
	case checkReserve:
		a.result, a.err = v.CheckReserve(ctx, o.requests...)
	case atMost:
		a.result, a.err = v.AllowAtMost(ctx, o.requests[0])
	case first:
		a.result, a.err = v.AllowFirst(ctx, o.requests...)
	case settle:
		a.result, a.err = v.Settle(ctx, o.receipt(results), o.used...)
	case credit:
		a.result.Status, a.err = v.Credit(ctx, o.requests[0])
	case cancel:
		a.said, a.err = v.Cancel(ctx, results[o.target].Receipt)
	case pause:
		a.until, a.err = v.Pause(ctx, o.requests[0].Limit, o.requests[0].Key, o.lasts)
	case resume:
		a.err = v.Resume(ctx, o.requests[0].Limit, o.requests[0].Key)
	case reset:
		a.err = v.Reset(ctx, o.requests[0].Limit, o.requests[0].Key)
	case change:
		a.result.Status, a.err = v.Change(ctx, o.limits[0], o.requests[0].Limit, o.requests[0].Key)
	case prune:
		a.pruned, a.err = v.Prune(ctx, o.limits...)
	}
	return a
}

// receipt is what o settles.
func (o op) receipt(results []ratelimit.Result) *ratelimit.Receipt {
	r := results[o.target].Receipt
	if r == nil || !o.text {
		return r
	}
	text, err := r.MarshalText()
	r = new(ratelimit.Receipt)
	if err := errors.Join(err, r.UnmarshalText(text)); err != nil {
		panic(err)
	}
	return r
}

// seen is requests for the limits that a store has seen when o was done.
func (o op) seen() (requests []ratelimit.Request) {
	var call decide.Call
	switch o.verb {
	case settle, cancel, prune:
		return nil
	case change:
		key := o.requests[0].Key
		return []ratelimit.Request{edited(o.limits[0], key), edited(o.requests[0].Limit, key)}
	case allow, reserve, check, checkReserve:
		call = o.asked(decide.All, func(requests []ratelimit.Request) (decide.Call, error) {
			return decide.New(o.verb == reserve || o.verb == checkReserve, requests...)
		})
	case atMost:
		call = o.asked(decide.AtMost, func(requests []ratelimit.Request) (decide.Call, error) { return decide.NewAtMost(requests[0]) })
	case first:
		call = o.asked(decide.First, func(requests []ratelimit.Request) (decide.Call, error) { return decide.NewFirst(requests...) })
	case pause:
		if o.lasts > 0 {
			return []ratelimit.Request{edited(o.requests[0].Limit, o.requests[0].Key)}
		}
	default:
		if o.verb != credit || o.requests[0].Validate() == nil {
			return []ratelimit.Request{edited(o.requests[0].Limit, o.requests[0].Key)}
		}
	}
	for i := range call.Demands {
		requests = append(requests, call.Demands[i].Limit.ForN(call.Demands[i].Key, 0))
	}
	return requests
}

// edited is a request for a limit that a store has seen in an edit, which binds its key only.
func edited(limit ratelimit.Limit, key string) ratelimit.Request {
	return ratelimit.Request{Limit: limit, Key: key, Overridden: true}
}

// asked returns the call that a store is asked, made of the requests that it has by their
// modes; none if they are refused at once.
func (o op) asked(v decide.Verb, make func([]ratelimit.Request) (decide.Call, error)) (call decide.Call) {
	requests := o.requests
	if o.verb == atMost {
		requests = requests[:1]
	}
	modes, err := decide.NewModes(v, o.at, requests)
	if err != nil {
		return call
	}
	_, _ = modes.Decide(func(left []ratelimit.Request) (result ratelimit.Result, err error) {
		if result.OK = true; len(left) > 0 {
			call, err = make(left)
		}
		return result, err
	})
	return call
}

// model is a memstore that can go back to an earlier point of its history, as
// a transaction that rolls back does.
type model struct {
	clock   clock
	store   *memstore.Store
	log     []op
	results []ratelimit.Result // one for each op of log
	played  []played           // all that was ever done
}

// played is an op that was done, and perhaps undone since.
type played struct {
	op
	undone bool
}

func newModel() *model {
	m := new(model)
	m.store = memstore.New(m.clock.now)
	return m
}

func (m *model) do(ctx context.Context, o op) reply {
	m.played = append(m.played, played{op: o})
	return m.play(ctx, o)
}

func (m *model) play(ctx context.Context, o op) reply {
	m.clock.set(o.at)
	a := o.do(ctx, m.store, m.results)
	m.log = append(m.log, o)
	m.results = append(m.results, a.result)
	return a
}

// paused reports whether the limit and key that o is about are.
func (m *model) paused(ctx context.Context, o op) bool {
	m.clock.set(o.at)
	now, err := m.store.Check(ctx, edited(o.requests[0].Limit, o.requests[0].Key))
	return err == nil && !now.PausedUntil.IsZero()
}

// rewind forgets all but the first n ops, by running those again.
func (m *model) rewind(ctx context.Context, n int) {
	left := len(m.log)
	for i := len(m.played) - 1; left > n; i-- {
		if !m.played[i].undone {
			m.played[i].undone = true
			left--
		}
	}
	m.store, m.log, m.results = memstore.New(m.clock.now), nil, nil
	for _, p := range m.played {
		if !p.undone {
			m.play(ctx, p.op)
			continue
		}
		for _, r := range p.seen() { // all the same, up to one whose name is of another kind
			if _, err := m.store.CheckReserve(ctx, r); err != nil {
				break
			}
		}
	}
}

// form is in which way a history calls pgstore.
type form struct {
	name     string
	inTx     bool
	level    pgx.TxIsoLevel
	portable bool
	queued   bool          // allow by QueueTake
	sql      bool          // through database/sql
	remember time.Duration // Escrow, of decisions on their own only; so short that next to nothing is taken ahead, which would lower the burst
}

var forms = []form{
	{name: "own"},
	{name: "own remembering", remember: time.Microsecond},
	{name: "own portable", portable: true},
	{name: "read committed", inTx: true, level: pgx.ReadCommitted},
	{name: "read committed portable", inTx: true, level: pgx.ReadCommitted, portable: true},
	{name: "repeatable read", inTx: true, level: pgx.RepeatableRead},
	{name: "repeatable read portable", inTx: true, level: pgx.RepeatableRead, portable: true},
	{name: "serializable", inTx: true, level: pgx.Serializable},
	{name: "serializable portable", inTx: true, level: pgx.Serializable, portable: true},
	{name: "read committed queued", inTx: true, level: pgx.ReadCommitted, queued: true},
	{name: "serializable portable queued", inTx: true, level: pgx.Serializable, portable: true, queued: true},
	{name: "read committed database/sql", inTx: true, level: pgx.ReadCommitted, sql: true},
	{name: "serializable database/sql", inTx: true, level: pgx.Serializable, sql: true},
	{name: "repeatable read portable database/sql", inTx: true, level: pgx.RepeatableRead, portable: true, sql: true},
}

func (f form) configure(config *pgstore.Config) {
	config.Portable, config.Escrow = f.portable, f.remember
}

func TestDifferential(t *testing.T) {
	t.Parallel()
	const calls = 70
	histories, broad := 6, 2
	if testing.Short() {
		histories, broad = 2, 1
	}
	total := newTally()
	t.Run("forms", func(t *testing.T) {
		for i, f := range forms {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t) // of its own: serializable transactions that look conflict
				for j := range histories {
					total.add(runHistory(t, db, f, uint64(1000*i+j), calls))
				}
			})
		}
	})
	if t.Failed() {
		return
	}
	total.wantBroad(t, broad)
	t.Logf("%v", total.counts)
}

// tally counts what histories consisted of, so that a generator that has
// become one-sided is noticed. It is safe for concurrent use once it is made.
type tally struct {
	mu     sync.Mutex
	counts map[string]int
}

func newTally() *tally {
	c := &tally{counts: map[string]int{"clock went back": 0, "definition changed": 0, "promise kept": 0, "pause ended": 0}}
	for _, v := range allVerbs {
		c.counts[string(v)] = 0
	}
	return c
}

func (c *tally) add(other map[string]int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, n := range other {
		c.counts[k] += n
	}
}

// wantBroad fails unless all that a history should have came at least n times.
func (c *tally) wantBroad(t *testing.T, n int) {
	t.Helper()
	if lacking := c.lacking(n); len(lacking) > 0 {
		t.Errorf("less than %d of %q: %v", n, lacking, c.counts)
	}
}

// lacking returns what a history should have and did not come n times: all that it counts.
func (c *tally) lacking(n int) (lacking []string) {
	for k, came := range c.counts {
		if came < n {
			lacking = append(lacking, k)
		}
	}
	return lacking
}

// history is one run through model and database.
type history struct {
	*generator
	t       *testing.T
	form    form
	seed    uint64
	model   *model
	sql     *pgstore.Store
	clock   *clock
	results []ratelimit.Result // of the database, one for each op of model.log
	tally   map[string]int     // what it consists of
}

// runHistory runs a random history of about the given number of calls, in
// limits of its own.
func runHistory(t *testing.T, db *pgtest.DB, f form, seed uint64, calls int) map[string]int {
	t.Helper()
	c := newClock()
	prefix := fmt.Sprintf("%s %d: ", f.name, seed)
	h := &history{
		generator: newGenerator(seed, prefix),
		t:         t, form: f, seed: seed, model: newModel(), sql: newStore(t, db, onClock(c), f.configure), clock: c, tally: map[string]int{},
	}
	for len(h.model.log) < calls && h.tally["calls"] < 2*calls {
		if f.inTx {
			h.transaction(db)
		} else {
			h.step(h.sql)
		}
		if h.rand.IntN(12) == 0 {
			h.call(h.sql, h.nextPrune())
		}
	}
	return h.tally
}

// transaction makes some calls in a transaction that commits or rolls back.
func (h *history) transaction(db *pgtest.DB) {
	h.t.Helper()
	ctx := h.t.Context()
	begin := db.Pool.BeginTx
	if h.form.sql {
		begin = func(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) { return beginSQL(ctx, db, options) }
	}
	tx, err := begin(ctx, pgx.TxOptions{IsoLevel: h.form.level})
	must(h.t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	h.nested(tx, 1+h.rand.IntN(8), true)
}

// nested makes calls in tx, a transaction or a savepoint, and ends it. A
// cancellation cannot be undone by a savepoint, so there is none in one.
func (h *history) nested(tx pgx.Tx, calls int, outer bool) {
	h.t.Helper()
	ctx := h.t.Context()
	start := len(h.model.log)
	h.noCancel = !outer
	for range calls {
		h.step(h.verbs(h.sql, tx))
		if outer && h.rand.IntN(8) == 0 {
			h.within(tx, func(savepoint pgx.Tx) { h.nested(savepoint, 1+h.rand.IntN(3), false) })
			h.noCancel = false
		}
	}
	if h.rand.IntN(3) > 0 {
		must(h.t, tx.Commit(ctx))
		return
	}
	must(h.t, tx.Rollback(ctx))
	h.model.rewind(ctx, start)
	h.results = h.results[:start]
	h.tally["rolled back"]++
}

// within runs do behind a savepoint of tx, as a caller makes them.
func (h *history) within(tx pgx.Tx, do func(savepoint pgx.Tx)) {
	h.t.Helper()
	savepoint, err := tx.Begin(h.t.Context())
	must(h.t, err)
	do(savepoint)
}

// step makes one random call, and if it was refused sees to the promise.
func (h *history) step(v verbs) {
	h.t.Helper()
	before := h.now
	o := h.next(h.model)
	o.text = o.text && !h.form.inTx // that a released savepoint was of this transaction is not to be known
	if o.at.Before(before) {
		h.tally["clock went back"]++
	}
	h.tally["definition changed"] += h.changed
	h.changed = 0
	a := h.call(v, o)
	takes := o.verb == allow || o.verb == reserve || o.verb == atMost || o.verb == first
	if !takes || a.err != nil || a.result.OK || a.result.RetryAfter > ratelimit.MaxSpan {
		return
	}
	if slices.ContainsFunc(o.requests, func(r ratelimit.Request) bool { return r.Mode == ratelimit.ModeRefuse }) { // which promises nothing
		return
	}
	h.retryAt = a.result.RetryAt
	if v, ok := v.(interface{ in() pgx.Tx }); ok {
		// Behind a savepoint, so that the wait may be of any length.
		h.within(v.in(), func(savepoint pgx.Tx) {
			h.keepsPromise(h.verbs(h.sql, savepoint), o)
			must(h.t, savepoint.Rollback(h.t.Context()))
		})
		return
	}
	if a.result.RetryAfter < 20*h.period {
		o.at, h.now = h.retryAt, h.retryAt
		if a := h.call(v, o); !a.result.OK {
			h.fail(fmt.Errorf("promised for %v and refused: %+v", h.retryAt, a.result))
		}
		h.tally["promise kept"]++
	}
}

// keepsPromise repeats a refused call at the instant that was promised.
func (h *history) keepsPromise(v verbs, o op) {
	h.t.Helper()
	h.clock.set(h.retryAt)
	a := o.do(h.t.Context(), v, h.results)
	if a.err != nil || !a.result.OK {
		h.fail(fmt.Errorf("%v: promised for %v and refused: %+v, %w", o, h.retryAt, a.result, a.err))
	}
	h.tally["promise kept"]++
}

// call makes one call in both, and compares.
func (h *history) call(v verbs, o op) reply {
	h.t.Helper()
	ctx := h.t.Context()
	if o.verb == resume && h.model.paused(ctx, o) {
		h.tally["pause ended"]++
	}
	want := h.model.do(ctx, o)
	h.clock.set(o.at)
	got := o.do(ctx, v, h.results)
	h.results = append(h.results, got.result)
	if err := sameReply(got, want); err != nil {
		h.fail(fmt.Errorf("%v\ngot  %+v\nwant %+v\n%w", o, got, want, err))
	}
	h.count(o, got)
	return got
}

func (h *history) count(o op, a reply) {
	asked := o.verb == allow || o.verb == reserve
	several := asked && len(a.result.Each()) > 1
	of := o.verb == first && a.err == nil && len(o.requests) > 1
	settled := o.verb == settle && a.err == nil
	more, less := false, false
	if settled {
		for i, status := range h.model.results[o.target].Each() {
			more, less = more || o.used[i] > status.Taken, less || o.used[i] < status.Taken
		}
	}
	sliding := a.err == nil && slides(ratelimit.NameOf(a.result.Request.Limit))
	calendar := a.err == nil && a.result.Request.Limit != nil && a.result.Request.Limit.Definition().Every != 0
	if o.verb == cancel {
		calendar = h.results[o.target].Request.Limit != nil && h.results[o.target].Request.Limit.Definition().Every != 0
		sliding = slides(ratelimit.NameOf(h.results[o.target].Request.Limit))
	}
	changed := o.verb == change && a.err == nil && a.result.Value != a.result.Capacity
	for k, is := range map[string]bool{
		"changed a bucket":    changed && o.limits[0].Definition().Kind == ratelimit.KindTokenBucket,
		"changed a window":    changed && o.limits[0].Definition().Kind == ratelimit.KindFixedWindow && !calendar,
		"changed a calendar":  changed && calendar,
		"changed slots":       changed && sliding,
		"calls":               true,
		string(o.verb):        true,
		"granted":             asked && a.result.OK,
		"refused":             asked && a.err == nil && !a.result.OK,
		"several granted":     several && a.result.OK,
		"several refused":     several && !a.result.OK,
		"same key twice":      asked && a.err == nil && len(a.result.Each()) < len(o.requests),
		"in debt":             o.verb == reserve && a.result.OK && a.result.RetryAfter > 0,
		"never":               errors.Is(a.err, ratelimit.ErrExceedsCapacity),
		"cancelled":           o.verb == cancel && a.said,
		"not cancelled":       o.verb == cancel && !a.said,
		"paused":              o.verb == pause && a.err == nil,
		"not paused":          o.verb == pause && a.err != nil,
		"while paused":        asked && !a.result.PausedUntil.IsZero(),
		"pruned rows":         a.pruned > 0,
		"calendar granted":    calendar && asked && a.result.OK,
		"calendar refused":    calendar && asked && !a.result.OK,
		"calendar ahead":      calendar && o.verb == reserve && a.result.OK && a.result.RetryAfter > 0,
		"calendar cancelled":  calendar && o.verb == cancel && a.said,
		"calendar paused":     calendar && asked && !a.result.PausedUntil.IsZero(),
		"granted above":       a.result.OK && a.result.Request.AboveShare > 0 && a.result.Taken > 0,
		"refused above":       asked && a.err == nil && !a.result.OK && a.result.Request.AboveShare > 0,
		"crossed":             a.result.Crossed(0.8),
		"shadowed":            a.result.Shadowed,
		"shadowed of several": a.result.Shadowed && several,
		"shadowed reserved":   o.verb == reserve && a.result.Shadowed && a.result.Each()[0].OK,
		"not shadowed":        asked && a.result.OK && a.result.Request.Mode == ratelimit.ModeShadow && !a.result.Shadowed,
		"settled of nothing":  settled && a.err == nil && slices.ContainsFunc(receipt.Payments(h.results[o.target].Receipt), func(p receipt.Payment) bool { return p.IsNothing() }),
		"refused by mode":     asked && !a.result.OK && a.result.Request.Mode == ratelimit.ModeRefuse,
		"refused until":       asked && !a.result.OK && a.result.Request.Mode == ratelimit.ModeRefuse && !a.result.Request.RefusedUntil.IsZero(),

		"settled for less":  less,
		"settled for more":  more,
		"settled from text": settled && o.text,
		"not settled":       o.verb == settle && a.err != nil,
		"at most all":       o.verb == atMost && a.result.OK && a.result.Taken == math.Floor(o.requests[0].Count),
		"at most some":      o.verb == atMost && a.result.OK && a.result.Taken < math.Floor(o.requests[0].Count),
		"at most none":      o.verb == atMost && a.err == nil && !a.result.OK,
		"first of several":  of && a.result.OK && a.result.Request == o.requests[0],
		"second of several": of && a.result.OK && a.result.Request != o.requests[0],
		"none of several":   of && !a.result.OK && len(a.result.Each()) > 1,

		"sliding granted":          sliding && asked && a.result.OK,
		"sliding refused":          sliding && asked && !a.result.OK,
		"sliding ahead":            sliding && o.verb == reserve && a.result.OK && a.result.RetryAfter > 0,
		"sliding cancelled":        sliding && o.verb == cancel && a.said,
		"sliding credited":         sliding && o.verb == credit,
		"sliding settled for less": sliding && less,
		"sliding settled for more": sliding && more,
		"sliding at most some":     sliding && o.verb == atMost && a.result.OK && a.result.Taken < math.Floor(o.requests[0].Count),
		"sliding chosen":           sliding && of && a.result.OK,
	} {
		if h.tally[k] += 0; is {
			h.tally[k]++
		}
	}
}

func (h *history) fail(err error) {
	h.t.Helper()
	log := h.model.log
	lines := make([]string, len(log))
	for i, o := range log {
		lines[i] = fmt.Sprintf("%d: %v", i, o)
	}
	h.t.Fatalf("form %s, seed %d, call %d: %v\nhistory:\n%s", h.form.name, h.seed, len(log), err, strings.Join(lines, "\n"))
}

// sameReply says in what got, of the database, differs from want.
func sameReply(got, want reply) error {
	for _, err := range []error{ratelimit.ErrInvalid, ratelimit.ErrExceedsCapacity, ratelimit.ErrSettled} {
		if errors.Is(got.err, err) != errors.Is(want.err, err) {
			return fmt.Errorf("error %w, want %w", got.err, want.err)
		}
	}
	if (got.err == nil) != (want.err == nil) {
		return fmt.Errorf("error %w, want %w", got.err, want.err)
	}
	if got.said != want.said || !got.until.Equal(want.until) || got.pruned != want.pruned {
		return fmt.Errorf("said %v, paused until %v, pruned %d; want %v, %v, %d", got.said, got.until, got.pruned, want.said, want.until, want.pruned)
	}
	if !got.result.At.Equal(want.result.At) || len(got.result.Each()) != len(want.result.Each()) {
		return fmt.Errorf("at %v of %d limits, want %v of %d", got.result.At, len(got.result.Each()), want.result.At, len(want.result.Each()))
	}
	errs := []error{sameStatus(got.result.Status, want.result.Status), samePayments(got.result, want.result)}
	for i := range got.result.Each() {
		errs = append(errs, sameStatus(got.result.Each()[i], want.result.Each()[i]))
	}
	return errors.Join(errs...)
}

func sameStatus(got, want ratelimit.Status) error {
	slack := 1e-6 * max(1, math.Abs(want.Value), want.Capacity)
	switch {
	case !got.At.Equal(want.At) || !got.PausedUntil.Equal(want.PausedUntil):
		return fmt.Errorf("at %v, paused until %v, want %v, %v", got.At, got.PausedUntil, want.At, want.PausedUntil)
	case got.Request != want.Request || got.Taken != want.Taken || got.Shadowed != want.Shadowed || got.OK != want.OK || got.Remaining != want.Remaining || got.Capacity != want.Capacity:
		return fmt.Errorf("status %+v, want %+v", got, want)
	case math.Abs(got.Value-want.Value) > slack:
		return fmt.Errorf("value %v, want %v", got.Value, want.Value)
	case math.Abs(got.Before-want.Before) > slack:
		return fmt.Errorf("value before %v, want %v", got.Before, want.Before)
	case (got.RetryAfter - want.RetryAfter).Abs() > time.Microsecond:
		return fmt.Errorf("retry after %v, want %v", got.RetryAfter, want.RetryAfter)
	case got.RetryAt.Sub(want.RetryAt).Abs() > time.Microsecond:
		return fmt.Errorf("retry at %v, want %v", got.RetryAt, want.RetryAt)
	case (got.ResetAfter - want.ResetAfter).Abs() > time.Microsecond:
		return fmt.Errorf("reset after %v, want %v", got.ResetAfter, want.ResetAfter)
	}
	return nil
}

func samePayments(got, want ratelimit.Result) error {
	if got.Receipt == nil || want.Receipt == nil {
		if got.Receipt != want.Receipt {
			return fmt.Errorf("receipt %v, want %v", got.Receipt, want.Receipt)
		}
		return nil
	}
	if g, w := receipt.Payments(got.Receipt), receipt.Payments(want.Receipt); !reflect.DeepEqual(g, w) {
		return fmt.Errorf("payments %+v, want %+v", g, w)
	}
	return nil
}

// generator makes up calls.
type generator struct {
	rand     *rand.Rand
	now      time.Time
	period   time.Duration // about that of the limits
	limits   []ratelimit.Limit
	retryAt  time.Time // of the last refusal
	changed  int       // how many definitions changed since somebody asked
	noCancel bool
	paused   []ratelimit.Request // of the last pause, or none
}

func newGenerator(seed uint64, prefix string) *generator {
	r := rand.New(rand.NewPCG(seed, 1))
	g := &generator{rand: r, now: noon, retryAt: noon}
	g.period = pick(r, time.Millisecond, time.Second, time.Minute, time.Hour, 24*time.Hour, 24*time.Hour, 30*24*time.Hour)
	for i := range 3 {
		// Names in an order that is not that of the calls.
		g.limits = append(g.limits, g.limit(fmt.Sprintf("%s%c", prefix, 'c'-i)))
	}
	return g
}

// slides reports whether a limit of a name is a sliding window. It stays one: what
// another kind left in its row is only about what the row means.
func slides(name string) bool { return strings.HasSuffix(name, "b") }

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

// limit makes up a definition.
func (g *generator) limit(name string) ratelimit.Limit {
	r := g.rand
	for {
		rate := pick(r, 1, 3, 10, 0.1, 1.0/3, 7.77, 20*r.Float64(), 1e6)
		period := time.Duration(float64(g.period) * pick(r, 1, 1, 1.0/3, 7, r.Float64()+0.01)).Truncate(time.Microsecond)
		capacity := pick(r, 0, 0, ratelimit.None, rate*2.5, rate/7, 1, 12)
		debt := pick(r, 0, 0, ratelimit.None, rate*3, rate/3, 1)
		var l ratelimit.Limit = ratelimit.TokenBucket{
			Name: name, Rate: rate, Period: period, Capacity: capacity, MaxReserved: debt,
		}
		if r.IntN(2) == 0 {
			start := pick(r, time.Time{}, noon, noon.Add(period/3), noon.Add(-31*period), noon.Add(100*365*24*time.Hour))
			l = ratelimit.FixedWindow{
				Name: name, Rate: rate, Period: period, Capacity: capacity, MaxReserved: debt, Start: start,
			}
		}
		if g.period >= 24*time.Hour && r.IntN(2) == 0 {
			l = ratelimit.FixedWindow{
				Name: name, Rate: rate, Capacity: capacity, MaxReserved: debt,
				Every: pick(r, ratelimit.Day, ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Year, 5*ratelimit.Day, 3*ratelimit.Month),
				Zone:  pick(r, "", "Europe/Berlin", "America/New_York", "Asia/Beirut", "Pacific/Apia"),
				Anchor: pick(r, ratelimit.Date{}, ratelimit.Date{Year: 2026, Month: time.January, Day: 31},
					ratelimit.Date{Year: 2024, Month: time.February, Day: 29}, ratelimit.Date{Year: 2031, Month: time.March, Day: 30}),
				Time: pick(r, 0, 0, 9*time.Hour, 2*time.Hour+30*time.Minute),
			}
		}
		if slides(name) {
			l = ratelimit.SlidingWindow{
				Name: name, Rate: rate, Period: period, MaxReserved: debt, Slots: pick(r, 0, 0, 1, 2, 6, 7, 100),
				Start: pick(r, time.Time{}, noon, noon.Add(period/3), noon.Add(-31*period)),
			}
		}
		if l.Validate() == nil {
			return l
		}
	}
}

// next makes up a call that follows on those of m.
func (g *generator) next(m *model) op {
	g.tick()
	if g.rand.IntN(15) == 0 {
		i := g.rand.IntN(len(g.limits))
		was := g.limits[i]
		g.limits[i] = g.limit(was.Definition().Name)
		g.changed++
		if was.Definition().Kind == g.limits[i].Definition().Kind && g.rand.IntN(2) == 0 {
			return g.change(was, g.limits[i])
		}
	}
	if g.rand.IntN(25) == 0 {
		was := pick(g.rand, g.limits...)
		for now := g.limit(was.Definition().Name); ; now = g.limit(was.Definition().Name) {
			if now.Definition().Kind == was.Definition().Kind {
				return g.change(was, now)
			}
		}
	}
	o := op{at: g.now, verb: pick(
		g.rand,
		allow, allow, allow, allow, allow, allow, reserve, reserve, reserve, reserve, reserve,
		check, checkReserve, atMost, atMost, first, first, credit, settle, settle, settle, cancel, cancel, pause, resume, reset,
	)}
	o.requests = g.requests()
	if !slices.Contains([]verb{reserve, checkReserve, credit}, o.verb) || g.rand.IntN(10) == 0 { // of which it is an error
		g.keep(o.requests)
	}
	if slices.Contains([]verb{allow, reserve, check, checkReserve, atMost, first}, o.verb) && g.rand.IntN(3) == 0 {
		g.mode(o.requests)
	}
	o.lasts = time.Duration((g.rand.Float64()*3 - 0.5) * float64(g.period)) // not in whole microseconds
	switch {
	case o.verb == pause:
		g.paused = o.requests[:1]
	case o.verb == resume && g.paused != nil && g.rand.IntN(4) > 0:
		o.requests = g.paused
	case o.verb == first && g.rand.IntN(2) == 0: // all of it, so that there is less for the next one
		for i, r := range o.requests {
			o.requests[i].Count = r.Limit.Definition().Capacity
		}
	}
	if o.verb == cancel || o.verb == settle {
		if g.noCancel || len(m.log) == 0 {
			o.verb = allow
			return o
		}
		o.target = g.target(m)
		o.text = g.rand.IntN(3) == 0
		for _, status := range m.results[o.target].Each() {
			o.used = append(o.used, g.used(status))
		}
	}
	return o
}

// change replaces a definition for a key.
func (g *generator) change(from, to ratelimit.Limit) op {
	return op{at: g.now, verb: change, requests: []ratelimit.Request{to.ForN(pick(g.rand, keys...), 0)}, limits: []ratelimit.Limit{from}}
}

// keep has some of the requests leave a part of the capacity.
func (g *generator) keep(requests []ratelimit.Request) {
	for i := range requests {
		if g.rand.IntN(4) == 0 {
			requests[i] = requests[i].Above(pick(g.rand, 0.2, 0.5, 1, g.rand.Float64(), 1.0/3))
		}
	}
}

// mode has some of the requests in a mode.
func (g *generator) mode(requests []ratelimit.Request) {
	for i := range requests {
		requests[i] = requests[i].In(pick(g.rand, 0, ratelimit.ModeEnforce, ratelimit.ModeShadow, ratelimit.ModeShadow, ratelimit.ModeShadow))
		if g.rand.IntN(8) == 0 {
			requests[i] = requests[i].In(ratelimit.ModeRefuse)
			requests[i].RefusedUntil = pick(g.rand, time.Time{}, g.now, g.now.Add(-g.period), g.now.Add(time.Microsecond), g.now.Add(g.period))
		}
	}
}

// used is what was really used of what was taken.
func (g *generator) used(status ratelimit.Status) float64 {
	return min(ratelimit.MaxTokens, pick(
		g.rand,
		0, status.Taken, status.Taken/2, status.Taken*g.rand.Float64(), status.Taken+1, status.Taken*2,
		status.Capacity*3, g.tokens(status.Request.Limit),
	))
}

// target is most often the result of a call that took something, which may
// have been cancelled already.
func (g *generator) target(m *model) int {
	last := max(0, len(m.log)-20)
	for range 8 {
		i := last + g.rand.IntN(len(m.log)-last)
		if m.results[i].Receipt != nil {
			return i
		}
	}
	return last
}

func (g *generator) nextPrune() op {
	g.tick()
	if g.rand.IntN(2) == 0 {
		g.now = g.now.Add(20 * g.period)
	}
	return op{at: g.now, verb: prune, limits: slices.Clone(g.limits[g.rand.IntN(len(g.limits)):])}
}

// tick moves the clock, now and then back.
func (g *generator) tick() {
	span := time.Duration(g.rand.Float64() * float64(g.period))
	g.now = pick(
		g.rand,
		g.now, g.now, g.now.Add(span/8), g.now.Add(span/8), g.now.Add(span), g.now.Add(3*span),
		g.now.Add(time.Microsecond), g.now.Add(-span/2), g.near(g.retryAt), g.near(g.retryAt.Add(-time.Microsecond)),
	).Truncate(time.Microsecond)
}

// near is at, unless that is so far away that the rest of the history would
// stand still.
func (g *generator) near(at time.Time) time.Time {
	if at.Sub(g.now).Abs() > 5*g.period {
		return g.now
	}
	return at
}

// keys are such as would break out of a careless literal.
var keys = []string{"", "a", `o'neil \ "$1" %s é`}

func (g *generator) requests() []ratelimit.Request {
	n := pick(g.rand, 1, 1, 1, 2, 3, 4)
	requests := make([]ratelimit.Request, n)
	for i := range requests {
		l := pick(g.rand, g.limits...)
		requests[i] = l.ForN(pick(g.rand, keys...), g.tokens(l))
	}
	return requests
}

func (g *generator) tokens(l ratelimit.Limit) float64 {
	d := bucket.Definition(l.Definition())
	unit := max(d.Capacity, d.Rate)
	debt := min(d.MaxReserved, 5*unit)
	return min(ratelimit.MaxTokens, pick(
		g.rand,
		0, 1, d.Capacity, d.Capacity/2, d.Capacity/3, unit*g.rand.Float64(), d.Capacity*g.rand.Float64(),
		d.Capacity/8, d.Capacity+debt, d.Capacity+debt*g.rand.Float64(),
	))
}
