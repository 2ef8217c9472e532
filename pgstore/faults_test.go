package pgstore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

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

// ownVerbs are all verbs on their own that take a limit.
var ownVerbs = []ownVerb{
	{"Allow", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return isYes(s.Allow(ctx, r))
	}},
	{"Allow several", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return isYes(s.Allow(ctx, r, slow("another", 10).For("")))
	}},
	{"Reserve", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return isYes(s.Reserve(ctx, r))
	}},
	{"Check", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return isOK(s.Check(ctx, r))
	}},
	{"CheckReserve", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return isOK(s.CheckReserve(ctx, r))
	}},
	{"AllowFunc", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (ran bool, err error) {
		result, err := s.AllowFunc(ctx, []ratelimit.Request{r}, func(pgx.Tx, ratelimit.Result) error {
			ran = true
			return nil
		})
		return ran || result.OK || result.Receipt != nil, err
	}},
	{"ReserveFunc", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (ran bool, err error) {
		result, err := s.ReserveFunc(ctx, []ratelimit.Request{r}, func(pgx.Tx, ratelimit.Result) error {
			ran = true
			return nil
		})
		return ran || result.OK || result.Receipt != nil, err
	}},
	{"Reset", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return false, s.Reset(ctx, r.Limit, r.Key)
	}},
	{"Credit", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		status, err := s.Credit(ctx, r)
		return status.OK, err
	}},
	{"Cancel", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return s.Cancel(ctx, paid(r).Receipt)
	}},
	{"Pause", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		until, err := s.Pause(ctx, r.Limit, r.Key, time.Hour)
		return !until.IsZero(), err
	}},
	{"Resume", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return false, s.Resume(ctx, r.Limit, r.Key)
	}},
	{"Take", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		err := s.Take(ctx, r)
		return err == nil, err
	}},
	{"AllowAtMost", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		result, err := s.AllowAtMost(ctx, r)
		return result.OK || result.Taken != 0 || result.Receipt != nil, err
	}},
	{"AllowFirst", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return isYes(s.AllowFirst(ctx, r, slow("another", 10).For("")))
	}},
	{"Wait", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return isYes(s.Wait(ctx, r))
	}},
	{"Settle", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return isOK(s.Settle(ctx, paid(r).Receipt, r.Count+1))
	}},
	{"PauseEach", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		until, err := s.PauseEach(ctx, []ratelimit.Request{r, slow("another", 10).For("")}, time.Hour)
		return !until.IsZero(), err
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
		n, err := s.Prune(ctx, r.Limit)
		return n != 0, err
	}},
}

// tableVerbs are those that take no definition, in the same way.
var tableVerbs = []ownVerb{
	{"Names", func(ctx context.Context, s *pgstore.Store, _ ratelimit.Request) (bool, error) {
		names, err := s.Names(ctx)
		return names != nil, err
	}},
	{"Forget", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		n, err := s.Forget(ctx, ratelimit.NameOf(r.Limit))
		return n != 0, err
	}},
	{"Ready", func(ctx context.Context, s *pgstore.Store, _ ratelimit.Request) (bool, error) {
		return false, s.Ready(ctx)
	}},
}

