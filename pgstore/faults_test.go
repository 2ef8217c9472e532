package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/internal/relay"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// ownVerb is a verb on its own. It reports what a caller would act on: anything but
// false when there is an error is a fault.
type ownVerb struct {
	name string
	do   func(context.Context, *pgstore.Store, ratelimit.Request) (ok bool, err error)
}

// txVerb is a verb in a transaction, in the same way.
type txVerb struct {
	name string
	do   func(context.Context, *pgstore.Store, pgx.Tx, ratelimit.Request) (ok bool, err error)
}

// aside is a request beside that of a test.
var aside = slow("another", 10).For("")

// taking asks for a test's request, and for more.
func taking(verb func(verbs, context.Context, ...ratelimit.Request) (ratelimit.Result, error), more ...ratelimit.Request) func(context.Context, verbs, ratelimit.Request) (bool, error) {
	return func(ctx context.Context, s verbs, r ratelimit.Request) (bool, error) {
		return isYes(verb(s, ctx, append([]ratelimit.Request{r}, more...)...))
	}
}

// running reports also whether the function ran.
func running(verb func(*pgstore.Store, context.Context, []ratelimit.Request, func(pgx.Tx, ratelimit.Result) error) (ratelimit.Result, error)) func(context.Context, *pgstore.Store, ratelimit.Request) (bool, error) {
	return func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		ran := false
		ok, err := isYes(verb(s, ctx, []ratelimit.Request{r}, func(pgx.Tx, ratelimit.Result) error { ran = true; return nil }))
		return ok || ran, err
	}
}

// said reports whether a verb returned something besides its error.
func said[T comparable](value T, err error) (bool, error) { return value != *new(T), err }

// storeVerbs are the verbs that take a limit both on their own and in a transaction.
var storeVerbs = []struct {
	name string
	do   func(context.Context, verbs, ratelimit.Request) (ok bool, err error)
}{
	{"Allow", taking(verbs.Allow)},
	{"Allow several", taking(verbs.Allow, aside)},
	{"Reserve", taking(verbs.Reserve)},
	{"Check", taking(verbs.Check)},
	{"CheckReserve", taking(verbs.CheckReserve)},
	{"AllowFirst", taking(verbs.AllowFirst, aside)},
	{"AllowAtMost", func(ctx context.Context, s verbs, r ratelimit.Request) (bool, error) {
		result, err := s.AllowAtMost(ctx, r)
		return result.OK || result.Taken != 0 || result.Receipt != nil, err
	}},
	{"Take", func(ctx context.Context, s verbs, r ratelimit.Request) (bool, error) {
		err := s.Take(ctx, r)
		return err == nil, err
	}},
	{"Settle", func(ctx context.Context, s verbs, r ratelimit.Request) (bool, error) {
		return isOK(s.Settle(ctx, paid(r), r.Count+1))
	}},
	{"Cancel", func(ctx context.Context, s verbs, r ratelimit.Request) (bool, error) { return s.Cancel(ctx, paid(r)) }},
	{"Credit", func(ctx context.Context, s verbs, r ratelimit.Request) (bool, error) { return said(s.Credit(ctx, r)) }},
	{"Pause", func(ctx context.Context, s verbs, r ratelimit.Request) (bool, error) {
		return said(s.Pause(ctx, r.Limit, r.Key, time.Hour))
	}},
	{"Resume", func(ctx context.Context, s verbs, r ratelimit.Request) (bool, error) {
		return false, s.Resume(ctx, r.Limit, r.Key)
	}},
	{"Reset", func(ctx context.Context, s verbs, r ratelimit.Request) (bool, error) {
		return false, s.Reset(ctx, r.Limit, r.Key)
	}},
}

// ownVerbs are all verbs on their own that take a limit, and verbsInTx those in a transaction.
var ownVerbs, verbsInTx = func() (own []ownVerb, inTx []txVerb) {
	for _, v := range storeVerbs {
		own = append(own, ownVerb{v.name, func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) { return v.do(ctx, s, r) }})
		inTx = append(inTx, txVerb{v.name + "Tx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
			return v.do(ctx, txVerbs{s, tx}, r)
		}})
	}
	inTx = append(inTx, txVerb{"PauseEachTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return said(s.PauseEachTx(ctx, tx, []ratelimit.Request{r, aside}, time.Hour))
	}})
	return append(own, otherVerbs...), inTx
}()

