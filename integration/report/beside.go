package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Grants from memory while all other verbs work on the same keys.

// lasting are the Config.Escrow of the stores of each process. Each has keys of its own.
var lasting = []time.Duration{10 * time.Millisecond, 100 * time.Millisecond, time.Second}

// besieged is a limit that everything is done to. Of a slow one so little comes in that every
// token can be found again.
type besieged struct {
	limit  ratelimit.Limit
	slow   bool
	pauses bool
	demand float64 // tokens a second that all ask for; 0 for as many as can be
}

// hot reports whether there is enough for many callers.
func (b *besieged) hot() bool {
	return !b.slow && b.limit.Definition().Capacity >= 1000 || b.demand >= 1000
}

// callers returns how many of a process take from it.
func (b *besieged) callers(workers int) int {
	if b.hot() {
		return 4 * workers
	}
	return workers
}

// often returns how many calls there are for each that does not just allow.
func (b *besieged) often() int {
	if b.hot() {
		return 160
	}
	return 40
}

var midnight = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// besiegedLimits are limits of 1 to 10,000 a second, judged by their curves, and slow ones
// with demand for as many, of which what was lost is judged.
var besiegedLimits = slices.Concat(
	fastLimits("1 a second", 5, 5*time.Second, false),
	fastLimits("100 a second", 100, time.Second, false),
	fastLimits("10,000 a second", 2000, 200*time.Millisecond, false),
	fastLimits("100 a second, paused", 100, time.Second, true),
	[]besieged{{limit: ratelimit.TokenBucket{Name: "token bucket, 1,000 a second, reserved", Rate: 1000, Period: time.Second, Capacity: 1000, MaxReserved: 100}}},
	slowLimits("asked for 1 a second", 1),
	slowLimits("asked for 100 a second", 100),
	slowLimits("asked for 3,000 a second", 3000),
)

func fastLimits(name string, rate float64, period time.Duration, pauses bool) []besieged {
	return []besieged{
		{limit: ratelimit.TokenBucket{Name: "token bucket, " + name, Rate: rate, Period: period, MaxReserved: ratelimit.None}, pauses: pauses},
		{limit: ratelimit.FixedWindow{Name: "fixed window, " + name, Rate: rate, Period: period, Start: midnight, MaxReserved: ratelimit.None}, pauses: pauses},
		{limit: ratelimit.SlidingWindow{Name: "sliding window, " + name, Rate: rate, Period: period, MaxReserved: ratelimit.None}, pauses: pauses},
	}
}

func slowLimits(name string, demand float64) []besieged {
	const most = 1e6
	return []besieged{
		{limit: ratelimit.TokenBucket{Name: "slow token bucket, " + name, Rate: most, Period: eon, Capacity: most}, slow: true, demand: demand},
		{limit: ratelimit.FixedWindow{Name: "slow fixed window, " + name, Rate: most, Period: eon, Start: midnight}, slow: true, demand: demand},
		{limit: ratelimit.SlidingWindow{Name: "slow sliding window, " + name, Rate: most, Period: eon}, slow: true, demand: demand},
	}
}

// besideEvent is tokens that somebody was granted, at an instant of the database's clock, and
// by another at the latest; or, below 0, that went back between two.
type besideEvent struct {
	Limit   int     `json:"l"`
	Lasts   int     `json:"h"`
	Count   float64 `json:"n,omitempty"`
	From    int64   `json:"f"` // microseconds
	To      int64   `json:"t"`
	Unknown float64 `json:"u,omitempty"` // tokens of a call that failed
	Verb    string  `json:"v"`
	Err     string  `json:"e,omitempty"`
	Memory  bool    `json:"m,omitempty"` // told sooner than any database could
}

const (
	before   = 1e5             // tokens of slow limits that are used first, so that there is room for refunds
	filled   = 1e9             // the tokens that a reset gives back, and more
	late     = 5 * time.Second // tokens that a transaction took from memory are back by then, although others lock the row
	mostLost = 0.001           // of the tokens granted of a slow limit
)

