package memstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/flight"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

// ErrLocked is returned by a verb that waited too long, or until its context ended, for a
// transaction that has taken from its limit and key. It wraps the context's error.
var ErrLocked = errors.New("memstore: waited for a transaction")

// ErrSilent is returned by every verb while the store is silent: see [Store.SetSilent]. Its
// SQLSTATE is that of a lost connection.
var ErrSilent error = silentError{}

type silentError struct{}

func (silentError) Error() string    { return "memstore: silent, as a test has asked" }
func (silentError) SQLState() string { return "08006" }

// SetSilent makes every verb fail at once with [ErrSilent], or work again: for tests of what a
// program does without its database, such as with package fallback.
func (s *Store) SetSilent(silent bool) { s.silent.Store(silent) }

// lockTimeout is how long a verb waits without a deadline in its context.
const lockTimeout = 5 * time.Second

// Store keeps limits in memory. It is safe for concurrent use. A nil Store answers every verb with
// [ratelimit.ErrInvalid].
//
// A verb that changes something waits while a transaction has one of its keys, until its context
// ends; without a deadline it waits 5 seconds, and the error is [ErrLocked]. Otherwise a context is
// looked at once, before anything changes.
type Store struct {
	clock   func() time.Time
	watches *watch.Observer
	seen    decide.Definitions
	silent  atomic.Bool
	flight  flight.Permits // the waiters for one
	keepers flight.Renewers

	mu    sync.Mutex
	rows  map[decide.Row]bucket.State
	held  map[decide.Key]*session // that has them until it ends
	freed chan struct{}           // closed when one of them is held no more
}

// Config configures a Store. Its zero value holds the defaults.
type Config struct {
	// Clock is the clock that decides. The default is time.Now.
	Clock func() time.Time

	// Observe hears of every decision and edit, once: see [ratelimit.Observe]. Those outside
	// of transactions are of [ratelimit.FormMemory]. The default, nil, costs nothing.
	Observe ratelimit.Observe
}

// New makes an empty store, in which every limit is full. A nil clock means
// time.Now.
func New(clock func() time.Time) *Store { return NewWithConfig(Config{Clock: clock}) }

// NewWithConfig returns an empty store with a clock and an observer.
func NewWithConfig(config Config) *Store {
	if config.Clock == nil {
		config.Clock = time.Now
	}
	return &Store{
		clock: config.Clock, watches: watch.New(config.Observe, class), rows: map[decide.Row]bucket.State{},
		held: map[decide.Key]*session{}, freed: make(chan struct{}),
	}
}

// class returns the class of an error, for [ratelimit.Event].
func class(err error) string {
	if errors.Is(err, ErrLocked) {
		return "locked"
	}
	return ""
}

// String keeps the keys out of logs.
func (s *Store) String() string { return "memstore.Store" }

// now returns the instant that decides.
func (s *Store) now() time.Time { return s.clock().Truncate(time.Microsecond) }

// session is an open transaction, with its savepoints.
type session struct {
	store  *Store
	layers []*layer // of the transaction, and of each savepoint that is open
}

// layer holds the changes since a transaction or a savepoint began.
type layer struct {
	rows map[decide.Row]row // as they are since then
	keys []decide.Key       // that are held since then
	undo []func()           // further actions of a rollback
}

// row is a row as a layer changed it; it may be deleted.
type row struct {
	state bucket.State
	gone  bool
}

func (of *session) push() *layer {
	l := &layer{rows: map[decide.Row]row{}}
	of.layers = append(of.layers, l)
	return l
}

// depth returns a layer's place among the savepoints, below 0 if it has ended.
func (of *session) depth(l *layer) int { return slices.Index(of.layers, l) }

// keep merges the layers from depth on into the one below, or into the store. It needs the
// store's lock, as undo does.
func (of *session) keep(depth int) {
	for _, l := range of.layers[depth:] {
		if depth > 0 {
			below := of.layers[depth-1]
			maps.Copy(below.rows, l.rows)
			below.keys, below.undo = append(below.keys, l.keys...), append(below.undo, l.undo...)
			continue
		}
		for name, r := range l.rows {
			if r.gone {
				delete(of.store.rows, name)
			} else {
				of.store.rows[name] = r.state
			}
		}
		of.store.free(l.keys)
	}
	of.layers = of.layers[:depth]
}

// undo forgets the layers from depth on.
func (of *session) undo(depth int) {
	for _, l := range slices.Backward(of.layers[depth:]) {
		for _, undo := range slices.Backward(l.undo) {
			undo()
		}
		of.store.free(l.keys)
	}
	of.layers = of.layers[:depth]
}