// otherVerbs are those on their own that have no form in a transaction, or another.
var otherVerbs = []ownVerb{
	{"AllowFunc", running((*pgstore.Store).AllowFunc)},
	{"ReserveFunc", running((*pgstore.Store).ReserveFunc)},
	{"Wait", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return isYes(s.Wait(ctx, r))
	}},
	{"PauseEach", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return said(s.PauseEach(ctx, []ratelimit.Request{r, aside}, time.Hour))
	}},
	{"CheckEach", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		statuses, err := s.CheckEach(ctx, r, r)
		return statuses != nil, err
	}},
	{"Rows", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (told bool, err error) {
		for _, err = range s.Rows(ctx, r.Limit, ratelimit.Page{Prefix: r.Key}) {
			told = told || err == nil
		}
		return told, err
	}},
	{"Prune", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return said(s.Prune(ctx, r.Limit))
	}},
}

// verbNamed is one of ownVerbs.
func verbNamed(name string) ownVerb {
	return ownVerbs[slices.IndexFunc(ownVerbs, func(v ownVerb) bool { return v.name == name })]
}

// tableVerbs are those that take no definition, in the same way.
var tableVerbs = []ownVerb{
	{"Names", func(ctx context.Context, s *pgstore.Store, _ ratelimit.Request) (bool, error) {
		names, err := s.Names(ctx)
		return names != nil, err
	}},
	{"Forget", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return said(s.Forget(ctx, ratelimit.NameOf(r.Limit)))
	}},
	{"Ready", func(ctx context.Context, s *pgstore.Store, _ ratelimit.Request) (bool, error) {
		return false, s.Ready(ctx)
	}},
}

// paid is the receipt of what was not taken, which can be cancelled.
func paid(r ratelimit.Request) *ratelimit.Receipt {
	limit := &receipt.Limit{Definition: bucket.Definition(r.Limit.Definition()), Key: r.Key}
	return receipt.New([]receipt.Payment{{Limit: limit, Tokens: r.Count}}, nil, "", nil, time.Time{})
}

// soon is a context with a deadline that a server that answers would keep.
func soon(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), 20*time.Second)
}

// shortly is a context for those who wait in vain.
func shortly(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), 30*time.Millisecond)
}

func over(t *testing.T) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx, cancel
}

// address is a pool of connections to an address where no PostgreSQL is.
func address(t *testing.T, l net.Listener) *pgtest.DB {
	t.Helper()
	return &pgtest.DB{Schema: "none", Pool: newPool(t, fmt.Sprintf("postgres://nobody@%s/none?sslmode=disable", l.Addr()))}
}

// listen listens where nobody accepts.
func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	return l
}

// Whatever is wrong with the database, no verb says yes, and none changes anything.
func TestFailClosed(t *testing.T) {
	t.Parallel()
	db, exhausted, silent, refused := pgtest.New(t), pgtest.New(t, maxConns(1)), listen(t), listen(t)
	must(t, refused.Close())
	conn, err := exhausted.Pool.Acquire(t.Context())
	must(t, err)
	for name, test := range map[string]struct {
		db   *pgtest.DB
		ctx  func(*testing.T) (context.Context, context.CancelFunc)
		want error
	}{
		"without a pool": {&pgtest.DB{}, soon, pgstore.ErrNoPool},
		"not migrated":   {pgtest.NewEmpty(t), soon, pgstore.ErrNotMigrated},
		"cancelled":      {db, over, context.Canceled},
		"exhausted":      {exhausted, shortly, context.DeadlineExceeded},
		"refused":        {address(t, refused), soon, nil},
		"silent":         {address(t, silent), shortly, context.DeadlineExceeded},
	} {
		var group sync.WaitGroup // all of them wait at the same time
		for _, portable := range []bool{false, true} {
			store := newStore(t, test.db, isPortable(portable))
			for _, limit := range []ratelimit.Limit{slow("bucket", 10), slowWindow("window", 10), shardedSlow("shards", 10, 2)} {
				for _, verb := range append(tableVerbs, ownVerbs...) {
					group.Go(func() {
						ctx, cancel := test.ctx(t)
						defer cancel()
						ok, err := verb.do(ctx, store, limit.For("k"))
						if ok || err == nil || test.want != nil && !errors.Is(err, test.want) {
							t.Errorf("%s: %s of %s: got OK %v, error %v; want error %v", name, verb.name, ratelimit.NameOf(limit), ok, err, test.want)
						}
					})
				}
			}
		}
		group.Wait()
	}
	conn.Release()
	for _, db := range []*pgtest.DB{db, exhausted} {
		if idle(t, db.Pool); len(tableOf(t, db)) != 0 {
			t.Errorf("got rows %q, want none", tableOf(t, db))
		}
	}
}