// verbsInTx are all verbs in a transaction, in the same way.
var verbsInTx = []struct {
	name string
	do   func(context.Context, *pgstore.Store, pgx.Tx, ratelimit.Request) (ok bool, err error)
}{
	{"AllowTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return isYes(s.AllowTx(ctx, tx, r))
	}},
	{"AllowTx several", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return isYes(s.AllowTx(ctx, tx, r, slow("another", 10).For("")))
	}},
	{"ReserveTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return isYes(s.ReserveTx(ctx, tx, r))
	}},
	{"CheckTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return isOK(s.CheckTx(ctx, tx, r))
	}},
	{"CheckReserveTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return isOK(s.CheckReserveTx(ctx, tx, r))
	}},
	{"ResetTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return false, s.ResetTx(ctx, tx, r.Limit, r.Key)
	}},
	{"CreditTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		status, err := s.CreditTx(ctx, tx, r)
		return status.OK, err
	}},
	{"CancelTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return s.CancelTx(ctx, tx, paid(r).Receipt)
	}},
	{"TakeTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		err := s.TakeTx(ctx, tx, r)
		return err == nil, err
	}},
	{"AllowAtMostTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		result, err := s.AllowAtMostTx(ctx, tx, r)
		return result.OK || result.Taken != 0 || result.Receipt != nil, err
	}},
	{"AllowFirstTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return isYes(s.AllowFirstTx(ctx, tx, r, slow("another", 10).For("")))
	}},
	{"SettleTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return isOK(s.SettleTx(ctx, tx, paid(r).Receipt, r.Count+1))
	}},
	{"PauseEachTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		until, err := s.PauseEachTx(ctx, tx, []ratelimit.Request{r, slow("another", 10).For("")}, time.Hour)
		return !until.IsZero(), err
	}},
	{"PauseTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		until, err := s.PauseTx(ctx, tx, r.Limit, r.Key, time.Hour)
		return !until.IsZero(), err
	}},
	{"ResumeTx", func(ctx context.Context, s *pgstore.Store, tx pgx.Tx, r ratelimit.Request) (bool, error) {
		return false, s.ResumeTx(ctx, tx, r.Limit, r.Key)
	}},
}

// paid is a result that can be cancelled.
func paid(r ratelimit.Request) ratelimit.Result {
	payment := receipt.Payment{
		Limit:  &receipt.Limit{Definition: bucket.Definition(r.Limit.Definition()), Key: r.Key},
		Tokens: r.Count,
	}
	return ratelimit.Result{Receipt: receipt.New([]receipt.Payment{payment}, nil, "", nil, time.Time{})}
}

// wantClosed asks all verbs on their own, and wants an error from each.
func wantClosed(t *testing.T, ctx func() (context.Context, context.CancelFunc), store *pgstore.Store, want error) {
	t.Helper()
	var group sync.WaitGroup // all of them wait at the same time
	for _, limit := range []ratelimit.Limit{slow("bucket", 10), slowWindow("window", 10), shardedSlow("shards", 10, 2)} {
		for _, verb := range append(tableVerbs, ownVerbs...) {
			group.Go(func() {
				ctx, cancel := ctx()
				defer cancel()
				ok, err := verb.do(ctx, store, limit.For("k"))
				if ok || err == nil || want != nil && !errors.Is(err, want) {
					t.Errorf("%s of %s: got OK %v, error %v; want error %v", verb.name, limit.Definition().Name, ok, err, want)
				}
			})
		}
	}
	group.Wait()
}

// soon is a context with a deadline that a server that answers would keep.
func soon(t *testing.T) func() (context.Context, context.CancelFunc) {
	return func() (context.Context, context.CancelFunc) { return context.WithTimeout(t.Context(), 20*time.Second) }
}

// shortly is a context for those who wait in vain.
func shortly(t *testing.T) func() (context.Context, context.CancelFunc) {
	return func() (context.Context, context.CancelFunc) {
		return context.WithTimeout(t.Context(), 30*time.Millisecond)
	}
}

func over(t *testing.T) func() (context.Context, context.CancelFunc) {
	return func() (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		return ctx, cancel
	}
}

// bothStores are a Store of each Config that takes other ways.
func bothStores(t *testing.T, db *pgtest.DB) map[string]*pgstore.Store {
	t.Helper()
	return map[string]*pgstore.Store{"default": newStore(t, db), "portable": newStore(t, db, portable)}
}

func TestFailClosedWithoutPool(t *testing.T) {
	t.Parallel()
	for name, store := range bothStores(t, &pgtest.DB{}) {
		t.Run(name, func(t *testing.T) { wantClosed(t, soon(t), store, pgstore.ErrNoPool) })
	}
}

