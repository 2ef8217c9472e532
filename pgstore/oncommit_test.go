package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/relay"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// firsts are statements by which a function may begin, and the round trips of all that is sent.
var firsts = []struct {
	name  string
	trips int
	do    func(context.Context, pgx.Tx, string) error
}{
	{"Exec", 2, func(ctx context.Context, tx pgx.Tx, table string) error {
		return errOf(tx.Exec(ctx, "INSERT INTO "+table+" VALUES ($1::int4);", 1))
	}},
	{"Exec without arguments", 2, func(ctx context.Context, tx pgx.Tx, table string) error {
		return errOf(tx.Exec(ctx, "INSERT INTO "+table+" VALUES (1)"))
	}},
	{"named arguments", 2, func(ctx context.Context, tx pgx.Tx, table string) error {
		return errOf(tx.Exec(ctx, "INSERT INTO "+table+" VALUES (@n::int4)", pgx.NamedArgs{"n": 1}))
	}},
	{"Query", 2, func(ctx context.Context, tx pgx.Tx, table string) error {
		rows, err := tx.Query(ctx, "INSERT INTO "+table+" VALUES ($1::int4) RETURNING n", 1)
		if err != nil {
			return err
		}
		numbers, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if err == nil && !slices.Equal(numbers, []int{1}) {
			err = fmt.Errorf("got %v", numbers)
		}
		return err
	}},
	{"QueryRow", 2, func(ctx context.Context, tx pgx.Tx, table string) error {
		var n int
		return tx.QueryRow(ctx, "INSERT INTO "+table+" VALUES ($1::int4) RETURNING n", 1).Scan(&n)
	}},
	{"SendBatch", 2, func(ctx context.Context, tx pgx.Tx, table string) error {
		var batch pgx.Batch
		n := 0
		batch.Queue("INSERT INTO "+table+" VALUES ($1::int4)", 1)
		batch.Queue("SELECT $1::int4", 7).QueryRow(func(row pgx.Row) error { return row.Scan(&n) })
		results := tx.SendBatch(ctx, &batch)
		if results.Tx() != nil {
			return errors.New("the results have a transaction")
		}
		if err := results.Close(); err != nil || n != 7 {
			return fmt.Errorf("got %d and %w", n, err)
		}
		return nil
	}},
	{"an option", 3, func(ctx context.Context, tx pgx.Tx, table string) error {
		return errOf(tx.Exec(ctx, "INSERT INTO "+table+" VALUES ($1::int4)", pgx.QueryExecModeExec, 1))
	}},
	{"several statements in one text", 3, func(ctx context.Context, tx pgx.Tx, table string) error {
		return errOf(tx.Exec(ctx, "INSERT INTO "+table+" VALUES (1); SELECT 1"))
	}},
	{"Begin", 5, func(ctx context.Context, tx pgx.Tx, table string) error {
		return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return errOf(tx.Exec(ctx, "INSERT INTO "+table+" VALUES (1)")) })
	}},
	{"CopyFrom", 0, func(ctx context.Context, tx pgx.Tx, table string) error {
		return errOf(tx.CopyFrom(ctx, pgx.Identifier(strings.Split(table, ".")), []string{"n"}, pgx.CopyFromRows([][]any{{1}})))
	}},
	{"Prepare", 0, func(ctx context.Context, tx pgx.Tx, table string) error {
		if _, err := tx.Prepare(ctx, "", "SELECT 1"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "INSERT INTO "+table+" VALUES (1)")
		return err
	}},
	{"LargeObjects", 0, func(ctx context.Context, tx pgx.Tx, table string) error {
		objects := tx.LargeObjects()
		if _, err := objects.Create(ctx, 0); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "INSERT INTO "+table+" VALUES (1)")
		return err
	}},
	{"Conn", 3, func(ctx context.Context, tx pgx.Tx, table string) error {
		return errOf(tx.Conn().Exec(ctx, "INSERT INTO "+table+" VALUES (1)"))
	}},
	{"an empty statement", 4, func(ctx context.Context, tx pgx.Tx, table string) error {
		_, err := tx.Exec(ctx, "")
		if err == nil {
			_, err = tx.Exec(ctx, "INSERT INTO "+table+" VALUES (1)")
		}
		return err
	}},
}

