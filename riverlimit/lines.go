package riverlimit

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/pgstore"
)

const (
	// A line that is not known here is looked at between lookAfter and twice that after a release.
	// Another process may have parked a job meanwhile.
	lookAfter = 100 * time.Millisecond

	// lookParked is how long after a job was parked its line is looked at. River has written its
	// snooze by then.
	lookParked = 350 * time.Millisecond

	// soon bounds the expected wait of a job for a permit in a worker. River takes about as long to
	// fetch another job. So jobs of seconds wait in no worker, and those of milliseconds need not
	// wait for River.
	soon = 250 * time.Millisecond

	wakeTimeout = 5 * time.Second
	mostParked  = 1000 // jobs that one statement parks
	mostLooked  = 100  // lines that one statement looks at

	// mostBehind is how many jobs a tenant may catch up on others under a shared limit.
	mostBehind = 20
)

// lines is what a process knows of the lines of its jobs. It knows a line from when it has parked
// or found a job there until it finds none.
type lines struct {
	store   *pgstore.Store
	catalog ratelimit.Catalog
	logger  *slog.Logger
	parks   *batch.Queue[*parking]
	poke    chan struct{}

	mu      sync.Mutex
	of      map[lineID]*line
	took    map[string]time.Duration // for how long permits of a limit are held, on average
	running bool
	later   time.Time // when to look at lines that are not known
	logged  time.Time
}

// line is what is known of a line.
type line struct {
	lineID
	limit   ratelimit.InFlight
	shared  *line         // the line of the last limit that its jobs ask for; itself if they ask for one
	under   []*line       // the lines whose shared line it is
	used    time.Duration // for how long its jobs have held permits; of a shared line, the most of those that had a turn
	known   bool          // that jobs are parked there
	parks   int           // how many jobs were parked there from here
	left    []int64       // jobs that have come by themselves, until they are taken out
	waiting int           // weight of the jobs that wait in workers here
	moved   time.Time     // when jobs were parked or woken there last
	next    time.Time     // when to look at it; never if it is zero
	pause   time.Duration // before the next look, if the last one found room but woke no job
}

func newLines(store *pgstore.Store, catalog ratelimit.Catalog, logger *slog.Logger) *lines {
	l := &lines{store: store, catalog: catalog, logger: logger, poke: make(chan struct{}, 1), of: make(map[lineID]*line), took: make(map[string]time.Duration)}
	l.parks = batch.New(mostParked, wakeTimeout, l.serve, nil)
	return l
}

// client is the part of River's client that matters here, whatever its driver.
type client interface {
	Schema() string
	Stopped() <-chan struct{}
}

// clientOf returns the client that works the job of ctx, or nil.
func clientOf(ctx context.Context) client {
	if c, err := river.ClientFromContextSafely[pgx.Tx](ctx); err == nil {
		return c
	}
	if c, err := river.ClientFromContextSafely[*sql.Tx](ctx); err == nil {
		return c
	}
	return nil
}

// idOf returns the line of a part of a request.
func idOf(c client, name, key string) lineID {
	id := lineID{name: name, key: key}
	if c != nil {
		id.river = c.Schema()
	}
	return id
}

// line returns what is known of a line. It needs mu.
func (l *lines) line(id lineID, limit ratelimit.InFlight) *line {
	li := l.of[id]
	if li == nil {
		li = &line{lineID: id}
		l.of[id] = li
	}
	li.limit = limit
	return li
}

// standby returns how much more weight may wait for permits of a line in workers here; it is
// negative if too much does. It is at most that of the shared line, or one tenant's jobs would keep
// others' from the workers. It needs mu.
func (l *lines) standby(li *line) int {
	n := l.startSoon(li)
	if li.shared != nil {
		n = min(n, max(l.startSoon(li.shared), -li.waiting))
	}
	return n
}

// startSoon returns standby by the line's own limit only.
func (l *lines) startSoon(li *line) int {
	took := l.took[li.name]
	if took == 0 {
		return -li.waiting
	}
	return min(int(time.Duration(li.limit.Limit)*soon/took), 2*li.limit.Limit+fronts) - li.waiting
}

