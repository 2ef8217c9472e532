package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/relay"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// The limits of the calls that are observed. Nothing comes in while they are.
var (
	observedTight = ratelimit.FixedWindow{Name: "tight", Rate: 10, Period: eon, Start: window.Start}
	observedAll   = []ratelimit.Limit{window, windows, observedTight}
)

// heard is what one call was, what its caller was told, and what Config.Observe was.
type heard struct {
	store    *hooked
	verb     ratelimit.Verb
	form     ratelimit.Form
	requests []ratelimit.Request
	answer   ratelimit.Outcome // that its caller was told
	err      error             // that its caller was told
	spent    bool              // false of a take in a transaction that was rolled back
	doubtful bool              // nobody knows whether that was
	injected int               // errors 40001 of its function

	mu        sync.Mutex
	events    []ratelimit.Event
	conflicts int // errors 40001 and 40P01 that the server has sent to it
}

type heardKey struct{}

// hooked is a store that tells what it decides, and what was heard of it.
type hooked struct {
	name   string
	schema string
	pool   *pgxpool.Pool
	store  *pgstore.Store
	exact  bool // no call of it ends with an outcome that nobody knows
	wait   time.Duration
	strays atomic.Int64 // events that no caller has

	mu    sync.Mutex
	heard []*heard
}

// lacks returns an outcome of which nothing was heard, or "retried", if there is one.
func (h *hooked) lacks() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	lacking := map[string]bool{"granted": true, "refused": true, "failed": true, "rolled_back": true, "retried": true}
	for _, c := range h.heard {
		for _, e := range c.events {
			delete(lacking, string(e.Outcome))
			if e.Retries > 0 {
				delete(lacking, "retried")
			}
		}
	}
	for what := range lacking {
		return what
	}
	return ""
}

func (h *hooked) observe(ctx context.Context, e ratelimit.Event) {
	c, ok := ctx.Value(heardKey{}).(*heard)
	if !ok {
		h.strays.Add(1)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events = append(c.events, e)
}

// conflicted is a tracer of pgx that counts what PostgreSQL asks to be run again.
type conflicted struct{ traced.Statements }

func (*conflicted) note(ctx context.Context, err error) {
	if c, ok := ctx.Value(heardKey{}).(*heard); ok && lab.AskedToRetry(err) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.conflicts++
	}
}

func (t *conflicted) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	t.note(ctx, data.Err)
}

func (t *conflicted) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchEndData) {
	t.note(ctx, data.Err)
}

// attackHook has stores with Config.Observe suffer, and compares what that was told with what
// callers were told, and with the rows.
func attackHook(ctx context.Context, l *site, c *chapter) error {
	c.say("Stores of all kinds (plain, portable, from memory) report calls in every form to Config.Observe, some with a limit in shadow. Meanwhile functions fail, panic and run again, transactions are rolled back, and callers give up. A fourth store has a pool that is too small. Two work through a relay that cuts connections, while backends are terminated. Each call has its own context, which finds its events. The tokens gone from the rows must equal the tokens that events report as taken. If answers were lost, they may differ by the tokens that events report as unknown. Retries must equal the 40001 that pgx's tracer saw.")
	f := &faulty{rarely: 150, done: map[string]int{}, turns: map[string]int{}}
	stores, end, err := l.hookedStores(ctx, f)
	if err != nil {
		return err
	}
	killed, err := l.observeAll(ctx, stores)
	for _, h := range stores {
		h.store.Close()
	}
	end()
	if err != nil {
		return err
	}
	harmed := 0
	for _, n := range f.counts("") {
		harmed += n.n
	}
	c.happened(count{"requests and answers that the relay did harm to", harmed}, count{"backends terminated", killed})
	for _, h := range stores {
		if err := l.compareHeard(ctx, c, h); err != nil {
			return fmt.Errorf("%s: %w", h.name, err)
		}
	}
	return nil
}