// TestOnCommitRoundTrips counts that BEGIN travels with the first statement, and the takes with COMMIT.
func TestOnCommitRoundTrips(t *testing.T) {
	t.Parallel()
	c := newCounted(t)
	store := newStore(t, c.DB)
	workTable(t, c.DB)
	for _, first := range firsts {
		t.Run(first.name, func(t *testing.T) {
			for _, what := range []string{"prepares", "later"} {
				c.reset()
				_, err := store.AllowOnCommit(t.Context(), []ratelimit.Request{slow("F", 100).For("k"), slowWindow("G", 100).For("k")}, pgx.ReadCommitted,
					func(tx pgx.Tx) error { return first.do(t.Context(), tx, c.Schema+".work") })
				must(t, err)
				if got := c.wire.count(); what == "later" && first.trips > 0 && got != first.trips {
					t.Errorf("%d round trips, want %d", got, first.trips)
				}
			}
		})
	}
}

// TestOnCommit has each first statement in each mode of pgx: what is granted is there with its work,
// and what is refused is not.
func TestOnCommit(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, maxConns(2), pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode.mode }))
			eachFirst(t, db)
		})
	}
}

// eachFirst takes on COMMIT after each first statement, twice, and once in vain.
func eachFirst(t *testing.T, db *pgtest.DB) {
	t.Helper()
	store := newStore(t, db)
	workTable(t, db)
	for i, first := range firsts {
		limit := slow(fmt.Sprint(first.name, i), 2)
		for n := range 3 {
			result, err := store.AllowOnCommit(t.Context(), []ratelimit.Request{limit.For("k")}, "", func(tx pgx.Tx) error {
				return first.do(t.Context(), tx, db.Schema+".work")
			})
			var refused *ratelimit.RefusedError
			switch {
			case n < 2 && (err != nil || !result.OK || result.Remaining != int64(1-n) || result.Receipt == nil):
				t.Errorf("%s: got %+v and %v", first.name, result, err)
			case n == 2 && (!errors.As(err, &refused) || result.OK || result.RetryAfter <= 0 || refused.Result.RetryAfter != result.RetryAfter):
				t.Errorf("%s: got %+v and %v, want a refusal", first.name, result, err)
			}
		}
	}
	if n := countWork(t, db); n != 2*len(firsts) {
		t.Errorf("%d rows of work, want %d", n, 2*len(firsts))
	}
	idle(t, db.Pool)
}

// TestOnCommitFailsToBegin has first statements that cannot be prepared, or sent, and functions that
// pass over that: nothing they do later is done outside of a transaction.
func TestOnCommitFailsToBegin(t *testing.T) {
	t.Parallel()
	s := newShop(t, 10)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for name, first := range map[string]func(pgx.Tx) error{
		"Exec":     func(tx pgx.Tx) error { _, err := tx.Exec(t.Context(), "SELECT none FROM none"); return err },
		"Query":    func(tx pgx.Tx) error { _, err := tx.Query(t.Context(), "SELECT none FROM none"); return err },
		"QueryRow": func(tx pgx.Tx) error { return tx.QueryRow(t.Context(), "SELECT none FROM none").Scan() },
		"over":     func(tx pgx.Tx) error { _, err := tx.Exec(over, "SELECT 1"); return err },
		"Begin":    func(tx pgx.Tx) error { _, err := tx.Begin(over); return err },
		"batch": func(tx pgx.Tx) error {
			var batch pgx.Batch
			batch.BeginTx(pgx.TxOptions{})
			err := tx.SendBatch(t.Context(), &batch).Close()
			_, _ = tx.Exec(t.Context(), "SELECT none FROM none")
			return err
		},
	} {
		for later, use := range map[string]func(pgx.Tx) error{
			"nothing": nothing,
			"Exec": func(tx pgx.Tx) error {
				return errOf(tx.Exec(t.Context(), `INSERT INTO `+s.Schema+`.orders (what) VALUES ('order')`))
			},
			"Conn": func(tx pgx.Tx) error {
				return errOf(tx.Conn().Exec(t.Context(), `INSERT INTO `+s.Schema+`.orders (what) VALUES ('order')`))
			},
		} {
			result, err := s.store.AllowOnCommit(t.Context(), s.requests(), "", func(tx pgx.Tx) error {
				if first(tx) == nil {
					t.Errorf("%s has no error", name)
				}
				if err := use(tx); err == nil && later != "nothing" {
					t.Errorf("%s, then %s has no error", name, later)
				}
				return nil
			})
			if err == nil || result.OK {
				t.Errorf("%s, then %s: got %+v and %v", name, later, result, err)
			}
		}
	}
	s.want(t, 0)
	idle(t, s.Pool)
}

