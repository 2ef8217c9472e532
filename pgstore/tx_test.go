package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// errorResponses collects what the server reports as errors.
type errorResponses struct {
	mu  sync.Mutex
	got []string
}

func (e *errorResponses) watch(c *pgxpool.Config) {
	c.ConnConfig.OnPgError = func(_ *pgconn.PgConn, err *pgconn.PgError) bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.got = append(e.got, err.Error())
		return true
	}
}

func (e *errorResponses) all() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.got)
}

// A refusal takes nothing and harms nothing: the transaction goes on, with
// what it did before, in savepoints too; other limits of the call are as they were;
// and PostgreSQL has no error to report.
func TestRefusalLeavesTransactionUsable(t *testing.T) {
	t.Parallel()
	var errorResponses errorResponses
	db, store := setUp(t, pgtest.WithConfig(errorResponses.watch))
	createOrders(t, db)
	plenty, window, empty := slow("a plenty", 10), slowWindow("b window", 10), slow("c empty", 1)
	mustAllow(t, store, plenty.For(""), window.For(""), empty.For(""))
	never := slow("d none yet", 10)
	several := []ratelimit.Request{plenty.For(""), window.For(""), empty.For(""), never.For("")}
	for _, take := range []struct {
		name     string
		do       func(context.Context, pgx.Tx, ...ratelimit.Request) (ratelimit.Result, error)
		requests []ratelimit.Request
	}{
		{"one", store.AllowTx, []ratelimit.Request{empty.For("")}},
		{"several", store.AllowTx, several},
		{"reserve one", store.ReserveTx, noDebt(empty.For(""))},
		{"reserve several", store.ReserveTx, noDebt(several...)},
	} {
		for _, level := range isolationLevels {
			t.Run(fmt.Sprintf("%s/%s", take.name, level), func(t *testing.T) {
				ctx := t.Context()
				want := statesOf(t, db)
				tx := begin(t, db, level)
				mustExec(t, tx, "INSERT INTO "+db.Schema+".orders (what) VALUES ($1)", t.Name())
				for range 2 { // a second refusal after the first, too
					if result, err := take.do(ctx, tx, take.requests...); err != nil || result.OK || result.RetryAfter <= 0 {
						t.Fatalf("got OK %v after %v, error %v, want a refusal", result.OK, result.RetryAfter, err)
					}
				}
				must(t, tx.Commit(ctx))
				wantOrders(t, db, t.Name(), 1)
				if got := statesOf(t, db); !slices.Equal(got, want) {
					t.Errorf("got rows %q, want %q", got, want)
				}
			})
		}
	}
	if got := errorResponses.all(); len(got) != 0 {
		t.Errorf("PostgreSQL reported errors: %q", got)
	}
}

// noDebt is the requests with limits that take no reservations into debt.
func noDebt(requests ...ratelimit.Request) []ratelimit.Request {
	var none []ratelimit.Request
	for _, r := range requests {
		switch l := r.Limit.(type) {
		case ratelimit.TokenBucket:
			l.MaxReserved = ratelimit.None
			none = append(none, l.ForN(r.Key, r.Count))
		case ratelimit.FixedWindow:
			l.MaxReserved = ratelimit.None
			none = append(none, l.ForN(r.Key, r.Count))
		}
	}
	return none
}

// wantUnlocked locks all rows from another connection, without waiting, or wants
// that to fail.
func wantUnlocked(t *testing.T, db *pgtest.DB, want bool) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		return errOf(tx.Exec(t.Context(), "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE NOWAIT"))
	})
	if want && err != nil || !want && codeOf(err) != "55P03" {
		t.Errorf("got %v, want all rows unlocked: %v", err, want)
	}
}

