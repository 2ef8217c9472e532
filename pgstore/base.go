package pgstore

import (
	"context"
	"fmt"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
	"github.com/pgratelimit/ratelimit/pgstore/internal/shards"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// base is shared by all of a Store's ways of deciding.
type base struct {
	*conn.Conn
	table  *table.Table
	config Config

	seen   decide.Definitions
	shards shards.Cache
	cache  *escrow.Cache // nil without Config.Escrow

	observer *watch.Observer                          // nil without Config.Observe
	counts   struct{ statements, calls atomic.Int64 } // for [Store.Stats]

	unanswered atomic.Bool // was the last [Store.Probe]?
}

func newBase(pool *pgxpool.Pool, config Config) *base {
	c := &conn.Conn{Pool: pool, Schema: config.Schema, Timeout: config.Timeout, RetryBudget: config.RetryBudget, Now: config.Clock}
	c.Open()
	return &base{Conn: c, config: config, observer: watch.New(config.Observe, conn.Class), table: table.New(config.Schema, config.Portable, c.Silence())}
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
	var session any
	if tx != nil {
		session, _ = conn.Session(tx)
	}
	return call.Receipted(changes, b.took(call, changes, at.UTC()), xid, session)
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

// faultOf is fault of a call in a caller's transaction. It names the limit, and also the
// lock that was waited for, as far as the server says so.
func (b *base) faultOf(call *decide.Call, err error) error {
	key := call.Demands[0].KeyOf()
	if conn.Code(err) == conn.LockNotAvailable {
		return conn.Locked(key.Name, err)
	}
	doing := fmt.Sprintf("take from limit %q", key.Name)
	if n := len(call.Demands) - 1; n > 0 {
		doing += fmt.Sprintf(", and from %d more", n)
	}
	return b.Fault(doing, err)
}