// TestOnCommitEndsItself has functions that end their transaction, or leave it as it cannot be committed.
func TestOnCommitEndsItself(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name         string
		do           func(context.Context, pgx.Tx) error
		want         error
		orders, left int
	}{
		{"Commit", func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }, nil, 1, 9},
		{"Commit and 40001", func(ctx context.Context, tx pgx.Tx) error {
			return errors.Join(tx.Commit(ctx), &pgconn.PgError{Code: serializationFailure}, errTest)
		}, errTest, 1, 9},
		{"COMMIT", ending("COMMIT"), pgx.ErrTxClosed, 1, 10},
		{"Rollback", func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) }, pgx.ErrTxClosed, 0, 10},
		{"ROLLBACK", ending("ROLLBACK"), pgx.ErrTxClosed, 0, 10},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newShop(t, 10)
			result, err := s.store.AllowOnCommit(t.Context(), s.requests(), "", func(tx pgx.Tx) error {
				return s.order(t.Context(), func(tx pgx.Tx) error { return test.do(t.Context(), tx) })(tx, ratelimit.Result{})
			})
			if !errors.Is(err, test.want) || result.OK != (test.want == nil) {
				t.Errorf("got %+v and %v, want %v", result, err, test.want)
			}
			s.wantRuns(t, 1)
			wantOrders(t, s.DB, "order", test.orders)
			wantLeft(t, s.store, s.limit.For("k"), float64(test.left))
			idle(t, s.Pool)
		})
	}
	t.Run("Commit that is refused", func(t *testing.T) {
		var outcome ratelimit.Outcome
		s := newShop(t, 1, func(c *pgstore.Config) {
			c.Observe = func(_ context.Context, e ratelimit.Event) { outcome = e.Outcome }
		})
		mustAllow(t, s.store, s.requests()...)
		result, err := onCommit(s.store, "")(t.Context(), s.requests(), s.order(t.Context(), func(tx pgx.Tx) error { return tx.Commit(t.Context()) }))
		if !errors.Is(err, ratelimit.ErrRefused) || result.OK || result.RetryAfter <= 0 || outcome != ratelimit.OutcomeRefused {
			t.Errorf("got %+v, %v and outcome %q", result, err, outcome)
		}
		wantOrders(t, s.DB, "order", 0)
		idle(t, s.Pool)
	})
	t.Run("rows that stay open", func(t *testing.T) {
		s := newShop(t, 10)
		result, err := s.store.AllowOnCommit(t.Context(), s.requests(), "", func(tx pgx.Tx) error {
			return errOf(tx.Query(t.Context(), `INSERT INTO `+s.Schema+`.orders (what) VALUES ('order') RETURNING what`))
		})
		if err == nil || result.OK {
			t.Errorf("got %+v and %v", result, err)
		}
		s.want(t, 0)
		idle(t, s.Pool)
	})
}

// TestEndedByAStatement has functions whose statement ends their transaction and that go on, in the
// function or after it. With AllowOnCommit no later statement is done. With AllowFunc the transaction
// is pgx's own, and closed once the function has returned.
func TestEndedByAStatement(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{"COMMIT", "ROLLBACK", "END", "ABORT"} {
		eachRunner(t, func(t *testing.T, s *shop, run runner) {
			insert := "INSERT INTO " + s.Schema + ".orders (what) VALUES ('later')"
			var kept pgx.Tx
			onCommit := strings.Contains(t.Name(), "OnCommit")
			_, err := run(t.Context(), s.requests(), func(tx pgx.Tx, _ ratelimit.Result) error {
				kept = tx
				_, err := tx.Exec(t.Context(), "SELECT 1")
				if err = errors.Join(err, ending(sql)(t.Context(), tx)); onCommit {
					wantEnded(t, tx, insert)
				}
				return err
			})
			committed := sql == "COMMIT" || sql == "END"
			if !errors.Is(err, pgx.ErrTxClosed) && (onCommit || !committed || err != nil) {
				t.Errorf("%s: got %v", sql, err)
			}
			wantEnded(t, kept, insert)
			if kept.Conn().IsClosed() {
				t.Errorf("%s: the connection is closed", sql)
			}
			wantOrders(t, s.DB, "later", 0)
			idle(t, s.Pool)
		})
	}
}