func TestFailClosedInTransaction(t *testing.T) {
	t.Parallel()
	db, empty := pgtest.New(t), pgtest.NewEmpty(t)
	for name, test := range map[string]struct {
		db     *pgtest.DB
		before func(*testing.T, pgx.Tx) (context.Context, context.CancelFunc)
		is     func(error) bool
	}{
		"not migrated": {empty, func(t *testing.T, _ pgx.Tx) (context.Context, context.CancelFunc) { return soon(t) }, func(err error) bool {
			return errors.Is(err, pgstore.ErrNotMigrated) && strings.Contains(err.Error(), "ratelimit migrate up")
		}},
		"cancelled": {db, func(t *testing.T, _ pgx.Tx) (context.Context, context.CancelFunc) { return over(t) }, func(err error) bool { return errors.Is(err, context.Canceled) }},
		"ended": {db, func(t *testing.T, tx pgx.Tx) (context.Context, context.CancelFunc) {
			must(t, tx.Commit(t.Context()))
			return soon(t)
		}, func(err error) bool { return errors.Is(err, pgx.ErrTxClosed) }},
		"after an error": {db, func(t *testing.T, tx pgx.Tx) (context.Context, context.CancelFunc) {
			_ = raise(t.Context(), "P0001")(tx)
			return soon(t)
		}, func(err error) bool { return codeOf(err) == "25P02" }},
	} {
		for _, portable := range []bool{false, true} {
			store := newStore(t, test.db, isPortable(portable))
			for _, verb := range verbsInTx {
				tx := begin(t, test.db, pgx.ReadCommitted)
				ctx, cancel := test.before(t, tx)
				if ok, err := verb.do(ctx, store, tx, slow("bucket", 10).For("k")); ok || !test.is(err) {
					t.Errorf("%s, portable %v: %s: got OK %v, error %v", name, portable, verb.name, ok, err)
				}
				cancel()
				_ = tx.Rollback(t.Context())
			}
		}
	}
	if got := tableOf(t, db); len(got) != 0 {
		t.Errorf("got rows %q, want none", got)
	}
}

// invalid are requests that no verb takes; any one of several is enough.
var invalid = []struct {
	name    string
	request ratelimit.Request
}{
	{"negative count", slow("bucket", 10).ForN("k", -1)},
	{"not a number", slow("bucket", 10).ForN("k", math.NaN())},
	{"infinite count", slow("bucket", 10).ForN("k", math.Inf(1))},
	{"negative infinite count", slow("bucket", 10).ForN("k", math.Inf(-1))},
	{"enormous count", slow("bucket", 10).ForN("k", 1e300)},
	{"no limit", ratelimit.Request{Key: "k", Count: 1}},
	{"no definition", ratelimit.TokenBucket{}.For("k")},
	{"empty name", slow("", 10).For("k")},
	{"long name", slow(strings.Repeat("n", ratelimit.MaxNameLength+1), 10).For("k")},
	{"zero byte in the name", slow("buc\x00ket", 10).For("k")},
	{"name not UTF-8", slow("buc\xffket", 10).For("k")},
	{"long key", slow("bucket", 10).For(strings.Repeat("k", ratelimit.MaxKeyLength+1))},
	{"zero byte in the key", slow("bucket", 10).For("k\x00")},
	{"key not UTF-8", slow("bucket", 10).For("\xff")},
	{"negative rate", ratelimit.TokenBucket{Name: "bucket", Rate: -1, Period: time.Second}.For("k")},
	{"rate not a number", ratelimit.TokenBucket{Name: "bucket", Rate: math.NaN(), Period: time.Second}.For("k")},
	{"no period", ratelimit.FixedWindow{Name: "window", Rate: 1}.For("k")},
	{"too many shards", ratelimit.FixedWindow{Name: "window", Rate: 1, Period: time.Second, Shards: ratelimit.MaxShards + 1}.For("k")},
}

// badCalls are calls that nobody can be granted, ever.
func badCalls() map[string][]ratelimit.Request {
	good := slow("a good one", 10).For("k")
	calls := map[string][]ratelimit.Request{
		"no requests":       nil,
		"too many requests": slices.Repeat([]ratelimit.Request{good}, ratelimit.MaxRequests+1),
		"two definitions":   {slow("bucket", 10).For("k"), slow("bucket", 11).For("k")},
	}
	for _, bad := range invalid {
		calls[bad.name] = []ratelimit.Request{bad.request}
		calls[bad.name+" after a good one"] = []ratelimit.Request{good, bad.request}
	}
	return calls
}