// attackBeside has three processes do everything to the same keys.
func attackBeside(ctx context.Context, l *site, c *chapter) error {
	lasts := l.seconds(60, 6)
	if l.minutes > 0 {
		lasts = time.Duration(l.minutes * float64(time.Minute))
	}
	c.say("Three processes take from the same keys; one process is Portable. Each has a store that takes ahead and one that does not. Config.Escrow is 10 ms, 100 ms and 1 s in turn, and the worst of the three is shown. The processes also reserve and cancel, settle for less, credit, pause, resume and reset. Their functions last up to three times Escrow, and sometimes fail. A limit's share is what it granted in a stretch of time, less the tokens that may have gone back in it, divided by what it allows. Lost are tokens of slow limits that, when all stores are closed, were not granted and are not in a row.")
	b := &besiege{events: map[[2]int][]besideEvent{}, errs: map[string]int{}, verbs: [2]map[string]int{{}, {}}}
	p, err := l.place(ctx, 2)
	if err != nil {
		return err
	}
	defer p.close()
	store, err := p.store(pgstore.Config{})
	if err != nil {
		return err
	}
	if err := useSome(ctx, store); err != nil {
		return err
	}
	for _, escrow := range lasting {
		if err := l.besiege(ctx, b, task{Job: "beside", Schema: p.schema, Workers: 2, Conns: 40, Escrow: escrow}, lasts/3); err != nil {
			return err
		}
	}
	return b.judge(ctx, store, c)
}

// besiege has three processes do it for a while.
func (l *site) besiege(ctx context.Context, b *besiege, t task, lasts time.Duration) error {
	children, err := l.launch(ctx, three(t), lab.Reading(&b.mu, b.note))
	if err != nil {
		return err
	}
	lab.AtWork(children)
	rest(ctx, lasts)
	return errors.Join(lab.End(children)...)
}

// useSome takes from slow limits.
func useSome(ctx context.Context, store *pgstore.Store) error {
	for _, of := range besiegedLimits {
		for h := range lasting {
			if !of.slow {
				continue
			}
			if err := store.Take(ctx, of.limit.ForN(besideKey(h), before)); err != nil {
				return err
			}
		}
	}
	return nil
}

// besiege is the results of processes. It is read by several goroutines.
type besiege struct {
	mu     sync.Mutex
	events map[[2]int][]besideEvent
	errs   map[string]int
	verbs  [2]map[string]int // all, and those from memory
}

func (b *besiege) note(e besideEvent) {
	key := [2]int{e.Limit, e.Lasts}
	b.events[key] = append(b.events[key], e)
	switch {
	case e.Err != "":
		b.errs[e.Verb+": "+e.Err]++
	case e.Memory:
		b.verbs[1][e.Verb]++
		fallthrough
	default:
		b.verbs[0][e.Verb]++
	}
}

func besideKey(lasts int) string { return lasting[lasts].String() }

func (b *besiege) judge(ctx context.Context, store *pgstore.Store, c *chapter) error {
	for i, of := range besiegedLimits {
		name := ratelimit.NameOf(of.limit)
		share, lost, granted := 0.0, math.Inf(-1), 0.0
		for h := range lasting {
			events := b.events[[2]int{i, h}]
			if !of.slow {
				share = max(share, shareOf(of, events))
				continue
			}
			taken, gone := 0.0, 0.0
			unknown := 0.0
			for _, e := range events {
				taken += max(e.Count, 0)
				gone += e.Count
				unknown += e.Unknown
			}
			now, err := store.Check(ctx, of.limit.ForN(besideKey(h), 0))
			if err != nil {
				return err
			}
			missing := of.limit.Definition().Capacity - before - gone - now.Value
			if missing < -1 { // so much does not come in
				c.fail(fmt.Sprintf("%s, %v: %g were granted that no row lacks", name, lasting[h], -missing))
			}
			granted += taken
			lost = max(lost, (missing-unknown)/max(taken, 1))
		}
		if of.slow {
			c.Tell(name+", granted", "%.0f", granted)
			c.AtMost(name+", lost of that at most", max(lost, 0), mostLost, "")
		} else {
			c.AtMost(name+", largest share", share, 1+1e-6, "")
		}
	}
	for _, verb := range besideVerbs {
		c.happened(count{verb, b.verbs[0][verb]})
	}
	for _, verb := range besideVerbs[:2] {
		c.happened(count{verb + ", in less than 50 µs", b.verbs[1][verb]})
	}
	wrong := 0
	for text, n := range b.errs {
		wrong += n
		c.Tell("error of "+text, "%d", n)
	}
	c.Zero("errors", wrong)
	return nil
}