// free unlocks keys and wakes the waiters for them.
func (s *Store) free(keys []decide.Key) {
	if len(keys) == 0 {
		return
	}
	for _, key := range keys {
		delete(s.held, key)
	}
	close(s.freed)
	s.freed = make(chan struct{})
}

// scope is the place where a verb reads and writes: the store's rows, with a transaction's changes
// over them. The verbs are its methods, so that their forms on their own and with Tx differ in the
// scope alone.
type scope struct {
	*Store
	session *session // nil for a verb on its own
	layer   *layer   // of the transaction or savepoint that the verb was given
	fault   error    // of that
	within  bool     // another verb, of which somebody is told
}

func (s *Store) own() scope { return scope{Store: s} }

// inside returns a scope for the parts of a verb, which are not reported.
func (s scope) inside() scope {
	s.within = true
	return s
}

// watch watches a verb, if somebody is to be told.
func (s scope) watch(ctx context.Context, verb ratelimit.Verb, requests ...ratelimit.Request) (w watch.Watch) {
	switch {
	case s.Store == nil || s.watches == nil || s.within:
		return w
	case s.session != nil || s.fault != nil:
		return s.watches.Begin(ctx, verb, ratelimit.FormTx, requests)
	}
	w.BeginLater(s.watches, ctx, verb, ratelimit.FormMemory, requests)
	return w
}

func (s scope) usable(ctx context.Context) error {
	if s.Store == nil || s.clock == nil {
		return &ratelimit.FieldError{Field: "Store", Value: s.Store, Reason: "must come from memstore.New"}
	}
	if s.fault != nil {
		return s.fault
	}
	if s.silent.Load() {
		return ErrSilent
	}
	return ctx.Err()
}

// lockOpen takes the store's lock, unless the transaction of the scope has ended.
func (s scope) lockOpen() error {
	return s.await(context.Background(), func() string { return "" })
}

// top returns the layer that a verb writes to: the newest open savepoint, as in PostgreSQL, or nil
// for a verb on its own. It needs the store's lock, as get and the methods that write do.
func (s scope) top() *layer {
	if s.session == nil {
		return nil
	}
	return s.session.layers[len(s.session.layers)-1]
}

// lock waits until no other transaction has the keys of a call, and takes the store's lock
// then. A transaction has them from then on.
func (s scope) lock(ctx context.Context, call *decide.Call) error {
	err := s.await(ctx, func() string {
		for i := range call.Demands {
			if s.isOthers(call.Demands[i].KeyOf()) {
				return fmt.Sprintf("limit %q and one of its keys", call.Demands[i].Definition.Name)
			}
		}
		return ""
	})
	if err != nil {
		return err
	}
	if top := s.top(); top != nil {
		for i := range call.Demands {
			if key := call.Demands[i].KeyOf(); s.held[key] == nil {
				s.held[key] = s.session
				top.keys = append(top.keys, key)
			}
		}
	}
	return nil
}

// await waits while another transaction has something that locked names, and takes the store's lock
// then, unless it returns an error.
func (s scope) await(ctx context.Context, locked func() string) error {
	s.mu.Lock()
	for what := locked(); what != ""; what = locked() {
		if _, ok := ctx.Deadline(); !ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, lockTimeout)
			defer cancel()
		}
		freed := s.freed
		s.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return fmt.Errorf("%w that has %s: %w", ErrLocked, what, ctx.Err())
		}
		s.mu.Lock()
	}
	if s.session != nil && s.session.depth(s.layer) < 0 {
		s.mu.Unlock()
		return pgx.ErrTxClosed
	}
	return nil
}

// isOthers reports whether another transaction has a key locked.
func (s scope) isOthers(key decide.Key) bool {
	holder := s.held[key]
	return holder != nil && holder != s.session
}

// get returns the state of a row, if it is there.
func (s scope) get(name decide.Row) (bucket.State, bool) {
	if s.session != nil {
		for _, l := range slices.Backward(s.session.layers) {
			if r, ok := l.rows[name]; ok {
				return r.state, !r.gone
			}
		}
	}
	state, ok := s.rows[name]
	return state, ok
}

func (s scope) put(name decide.Row, state bucket.State) {
	if top := s.top(); top != nil {
		top.rows[name] = row{state: state}
		return
	}
	s.rows[name] = state
}

func (s scope) remove(name decide.Row) {
	if top := s.top(); top == nil {
		delete(s.rows, name)
	} else if _, ok := s.get(name); ok {
		top.rows[name] = row{gone: true}
	}
}

// onRollback calls do if the verb is rolled back with its transaction.
func (s scope) onRollback(do func()) {
	top := s.top()
	top.undo = append(top.undo, do)
}