// neverCalls exceed a limit by themselves or together.
func neverCalls() map[string][]ratelimit.Request {
	bucket, window, shards := slow("bucket", 10), slowWindow("window", 10), shardedSlow("shards", 10, 2)
	bucket.MaxReserved, window.MaxReserved, shards.MaxReserved = 5, 5, 5
	return map[string][]ratelimit.Request{
		"bucket":        {bucket.ForN("k", 15.001)},
		"window":        {window.ForN("k", 16)},
		"shards":        {shards.ForN("k", 16)},
		"together":      {bucket.ForN("k", 8), bucket.ForN("k", 8)},
		"one of two":    {slow("a good one", 10).For("k"), bucket.ForN("k", 16)},
		"above allowed": {slow("a good one", 10).For("k"), bucket.ForN("k", 1e9)},
	}
}

// takesAndChecks are the verbs that take several requests, in both forms.
func takesAndChecks(ctx context.Context, store *pgstore.Store, tx pgx.Tx) map[string]func(...ratelimit.Request) (ratelimit.Result, error) {
	all := make(map[string]func(...ratelimit.Request) (ratelimit.Result, error))
	for form, s := range map[string]verbs{"": store, "Tx": txVerbs{store, tx}} {
		for name, verb := range map[string]func(verbs, context.Context, ...ratelimit.Request) (ratelimit.Result, error){
			"Allow": verbs.Allow, "Reserve": verbs.Reserve, "Check": verbs.Check, "CheckReserve": verbs.CheckReserve,
		} {
			all[name+form] = func(r ...ratelimit.Request) (ratelimit.Result, error) { return verb(s, ctx, r...) }
		}
	}
	for name, run := range map[string]runner{"AllowFunc": store.AllowFunc, "ReserveFunc": store.ReserveFunc} {
		all[name] = func(r ...ratelimit.Request) (ratelimit.Result, error) {
			return run(ctx, r, func(pgx.Tx, ratelimit.Result) error { panic("a bad call ran") })
		}
	}
	return all
}

// hasCount is the verbs on their own, and in a transaction, that take a count.
var hasCount = map[string]bool{
	"Allow": true, "Reserve": true, "Check": true, "CheckReserve": true, "Credit": true,
	"Take": true, "AllowAtMost": true, "AllowFirst": true, "Wait": true, "CheckEach": true,
}

// badCount reports whether nothing is wrong with a request but its count.
func badCount(r ratelimit.Request) bool {
	return r.Limit != nil && r.Limit.For(r.Key).Validate() == nil
}

// What is wrong by itself is an error that says so, does not reach the
// database, and so leaves the rows and the transaction as they are.
func TestBadInputChangesNothing(t *testing.T) {
	t.Parallel()
	var errorResponses errorResponses
	db, store := setUp(t, pgtest.WithConfig(errorResponses.watch))
	mustAllow(t, store, slow("bucket", 10).For("k"), slow("a good one", 10).For("k"))
	want := tableOf(t, db)
	tx := begin(t, db, pgx.Serializable)
	for verb, do := range takesAndChecks(t.Context(), store, tx) {
		for name, calls := range badCalls() {
			result, err := do(calls...)
			var field *ratelimit.FieldError
			if result.OK || result.Receipt != nil || !errors.Is(err, ratelimit.ErrInvalid) || !errors.As(err, &field) {
				t.Errorf("%s/%s: got OK %v, error %v, want %v", verb, name, result.OK, err, ratelimit.ErrInvalid)
			}
		}
		for name, calls := range neverCalls() {
			result, err := do(calls...)
			var never *ratelimit.ExceedsCapacityError
			if result.OK || result.Receipt != nil || !errors.Is(err, ratelimit.ErrExceedsCapacity) || !errors.As(err, &never) {
				t.Errorf("%s/%s: got OK %v, error %v, want %v", verb, name, result.OK, err, ratelimit.ErrExceedsCapacity)
			}
		}
	}
	for _, bad := range invalid {
		for _, verb := range ownVerbs {
			if verb.name == "Cancel" || verb.name == "Settle" || verb.name == "Prune" || !hasCount[verb.name] && badCount(bad.request) { // take no such requests
				continue
			}
			if ok, err := verb.do(t.Context(), store, bad.request); ok || !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("%s/%s: got OK %v, error %v, want %v", verb.name, bad.name, ok, err, ratelimit.ErrInvalid)
			}
		}
		for _, verb := range verbsInTx {
			if verb.name == "CancelTx" || verb.name == "SettleTx" || !hasCount[strings.TrimSuffix(verb.name, "Tx")] && badCount(bad.request) {
				continue
			}
			if ok, err := verb.do(t.Context(), store, tx, bad.request); ok || !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("%s/%s: got OK %v, error %v, want %v", verb.name, bad.name, ok, err, ratelimit.ErrInvalid)
			}
		}
	}
	for _, lasts := range []time.Duration{0, -time.Hour, ratelimit.MaxSpan + 1} {
		if until, err := store.PauseTx(t.Context(), tx, slow("bucket", 10), "k", lasts); !until.IsZero() || !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("pause for %v: got %v, error %v", lasts, until, err)
		}
	}
	if got := tableOf(t, db); !slices.Equal(got, want) {
		t.Errorf("got rows %q, want %q", got, want)
	}
	if result, err := store.AllowTx(t.Context(), tx, slow("bucket", 10).For("k")); err != nil || !result.OK {
		t.Errorf("afterwards in the transaction: got OK %v, error %v", result.OK, err)
	}
	should(t, tx.Commit(t.Context()))
	wantLeft(t, store, slow("bucket", 10).For("k"), 8)
	if got := errorResponses.all(); len(got) != 0 {
		t.Errorf("PostgreSQL reported errors: %q", got)
	}
}