// hookedStores makes the stores, each with a schema of its own, some behind a relay to which f
// happens; end closes what they have.
func (l *site) hookedStores(ctx context.Context, f *faulty) (stores []*hooked, end func(), err error) {
	r, err := relayTo(l.server.URL)
	if err != nil {
		return nil, nil, err
	}
	cuts := []relay.Fate{relay.Cut, relay.CutWithin, relay.CutAfter} // silence takes seconds, and is attacked elsewhere
	r.Interfere(f.judge("request", cuts), f.judge("answer", append(cuts, relay.Fatal)))
	for _, s := range []struct {
		name   string
		config pgstore.Config
		conns  int32
		cut    bool
	}{
		{"plain", pgstore.Config{}, 16, false},
		{"portable", pgstore.Config{Portable: true}, 16, false},
		{"from memory", pgstore.Config{Escrow: briefly}, 16, false},
		{"a pool of 2", pgstore.Config{}, 2, false},
		{"cut and killed", pgstore.Config{}, 8, true},
		{"cut and killed, portable", pgstore.Config{Portable: true}, 8, true},
	} {
		h := &hooked{name: s.name, exact: !s.cut && s.conns > 2, wait: patience}
		switch {
		case s.cut:
			h.wait = time.Second
		case !h.exact:
			h.wait = time.Second / 4
		}
		if h.schema, err = l.schema(ctx); err != nil {
			return nil, nil, err
		}
		h.pool, err = newPool(l.server.URL, s.conns, func(config *pgxpool.Config) {
			config.ConnConfig.Tracer = &conflicted{}
			config.ConnConfig.RuntimeParams["application_name"] = s.name
			if s.cut {
				relayed(config, r.Address().String())
			}
		})
		if err != nil {
			return nil, nil, err
		}
		s.config.Schema, s.config.Timeout, s.config.Observe = h.schema, h.wait, h.observe
		if h.store, err = pgstore.New(h.pool, &s.config); err != nil {
			return nil, nil, err
		}
		stores = append(stores, h)
	}
	return stores, func() {
		r.Close()
		for _, h := range stores {
			go h.pool.Close() // one whose network is silent closes late
		}
	}, nil
}

// observeAll has callers work with all stores, and terminates backends of those that are to
// suffer that. It returns how many.
func (l *site) observeAll(ctx context.Context, stores []*hooked) (killed int, err error) {
	over, stop := context.WithCancel(ctx)
	defer stop()
	var group sync.WaitGroup
	for _, h := range stores {
		h.begin(ctx)
		for n := range 12 {
			group.Go(func() {
				random := rand.New(rand.NewPCG(rand.Uint64(), uint64(n)))
				for over.Err() == nil {
					h.call(ctx, random)
				}
			})
		}
	}
	more := until(l.seconds(20, 2), func() bool {
		return !slices.ContainsFunc(stores, func(h *hooked) bool { return h.exact && h.lacks() != "" })
	})
	for err == nil && ctx.Err() == nil && more() {
		time.Sleep(200 * time.Millisecond)
		var n int
		err = l.ask(ctx, "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'cut and killed%' ORDER BY random() LIMIT 1) AS one", &n)
		killed += n
	}
	stop()
	group.Wait()
	return killed, err
}

var errFunction = errors.New("the function fails")

// begin takes so much that what comes back fits: below a limit that is nearly full, a store that
// decides from memory gives less back.
func (h *hooked) begin(ctx context.Context) {
	c := &heard{store: h, spent: true, form: ratelimit.FormOwn, verb: ratelimit.VerbAllow}
	for key := range 4 {
		c.requests = append(c.requests, window.ForN(fmt.Sprint(key), 3000), windows.ForN(fmt.Sprint(key), 3000))
	}
	bounded, cancel := context.WithTimeout(context.WithValue(ctx, heardKey{}, c), h.wait)
	defer cancel()
	c.told(h.store.Allow(bounded, c.requests...))
	h.heard = append(h.heard, c)
}