// Who waits for a row gets what the one before leaves, and knows what that one did.
func TestWaitingForARow(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	type outcome struct {
		ok   bool
		code string
	}
	after := map[bool]map[pgx.TxIsoLevel]outcome{ // a rollback, or a commit
		false: {pgx.ReadCommitted: {true, ""}, pgx.RepeatableRead: {true, ""}, pgx.Serializable: {true, ""}},
		true:  {pgx.ReadCommitted: {false, ""}, pgx.RepeatableRead: {false, serializationFailure}, pgx.Serializable: {false, serializationFailure}},
	}
	for name, limit := range map[string]ratelimit.Limit{
		"no row": slow("bucket", 1), "a row": slow("bucket", 10), "no window": slowWindow("window", 1), "a window": slowWindow("window", 10),
	} {
		for commit, outcomes := range after {
			for level, want := range outcomes {
				t.Run(fmt.Sprintf("%s/commit %v/%s", name, commit, level), func(t *testing.T) {
					r := limit.For(t.Name())
					if capacity := limit.Definition().Capacity; capacity > 1 {
						mustAllow(t, store, limit.ForN(r.Key, capacity-1))
					}
					first, second := begin(t, db, level), begin(t, db, level)
					takeIn(t, store, first, r)
					later := allowLater(store, second, r)
					waitsForLock(t, db, second)
					end(t, map[bool]func(context.Context) error{false: first.Rollback, true: first.Commit}[commit])
					got := <-later
					if got := (outcome{got.OK, codeOf(got.err)}); got != want {
						t.Errorf("got %v, want %v", got, want)
					}
					if want.code == "" {
						must(t, got.err)
					}
				})
			}
		}
	}
}

// A refusal by a limit with shards leaves none of them locked, those of other
// limits of the call included: a transaction that is refused may go on for long,
// and another may ask for the shards one after the other.
func TestShardedRefusalLeavesNoShardLocked(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	short, plenty, unused := shardedSlow("short", 8, 4), shardedSlow("plenty", 1000, 4), shardedSlow("unused", 1000, 4)
	mustAllow(t, store, short.ForN("k", 7), plenty.ForN("k", 900)) // has rows of all shards
	for name, requests := range map[string][]ratelimit.Request{
		"one":                    {short.ForN("k", 2)},
		"more than a shard has":  {short.ForN("k", 8)},
		"one that has enough":    {plenty.For("k"), short.ForN("k", 2)},
		"one that has no rows":   {short.ForN("k", 2), unused.For("k")},
		"over several of others": {plenty.ForN("k", 90), short.ForN("k", 2)},
	} {
		for _, level := range isolationLevels {
			t.Run(name+"/"+string(level), func(t *testing.T) {
				tx := begin(t, db, level)
				for range 2 {
					for verb, take := range map[string]func(context.Context, pgx.Tx, ...ratelimit.Request) (ratelimit.Result, error){
						"allow": store.AllowTx, "reserve": store.ReserveTx,
					} {
						asked := requests
						if verb == "reserve" {
							asked = noDebt(requests...)
						}
						if result, err := take(t.Context(), tx, asked...); err != nil || result.OK {
							t.Fatalf("%s: got OK %v, error %v, want a refusal", verb, result.OK, err)
						}
						wantUnlocked(t, db, true)
					}
				}
				takeIn(t, store, tx, plenty.For("k"))
				wantUnlocked(t, db, false)
				end(t, tx.Rollback)
			})
		}
	}
}

// createOrders makes the table in which tests do their work.
func createOrders(t *testing.T, db *pgtest.DB) {
	t.Helper()
	must(t, errOf(db.Pool.Exec(t.Context(), `CREATE TABLE `+db.Schema+`.orders (id bigserial PRIMARY KEY, what text)`)))
}

func countOrders(t *testing.T, db *pgtest.DB, what string) (n int) {
	t.Helper()
	err := db.Pool.QueryRow(t.Context(), `SELECT count(*) FROM `+db.Schema+`.orders WHERE what = $1`, what).Scan(&n)
	must(t, err)
	return n
}

func wantOrders(t *testing.T, db *pgtest.DB, what string, want int) {
	t.Helper()
	if got := countOrders(t, db, what); got != want {
		t.Errorf("got %d orders, want %d", got, want)
	}
}

// runner is AllowFunc or ReserveFunc.
type runner func(context.Context, []ratelimit.Request, func(pgx.Tx, ratelimit.Result) error) (ratelimit.Result, error)

// shop is a database in which an order costs a token.
type shop struct {
	*pgtest.DB
	store *pgstore.Store
	limit ratelimit.Limit
	runs  atomic.Int64 // of the function
}

func newShop(t *testing.T, capacity float64, change ...func(*pgstore.Config)) *shop {
	t.Helper()
	db := pgtest.New(t, maxConns(16))
	createOrders(t, db)
	return &shop{DB: db, store: newStore(t, db, change...), limit: slow("orders", capacity)}
}

