package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/escrow"
	"github.com/pgratelimit/ratelimit/internal/shards"
	"github.com/pgratelimit/ratelimit/internal/table"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

// base is shared by all of a Store's ways of deciding.
type base struct {
	pool   *pgxpool.Pool
	table  *table.Table
	config Config

	seen     decide.Definitions
	shards   shards.Cache
	cache    *escrow.Cache // nil without Config.Escrow
	work     work
	blocking chan struct{} // has room for the connections that may wait for a locked row

	observer *watch.Observer                                   // nil without Config.Observe
	counts   struct{ statements, calls, retries atomic.Int64 } // for [Store.Stats]
}

func newBase(pool *pgxpool.Pool, config Config) *base {
	b := &base{pool: pool, config: config, observer: watch.New(config.Observe, class), table: table.New(config.Schema, config.Portable, silence(config.Timeout))}
	b.work.over = make(chan struct{})
	b.work.open, b.work.shut = context.WithCancel(context.Background())
	if pool != nil {
		b.blocking = make(chan struct{}, min(pool.Config().MaxConns/4, 4))
	}
	return b
}

// silence returns for how long the server keeps the locks of a decision's own transaction while
// it hears nothing of us.
func silence(timeout time.Duration) time.Duration {
	if timeout == NoTimeout {
		return defaultTimeout
	}
	return timeout
}

// work counts the calls that Close waits for. All calls pass here, and each writes this one
// number twice; a lock and a sync.WaitGroup would write shared memory four times.
type work struct {
	under          atomic.Int64 // how much is under way; by closing less when nothing more is to begin
	closing, ended sync.Once
	over           chan struct{} // closed when nothing is under way then

	open context.Context // ends when nothing more is to begin
	shut context.CancelFunc
}

const closing = math.MinInt64 / 2

func (w *work) begin(ctx context.Context) error {
	if w.under.Add(1) > 0 || ctx.Value(w) != nil {
		return nil
	}
	w.end()
	return ErrClosed
}

// whole begins something of several parts, such as a wait. Its context ends when the Store
// is closed, but its parts, which have w in theirs, begin all the same.
func (w *work) whole(ctx context.Context) (_ context.Context, end func(), err error) {
	if err := w.begin(ctx); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(context.WithValue(ctx, w, true))
	stop := context.AfterFunc(w.open, cancel)
	return ctx, func() { stop(); cancel(); w.end() }, nil
}

func (w *work) end() {
	if w.under.Add(-1) == closing {
		w.ended.Do(func() { close(w.over) })
	}
}

// spawn starts a goroutine for work that was begun.
func (w *work) spawn(f func()) {
	w.under.Add(1)
	go func() {
		defer w.end()
		f()
	}()
}

// underWay is how much is under way, also when nothing more is to begin.
func (w *work) underWay() int64 {
	n := w.under.Load()
	if n < 0 {
		n -= closing
	}
	return n
}

func (w *work) close() {
	w.closing.Do(func() {
		w.shut()
		w.under.Add(closing + 1)
		w.end()
	})
	<-w.over
}

const (
	firstPause   = 2 * time.Millisecond
	longestPause = 250 * time.Millisecond

	mostForgotten = 24 // prepared statements that a decision finds gone, at most
)

// retry runs attempt until PostgreSQL does not ask for another, with full jitter in between
// (Brooker, "Exponential Backoff And Jitter", 2015), until ctx is over, or for the retry budget
// if it has no deadline. An error because ctx is over wraps the last error of PostgreSQL too.
// On a connection that has lost its prepared statements, pgx prepares one more with each
// attempt. A transaction that may have been committed is not attempted again.
func (b *base) retry(ctx context.Context, attempt func() error) error {
	return b.retryCounted(ctx, func() {}, attempt)
}

// retryCounted is retry that calls again before each attempt that PostgreSQL has asked for.
func (b *base) retryCounted(ctx context.Context, again func(), attempt func() error) error {
	end, hasDeadline := ctx.Deadline()
	if !hasDeadline {
		end = time.Now().Add(b.config.RetryBudget)
	}
	var last error // that asked for another attempt
	longest := firstPause
	for n, forgotten := 1, 0; ; n++ {
		err := attempt()
		if err == nil {
			return nil
		}
		if isForgotten(err) && forgotten < mostForgotten && ctx.Err() == nil {
			forgotten++
			continue
		}
		if !retriable(err) || isDone(err) {
			if last != nil && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)) {
				return fmt.Errorf("pgstore: gave up after %d attempts: %w: %w", n, err, last)
			}
			return err
		}
		last = err
		pause := time.Duration(rand.Int64N(int64(longest)))
		if time.Until(end) <= pause {
			if hasDeadline {
				err = fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
			}
			return fmt.Errorf("pgstore: gave up after %d attempts: %w", n, err)
		}
		longest = min(2*longest, longestPause)
		if ctxErr := sleep(ctx, pause); ctxErr != nil {
			return fmt.Errorf("pgstore: gave up after %d attempts: %w: %w", n, ctxErr, err)
		}
		b.counts.retries.Add(1)
		again()
	}
}

// isForgotten reports whether the server did nothing, since the connection does not
// have a statement any more that pgx had prepared.
func isForgotten(err error) bool {
	return code(err) == "26000" && !isDone(err) // invalid_sql_statement_name
}

// errCommitted is a function that failed after it had committed.
var errCommitted = errors.New("pgstore: the function committed the transaction itself, so it is not run again")

// isDone reports whether an attempt was committed, or may have been.
func isDone(err error) bool {
	return errors.Is(err, ErrOutcomeUnknown) || errors.Is(err, errCommitted)
}