func TestFailClosedWhenNotMigrated(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	for name, store := range bothStores(t, db) {
		t.Run(name, func(t *testing.T) { wantClosed(t, soon(t), store, pgstore.ErrNotMigrated) })
		for _, verb := range verbsInTx {
			t.Run(name+"/"+verb.name, func(t *testing.T) {
				ok, err := verb.do(t.Context(), store, begin(t, db, pgx.ReadCommitted), slow("bucket", 10).For("k"))
				if ok || !errors.Is(err, pgstore.ErrNotMigrated) || !strings.Contains(fmt.Sprint(err), "ratelimit migrate up") {
					t.Errorf("got OK %v, error %v, want %v", ok, err, pgstore.ErrNotMigrated)
				}
			})
		}
	}
}

func TestFailClosedWhenCancelled(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, store := range bothStores(t, db) {
		t.Run(name, func(t *testing.T) { wantClosed(t, over(t), store, context.Canceled) })
		for _, verb := range verbsInTx {
			t.Run(name+"/"+verb.name, func(t *testing.T) {
				ctx, cancel := over(t)()
				defer cancel()
				ok, err := verb.do(ctx, store, begin(t, db, pgx.ReadCommitted), slow("bucket", 10).For("k"))
				if ok || !errors.Is(err, context.Canceled) {
					t.Errorf("got OK %v, error %v, want %v", ok, err, context.Canceled)
				}
			})
		}
	}
	if got := tableOf(t, db); len(got) != 0 {
		t.Errorf("got rows %q, want none", got)
	}
	idle(t, db.Pool)
}

func TestFailClosedInEndedTransaction(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	for _, verb := range verbsInTx {
		t.Run(verb.name, func(t *testing.T) {
			tx := begin(t, db, pgx.ReadCommitted)
			must(t, tx.Commit(t.Context()))
			ok, err := verb.do(t.Context(), store, tx, slow("bucket", 10).For("k"))
			if ok || !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("got OK %v, error %v, want %v", ok, err, pgx.ErrTxClosed)
			}
		})
		t.Run(verb.name+" after an error", func(t *testing.T) {
			tx := begin(t, db, pgx.ReadCommitted)
			if err := raise(t.Context(), "P0001")(tx); err == nil {
				t.Fatal("got no error, want one")
			}
			ok, err := verb.do(t.Context(), store, tx, slow("bucket", 10).For("k"))
			if ok || codeOf(err) != "25P02" {
				t.Errorf("got OK %v, error %v, want code 25P02", ok, err)
			}
		})
	}
	if got := tableOf(t, db); len(got) != 0 {
		t.Errorf("got rows %q, want none", got)
	}
}

func TestFailClosedWhenPoolIsExhausted(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, maxConns(1))
	conn, err := db.Pool.Acquire(t.Context())
	must(t, err)
	for name, store := range bothStores(t, db) {
		t.Run(name, func(t *testing.T) { wantClosed(t, shortly(t), store, context.DeadlineExceeded) })
	}
	conn.Release()
	if got := tableOf(t, db); len(got) != 0 {
		t.Errorf("got rows %q, want none", got)
	}
}

// address is a pool of connections to an address where no PostgreSQL is.
func address(t *testing.T, l net.Listener) *pgtest.DB {
	t.Helper()
	return &pgtest.DB{Schema: "none", Pool: newPool(t, fmt.Sprintf("postgres://nobody@%s/none?sslmode=disable", l.Addr()))}
}

func TestFailClosedWhenRefused(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	l.Close() // so connections are refused
	for name, store := range bothStores(t, address(t, l)) {
		t.Run(name, func(t *testing.T) { wantClosed(t, soon(t), store, nil) })
	}
}