// shareOf returns the most that was granted in a stretch, less what may have gone back in it, of
// what is promised for it.
func shareOf(of besieged, events []besideEvent) (share float64) {
	d := of.limit.Definition()
	capacity, span := d.Capacity, int64(math.MaxInt64)
	perMicro := d.Rate / float64(d.Period.Microseconds())
	refill := func(at int64) float64 { return perMicro * float64(at-events[0].From) }
	switch d.Kind {
	case ratelimit.KindFixedWindow:
		if !of.pauses {
			edge := func(at int64) int64 { return (at - midnight.UnixMicro()) / d.Period.Microseconds() }
			first := int64(0)
			if len(events) > 0 {
				first = edge(events[0].From)
			}
			refill = func(at int64) float64 { return d.Rate * float64(edge(at)-first) }
			break
		}
		capacity += d.Rate // a pause moves the edges
	case ratelimit.KindSlidingWindow:
		capacity, span = d.Rate, d.Period.Microseconds()
		refill = func(int64) float64 { return 0 }
	}
	owed := int64(0) // for how long refunds can be used by an earlier reservation
	if d.Kind == ratelimit.KindTokenBucket && d.MaxReserved > 0 {
		owed = int64(d.MaxReserved / perMicro)
	}
	return mostOf(events, capacity, span, owed, refill)
}

// mostOf looks at all stretches shorter than a span, by the instants of their ends. What a
// stretch holds is told apart into a part of its begin and one of its end, so the least of the
// former is kept for each end.
func mostOf(events []besideEvent, capacity float64, span, owed int64, refill func(int64) float64) (share float64) {
	type at struct {
		when           int64
		order          int // returns begin, stretches begin, grants, stretches end, returns end
		granted, given float64
	}
	var all []at
	for _, e := range sinceAsked(events) {
		switch {
		case e.Count > 0:
			all = append(all, at{when: e.From, order: 1, granted: e.Count})
		case e.Count < 0:
			all = append(all, at{when: e.From - 1, order: 0, given: -e.Count}, at{when: e.To + 1 + owed, order: 2, given: -e.Count})
		}
	}
	slices.SortFunc(all, func(a, b at) int { return cmp.Or(cmp.Compare(a.when, b.when), cmp.Compare(a.order, b.order)) })
	type begin struct {
		when  int64
		level float64 // of the tokens in a stretch, if it ends later
	}
	var begins []begin // levels fall
	granted, back, over := 0.0, 0.0, 0.0
	for _, e := range all {
		switch e.order {
		case 0:
			back += e.given
		case 2:
			over += e.given
		default:
			level := -granted + over + refill(e.when)
			for len(begins) > 0 && begins[len(begins)-1].level <= level {
				begins = begins[:len(begins)-1]
			}
			begins = append(begins, begin{e.when, level})
			for e.when-begins[0].when >= span {
				begins = begins[1:]
			}
			granted += e.granted
			share = max(share, (begins[0].level+granted-back-refill(e.when))/capacity)
		}
	}
	return share
}

// sinceAsked returns events, of which what went back begins no later than each grant that had
// not been answered yet: that may have been granted from it. A call that waits for its row is
// told the instant at which it began to wait, since no more was refilled for it; what others
// give back meanwhile is there all the same when it has the row.
func sinceAsked(events []besideEvent) []besideEvent {
	events = slices.SortedFunc(slices.Values(events), func(a, b besideEvent) int { return cmp.Compare(a.From, b.From) })
	var asked []besideEvent
	for i, e := range events {
		switch {
		case e.Count > 0:
			asked = append(asked, e)
		case e.Count < 0:
			asked = slices.DeleteFunc(asked, func(grant besideEvent) bool { return grant.To < e.From })
			for _, grant := range asked {
				events[i].From = min(events[i].From, grant.From)
			}
		}
	}
	return events
}