// sleep returns after a pause, or with ctx's error when that is over first.
func sleep(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// clock is the instant that decides, nil for the database's.
func (b *base) clock() *time.Time {
	if b.config.Clock == nil {
		return nil
	}
	now := b.config.Clock().UTC().Truncate(time.Microsecond)
	return &now
}

// watch watches a verb, if the Store is observed.
func (b *base) watch(ctx context.Context, verb ratelimit.Verb, form ratelimit.Form, requests ...ratelimit.Request) (w watch.Watch) {
	if b == nil || b.observer == nil {
		return w
	}
	return b.observer.Begin(ctx, verb, form, requests)
}

// later watches a verb on its own by w, whose time begins when it is not answered from memory.
func (b *base) later(w *watch.Watch, ctx context.Context, verb ratelimit.Verb, requests ...ratelimit.Request) {
	if b != nil {
		w.Later(b.observer, ctx, verb, ratelimit.FormOwn, requests)
	}
}

// now is the instant of a decision without the database.
func (b *base) now() time.Time {
	if now := b.clock(); now != nil {
		return *now
	}
	return time.Now().UTC().Truncate(time.Microsecond)
}

// usable is the error of a Store that did not come from New.
func (b *base) usable() error {
	if b == nil {
		return &ratelimit.FieldError{Field: "Store", Value: nil, Reason: "must come from pgstore.New"}
	}
	return nil
}

// usableIn is the error of a verb in a transaction that is none.
func (b *base) usableIn(tx pgx.Tx) error {
	if err := b.usable(); err != nil {
		return err
	}
	if v := reflect.ValueOf(tx); tx == nil || v.Kind() == reflect.Pointer && v.IsNil() {
		return &ratelimit.FieldError{Field: "Tx", Value: nil, Reason: "must not be nil"}
	}
	return nil
}

// call returns the call of a verb, and notes the definitions of its limits.
func (b *base) call(verb decide.Verb, reserve bool, requests []ratelimit.Request) (decide.Call, error) {
	call, err := verb.Call(reserve, requests)
	if err != nil {
		return decide.Call{}, err
	}
	return call, b.seen.NoteCall(&call)
}

// granted returns the result of a call with changes made at an instant. xid is the transaction
// or savepoint that made them, in tx; that is nil when they are committed.
func (b *base) granted(call *decide.Call, changes []decide.Change, at time.Time, xid string, tx pgx.Tx) ratelimit.Result {
	var conn any
	if tx != nil {
		conn, _ = session(tx)
	}
	return call.Receipted(changes, b.took(call, changes, at.UTC()), xid, conn)
}

// session returns a value that identifies the connection of a transaction, and the data kept
// with it; nil if it is not known. A transaction of package sqltx has no connection of pgx.
func session(tx pgx.Tx) (conn any, data map[string]any) {
	if conn := tx.Conn(); conn != nil {
		return conn, conn.PgConn().CustomData()
	}
	if other, ok := tx.(interface{ Session() (any, map[string]any) }); ok {
		return other.Session()
	}
	return nil, nil
}

// took notes the changes of a call, and returns the states then known of its limits.
func (b *base) took(call *decide.Call, changes []decide.Change, at time.Time) decide.View {
	for i := range changes {
		b.cache.Changed(changes[i].Key)
	}
	view := decide.View{At: at}
	if call.Sharded() {
		view.States = b.shards.Took(call, changes, at)
	}
	return view
}

// saw notes the states read of a call's limits.
func (b *base) saw(call *decide.Call, view decide.View) {
	for i := range call.Demands {
		b.shards.Observe(&call.Demands[i], view.States[i])
	}
}

// changed forgets the known state of a key's rows, which were changed otherwise than by a take.
// Leases stay.
func (b *base) changed(key decide.Key) {
	b.shards.Forget(key)
	b.cache.Changed(key)
}

// spent takes out the tokens that this process has used from memory and that the row of a key is to
// learn of: they are not out any more. A transaction of the Store's own that gives something back
// tells rows, and has in its context, under b, those that it has told. A caller's transaction has
// none, since it may be rolled back unnoticed. A sliding window's row learns of none, since refunds
// go to their own permits, with any number of tokens out.
func (b *base) spent(ctx context.Context, d *bucket.Definition, key decide.Key) bucket.Spent {
	told, own := ctx.Value(b).(map[decide.Key]bucket.Spent)
	if !own || b.cache == nil || d.Slotted() {
		return bucket.Spent{}
	}
	if _, said := told[key]; said { // with another of its rows
		return bucket.Spent{}
	}
	told[key] = b.cache.Spent(key)
	return told[key]
}

// unsaid notes that a transaction was rolled back that was to tell rows something.
func (b *base) unsaid(told map[decide.Key]bucket.Spent) {
	for key, spent := range told {
		b.cache.Unsaid(key, spent)
	}
}

// fault wraps an error of the database.
func (b *base) fault(doing string, err error) error { return fault(b.config.Schema, doing, err) }

// faultOf is fault of a call in a caller's transaction. It names the limit, and also the
// lock that was waited for, as far as the server says so.
func (b *base) faultOf(call *decide.Call, err error) error {
	key := call.Demands[0].KeyOf()
	if code(err) == lockNotAvailable {
		return locked(key, err)
	}
	doing := fmt.Sprintf("take from limit %q, key %q", key.Name, key.Key)
	if n := len(call.Demands) - 1; n > 0 {
		doing += fmt.Sprintf(", and from %d more", n)
	}
	return b.fault(doing, err)
}