func TestFailClosedWhenSilent(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0") // where nobody accepts
	must(t, err)
	defer l.Close()
	for name, store := range bothStores(t, address(t, l)) {
		t.Run(name, func(t *testing.T) { wantClosed(t, shortly(t), store, context.DeadlineExceeded) })
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
	type inTx = func(context.Context, pgx.Tx, ...ratelimit.Request) (ratelimit.Result, error)
	type own = func(context.Context, ...ratelimit.Request) (ratelimit.Result, error)
	type run = func(context.Context, []ratelimit.Request, func(pgx.Tx, ratelimit.Result) error) (ratelimit.Result, error)
	verbs := make(map[string]func(...ratelimit.Request) (ratelimit.Result, error))
	for name, verb := range map[string]inTx{
		"AllowTx": store.AllowTx, "ReserveTx": store.ReserveTx, "CheckTx": store.CheckTx, "CheckReserveTx": store.CheckReserveTx,
	} {
		verbs[name] = func(r ...ratelimit.Request) (ratelimit.Result, error) { return verb(ctx, tx, r...) }
	}
	for name, verb := range map[string]own{
		"Allow": store.Allow, "Reserve": store.Reserve, "Check": store.Check, "CheckReserve": store.CheckReserve,
	} {
		verbs[name] = func(r ...ratelimit.Request) (ratelimit.Result, error) { return verb(ctx, r...) }
	}
	for name, verb := range map[string]run{"AllowFunc": store.AllowFunc, "ReserveFunc": store.ReserveFunc} {
		verbs[name] = func(r ...ratelimit.Request) (ratelimit.Result, error) {
			return verb(ctx, r, func(pgx.Tx, ratelimit.Result) error { panic("a bad call ran") })
		}
	}
	return verbs
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
			r.interfere(nil, func(int) relay.Fate { return relay.Fatal })
			result, err := run(t.Context(), s.requests(), s.order(t.Context(), nothing))
			if result.OK || codeOf(err) != "08P01" {
				t.Errorf("got OK %v, error %v, want code 08P01", result.OK, err)
			}
		})
	}
}

// The server ends the connection during the COMMIT, and so rolls back.
func TestRunnerLosesConnectionAtCommit(t *testing.T) {
	t.Parallel()
	s := newShop(t, 10)
	s.atCommit(t, 1, `PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(20)`)
	result, err := s.store.AllowFunc(t.Context(), s.requests(), s.order(t.Context(), nothing))
	if err == nil || result.OK || codeOf(err) != "57P01" {
		t.Errorf("got OK %v, error %v, want code 57P01", result.OK, err)
	}
	s.wantRuns(t, 1)
	s.want(t, 0)
	idle(t, s.Pool)
}

// cutter loses connections as COMMIT is sent over them: the message itself,
// or the server's reply to it.
type cutter struct {
	net.Conn
	reply bool
	armed *atomic.Bool
}

func (c *cutter) Write(p []byte) (n int, err error) {
	if !bytes.Contains(bytes.ToLower(p), []byte("commit")) || !c.armed.CompareAndSwap(true, false) {
		return c.Conn.Write(p)
	}
	if c.reply {
		if n, err = c.Conn.Write(p); err != nil {
			return n, err
		}
	}
	return len(p), c.Conn.Close()
}

// When it is not known from the reply whether the server committed, what the
// runner says is true all the same, and nothing runs twice.
func TestRunnerLosesCommit(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		reply bool
		want  int // orders
	}{
		{"the message", false, 0},
		{"the reply", true, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newShop(t, 10)
			var armed atomic.Bool
			config := s.Pool.Config()
			config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := new(net.Dialer).DialContext(ctx, network, address)
				return &cutter{conn, test.reply, &armed}, err
			}
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			must(t, err)
			defer pool.Close()
			store := newStore(t, &pgtest.DB{Schema: s.Schema, Pool: pool})
			result, err := store.AllowFunc(t.Context(), s.requests(), s.order(t.Context(), func(pgx.Tx) error {
				armed.Store(true)
				return nil
			}))
			if armed.Load() {
				t.Fatal("the connection was not cut")
			}
			s.wantRuns(t, 1)
			eventually(t, "the server has done with it", func() bool { return countOrders(t, s.DB, "order") == test.want })
			s.want(t, test.want)
			if committed := test.want == 1; (err == nil) != committed || result.OK != committed {
				t.Errorf("got OK %v, error %v, want OK %v", result.OK, err, committed)
			}
			idle(t, pool)
		})
	}
}