// wantEnded wants no statement to be done in a transaction.
func wantEnded(t *testing.T, tx pgx.Tx, insert string) {
	t.Helper()
	var batch pgx.Batch
	batch.Queue(insert)
	_, exec := tx.Exec(t.Context(), insert)
	_, query := tx.Query(t.Context(), insert)
	_, begin := tx.Begin(t.Context())
	objects := tx.LargeObjects()
	_, object := objects.Create(t.Context(), 0)
	for i, err := range []error{
		exec, query, begin, object, tx.QueryRow(t.Context(), insert).Scan(), tx.SendBatch(t.Context(), &batch).Close(), tx.Commit(t.Context()),
	} {
		if !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("statement %d: got %v, want %v", i, err, pgx.ErrTxClosed)
		}
	}
}

// TestOnCommitCrowd has many take from one key, at each level: as many orders are there as were
// granted, and no more than there are tokens.
func TestOnCommitCrowd(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		for name, change := range map[string]func(*pgstore.Config){"": unchanged, " from memory": withEscrow(10 * time.Second), " portable": portable} {
			if name == " portable" && level == pgx.Serializable {
				continue // it is refused
			}
			t.Run(string(level)+name, func(t *testing.T) {
				t.Parallel()
				const capacity, callers, each = 20, 8, 4
				s := newShop(t, capacity, change, budget(time.Minute))
				t.Cleanup(s.store.Close)
				var granted, refused atomic.Int64
				together(callers, func(int) {
					for range each {
						result, err := onCommit(s.store, level)(t.Context(), s.requests(), s.order(t.Context(), nothing))
						switch {
						case err == nil && result.OK && result.Receipt != nil:
							granted.Add(1)
						case errors.Is(err, ratelimit.ErrRefused):
							refused.Add(1)
						default:
							t.Errorf("got %+v and %v", result, err)
						}
					}
				})
				least := int64(capacity)
				if name == " from memory" { // where some may be left for nobody
					least /= 2
				}
				if n := granted.Load(); n > capacity || n < least || refused.Load() != callers*each-n {
					t.Errorf("%d granted and %d refused of %d tokens", n, refused.Load(), capacity)
				}
				wantOrders(t, s.DB, "order", int(granted.Load()))
				idle(t, s.Pool)
			})
		}
	}
}

// TestOnCommitFromMemory has tokens that are held already: no take is sent, and what is rolled back is
// put back.
func TestOnCommitFromMemory(t *testing.T) {
	t.Parallel()
	c := newCounted(t)
	createOrders(t, c.DB)
	store := newStore(t, c.DB, withEscrow(10*time.Second))
	t.Cleanup(store.Close)
	limit := slow("orders", 1000)
	for range 50 { // until it is worth to prefetch
		mustAllow(t, store, limit.For("k"))
	}
	s := &shop{DB: c.DB, store: store, limit: limit}
	before := tableOf(t, c.DB)
	for i := range 4 {
		result, err := onCommit(store, pgx.ReadCommitted)(t.Context(), s.requests(), s.order(t.Context(), func(pgx.Tx) error {
			if i%2 == 1 {
				return errTest
			}
			return nil
		}))
		if (err == nil) != (i%2 == 0) || result.OK != (err == nil) {
			t.Errorf("got %+v and %v", result, err)
		}
	}
	if after := tableOf(t, c.DB); !slices.Equal(before, after) {
		t.Errorf("got rows %q, want %q", after, before)
	}
	wantOrders(t, c.DB, "order", 2)
	store.Close()
	wantLeft(t, newStore(t, c.DB), limit.For("k"), 1000-50-2)
}