// enter returns for how long a job may wait for its permits in a worker. A job that waits must
// leave afterwards; with 0 it asks without waiting. A new job may neither wait nor ask if as many
// jobs of a known line wait here as may: then full is that part of its request. A woken job waits
// all the same, but not long.
func (l *lines) enter(c client, asked *ratelimit.PermitRequest, woken bool, most time.Duration) (wait time.Duration, full *ratelimit.PermitRequest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	parts := asked.Parts()
	for i, p := range parts {
		id := idOf(c, p.Limit.Name, p.Key)
		li := l.of[id]
		switch {
		case li == nil || !li.known:
		case l.standby(li) >= p.N:
			wait = max(wait, most)
		case woken && i < len(parts)-1: // the next limit says whether it may wait for long
			wait = max(wait, min(most, soon))
		case !woken && p.Limit.Mode != ratelimit.ModeRefuse:
			return 0, &parts[i]
		default:
			wait, most = min(most, soon), min(most, soon)
		}
	}
	if wait > 0 {
		for _, p := range parts {
			l.line(idOf(c, p.Limit.Name, p.Key), p.Limit).waiting += p.N
		}
	}
	return wait, nil
}

// leave ends the wait of a job that has entered. If it was in vain, others get what was left for it.
func (l *lines) leave(c client, asked *ratelimit.PermitRequest, vain bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range asked.Parts() {
		li := l.of[idOf(c, p.Limit.Name, p.Key)]
		if li == nil {
			continue
		}
		if li.waiting -= p.N; vain {
			l.lookAt(c, li, time.Now())
		}
	}
}

// park parks a job in the line of the part of its request that was refused, by a statement shared with
// other jobs, and reports whether it is the first there.
func (l *lines) park(ctx context.Context, c client, job *rivertype.JobRow, asked *ratelimit.PermitRequest, refused *ratelimit.Permit) (first bool, err error) {
	p := &parking{line: idOf(c, refused.InFlight.Name, refused.Key), priority: job.Priority, job: job.ID, weight: refused.N}
	if p.line == idOf(c, asked.Limit.Name, asked.Key) {
		p.place = &job.CreatedAt
	}
	if _, err := l.parks.Do(ctx, p); err != nil {
		return false, err
	}
	if p.err != nil {
		return false, p.err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	li := l.line(p.line, refused.InFlight)
	li.known, li.moved = true, time.Now()
	li.parks++
	l.lookAt(c, li, time.Now().Add(lookParked))
	return p.first, nil
}

// serve parks the jobs that have gathered.
func (l *lines) serve(ctx context.Context, tickets []*batch.Ticket[*parking]) {
	jobs := make([]*parking, len(tickets))
	for i, t := range tickets {
		jobs[i] = t.Value
	}
	err := l.alone(ctx, func(tx pgx.Tx) error { return park(ctx, tx, l.store.Schema(), jobs) })
	for _, t := range tickets {
		t.Value.err = err
		t.Finish()
	}
}

// alone runs a statement at READ COMMITTED, whatever the default is: stricter levels let others
// fail it.
func (l *lines) alone(ctx context.Context, do func(tx pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, l.store.Pool(), pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, do)
}

// lookAt makes sure that a line is looked at by an instant.
func (l *lines) lookAt(c client, li *line, at time.Time) {
	if li.next.IsZero() || at.Before(li.next) {
		li.next, li.pause = at, 0
	}
	if !l.running {
		l.running = true
		var stopped <-chan struct{}
		if c != nil {
			stopped = c.Stopped()
		}
		go l.run(stopped)
		return
	}
	select {
	case l.poke <- struct{}{}:
	default:
	}
}

// end ends the work of a job that has held a permit since an instant. If jobs are parked for the
// permit, end releases it in the transaction that wakes them. Otherwise the caller releases it.
func (l *lines) end(ctx context.Context, c client, job int64, permit *ratelimit.Permit, since time.Time) {
	calls, here := l.calls(c, permit, time.Since(since))
	switch {
	case here: // a job that waits here gets the permit
		l.looks(c, permit)
		return
	case len(calls) == 0:
		return
	}
	calls[0].ended = append(calls[0].ended, job)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), wakeTimeout)
	defer cancel()
	err := l.store.Permits().ReleaseFunc(ctx, *permit, func(tx pgx.Tx) error { return wake(ctx, tx, l.store, calls) })
	if err != nil {
		l.looks(c, permit)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, call := range calls {
		l.answered(c, call)
	}
}