// call makes a call, in a form and with a fate of chance.
func (h *hooked) call(ctx context.Context, r *rand.Rand) {
	c := &heard{store: h, spent: true}
	for _, limit := range observedAll {
		if r.IntN(2) == 0 || limit == observedAll[2] && c.requests == nil {
			c.requests = append(c.requests, ratelimit.Request{Limit: limit, Key: fmt.Sprint(r.IntN(4)), Count: float64(1 + r.IntN(3))})
		}
	}
	if tight := &c.requests[len(c.requests)-1]; tight.Limit == observedAll[2] && len(c.requests) > 1 && r.IntN(2) == 0 {
		*tight = tight.In(ratelimit.ModeShadow)
	}
	patient, cancel := context.WithTimeout(context.WithValue(ctx, heardKey{}, c), h.wait)
	defer cancel()
	switch r.IntN(4) {
	case 0:
		c.inTx(patient, r)
	case 1:
		c.inRun(patient, r)
	default:
		c.own(patient, r)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.heard = append(h.heard, c)
}

// told notes the answer that a caller got.
func (c *heard) told(result ratelimit.Result, err error) {
	c.err = err
	switch {
	case err == nil && result.OK:
		c.answer = ratelimit.OutcomeGranted
	case err == nil, errors.Is(err, ratelimit.ErrRefused):
		c.answer = ratelimit.OutcomeRefused
	case errors.Is(err, pgstore.ErrOutcomeUnknown):
		c.answer = ratelimit.OutcomeUnknown
	default:
		c.answer = ratelimit.OutcomeFailed
	}
}

func (c *heard) own(ctx context.Context, r *rand.Rand) {
	c.form, c.verb = ratelimit.FormOwn, ratelimit.VerbAllow
	store := c.store.store
	var result ratelimit.Result
	var err error
	switch r.IntN(6) {
	case 0:
		c.verb = ratelimit.VerbCheck
		result, err = store.Check(ctx, c.requests...)
	case 1:
		c.verb, c.requests = ratelimit.VerbAllowAtMost, c.requests[:1]
		result, err = store.AllowAtMost(ctx, c.requests[0])
	case 2: // given up before it begins
		over, cancel := context.WithCancel(ctx)
		cancel()
		result, err = store.Allow(over, c.requests...)
	default:
		result, err = store.Allow(ctx, c.requests...)
	}
	c.told(result, err)
	small := c.requests[len(c.requests)-1].Limit == observedAll[2] // which is nearly full, and has less room than is given back
	if err != nil || !result.OK || result.Receipt == nil || small || r.IntN(3) > 0 {
		return
	}
	back := &heard{store: c.store, form: ratelimit.FormOwn, verb: ratelimit.VerbCancel, spent: true}
	ctx = context.WithValue(ctx, heardKey{}, back)
	if cancelled, err := store.Cancel(ctx, result.Receipt); err == nil && !cancelled {
		back.told(ratelimit.Result{}, nil)
	} else {
		back.told(ratelimit.Result{Status: ratelimit.Status{OK: true}}, err)
	}
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	c.store.heard = append(c.store.heard, back)
}

func (c *heard) inTx(ctx context.Context, r *rand.Rand) {
	level := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.Serializable}[r.IntN(2)]
	rollBack := r.IntN(3) == 0
	asked := false
	err := pgx.BeginTxFunc(ctx, c.store.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
		asked, c.form, c.verb = true, ratelimit.FormTx, ratelimit.VerbAllow
		result, err := c.store.store.AllowTx(ctx, tx, c.requests...)
		c.told(result, err)
		if err == nil && rollBack {
			err = errRolledBack
		}
		return err
	})
	if !asked { // no transaction, and nothing to be told of
		c.form = ""
		return
	}
	c.spent = err == nil
	var pgErr *pgconn.PgError
	answered := errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR"
	c.doubtful = err != nil && c.err == nil && !rollBack && !answered // COMMIT was lost
}

func (c *heard) inRun(ctx context.Context, r *rand.Rand) {
	c.form, c.verb = ratelimit.FormRunner, ratelimit.VerbAllow
	fate := r.IntN(5)
	var failed error // of the function, the last time
	panicked := func() (panicked bool) {
		defer func() { panicked = recover() != nil }()
		result, err := c.store.store.AllowFunc(ctx, c.requests, func(tx pgx.Tx, _ ratelimit.Result) error {
			_, failed = tx.Exec(ctx, "SELECT 1")
			switch {
			case failed != nil:
			case fate == 0 && c.injected < 2:
				c.injected++
				failed = &pgconn.PgError{Code: "40001", Severity: "ERROR", SeverityUnlocalized: "ERROR"}
			case fate == 1:
				failed = errFunction
			case fate == 2 && r.IntN(10) == 0:
				panic(errFunction)
			}
			return failed
		})
		c.told(result, err)
		return false
	}()
	if panicked || failed != nil && !lab.AskedToRetry(failed) && errors.Is(c.err, failed) {
		c.answer = ratelimit.OutcomeRolledBack
	}
}

// span is what may be, from low to high.
type span struct{ low, high float64 }

// tally is what was heard of a store, and found wrong.
type tally struct {
	calls, twice, never, otherwise int
	outcomes                       map[ratelimit.Outcome]int
	retries                        int  // by events
	retried                        span // by what the runner got
	gone                           map[[2]string]span
	example                        string // of an event that is not as the answer
}

// add adds to what is gone: n, or perhaps n.
func (t *tally) add(r *ratelimit.Request, n float64, perhaps bool) {
	key := [2]string{ratelimit.NameOf(r.Limit), r.Key}
	s := t.gone[key]
	if !perhaps {
		s.low += n
		s.high += n
	} else {
		s.low += min(n, 0)
		s.high += max(n, 0)
	}
	t.gone[key] = s
}