// besideVerbs are the verbs of processes; the first two also work from memory.
var besideVerbs = []string{
	"Allow", "Reserve", "AllowFunc", "Wait", "Allow, without Escrow",
	"Cancel", "Settle", "Credit", "AllowFunc that fails", "Reset", "Pause", "Resume",
}

// besides does everything to all limits.
func besides(ctx context.Context, e *env) error {
	plain, err := pgstore.New(e.pool, &pgstore.Config{Schema: e.Schema, Portable: e.Portable})
	if err != nil {
		return err
	}
	defer plain.Close()
	var group sync.WaitGroup
	for i, of := range besiegedLimits {
		for n := range of.callers(e.Workers) {
			group.Go(func() { newBesieger(e, i, of, n+1, plain).takeOn(ctx) })
		}
		if i%3 == e.Process-1 { // one that edits is enough
			group.Go(func() { newBesieger(e, i, of, 0, plain).editOn(ctx) })
		}
	}
	group.Wait()
	e.store.Close()
	return nil
}

func newBesieger(e *env, i int, of besieged, n int, plain *pgstore.Store) *besieger {
	return &besieger{
		env: e, of: of, limit: i, lasts: slices.Index(lasting, e.Escrow), plain: plain,
		rand: rand.New(rand.NewPCG(e.Seed, uint64(i<<8|n))),
	}
}

// besieger is one goroutine that does things to one key.
type besieger struct {
	*env
	of           besieged
	limit, lasts int
	plain        *pgstore.Store
	rand         *rand.Rand
}

func (b *besieger) key() string { return besideKey(b.lasts) }

// request asks for some tokens: of a limit of many for more.
func (b *besieger) request() ratelimit.Request {
	most := 3
	if b.of.hot() && !b.of.slow {
		most = 20
	}
	return b.of.limit.ForN(b.key(), float64(1+b.rand.IntN(most)))
}

// rest waits for a while. It reports whether ctx did not end before.
func rest(ctx context.Context, lasts time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(lasts):
		return true
	}
}

// takeOn takes, at the pace of the demand.
func (b *besieger) takeOn(ctx context.Context) {
	pace := b.of.demand / float64(3*b.of.callers(b.Workers)) / 2 // requests are for two on average
	begun := time.Now()
	for done := 0.0; ctx.Err() == nil; done++ {
		if pace > 0 {
			if ahead := time.Duration(done/pace*float64(time.Second)) - time.Since(begun); ahead > 0 && !rest(ctx, ahead) {
				return
			}
		}
		b.take()
	}
}

func (b *besieger) take() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	request := b.request()
	verb, take := "Allow", b.store.Allow
	switch n := b.rand.IntN(b.of.often()); {
	case n == 0:
		verb, take = "Allow, without Escrow", b.plain.Allow
	case n < 3:
		verb, take = "Reserve", b.store.Reserve
	case n == 3 && !b.of.slow:
		verb = "Wait"
		take = func(ctx context.Context, rs ...ratelimit.Request) (ratelimit.Result, error) {
			result, err := b.store.Wait(ctx, rs...)
			return result, unlessRefused(err)
		}
	case n == 4:
		b.function(ctx, request, 0)
		return
	}
	from := time.Now()
	result, err := take(ctx, request)
	b.tell(verb, request, result, err, from, time.Now())
	if err != nil {
		time.Sleep(10 * time.Millisecond)
		return
	}
	if !result.OK {
		time.Sleep(min(max(result.RetryAfter, 200*time.Microsecond), 10*time.Millisecond))
		return
	}
	switch n := b.rand.IntN(b.of.often()); {
	case n == 0 || verb == "Reserve":
		b.giveBack("Cancel", request.Count, 0, func() error {
			cancelled, err := b.store.Cancel(ctx, result.Receipt)
			if err == nil && !cancelled {
				err = errors.New("nothing was cancelled")
			}
			return err
		})
	case n == 1:
		used := float64(b.rand.IntN(int(request.Count)))
		b.giveBack("Settle", request.Count-used, 0, func() error {
			_, err := b.store.Settle(ctx, result.Receipt, used)
			return err
		})
	case n == 2:
		b.giveBack("Credit", request.Count, 0, func() error {
			_, err := b.store.Credit(ctx, request)
			return err
		})
	}
}