// terminate ends a connection from another, and returns when it has ended.
func terminate(t *testing.T, db *pgtest.DB, pid uint32) {
	t.Helper()
	should(t, errOf(db.Pool.Exec(t.Context(), `SELECT pg_terminate_backend($1, 20000)`, pid)))
}

// When the connection is lost before the COMMIT was sent, all is rolled back,
// and nothing runs again.
func TestRunnerLosesConnection(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		after func(*testing.T, *shop, pgx.Tx) error
	}{
		{"and says so", func(t *testing.T, s *shop, tx pgx.Tx) error {
			return raise(t.Context(), serializationFailure)(tx) // not what comes back from a dead connection
		}},
		{"and says nothing", func(*testing.T, *shop, pgx.Tx) error { return nil }},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newShop(t, 10)
			result, err := s.store.AllowFunc(t.Context(), s.requests(), s.order(t.Context(), func(tx pgx.Tx) error {
				terminate(t, s.DB, tx.Conn().PgConn().PID())
				return test.after(t, s, tx)
			}))
			if err == nil || result.OK {
				t.Errorf("got OK %v, error %v, want an error", result.OK, err)
			}
			s.wantRuns(t, 1)
			s.want(t, 0)
			idle(t, s.Pool)
		})
	}
}

// A connection that ends with the question that precedes BEGIN, since a pooler has lost the server, says
// so.
func TestRunnerLosesConnectionBeforeBegin(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"AllowFunc", "AllowOnCommit"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRelay(t)
			db := pgtest.New(t, maxConns(1), r.through())
			t.Cleanup(r.Close)
			s := newShopOn(t, db, 10)
			run := runner(s.store.AllowFunc)
			if name == "AllowOnCommit" {
				run = onCommit(s.store, "")
			}
			r.interfere(func(int) relay.Fate { return relay.Fatal })
			result, err := run(t.Context(), s.requests(), s.order(t.Context(), nothing))
			if result.OK || codeOf(err) != "08P01" {
				t.Errorf("got OK %v, error %v, want code 08P01", result.OK, err)
			}
		})
	}
}

// When it is not known from the reply whether the server committed, what the
// runner says is true all the same, and nothing runs twice.
func TestRunnerLosesCommit(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		want int // orders
		fate relay.Fate
	}{
		"the message":                       {0, relay.Cut},
		"the reply":                         {1, relay.Cut},
		"the reply, as a pooler reports it": {1, relay.Fatal},
	} {
		t.Run(name, func(t *testing.T) {
			want, r := test.want, newRelay(t)
			db := pgtest.New(t, maxConns(2), r.through())
			t.Cleanup(r.Close)
			s := newShopOn(t, db, 10)
			result, err := s.store.AllowFunc(t.Context(), s.requests(), s.order(t.Context(), func(pgx.Tx) error {
				fate := func(n int, _ []byte) relay.Fate {
					if n == 1 {
						return test.fate
					}
					return relay.Pass
				}
				if want == 0 {
					r.Interfere(fate, nil)
				} else {
					r.Interfere(nil, fate)
				}
				return nil
			}))
			s.wantRuns(t, 1)
			s.want(t, want)
			if committed := want == 1; (err == nil) != committed || result.OK != committed {
				t.Errorf("got OK %v, error %v, want OK %v", result.OK, err, committed)
			}
			idle(t, db.Pool)
		})
	}
}