// count counts a call.
func (t *tally) count(c *heard) {
	if c.form == "" {
		return
	}
	t.calls++
	switch {
	case len(c.events) == 0:
		t.never++
		return
	case len(c.events) > 1:
		t.twice++
	}
	e := &c.events[0]
	t.outcomes[e.Outcome]++
	form := e.Form
	if form == ratelimit.FormMemory {
		form = ratelimit.FormOwn
	}
	if e.Outcome != c.answer || form != c.form || e.Verb != c.verb || (e.Err == nil) != (c.err == nil || errors.Is(c.err, ratelimit.ErrRefused)) {
		t.otherwise++
		t.example = fmt.Sprintf("%s %s, whose caller was told %s (%v), is told as %v", c.form, c.verb, c.answer, c.err, e)
	}
	if c.form == ratelimit.FormRunner {
		got := float64(c.conflicts + c.injected)
		t.retries += e.Retries
		t.retried.low += got
		t.retried.high += got
		if lab.AskedToRetry(c.err) || errors.Is(c.err, pgstore.ErrOutcomeUnknown) { // it gave up, perhaps before it began again
			t.retried.low--
		}
	}
	t.take(c, e)
}

// take counts what an event says is gone.
func (t *tally) take(c *heard, e *ratelimit.Event) {
	unknown := e.Outcome == ratelimit.OutcomeUnknown || e.Outcome == ratelimit.OutcomeFailed && c.form == ratelimit.FormOwn
	switch {
	case e.Verb == ratelimit.VerbCheck:
	case e.Verb == ratelimit.VerbCancel && (e.Outcome == ratelimit.OutcomeGranted || unknown):
		for i := range e.Requests {
			t.add(&e.Requests[i], -e.Requests[i].Count, unknown)
		}
	case unknown && e.ErrorClass != "canceled": // that was given up before it began
		for i := range c.requests {
			t.add(&c.requests[i], c.requests[i].Count, true)
		}
	case e.Outcome == ratelimit.OutcomeGranted && (c.spent || c.doubtful):
		for p := range e.Each() {
			t.add(&p.Status.Request, p.Status.Taken, c.doubtful)
		}
	}
}

// compareHeard compares what was heard of a store with what callers were told, and with its rows.
func (l *site) compareHeard(ctx context.Context, c *chapter, h *hooked) error {
	t := &tally{outcomes: map[ratelimit.Outcome]int{}, gone: map[[2]string]span{}}
	for _, call := range h.heard {
		t.count(call)
	}
	wrong, width, total := 0, 0.0, 0.0
	for _, limit := range observedAll {
		for key := range 4 {
			var gone float64 // nothing of a key without rows
			sql := fmt.Sprintf("SELECT coalesce(sum(%g::float8 / %d - value), 0)::float8 FROM %s.rate_limits WHERE name = '%s' AND key = '%d'",
				limit.Definition().Rate, max(1, limit.Definition().Shards), h.schema, ratelimit.NameOf(limit), key)
			if err := l.ask(ctx, sql, &gone); err != nil {
				return err
			}
			s := t.gone[[2]string{ratelimit.NameOf(limit), fmt.Sprint(key)}]
			total, width = total+gone, width+s.high-s.low
			if gone > s.high+slack(gone) || gone < s.low-slack(gone) {
				wrong++
				c.fail(fmt.Sprintf("%s: of limit %s, key %d, %g is gone, and by events %g to %g", h.name, ratelimit.NameOf(limit), key, gone, s.low, s.high))
			}
		}
	}
	c.Tell(h.name+", calls", "%d, told as %s", t.calls, strings.Trim(fmt.Sprint(t.outcomes), "map[]"))
	c.Zero(h.name+", calls that are told twice, or not at all, and events without a caller", t.twice+t.never+int(h.strays.Load()))
	c.Zero(h.name+", events that differ from the answer", t.otherwise)
	if t.example != "" {
		c.fail(t.example)
	}
	c.Zero(fmt.Sprintf("%s, keys of which more or less is gone than events say (%.0f tokens in all)", h.name, total), wrong)
	retries := fmt.Sprintf("%g to %g, by the 40001 and 40P01 that it got", t.retried.low, t.retried.high)
	c.Add(h.name+", retries of the runner", fmt.Sprint(t.retries), retries, float64(t.retries) >= t.retried.low && float64(t.retries) <= t.retried.high)
	if !h.exact {
		c.Tell(h.name+", tokens of unknown outcomes", "%.0f", width)
		c.happened(count{h.name + ", calls that failed", t.outcomes[ratelimit.OutcomeFailed]})
		return nil
	}
	c.Zero(h.name+", tokens of unknown outcomes", int(math.Ceil(width)))
	c.Zero(h.name+", retries by Stats that no event has", int(h.store.Stats().Retries)-t.retries)
	if o := h.lacks(); o != "" {
		c.fail(fmt.Sprintf("%s: no call was told as %s", h.name, o))
	}
	return nil
}

// slack returns what rounding may make of sums.
func slack(gone float64) float64 { return 1e-6 * (1 + math.Abs(gone)) }