// calls returns the calls for the known lines of a permit that is released. The other lines are
// looked at later, all together. Under a shared limit, the line whose turn it is takes the place of
// the permit's own. A permit of one limit is handed to a job that waits for it in a worker here:
// then here is true, and there are no calls. calls also notes for how long the permit was held.
func (l *lines) calls(c client, permit *ratelimit.Permit, held time.Duration) (calls []*call, here bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	parts := permit.Parts()
	for _, p := range parts {
		name := p.InFlight.Name
		took := held
		if was := l.took[name]; was > 0 {
			took = was + (held-was)/4
		}
		l.took[name] = max(took, time.Microsecond)
		li := l.of[idOf(c, name, p.Key)]
		here = here || li != nil && li.waiting > 0
	}
	if here && len(parts) == 1 {
		return nil, true
	}
	if now := time.Now(); l.later.Before(now.Add(lookAfter)) {
		l.later = now.Add(2 * lookAfter)
	}
	shared, last := l.share(c, parts, held), parts[len(parts)-1]
	turn := l.turn(shared)
	for _, p := range parts {
		li := l.of[idOf(c, p.InFlight.Name, p.Key)]
		freed := 1 + len(p.More)
		if li.waiting > 0 { // such a job may take it, so the statement counts what is free
			freed = 0
		}
		switch {
		case !li.known:
			l.lookAt(c, li, l.later)
		case turn == nil || li == shared:
			calls = append(calls, l.call(li, freed))
		case li != turn:
			l.lookAt(c, li, time.Now().Add(lookParked))
		}
	}
	if turn != nil {
		calls = append(calls, l.call(turn, 1+len(last.More)))
	}
	return calls, false
}

// share notes in a job's lines for how long it has held permits, and returns the shared line: that of its last
// limit. It needs mu.
func (l *lines) share(c client, parts []ratelimit.Permit, held time.Duration) (shared *line) {
	last := parts[len(parts)-1]
	shared = l.line(idOf(c, last.InFlight.Name, last.Key), last.InFlight)
	for _, p := range parts {
		li := l.line(idOf(c, p.InFlight.Name, p.Key), p.InFlight)
		if li.shared != shared {
			li.leave()
			if li.shared = shared; li != shared {
				shared.under = append(shared.under, li)
			}
		}
		if li != shared {
			li.used = held + max(li.used, shared.used-mostBehind*l.took[li.name])
		}
	}
	return shared
}

// turn returns the line under a shared one whose next job is woken, or nil. Only lines with parked
// jobs, and with room for one more in workers here, get a turn. Among them it picks the line whose
// jobs have held permits for the shortest time; jobs that wait here count as well. It needs mu.
func (l *lines) turn(shared *line) (next *line) {
	least := time.Duration(0)
	for _, li := range shared.under {
		used := li.used + time.Duration(li.waiting)*l.took[li.name]
		if li.known && li.pause == 0 && l.startSoon(li) > 0 && (next == nil || used < least) {
			next, least = li, used
		}
	}
	if next != nil {
		shared.used = max(shared.used, next.used)
	}
	return next
}

// leave takes a line out of its shared one.
func (li *line) leave() {
	if li.shared != nil {
		li.shared.under = slices.DeleteFunc(li.shared.under, func(u *line) bool { return u == li })
	}
}

// forget forgets a line where no jobs are known or looked for. It needs mu.
func (l *lines) forget(li *line) {
	if li.known || li.waiting > 0 || !li.next.IsZero() || len(li.under) > 0 {
		return
	}
	delete(l.of, li.lineID)
	if li.leave(); li.shared != nil && li.shared != li {
		l.forget(li.shared)
	}
}

// call returns the call for a line, by what the catalog says now. Its answer says when to look
// again. It needs mu.
func (l *lines) call(li *line, freed int) *call {
	if l.catalog != nil {
		li.limit = l.catalog.InFlight(li.limit, li.key)
	}
	ended := li.left
	li.left, li.next = nil, time.Time{}
	return &call{
		line: li.lineID, limit: li.limit.Limit, lease: li.limit.LeaseOrDefault(), freed: freed, extra: l.standby(li),
		ended: ended, parks: li.parks,
	}
}