// function has a function run for a while, which sometimes fails.
func (b *besieger) function(ctx context.Context, request ratelimit.Request, lasts time.Duration) {
	fails := b.rand.IntN(3) == 0
	var begun time.Time
	from := time.Now()
	var early ratelimit.Result
	result, err := b.store.AllowFunc(ctx, []ratelimit.Request{request}, func(_ pgx.Tx, result ratelimit.Result) error {
		early, begun = result, time.Now()
		time.Sleep(lasts)
		if fails {
			return errRolledBack
		}
		return nil
	})
	switch {
	case errors.Is(err, errRolledBack):
		b.tell("AllowFunc", request, early, nil, from, begun)
		b.out.Write(b.event("AllowFunc that fails", -request.Count, from, time.Now().Add(late)))
	default:
		b.tell("AllowFunc", request, result, unlessRefused(err), from, begun)
	}
}

func (b *besieger) event(verb string, n float64, from, to time.Time) besideEvent {
	return besideEvent{Limit: b.limit, Lasts: b.lasts, Verb: verb, Count: n, From: from.UnixMicro(), To: to.UnixMicro()}
}

// tell writes the result of a call that takes: what was reserved counts when it is due. An answer
// from memory tells the latest instant that it may be on the database's clock, later by as long
// as the statement waited that prefetched. The database's clock is this machine's here, so a
// call that was made from one instant on was granted by another, when it returned or its
// function began.
func (b *besieger) tell(verb string, request ratelimit.Request, result ratelimit.Result, err error, from, by time.Time) {
	switch {
	case err != nil:
		e := b.event(verb, 0, time.Now(), time.Now())
		e.Unknown, e.Err = request.Count, err.Error()
		b.out.Write(e)
	case result.OK:
		at := by
		if result.At.Before(at) {
			at = result.At
		}
		if result.RetryAt.After(result.At) {
			at = result.RetryAt
		}
		e := b.event(verb, request.Count, at, by)
		e.Memory = by.Sub(from) < 50*time.Microsecond
		b.out.Write(e)
	}
}

// giveBack writes the tokens given back.
func (b *besieger) giveBack(verb string, n float64, later time.Duration, give func() error) {
	from := time.Now()
	err := give()
	e := b.event(verb, -n, from, time.Now().Add(later))
	if err != nil {
		e.Err = err.Error()
		e.Unknown = n
	}
	b.out.Write(e)
}

// editOn runs functions that last, resets, and pauses and resumes.
func (b *besieger) editOn(ctx context.Context) {
	for ctx.Err() == nil {
		wait := time.Duration(b.rand.IntN(2000))*time.Millisecond + 4*time.Duration(b.rand.Int64N(int64(b.Escrow)))
		if !rest(ctx, wait) {
			return
		}
		b.edit()
	}
}

func (b *besieger) edit() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	switch n := b.rand.IntN(4); {
	case n == 0 && !b.of.slow:
		b.giveBack("Reset", filled, 0, func() error { return b.store.Reset(ctx, b.of.limit, b.key()) })
	case n < 3 && b.of.pauses:
		b.giveBack("Pause", 0, 0, func() error {
			_, err := b.store.Pause(ctx, b.of.limit, b.key(), time.Duration(20+b.rand.IntN(100))*time.Millisecond)
			return err
		})
		time.Sleep(time.Duration(b.rand.IntN(60)) * time.Millisecond)
		b.giveBack("Resume", 0, 0, func() error { return b.store.Resume(ctx, b.of.limit, b.key()) })
	default:
		b.function(ctx, b.request(), time.Duration(b.rand.Float64()*3*float64(b.Escrow)))
	}
}