// order inserts an order and then does more.
func (s *shop) order(ctx context.Context, more func(tx pgx.Tx) error) func(pgx.Tx, ratelimit.Result) error {
	return func(tx pgx.Tx, _ ratelimit.Result) error {
		s.runs.Add(1)
		if _, err := tx.Exec(ctx, `INSERT INTO `+s.Schema+`.orders (what) VALUES ('order')`); err != nil {
			return err
		}
		return more(tx)
	}
}

func (s *shop) requests() []ratelimit.Request { return []ratelimit.Request{s.limit.For("k")} }

// want compares the orders with n, and the tokens that were spent too.
func (s *shop) want(t *testing.T, n int) {
	t.Helper()
	wantOrders(t, s.DB, "order", n)
	wantLeft(t, s.store, s.limit.For("k"), s.limit.Definition().Capacity-float64(n))
}

func (s *shop) wantRuns(t *testing.T, want int64) {
	t.Helper()
	if got := s.runs.Load(); got != want {
		t.Errorf("ran %d times, want %d", got, want)
	}
}

func nothing(pgx.Tx) error { return nil }

// onCommit is AllowOnCommit at a level, as a runner.
func onCommit(store *pgstore.Store, level pgx.TxIsoLevel) runner {
	return func(ctx context.Context, requests []ratelimit.Request, do func(pgx.Tx, ratelimit.Result) error) (ratelimit.Result, error) {
		return store.AllowOnCommit(ctx, requests, level, func(tx pgx.Tx) error { return do(tx, ratelimit.Result{}) })
	}
}

// eachRunner runs test with each runner that allows, on shops of their own.
func eachRunner(t *testing.T, test func(*testing.T, *shop, runner), change ...func(*pgstore.Config)) {
	t.Helper()
	t.Run("AllowFunc", func(t *testing.T) {
		s := newShop(t, 10, change...)
		test(t, s, s.store.AllowFunc)
	})
	t.Run("AllowOnCommit", func(t *testing.T) {
		s := newShop(t, 10, change...)
		test(t, s, onCommit(s.store, pgx.Serializable))
	})
}

func TestRunnerCommitsAll(t *testing.T) {
	t.Parallel()
	s := newShop(t, 10)
	for i, run := range []runner{s.store.AllowFunc, s.store.ReserveFunc} {
		result, err := run(t.Context(), s.requests(), func(tx pgx.Tx, result ratelimit.Result) error {
			var level string
			err := tx.QueryRow(t.Context(), `SHOW transaction_isolation`).Scan(&level)
			if err != nil || level != "serializable" || !result.OK {
				t.Errorf("got OK %v at level %q, error %v", result.OK, level, err)
			}
			return s.order(t.Context(), nothing)(tx, result)
		})
		if err != nil || !result.OK || result.Receipt == nil {
			t.Errorf("got %+v, error %v", result, err)
		}
		s.want(t, i+1)
	}
	s.wantRuns(t, 2)
	idle(t, s.Pool)
}

func TestRunnerRefused(t *testing.T) {
	t.Parallel()
	s := newShop(t, 1)
	s.limit = ratelimit.TokenBucket{Name: "orders", Rate: 1, Period: time.Hour, MaxReserved: ratelimit.None}
	mustAllow(t, s.store, s.requests()...)
	before := tableOf(t, s.DB)
	for _, run := range []runner{s.store.AllowFunc, s.store.ReserveFunc} {
		result, err := run(t.Context(), s.requests(), s.order(t.Context(), nothing))
		var refused *ratelimit.RefusedError
		if !errors.Is(err, ratelimit.ErrRefused) || !errors.As(err, &refused) {
			t.Fatalf("got %v, want %v", err, ratelimit.ErrRefused)
		}
		if result.OK || result.RetryAfter <= 0 || refused.Result.RetryAfter != result.RetryAfter || refused.Result.Request != s.requests()[0] {
			t.Errorf("got %+v, in the error %+v", result, refused.Result)
		}
	}
	s.wantRuns(t, 0)
	if after := tableOf(t, s.DB); !slices.Equal(before, after) {
		t.Errorf("got rows %q, want %q", after, before)
	}
	idle(t, s.Pool)
}