// TestOnCommitBefore has requests that end before the function runs.
func TestOnCommitBefore(t *testing.T) {
	t.Parallel()
	s := newShop(t, 10)
	none := func(pgx.Tx) error { s.runs.Add(1); return nil }
	for want, requests := range unbatched {
		for _, r := range requests {
			result, err := s.store.AllowOnCommit(t.Context(), []ratelimit.Request{slow("first", 5).For("k"), r}, "", none)
			if !errors.Is(err, want) || result.OK || errors.Is(err, ratelimit.ErrRefused) && result.RetryAfter <= 0 {
				t.Errorf("%v: got %+v and %v, want %v", r, result, err, want)
			}
		}
	}
	if _, err := s.store.AllowOnCommit(t.Context(), s.requests(), "serializable; COMMIT", none); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("at a level that there is not: %v", err)
	}
	if _, err := s.store.AllowOnCommit(t.Context(), s.requests(), "", nil); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("without a function: %v", err)
	}
	alone, err := pgstore.New(nil, nil)
	must(t, err)
	if _, err := alone.AllowOnCommit(t.Context(), s.requests(), "", none); !errors.Is(err, pgstore.ErrNoPool) {
		t.Errorf("without a pool: %v", err)
	}
	s.wantRuns(t, 0)
}

// TestOnCommitShadow has a limit in ModeShadow that is short: the function runs once.
func TestOnCommitShadow(t *testing.T) {
	t.Parallel()
	s := newShop(t, 2)
	for i := range 3 {
		requests := []ratelimit.Request{slow("trial", 1).For("k").In(ratelimit.ModeShadow), slow("never", 1).ForN("k", 2).In(ratelimit.ModeShadow), s.limit.For("k")}
		result, err := onCommit(s.store, "")(t.Context(), requests, s.order(t.Context(), nothing))
		if (err == nil) != (i < 2) || result.OK != (i < 2) || i < 2 && (len(result.Each()) != 3 || !result.Shadowed) {
			t.Errorf("%d: got %+v and %v", i, result, err)
		}
	}
	s.wantRuns(t, 3)
	s.want(t, 2)
}

// TestOnCommitLost loses the answer to the second COMMIT, after it was done and before it arrived. The
// first one failed, after its takes were granted. Both are also the function's own.
func TestOnCommitLost(t *testing.T) {
	t.Parallel()
	for _, committed := range []bool{true, false} {
		for _, own := range []bool{false, true} {
			onCommitLost(t, committed, own)
		}
	}
}

func onCommitLost(t *testing.T, committed, own bool) {
	t.Run(fmt.Sprintf("committed %v, by the function %v", committed, own), func(t *testing.T) {
		t.Parallel()
		r := newRelay(t)
		db := pgtest.New(t, maxConns(2), r.through())
		t.Cleanup(r.Close)
		s := newShopOn(t, db, 10)
		if _, err := s.store.AllowOnCommit(t.Context(), s.requests(), "", func(pgx.Tx) error { return nil }); err != nil {
			t.Fatal(err) // it is known what server this is
		}
		s.atCommit(t, 1, `RAISE EXCEPTION 'raised by the test' USING ERRCODE = '40001'`)
		result, err := onCommit(s.store, "")(within(t, 20*time.Second), s.requests(), s.order(t.Context(), func(tx pgx.Tx) error {
			if s.runs.Load() == 1 {
				if own {
					return tx.Commit(t.Context())
				}
				return nil
			}
			fate := func(n int, _ []byte) relay.Fate {
				if n == 1 {
					return relay.Cut
				}
				return relay.Pass
			}
			if committed {
				r.Interfere(nil, fate)
			} else {
				r.Interfere(fate, nil)
			}
			if own {
				_ = tx.Commit(t.Context())
			}
			return nil
		}))
		if (err == nil) != committed || result.OK != committed || result.Receipt != nil || errors.Is(err, pgstore.ErrOutcomeUnknown) {
			t.Errorf("got %+v and %v", result, err)
		}
		s.wantRuns(t, 2)
		want := 0
		if committed {
			want = 1
		}
		wantOrders(t, s.DB, "order", want)
		wantLeft(t, s.store, s.limit.For("k"), float64(9-want))
		idle(t, s.Pool)
	})
}

// TestOnCommitReceipt cancels what was taken.
func TestOnCommitReceipt(t *testing.T) {
	t.Parallel()
	s := newShop(t, 10)
	result, err := onCommit(s.store, "")(t.Context(), s.requests(), s.order(t.Context(), nothing))
	must(t, err)
	if cancelled, err := s.store.Cancel(t.Context(), result.Receipt); !cancelled || err != nil {
		t.Errorf("got %v and %v", cancelled, err)
	}
	wantLeft(t, s.store, s.limit.For("k"), 10)
}