// passOn makes sure that the lines of a request's other parts are looked at, which have not refused
// it. The job may have been woken for a permit of one of them, and has not taken it.
func (l *lines) passOn(c client, asked *ratelimit.PermitRequest, refused *ratelimit.Permit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range asked.Parts() {
		if p.Limit.Name != refused.InFlight.Name || p.Key != refused.Key {
			l.lookAt(c, l.line(idOf(c, p.Limit.Name, p.Key), p.Limit), time.Now())
		}
	}
}

// looks makes sure that the lines of a permit are looked at: there may be permits for other jobs.
// The jobs in came leave their lines. They came by themselves, at the end of a lease or by a retry.
func (l *lines) looks(c client, permit *ratelimit.Permit, came ...int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range permit.Parts() {
		li := l.line(idOf(c, p.InFlight.Name, p.Key), p.InFlight)
		li.left = append(li.left, came...)
		l.lookAt(c, li, time.Now())
	}
}

// answered notes what a look has found. It needs mu.
func (l *lines) answered(c client, call *call) {
	li := l.of[call.line]
	if li == nil {
		return
	}
	li.known = call.More || li.parks != call.parks // the look may have missed jobs that were parked since it began
	if call.Woken > 0 {
		li.moved = time.Now()
	}
	wait, pause := call.lease, time.Duration(0)
	switch {
	case !li.known:
		l.forget(li)
		return
	case call.Dead >= fronts:
		wait = 0
	case call.Room && call.Woken == 0: // River has not written their snoozes yet
		pause = min(max(2*li.pause, lookParked), call.lease)
		wait = pause
	case call.Room:
		wait = lookParked
	}
	l.lookAt(c, li, time.Now().Add(wait))
	li.pause = pause
}

// run looks at lines when they are due, until none is or the client has stopped. Then it looks once
// more at those that are due soon.
func (l *lines) run(stopped <-chan struct{}) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-l.poke:
		case <-stopped:
			l.look(time.Now().Add(lookParked), true)
			l.mu.Lock()
			l.running = false
			l.mu.Unlock()
			return
		}
		l.look(time.Now(), false)
		l.mu.Lock()
		next := time.Time{}
		for _, li := range l.of {
			if !li.next.IsZero() && (next.IsZero() || li.next.Before(next)) {
				next = li.next
			}
		}
		if next.IsZero() {
			l.running = false
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
		timer.Reset(max(0, time.Until(next)))
	}
}

// look looks at the lines that are due at an instant. Lines under a shared one in which jobs stand
// are left to their turns, unless it is the last look.
func (l *lines) look(at time.Time, last bool) {
	for _, calls := range l.due(at, last) {
		for len(calls) > 0 {
			some := calls[:min(len(calls), mostLooked)]
			calls = calls[len(some):]
			ctx, cancel := context.WithTimeout(context.Background(), wakeTimeout)
			err := l.alone(ctx, func(tx pgx.Tx) error { return wake(ctx, tx, l.store, some) })
			cancel()
			if last && err != nil {
				return // the program may have closed the pool; a line is looked at by others, and within a lease
			}
			l.looked(some, err)
		}
	}
}

func (l *lines) due(at time.Time, last bool) map[string][]*call {
	l.mu.Lock()
	defer l.mu.Unlock()
	due := make(map[string][]*call)
	for _, li := range l.of {
		switch shared := li.shared; {
		case li.next.IsZero() || li.next.After(at):
		case !last && li.pause == 0 && shared != nil && shared != li && shared.known && at.Before(shared.moved.Add(shared.limit.LeaseOrDefault())):
			li.next = at.Add(lookParked)
		default:
			li.next = time.Time{}
			due[li.river] = append(due[li.river], l.call(li, 0))
		}
	}
	return due
}

// looked notes what a statement has found, or that it failed.
func (l *lines) looked(calls []*call, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, call := range calls {
		li := l.of[call.line]
		switch {
		case err == nil:
			l.answered(nil, call)
		case li == nil:
		case errors.Is(err, ErrNotMigrated) && li.waiting == 0: // nobody is parked
			li.known = false
			l.forget(li)
		default:
			l.lookAt(nil, li, time.Now().Add(faultSnooze))
		}
	}
	if err != nil && time.Since(l.logged) > time.Minute {
		l.logged = time.Now()
		l.logger.Error("riverlimit: jobs that wait in line could not be woken; trying again", slog.String("error", err.Error()))
	}
}