// Errors other than those that ask for it run nothing again, and come back as
// they are.
func TestRunnerErrors(t *testing.T) {
	t.Parallel()
	eachRunner(t, func(t *testing.T, s *shop, run runner) {
		must(t, errOf(s.Pool.Exec(t.Context(), `ALTER TABLE `+s.Schema+`.orders ADD UNIQUE (what)`)))
		var returned error
		returning := func(do func(pgx.Tx) error) func(pgx.Tx) error {
			return func(tx pgx.Tx) error {
				returned = do(tx)
				return returned
			}
		}
		for _, test := range []struct {
			name string
			do   func(pgx.Tx) error
			code string
		}{
			{"own", func(pgx.Tx) error { return errTest }, ""},
			{"a refusal by another limit", func(pgx.Tx) error { return &ratelimit.RefusedError{} }, ""},
			{"deadline of another context", func(pgx.Tx) error { return context.DeadlineExceeded }, ""},
			{"unique violation", func(tx pgx.Tx) error { return s.order(t.Context(), nothing)(tx, ratelimit.Result{}) }, "23505"},
			{"lock not available", raise(t.Context(), "55P03"), "55P03"},
			{"statement timeout", raise(t.Context(), "57014"), "57014"},
			{"aborted before", func(tx pgx.Tx) error {
				_ = raise(t.Context(), serializationFailure)(tx) // swallowed
				return raise(t.Context(), "55P03")(tx)
			}, "25P02"},
		} {
			t.Run(test.name, func(t *testing.T) {
				runs := 0
				result, err := run(t.Context(), s.requests(), s.order(t.Context(), func(tx pgx.Tx) error {
					runs++
					return returning(test.do)(tx)
				}))
				if err == nil || err != returned || codeOf(err) != test.code {
					t.Errorf("got %v, want as it is %v with code %q", err, returned, test.code)
				}
				if runs != 1 {
					t.Errorf("ran %d times, want 1", runs)
				}
				if result.OK || result.Receipt != nil {
					t.Errorf("got a result of what was rolled back: %+v", result)
				}
				s.want(t, 0)
				idle(t, s.Pool)
			})
		}
	})
}

func TestRunnerPanic(t *testing.T) {
	t.Parallel()
	eachRunner(t, func(t *testing.T, s *shop, run runner) {
		value := &struct{ int }{1}
		func() {
			defer func() {
				if got := recover(); got != value {
					t.Errorf("recovered %v, want %v", got, value)
				}
			}()
			_, _ = run(t.Context(), s.requests(), s.order(t.Context(), func(pgx.Tx) error { panic(value) }))
		}()
		s.wantRuns(t, 1)
		s.want(t, 0)
		idle(t, s.Pool)
	})
}

// T.FailNow in the function ends its goroutine.
func TestRunnerGoexit(t *testing.T) {
	t.Parallel()
	eachRunner(t, func(t *testing.T, s *shop, run runner) {
		ended := make(chan bool)
		go func() {
			returned := false
			defer func() { ended <- returned }()
			_, _ = run(t.Context(), s.requests(), s.order(t.Context(), func(pgx.Tx) error {
				runtime.Goexit()
				return nil
			}))
			returned = true
		}()
		if <-ended {
			t.Error("AllowFunc returned, want the goroutine to end")
		}
		s.wantRuns(t, 1)
		s.want(t, 0)
		idle(t, s.Pool)
	})
}

// atCommit makes the first n commits of an order end in plpgsql statements. A
// sequence counts them, since a rollback does not take that back.
func (s *shop) atCommit(t *testing.T, n int, plpgsql string) {
	t.Helper()
	_, err := s.Pool.Exec(t.Context(), strings.NewReplacer("{schema}", s.Schema, "{n}", fmt.Sprint(n), "{do}", plpgsql).Replace(`
		CREATE SEQUENCE {schema}.commits;
		CREATE FUNCTION {schema}.at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF nextval('{schema}.commits') <= {n} THEN {do}; END IF;
			RETURN NULL;
		END $$;
		CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON {schema}.orders
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {schema}.at_commit()`))
	must(t, err)
}

func TestRunnerRunsAgain(t *testing.T) {
	t.Parallel()
	for _, code := range []string{serializationFailure, deadlockDetected} {
		t.Run(code+" in the function", func(t *testing.T) {
			eachRunner(t, func(t *testing.T, s *shop, run runner) {
				result, err := run(t.Context(), s.requests(), s.order(t.Context(), func(tx pgx.Tx) error {
					if s.runs.Load() <= 2 {
						return fmt.Errorf("wrapped: %w", raise(t.Context(), code)(tx))
					}
					return nil
				}))
				if err != nil || !result.OK {
					t.Errorf("got OK %v, error %v", result.OK, err)
				}
				s.wantRuns(t, 3)
				s.want(t, 1)
			})
		})
		t.Run(code+" at commit", func(t *testing.T) {
			eachRunner(t, func(t *testing.T, s *shop, run runner) {
				s.atCommit(t, 2, `RAISE EXCEPTION 'raised by the test' USING ERRCODE = '`+code+`'`)
				result, err := run(t.Context(), s.requests(), s.order(t.Context(), nothing))
				if err != nil || !result.OK {
					t.Errorf("got OK %v, error %v", result.OK, err)
				}
				s.wantRuns(t, 3)
				s.want(t, 1)
			})
		})
	}
}

// When the time is over, the error says both that it is and what PostgreSQL
// said last.
func TestRunnerGivesUp(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, test := range []struct {
		name string
		ctx  func(*testing.T) (context.Context, context.CancelFunc)
		last func(context.Context, context.CancelFunc) func(pgx.Tx) error // the second run and later
		want error
	}{
		{"at the deadline between attempts", inAMoment, func(ctx context.Context, _ context.CancelFunc) func(pgx.Tx) error {
			return raise(ctx, serializationFailure)
		}, context.DeadlineExceeded},
		{"at the deadline in an attempt", inAMoment, func(ctx context.Context, _ context.CancelFunc) func(pgx.Tx) error {
			return func(tx pgx.Tx) error { return errOf(tx.Exec(ctx, "SELECT pg_sleep(60)")) }
		}, context.DeadlineExceeded},
		{"cancelled in an attempt", cancellable, func(ctx context.Context, cancel context.CancelFunc) func(pgx.Tx) error {
			return func(tx pgx.Tx) error {
				cancel()
				return raise(ctx, serializationFailure)(tx)
			}
		}, context.Canceled},
		{"cancelled between attempts", cancellable, func(ctx context.Context, cancel context.CancelFunc) func(pgx.Tx) error {
			return func(tx pgx.Tx) error {
				err := raise(ctx, serializationFailure)(tx)
				cancel()
				return err
			}
		}, context.Canceled},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, 10)
			ctx, cancel := test.ctx(t)
			defer cancel()
			result, err := s.store.AllowFunc(ctx, s.requests(), s.order(ctx, func(tx pgx.Tx) error {
				if s.runs.Load() == 1 {
					return raise(ctx, serializationFailure)(tx)
				}
				return test.last(ctx, cancel)(tx)
			}))
			if result.OK || !errors.Is(err, test.want) || !hasCode(err, serializationFailure) {
				t.Errorf("got OK %v, error %v; want both %v and code %s", result.OK, err, test.want, serializationFailure)
			}
			if s.runs.Load() < 2 {
				t.Errorf("ran %d times, want it to have run again", s.runs.Load())
			}
			s.want(t, 0)
			idle(t, s.Pool)
		})
	}
}

func inAMoment(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), time.Second)
}

func cancellable(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithCancel(t.Context())
}

func TestRunnerGivesUpWithoutDeadline(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	eachRunner(t, func(t *testing.T, s *shop, run runner) {
		_, err := run(t.Context(), s.requests(), s.order(t.Context(), raise(t.Context(), serializationFailure)))
		if !hasCode(err, serializationFailure) {
			t.Errorf("got %v, want code %s", err, serializationFailure)
		}
		s.want(t, 0)
	}, func(c *pgstore.Config) { c.RetryBudget = time.Second })
}

// A function that swallows PostgreSQL's errors has not succeeded.
func TestRunnerSwallowedError(t *testing.T) {
	t.Parallel()
	for _, code := range []string{serializationFailure, deadlockDetected, "23505"} {
		t.Run(code, func(t *testing.T) {
			eachRunner(t, func(t *testing.T, s *shop, run runner) {
				result, err := run(t.Context(), s.requests(), s.order(t.Context(), func(tx pgx.Tx) error {
					if err := raise(t.Context(), code)(tx); err == nil {
						t.Error("got no error to swallow")
					}
					return nil
				}))
				if result.OK || !errors.Is(err, pgx.ErrTxCommitRollback) {
					t.Errorf("got OK %v, error %v, want %v", result.OK, err, pgx.ErrTxCommitRollback)
				}
				s.wantRuns(t, 1)
				s.want(t, 0)
			})
		})
	}
}
